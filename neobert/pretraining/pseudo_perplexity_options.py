"""Options of `neobert pseudo-perplexity`. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ..common.constants import DEVICE_HELP, TRUST_REMOTE_CODE_HELP
from ..common.options import OptionGroup, OptionParser, option


# Default lengths in tokens.
LENGTHS = (128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """Masked language models, and how they are run."""

    title = "Model"

    model: list[str] = option(
        help="Masked language models: directories or names on the Hub.",
        metavar="NAME",
        affects_results=False,
    )
    yarn: list[Annotated[float, Meta(ge=1, le=1e6)] | Literal["off"]] = option(
        default_factory=lambda: ["off"],
        help="YaRN factors, which multiply the context length that a NeoBERT was trained with. "
        "off: the model as it was saved. Several values are measured one after another.",
        metavar="{off,FLOAT}",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "Precision of the weights and the computation."
    )
    device: str | None = option(None, DEVICE_HELP, metavar="NAME", affects_results=False)
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE_HELP)

    def __post_init__(self) -> None:
        # A repeated model or factor would be measured again, and its texts counted twice.
        object.__setattr__(self, "model", list(dict.fromkeys(self.model)))
        object.__setattr__(self, "yarn", list(dict.fromkeys(self.yarn)))


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionGroup):
    """Texts, and the lengths at which they are measured."""

    title = "Data"

    text: str = option(
        help="Texts: a file (jsonl, parquet, csv, tsv, txt), a directory, a glob, or a dataset on "
        "the Hub (name:subset@revision).",
        metavar="NAME",
        affects_results=False,
    )
    column: str = option("text", "Column that contains the texts.", metavar="NAME")
    max_texts: Annotated[int, Meta(ge=1)] = option(
        100,
        "Maximum number of texts. Texts that reach the largest length are selected first, then "
        "the longest of the others.",
    )
    lengths: list[Annotated[int, Meta(ge=1, le=2**31 - 1)]] | None = option(
        None,
        "Lengths to measure, in tokens including special tokens. By default "
        f"{', '.join(map(str, LENGTHS))}, up to the context length of the model.",
    )
    bucketing: Literal["truncate", "full"] = option(
        "truncate",
        "Assignment of texts to lengths. truncate: measure each text at every length that it "
        "reaches, truncated to this length. full: measure each text once at its full length, "
        "truncated to the largest of --lengths, and count it under the smallest length that is not "
        "exceeded.",
    )


@dataclass(frozen=True)
class SamplingOptions(OptionGroup):
    """Positions that are masked."""

    title = "Sampling"

    positions: Annotated[int, Meta(ge=1)] | Literal["exact"] = option(
        64,
        "Number of positions to mask in each text, sampled at random. exact: mask every position.",
        metavar="{INT,exact}",
    )
    seed: int = option(0, "Random seed of the sampled positions.")


@dataclass(frozen=True)
class OutputOptions(OptionGroup):
    """Output directory."""

    title = "Output"

    output: str = option(
        "runs/pseudo_perplexity",
        "Output directory of the CSV file, the table and the plot.",
        metavar="PATH",
        affects_results=False,
    )


@dataclass(frozen=True)
class PseudoPerplexityOptions:
    """Options of `neobert pseudo-perplexity`."""

    model: ModelOptions
    data: TextOptions
    sampling: SamplingOptions = SamplingOptions()
    output: OutputOptions = OutputOptions()


PARSER = OptionParser(
    "neobert pseudo-perplexity",
    "Measure the pseudo-perplexity of masked language models against text length (Figure 2 of the "
    "paper). An interrupted run resumes.",
    PseudoPerplexityOptions,
    "neobert pseudo-perplexity --model chandar-lab/NeoBERT --text articles.jsonl --positions 64",
)
