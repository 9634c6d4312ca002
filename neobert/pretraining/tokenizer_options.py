"""Options of `neobert tokenizer`. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ..common.errors import UserError
from ..common.options import OptionGroup, OptionParser, option


# Vocabulary sizes are multiples of this number, as required by the matrix units of GPUs.
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionGroup):
    """Training texts and the output directory."""

    title = "Data"

    texts: list[str] = option(
        help="Training texts: files (jsonl, parquet, csv, tsv, txt), directories, globs, or "
        "datasets on the Hub.",
        positional=True,
    )
    output: str = option(
        help="Output directory of the tokenizer. It must not exist.", metavar="PATH"
    )
    column: str = option("text", "Column that contains the texts.", metavar="NAME")
    split: str = option("train", "Split of a Hub dataset or a saved dataset.", metavar="NAME")
    max_characters: Annotated[int, Meta(ge=1)] = option(
        200_000_000, "Maximum number of characters to read, from the start of the texts."
    )


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions(OptionGroup):
    """Size and content of the vocabulary."""

    title = "Vocabulary"

    vocab_size: Annotated[int, Meta(ge=VOCABULARY_MULTIPLE)] = option(
        help=f"Vocabulary size, rounded up to a multiple of {VOCABULARY_MULTIPLE}."
    )
    min_frequency: Annotated[int, Meta(ge=1)] = option(
        2,
        "Minimum number of occurrences for a character or token to be added to the vocabulary.",
    )
    extend: str | None = option(
        None,
        "WordPiece tokenizer to extend: a directory or a name on the Hub. Its tokens keep their "
        "IDs, and new tokens are appended.",
        metavar="NAME",
    )

    @property
    def rounded_size(self) -> int:
        """The requested vocabulary size, rounded up to a multiple of VOCABULARY_MULTIPLE."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True)
class NormalizationOptions(OptionGroup):
    """Normalization of the texts before tokenization."""

    title = "Normalization"

    cased: bool = option(False, "Keep capital letters. By default texts are lowercased.")
    strip_accents: bool = option(False, "Remove accents: tokenize \u00e9 as e.")


@dataclass(frozen=True)
class TokenizerOptions:
    """Options of `neobert tokenizer`."""

    data: TextOptions
    vocabulary: VocabularyOptions
    normalization: NormalizationOptions = NormalizationOptions()

    def __post_init__(self) -> None:
        base = self.vocabulary.extend
        if base is not None and (self.normalization.cased or self.normalization.strip_accents):
            raise UserError(
                f"`cased` and `strip_accents` cannot be combined with `extend`, whose tokenizer "
                f"{base} determines them. Omit them."
            )


PARSER = OptionParser(
    "neobert tokenizer",
    "Train a WordPiece tokenizer in BERT's format, and compare it with another tokenizer on "
    "validation texts.",
    TokenizerOptions,
    "neobert tokenizer texts.jsonl --output my-tokenizer --vocab-size 32000",
)
