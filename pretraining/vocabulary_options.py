"""Options of `neobert tokenizer`. Imports neither torch nor transformers."""

from dataclasses import dataclass

from ..common.arguments import Arguments, Options, option
from ..common.errors import UserError


MULTIPLE = 64  # of a vocabulary's rows, for matrix units


@dataclass(kw_only=True)
class TextOptions(Arguments):
    """What is read."""

    texts: list[str] = option(
        help="files (jsonl, parquet, csv, tsv, txt), folders, patterns, or Hub data sets",
        positional=True,
        free=True,  # known by their digest
    )
    column: str = option("text", "column with the text")
    subset: str | None = option(None, "subset of a Hub data set")
    split: str = option("train", "split of a Hub or saved data set")
    limit: int = option(200_000_000, "characters that are read, the first ones", least=1)


@dataclass(kw_only=True)
class VocabularyOptions(Arguments):
    """What is made."""

    vocab_size: int = option(help=f"pieces, rounded up to a multiple of {MULTIPLE}", least=MULTIPLE)
    extend: str | None = option(
        None,
        "folder or Hub name of a WordPiece tokenizer: its pieces keep their ids, new ones follow",
        free=True,
    )
    cased: bool = option(False, "keep capital letters")
    strip_accents: bool = option(False, "read \u00e9 as e")
    min_frequency: int = option(2, "rarer characters and pieces are left out", least=1)
    output: str = option(help="folder of the tokenizer and its report", free=True)

    def __post_init__(self):
        super().__post_init__()
        self.rows = -(-self.vocab_size // MULTIPLE) * MULTIPLE
        if self.extend is not None and (self.cased or self.strip_accents):
            raise UserError(
                f"cased and strip_accents follow the tokenizer that is extended, {self.extend}; "
                "leave them out"
            )


TOKENIZER_OPTIONS = Options(
    "neobert tokenizer",
    "A WordPiece tokenizer learnt from texts, in the form of BERT's, and how it cuts held-out text "
    "beside another one.",
    (TextOptions, VocabularyOptions),
    "neobert tokenizer texts.jsonl --output my-tokenizer --vocab-size 32000",
)
