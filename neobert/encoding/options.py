"""Options of `neobert encode`. Imports neither torch nor transformers."""

from dataclasses import dataclass

from ..common.arguments import Arguments, Options, option
from ..common.constants import DTYPES
from ..common.errors import UserError
from ..embeddings.options import TOKENS_HELP, EncoderOptions


@dataclass(kw_only=True)
class CorpusOptions(Arguments):
    """What is encoded, by which model."""

    source: str = option(
        help=(
            "texts (.jsonl, .parquet, .csv, .tsv, .txt): a file, a folder, a glob or a URL of them"
        ),
        positional=True,
        free=True,
    )
    output: str = option(
        help="a folder of parquet files, one file (.parquet), or the URL of either",
        positional=True,
        free=True,
    )
    model: str = option(help="sentence encoder or bare encoder: a folder or a Hub name")
    text_column: str = option("text", "column that holds the text")
    prompt_name: str | None = option(
        None, "name of one of the model's prompts to put before each text"
    )
    prompt: str | None = option(None, "text to put before each text")


@dataclass(kw_only=True)
class LongTextOptions(Arguments):
    """What is done with texts that are longer than the model reads."""

    long_texts: str = option(
        "cut",
        "cut: a vector a text, of its beginning; windows: a vector for each part of a text",
        choices=("cut", "windows"),
    )
    window: int | None = option(
        None, "most tokens of a window; 256, or as many as the model reads if less", least=1
    )
    overlap: int | None = option(
        None, "most tokens that neighbouring windows share; an eighth of a window", least=0
    )

    def __post_init__(self):
        super().__post_init__()
        if self.long_texts == "cut":
            for name in ("window", "overlap"):
                if getattr(self, name) is not None:
                    raise UserError(f"{name} is for windows; give long_texts windows too")


@dataclass(kw_only=True)
class VectorOptions(Arguments):
    """What is written."""

    keep: list[str] | None = option(
        None,
        "Columns to copy with their types; NAME:text copies a column as text. By default `id`, if "
        "the input has this column.",
    )
    normalize: bool = option(False, "scale the vectors to length 1")
    output_dtype: str = option(
        "float32",
        "of the vectors in the output; int8 is a quarter of float32, binary, a bit a dimension, "
        "a 32nd",
        choices=("float32", "float16", "int8", "binary"),
    )
    truncate_dim: int | None = option(
        None, "dimensions to keep, the first ones; for models trained for it", least=1
    )


@dataclass(kw_only=True)
class WorkOptions(Arguments):
    """How the work is done and shared out."""

    dtype: str = option(
        "auto",
        "of the model; auto takes the fastest of floating point by a measurement, int8 is for "
        "NeoBERT on a CPU",
        choices=DTYPES,
    )
    device: str | None = option(
        None, "cpu, cuda, cuda:1, ...; under a launcher each process has a GPU", free=True
    )
    tokens_per_batch: int | None = option(None, TOKENS_HELP, free=True, least=1)
    rows: int = option(8192, "most rows of an input file in a part", least=1)
    shard: str | None = option(
        None,
        "share of the parts, from 0/n to n-1/n; by default that of a process of torchrun, "
        "accelerate or srun",
        free=True,
    )


@dataclass(kw_only=True)
class EncodeArguments(WorkOptions, EncoderOptions, LongTextOptions, VectorOptions, CorpusOptions):
    """Options of `neobert encode`."""

    def __post_init__(self):
        super().__post_init__()
        if self.prompt is not None and self.prompt_name is not None:
            raise UserError("give either prompt or prompt_name, not both")


OPTIONS = {
    "encode": Options(
        "neobert encode",
        "Embeddings of a corpus of any size, in constant memory, by several processes, GPUs or "
        "machines. An interrupted run continues.",
        (EncodeArguments,),
        "neobert encode texts.jsonl vectors.parquet --model examples/sentence-encoder",
    ),
}
