"""What a student learns from: texts of local files, split by hash, and the teacher's vectors of
them, kept on disk.

The vectors of N texts are one file `NAME.npy`, (N, D) float16. `NAME.json` beside it says how many
are there, so that a run which was interrupted goes on.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np
from tqdm.auto import tqdm

from ..common.arguments import Arguments, option, typed
from ..common.data import file_format, fraction, rows
from ..common.errors import UserError
from ..common.files import read_json, write_json


PART = 65_536  # texts whose vectors are written at a time


@dataclass
class TextSource(Arguments):
    """One entry of `texts` or `other_texts` in a recipe."""

    path: str = option("", "a .jsonl or .parquet file, or .txt with a text a line")
    column: str | list[str] = option("text", "column of the text, or a list of columns")
    share: float = option(1.0, "of the rows that are taken, by hash", above=0, most=1)
    name: str | None = option(None, "what it is, for the card; the file's name by default")
    license: str | None = option(None, "for the card")

    @classmethod
    def from_entry(cls, entry):
        """From a path, or a mapping of the fields above. Raises UserError for unknown keys, wrong
        types and files that are not there."""
        values = {"path": entry} if isinstance(entry, str) else entry
        source = cls(**typed(values, get_type_hints(cls), f"of {entry!r} in texts"))
        source.name = source.name or Path(source.path).stem
        if not Path(source.path).is_file():
            raise UserError(f"there is no file {source.path}, named in texts")
        return source

    def read(self):
        """The texts in file order, without surrounding spaces; empty ones are left out."""
        columns = [self.column] if isinstance(self.column, str) else self.column
        columns = ["text"] if file_format(self.path) == ".txt" else columns
        for row in rows(self.path, columns, columns):
            texts = [text for text in (row[column].strip() for column in columns) if text]
            if texts and fraction(f"share {texts[0]}") < self.share:
                yield from texts


def is_held_out(text, percent):
    """Whether a text is kept for measuring: a fixed function of its words, so that copies of it
    stay on the same side."""
    return fraction(" ".join(text.lower().split())) < percent / 100


@dataclass(frozen=True)
class Texts:
    """The texts of a run, each once.

    Attributes:
        train: to learn from.
        held_out: of the same sources, to measure with.
        other: {name: texts} of other kinds, to measure with.
    """

    train: list
    held_out: list
    other: dict

    @property
    def measured(self):
        """{name: texts} of what agreement with the teacher is measured on, at least 3 each."""
        sets = {"held_out": self.held_out, **self.other}
        return {name: texts for name, texts in sets.items() if len(texts) > 2}

    def check_measured(self):
        """Raises UserError where there is nothing to measure on."""
        if not self.measured:
            raise UserError(
                f"{len(self.held_out)} of {len(self.train) + len(self.held_out)} texts are held "
                "out, and 3 are needed to measure with; give a larger --held-out-percent"
            )


def read_texts(sources, others, held_out_percent, most):
    """`Texts` of the sources; of held-out texts, and of each kind of other texts, the first `most`
    in the order of their hashes.

    Raises:
        UserError: no text is left to learn from.
    """
    train, held_out, seen = [], [], set()
    for text in (text for source in sources for text in source.read()):
        if text not in seen:
            seen.add(text)
            (held_out if is_held_out(text, held_out_percent) else train).append(text)
    if len(train) < 2:
        raise UserError(
            f"texts must hold at least 2 different texts to learn from, but {len(train)} were found"
        )
    other = {}
    for source in others:
        other[source.name] = _chosen({text for text in source.read() if text not in seen}, most)
    return Texts(train, _chosen(held_out, most), other)


def _chosen(texts, most):
    return sorted(texts, key=fraction)[:most]


def texts_digest(texts):
    """Twelve hex digits of all texts in their order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def teacher_vectors(path, texts, teacher):
    """The teacher's vectors of N texts, (N, D) float16, memory-mapped; those that the file does not
    have yet are computed first.

    Args:
        path: of the file, .npy; it holds the vectors of these texts by this teacher alone.
        teacher: `PackedEncoder`.
    """
    described = path.with_suffix(".json")
    done = read_json(described)["done"] if described.is_file() else 0
    if done < len(texts):
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (len(texts), teacher.width)
        vectors = np.lib.format.open_memmap(path, "r+" if done else "w+", np.float16, shape)
        with tqdm(total=len(texts), initial=done, desc=f"teacher, {path.stem}") as bar:
            for start in range(done, len(texts), PART):
                tokens = teacher.tokenize(texts[start : start + PART])
                vectors[start : start + PART] = teacher.embed(tokens, bar.update)
                vectors.flush()
                write_json(described, {"done": min(start + PART, len(texts))})
    return np.load(path, mmap_mode="r")
