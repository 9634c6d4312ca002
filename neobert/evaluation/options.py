"""Options of `neobert retrieval` and `neobert mteb`. Imports neither torch nor transformers."""

import re
from dataclasses import dataclass
from pathlib import Path

from ..common.arguments import Arguments, Options, option
from ..common.constants import DTYPES
from ..common.errors import UserError
from ..embeddings.instructions import TEMPLATE, check_template
from ..embeddings.options import TOKENS_HELP, EncoderOptions


PAPER_BENCHMARK = "MTEB(eng, v1)"
BENCHMARKS = ("MTEB(eng, v2)", PAPER_BENCHMARK, "NanoBEIR")  # that have a table of their own


@dataclass(kw_only=True)
class QuestionOptions(Arguments):
    """What is measured on what."""

    model: str = option(
        help="sentence encoder or bare encoder: a folder or a Hub name", positional=True
    )
    pairs: str = option(
        help="file of rows with columns anchor, positive, and perhaps negative, negative_1, ..."
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, ...")


@dataclass(kw_only=True)
class RetrievalArguments(EncoderOptions, QuestionOptions):
    """Options of `neobert retrieval`."""


@dataclass(kw_only=True)
class TaskOptions(Arguments):
    """What is measured on what."""

    model: str = option(help="sentence encoder or bare encoder: a folder or a Hub name")
    output: str = option(help="folder for <name>.json, the tables and MTEB's result cache")
    tasks: list[str] = option(
        default_factory=lambda: [BENCHMARKS[0]],
        help="names of tasks and benchmarks, as 'MTEB(eng, v1)' (the paper's) or NanoBEIR",
    )
    name: str | None = option(None, "name of the row; the model's by default")
    instructions: str = option(
        "mteb", "mteb (each task's own prompt), none, or a YAML or JSON file {task or type: text}"
    )
    instruction_template: str = option(TEMPLATE, "how an instruction is put before a text")
    dtype: str = option(
        "auto",
        "float16 on CUDA, as in the paper; elsewhere auto takes the fastest of floating point by a "
        "measurement; int8 is for NeoBERT on a CPU",
        choices=DTYPES,
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, ...")
    tokens_per_batch: int | None = option(None, TOKENS_HELP, least=1)


@dataclass(kw_only=True)
class MtebArguments(EncoderOptions, TaskOptions):
    """Options of `neobert mteb`."""

    def __post_init__(self):
        super().__post_init__()
        check_template(self.instruction_template)
        if not re.fullmatch(r"[\w.+-]+", self.row):
            raise UserError(
                f"name may hold letters, digits and . _ + -, but {self.row!r} was given"
            )

    @property
    def row(self):
        """Name of the row in the table."""
        return self.name or Path(self.model.rstrip("/")).name


OPTIONS = {
    "retrieval": Options(
        "neobert retrieval",
        "How often an encoder finds the text that belongs to a question, among all texts of a "
        "file.",
        (RetrievalArguments,),
        "neobert retrieval runs/encoder --pairs test.jsonl",
    ),
    "mteb": Options(
        "neobert mteb",
        "MTEB and NanoBEIR through the mteb package, packed and resumable, with their tables.",
        (MtebArguments,),
        "neobert mteb --model runs/encoder --tasks STS12 --output results/mteb",
    ),
}
