"""What a student learns from: texts of local files, split by hash, and the teacher's vectors of
them, kept on disk.

A folder of vectors has `vectors.json`, which says of whose texts and which teacher they are, and
shards `00000.npy` of (65,536, D) float16. Every shard is written completely or not at all, so that
a run which was interrupted goes on at the first one that is missing.
"""

import contextlib
import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np
import torch
from tqdm.auto import tqdm

from ..common.arguments import Arguments, option, typed
from ..common.errors import UserError
from ..common.files import new_file, read_json, write_json
from ..common.rows import check_column, read_rows, row_format


SHARD = 65_536


@dataclass
class TextSource(Arguments):
    """One entry of `texts` or `other_texts` in a recipe."""

    path: str = option("", "a .jsonl or .parquet file, or .txt with a text a line")
    column: str = option("text", "column of the text")
    pair: str | None = option(None, "column of a text that belongs to it: both are in one batch")
    share: float = option(1.0, "of the rows that are taken, by hash", above=0, most=1)
    name: str | None = option(None, "what it is, for the card; the file's name by default")
    license: str | None = option(None, "for the card")

    @classmethod
    def from_entry(cls, entry):
        """From a path, or a mapping of the fields above. Raises UserError for unknown keys, wrong
        types and files that are not there."""
        values = {"path": entry} if isinstance(entry, str) else entry
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = (
            [key for key in values if key not in known]
            if isinstance(values, dict)
            else [str(values)]
        )
        if unknown or not values.get("path"):
            raise UserError(
                f"each of texts must be a file or a mapping with {', '.join(known)}, but {entry!r} "
                "was given"
            )
        source = cls(**typed(values, get_type_hints(cls), f"of {entry!r} in texts"))
        source.name = source.name or Path(source.path).stem
        if not Path(source.path).is_file():
            raise UserError(f"there is no file {source.path}, named in texts")
        return source

    def read(self):
        """Tuples of one text, or of two that belong together, in file order and without surrounding
        spaces; empty texts are left out."""
        columns = ["text"] if row_format(Path(self.path)) == ".txt" else [self.column]
        columns += [self.pair] if self.pair else []
        for column in columns:
            check_column([Path(self.path)], column, "column in texts")
        for _, row in read_rows(self.path, columns, columns):
            texts = tuple(filter(None, (row[column].strip() for column in columns)))
            if texts and _fraction(f"share {texts[0]}") < self.share:
                yield texts


def _fraction(text):
    """A number from 0 to 1 that is a fixed function of the text."""
    return int.from_bytes(hashlib.sha1(text.encode("utf-8", "replace")).digest()[:8], "big") / 2**64


def is_held_out(text, percent):
    """Whether a text is kept for measuring: a fixed function of its words, so that copies of it
    stay on the same side."""
    return _fraction(" ".join(text.lower().split())) < percent / 100


@dataclass(frozen=True)
class Texts:
    """The texts of a run, each once.

    Attributes:
        train: to learn from.
        held_out: of the same sources, to measure with.
        other: {name: texts} of other kinds, to measure with.
        units: lists of numbers of training texts that belong together; every text is in one.
    """

    train: list
    held_out: list
    other: dict
    units: list


def read_texts(sources, others, held_out_percent, most):
    """`Texts` of the sources; of held-out texts, and of each kind of other texts, the first `most`
    in the order of their hashes.

    Raises:
        UserError: no text is left to learn from.
    """
    train, held_out, seen, units = [], [], {}, []
    for source in sources:
        for together in source.read():
            new = [text for text in dict.fromkeys(together) if text not in seen]
            kept = [text for text in new if not is_held_out(text, held_out_percent)]
            # A text that came before brings its partners into its own unit.
            known = [seen[text] for text in together if seen.get(text) is not None]
            unit = known[0] if known else len(units)
            if kept and not known:
                units.append([])
            for text in new:
                seen[text] = unit if text in kept else None
            if kept:
                units[unit] += range(len(train), len(train) + len(kept))
            train += kept
            held_out += [text for text in new if text not in kept]
    if len(train) < 2:
        raise UserError(
            f"texts must hold at least 2 different texts to learn from, but {len(train)} were found"
        )
    other = {
        source.name: _chosen(
            {text for texts in source.read() for text in texts if text not in seen}, most
        )
        for source in others
    }
    return Texts(
        train,
        _chosen(held_out, most),
        {name: texts for name, texts in other.items() if len(texts) > 2},
        units,
    )


def _chosen(texts, most):
    return sorted(texts, key=lambda text: hashlib.sha1(text.encode()).digest())[:most]


def texts_digest(texts):
    """Twelve hex digits of all texts in their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:12]


class TeacherVectors:
    """The teacher's vectors of a list of texts: (N, D) float16 in shards on disk.

    Args:
        folder: of these texts alone.
        texts: N strings.
        identity: {name: value} of what else the vectors depend on.
        load_teacher: function without arguments that returns a `PackedEncoder`; called when a shard
            is missing.
    Raises:
        UserError: the folder holds vectors of another teacher or of other texts.
    """

    def __init__(self, folder, texts, identity, load_teacher):
        self.folder, self.count = Path(folder), len(texts)
        wanted = {"texts": texts_digest(texts), "count": len(texts), **identity}
        described = self.folder / "vectors.json"
        if described.is_file():
            found = read_json(described)
            changed = [name for name in wanted if found.get(name) != wanted[name]]
            if changed:
                raise UserError(
                    f"{folder} holds vectors of another run ({', '.join(changed)} differ); give "
                    "another --work, or remove that folder"
                )
        else:
            write_json(described, wanted)
        shards = [
            (i, self.folder / f"{number:05d}.npy")
            for number, i in enumerate(range(0, len(texts), SHARD))
        ]
        missing = [(start, path) for start, path in shards if not path.is_file()]
        if missing:
            teacher = load_teacher()
            with tqdm(
                total=sum(min(SHARD, len(texts) - start) for start, _ in missing),
                desc=f"teacher, {self.folder.name}",
            ) as bar:
                for start, path in missing:
                    if path.is_file():  # another process was faster
                        continue
                    vectors = teacher.embed(
                        teacher.tokenize(texts[start : start + SHARD]), bar.update
                    )
                    self._write(path, vectors)
        self.shards = [np.load(path, mmap_mode="r") for _, path in shards]

    @staticmethod
    def _write(path, vectors):
        with np.errstate(over="ignore"):
            vectors = vectors.astype(np.float16)
        if not np.isfinite(vectors).all():
            raise UserError(
                "the teacher's vectors are not finite in float16; give --teacher-dtype float32"
            )
        with new_file(path) as file:
            np.save(file, vectors)

    @property
    def width(self):
        return self.shards[0].shape[1]

    def __len__(self):
        return self.count

    def rows(self, index):
        """(n, D) float32 of the texts with these numbers."""
        return np.stack([self.shards[i // SHARD][i % SHARD] for i in index]).astype(np.float32)


def training_dataset(texts, vectors):
    """A `datasets.Dataset` with columns text and label, the teacher's vector (D,) float32, which is
    read from disk when it is asked for."""
    from datasets import Dataset

    data = Dataset.from_dict({"text": texts, "label": list(range(len(texts)))})

    def with_vectors(batch):
        output = dict(batch)
        if "label" in batch:
            output["label"] = list(torch.from_numpy(vectors.rows(batch["label"])))
        return output

    return data.with_transform(with_vectors)


def token_lengths(texts, tokenizer, max_length, path):
    """Tokens of each text, (N,) int32, kept in the file `path`."""
    with contextlib.suppress(OSError, ValueError, EOFError):  # none, or a torn one
        lengths = np.load(path)
        if lengths.shape == (len(texts),):
            return lengths
    lengths = []
    for start in tqdm(range(0, len(texts), 4096), desc="lengths"):
        rows = tokenizer(
            texts[start : start + 4096],
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
        )["input_ids"]
        lengths += map(len, rows)
    with new_file(path) as file:
        np.save(file, np.array(lengths, dtype=np.int32))
    return np.array(lengths, dtype=np.int32)
