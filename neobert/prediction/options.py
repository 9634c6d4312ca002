"""Options of `neobert predict`. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ..common.constants import DEVICE_HELP, TRUST_REMOTE_CODE_HELP
from ..common.errors import UserError
from ..common.options import OptionGroup, OptionParser, option
from ..embeddings.options import BATCH_TOKENS_HELP


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    """Input and output."""

    title = "Data"

    input: str = option(
        help="Texts (.csv, .tsv, .jsonl, .parquet, .txt): a file, a directory, a glob or a URL.",
        positional=True,
        affects_results=False,
    )
    output: str = option(
        help="Output file (.csv, .jsonl or .parquet) with the columns of the input and the "
        "predictions.",
        positional=True,
        affects_results=False,
    )
    text_column: list[str] | None = option(
        None,
        "Column that contains the text, or the two columns of a pair. By default the columns that "
        "the model was trained on, or text if the input lacks them.",
        metavar="NAME",
    )
    probabilities: bool = option(
        False, "Add one column per label, probability_LABEL, with the probability of the label."
    )
    rows: Annotated[int, Meta(ge=1)] = option(
        4096, "Number of rows that are read, predicted and stored together."
    )


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Classifier to use."""

    title = "Model"

    model: str = option(
        help="Output directory of neobert finetune, or another classifier: a directory or a name "
        "on the Hub.",
        metavar="NAME",
        affects_results=False,
    )
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE_HELP, affects_results=False)


@dataclass(frozen=True)
class LongTextOptions(OptionGroup):
    """Handling of texts that are longer than the limit of the model."""

    title = "Long texts"

    long_texts: Literal["truncate", "windows"] = option(
        "truncate",
        "truncate: truncate long texts, and report their number. windows: divide long texts into "
        "overlapping windows. Label logits are averaged over the windows; each word is tagged in "
        "the window with the most context around it.",
    )
    max_length: Annotated[int, Meta(ge=8, le=2**31 - 1)] | None = option(
        None,
        "Maximum sequence length in tokens. By default the length used in "
        "training, or the limit of the model if it has no task.json.",
    )
    overlap: Annotated[int, Meta(ge=0)] | None = option(
        None,
        "Maximum overlap of neighboring windows in tokens. By default one eighth of the window.",
    )

    def __post_init__(self) -> None:
        # An option without an effect would suggest that windows are used.
        if self.long_texts == "truncate" and self.overlap is not None:
            raise UserError("`overlap` requires `--long-texts windows`.")


@dataclass(frozen=True)
class InferenceOptions(OptionGroup):
    """Precision, device and batches."""

    title = "Inference"

    dtype: Literal["float32", "bfloat16", "int8"] = option(
        "float32", "Precision of the model. int8 is for NeoBERT on a CPU."
    )
    device: str | None = option(None, DEVICE_HELP, metavar="NAME", affects_results=False)
    batch_tokens: Annotated[int, Meta(ge=1)] | None = option(
        None, BATCH_TOKENS_HELP, affects_results=False
    )


@dataclass(frozen=True)
class PredictOptions:
    """Options of `neobert predict`."""

    data: DataOptions
    model: ModelOptions
    long_texts: LongTextOptions = LongTextOptions()
    inference: InferenceOptions = InferenceOptions()


OPTIONS = {
    "predict": OptionParser(
        "neobert predict",
        "Predict labels with calibrated probabilities, values or entities for the texts of a file "
        "of any size, in constant memory. An interrupted run resumes.",
        PredictOptions,
        "neobert predict reviews.csv predictions.csv --model runs/reviews",
    ),
}
