"""Options of `neobert retrieval` and `neobert mteb`. Imports neither torch nor transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common.constants import DEVICE_HELP, DTYPES
from ..common.folders import check_row_name
from ..common.options import OptionGroup, OptionParser, option
from ..embeddings.instructions import TEMPLATE, check_template
from ..embeddings.options import AUTO_DTYPE_HELP, BATCH_TOKENS_HELP, EncoderOptions


# Benchmark of the paper, table 4.
PAPER_BENCHMARK = "MTEB(eng, v1)"
# Benchmarks that have a table in table.md.
BENCHMARKS = ("MTEB(eng, v2)", PAPER_BENCHMARK, "NanoBEIR")


@dataclass(frozen=True)
class RetrievalDataOptions(OptionGroup):
    """Model and pairs."""

    title = "Data"

    model: str = option(
        help="Model to evaluate: a directory or a name on the Hub.", positional=True
    )
    pairs: str = option(
        help="File of rows with the columns anchor, positive and, optionally, negative or "
        "negative_1, negative_2, ...",
        metavar="PATH",
    )
    device: str | None = option(None, DEVICE_HELP, metavar="NAME")


@dataclass(frozen=True)
class RetrievalOptions:
    """Options of `neobert retrieval`."""

    data: RetrievalDataOptions
    encoder: EncoderOptions = EncoderOptions()


@dataclass(frozen=True)
class TaskOptions(OptionGroup):
    """Model, tasks and output."""

    title = "Evaluation"

    model: str = option(help="Model to evaluate: a directory or a name on the Hub.", metavar="NAME")
    output: str = option(
        help="Output directory for NAME.json, the tables and MTEB's result cache.", metavar="PATH"
    )
    tasks: list[str] = option(
        default_factory=lambda: [BENCHMARKS[0]],
        help="Names of tasks and benchmarks, such as NanoBEIR or 'MTEB(eng, v1)', the benchmark "
        "of the paper.",
        metavar="NAME",
    )
    name: str | None = option(
        None, "Name of the row in the tables. By default the name of the model.", metavar="NAME"
    )

    def __post_init__(self) -> None:
        # The name is also that of a file.
        check_row_name(self.row)

    @property
    def row(self) -> str:
        """Name of the row in the tables."""
        return self.name or Path(self.model.rstrip("/")).name


@dataclass(frozen=True)
class TaskInstructionOptions(OptionGroup):
    """Instructions before the texts."""

    title = "Instructions"

    instructions: str = option(
        "mteb",
        "Instructions before the texts: mteb (the prompt of each task), model (the prompts of the "
        "model for queries and documents), none, or a YAML or JSON file {task or type: text}.",
        metavar="{mteb,model,none,PATH}",
    )
    instruction_template: str = option(TEMPLATE, "Format of an instruction before a text.")

    def __post_init__(self) -> None:
        check_template(self.instruction_template)


@dataclass(frozen=True)
class InferenceOptions(OptionGroup):
    """Precision, device and batches."""

    title = "Inference"

    dtype: Literal[DTYPES] = option(  # type: ignore[valid-type]
        "auto",
        f"Precision of the model. {AUTO_DTYPE_HELP} int8 is for NeoBERT on a CPU.",
    )
    device: str | None = option(None, DEVICE_HELP, metavar="NAME")
    batch_tokens: Annotated[int, Meta(ge=1)] | None = option(None, BATCH_TOKENS_HELP)


@dataclass(frozen=True)
class MtebOptions:
    """Options of `neobert mteb`."""

    evaluation: TaskOptions
    instructions: TaskInstructionOptions = TaskInstructionOptions()
    encoder: EncoderOptions = EncoderOptions()
    inference: InferenceOptions = InferenceOptions()


OPTIONS: dict[str, OptionParser[Any]] = {
    "retrieval": OptionParser(
        "neobert retrieval",
        "Measure the retrieval quality of an encoder on pairs: recall and MRR, with all texts of "
        "the file ranked for every query of the file.",
        RetrievalOptions,
        "neobert retrieval runs/encoder --pairs test.jsonl",
    ),
    "mteb": OptionParser(
        "neobert mteb",
        "Evaluate an encoder on MTEB and NanoBEIR with the mteb package. Batches are packed, and "
        "an interrupted evaluation resumes.",
        MtebOptions,
        "neobert mteb --model runs/encoder --tasks STS12 --output runs/mteb",
    ),
}
