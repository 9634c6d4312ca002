"""Options of `neobert encode`. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ..common.constants import DEVICE_HELP, DTYPES
from ..common.errors import UserError
from ..common.options import OptionGroup, OptionParser, option
from ..embeddings.options import AUTO_DTYPE_HELP, BATCH_TOKENS_HELP, EncoderOptions


@dataclass(frozen=True)
class CorpusOptions(OptionGroup):
    """Input and output."""

    title = "Data"

    source: str = option(
        help="Texts (.jsonl, .parquet, .csv, .tsv, .txt): a file, a directory, a glob or a URL.",
        positional=True,
        affects_results=False,
    )
    output: str = option(
        help="Directory of parquet files to write, a single .parquet file, or the URL of either.",
        positional=True,
        affects_results=False,
    )
    text_column: str = option("text", "Column that contains the texts.", metavar="NAME")
    keep: list[str] | None = option(
        None,
        "Columns to copy with their types; NAME:text copies a column as text. By default `id`, if "
        'the input has this column; --keep "" copies no column.',
        metavar="NAME",
        may_be_empty=True,
    )
    rows: Annotated[int, Meta(ge=1)] = option(
        8192, "Maximum number of rows of an input file in one part of the output."
    )


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Model and the prompt before each text."""

    title = "Model"

    model: str = option(
        help="Sentence encoder, or encoder without a pooling module: a directory or a name on the "
        "Hub.",
        metavar="NAME",
    )
    prompt_name: str | None = option(
        None,
        "Name of the model's prompt to prepend to each text. By default the default prompt of the "
        "model.",
        metavar="NAME",
    )
    prompt: str | None = option(
        None,
        'Prompt to prepend to each text. --prompt "" disables the default prompt of the model.',
        may_be_empty=True,
    )

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_name is not None:
            raise UserError("`prompt` and `prompt_name` cannot be combined. Pass one of them.")


@dataclass(frozen=True)
class LongTextOptions(OptionGroup):
    """Handling of texts that are longer than the limit of the model."""

    title = "Long texts"

    long_texts: Literal["truncate", "windows"] = option(
        "truncate",
        "truncate: truncate long texts, one embedding per text. windows: one embedding per window "
        "of the text.",
    )
    window: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Maximum window size in tokens. By default 256, or the limit of the model if it is lower.",
    )
    overlap: Annotated[int, Meta(ge=0)] | None = option(
        None,
        "Maximum overlap of neighboring windows in tokens. By default one eighth of the window.",
    )

    def __post_init__(self) -> None:
        # An option without an effect would suggest that windows are used.
        for name in ("window", "overlap"):
            if self.long_texts == "truncate" and getattr(self, name) is not None:
                raise UserError(f"`{name}` requires `--long-texts windows`.")


@dataclass(frozen=True)
class EmbeddingOptions(OptionGroup):
    """Form of the embeddings in the output."""

    title = "Embeddings"

    normalize: bool = option(False, "Normalize the embeddings to unit length.")
    output_dtype: Literal["float32", "float16", "int8", "binary"] = option(
        "float32",
        "Precision of the stored embeddings. int8 takes 1/4 of the space of float32, binary 1/32 "
        "(one bit per dimension).",
    )
    truncate_dim: Annotated[int, Meta(ge=1)] | None = option(
        None, "Number of leading dimensions to keep, for models that were trained for truncation."
    )


@dataclass(frozen=True)
class InferenceOptions(OptionGroup):
    """Precision, device, batches and distribution of the work."""

    title = "Inference"

    dtype: Literal[DTYPES] = option(  # type: ignore[valid-type]
        "auto",
        f"Precision of the model. {AUTO_DTYPE_HELP} int8 is for NeoBERT on a CPU.",
    )
    device: str | None = option(
        None,
        f"{DEVICE_HELP} Under a launcher, each process uses its own GPU.",
        metavar="NAME",
        affects_results=False,
    )
    batch_tokens: Annotated[int, Meta(ge=1)] | None = option(
        None, BATCH_TOKENS_HELP, affects_results=False
    )
    shard: str | None = option(
        None,
        "Shard of the parts to encode, from 0/N to N-1/N. By default the rank of the process "
        "under torchrun, accelerate or srun.",
        metavar="I/N",
        affects_results=False,
    )


@dataclass(frozen=True)
class EncodeOptions:
    """Options of `neobert encode`."""

    corpus: CorpusOptions
    model: ModelOptions
    encoder: EncoderOptions = EncoderOptions()
    long_texts: LongTextOptions = LongTextOptions()
    embeddings: EmbeddingOptions = EmbeddingOptions()
    inference: InferenceOptions = InferenceOptions()


OPTIONS = {
    "encode": OptionParser(
        "neobert encode",
        "Compute the embeddings of a corpus of any size in constant memory, with any number of "
        "processes, GPUs or machines. An interrupted run resumes.",
        EncodeOptions,
        "neobert encode texts.jsonl embeddings.parquet --model examples/sentence-encoder",
    ),
}
