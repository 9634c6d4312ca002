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
from sentence_transformers.base.sampler import DefaultBatchSampler
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
        """The texts in file order, without surrounding spaces; empty ones are left out."""
        column = "text" if row_format(Path(self.path)) == ".txt" else self.column
        check_column([Path(self.path)], column, "column in texts")
        yield from filter(
            None, (row[column].strip() for _, row in read_rows(self.path, [column], [column]))
        )


def is_held_out(text, percent):
    """Whether a text is kept for measuring: a fixed function of its words, so that copies of it
    stay on the same side."""
    digest = hashlib.sha1(" ".join(text.lower().split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64


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


def read_texts(sources, others, held_out_percent, most_held_out, most_other=2000):
    """`Texts` of the sources; of held-out and other texts the first so many in the order of their
    hashes.

    Raises:
        UserError: no text is left to learn from.
    """
    train, held_out, seen = [], [], set()
    for source in sources:
        for text in source.read():
            if text in seen:
                continue
            seen.add(text)
            (held_out if is_held_out(text, held_out_percent) else train).append(text)
    if len(train) < 2:
        raise UserError(
            f"texts must hold at least 2 different texts to learn from, but {len(train)} were found"
        )
    other = {
        source.name: _chosen({text for text in source.read() if text not in seen}, most_other)
        for source in others
    }
    return Texts(
        train,
        _chosen(held_out, most_held_out),
        {name: texts for name, texts in other.items() if len(texts) > 2},
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


class SimilarLengths(DefaultBatchSampler):
    """Batches of texts of nearly one length: attention on the CPU runs once a length.

    Each epoch shuffles all texts, sorts every `pool` batches of them by length, and shuffles the
    batches. `group` neighbouring batches hold texts of one length: those of the processes of a
    step, which wait for each other.

    Args:
        dataset: of N texts.
        lengths: (N,) tokens of each.
    """

    pool = 64

    def __init__(
        self,
        dataset,
        batch_size,
        drop_last=True,
        generator=None,
        seed=0,
        lengths=None,
        group=1,
        **kwargs,
    ):
        super().__init__(range(len(dataset)), batch_size=batch_size, drop_last=True)
        self.lengths = torch.from_numpy(np.asarray(lengths))
        self.group = group
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return max(1, len(self.lengths) // (self.batch_size * self.group)) * self.group

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        together = self.batch_size * self.group
        groups = []
        for part in order.split(self.pool * together):
            part = part[self.lengths[part].argsort(stable=True)]
            groups += [rows for rows in part.split(together) if len(rows) == together]
        groups = groups or [order]  # fewer texts than one step takes
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield from (
                rows.tolist() for rows in groups[index].split(-(-len(groups[index]) // self.group))
            )
