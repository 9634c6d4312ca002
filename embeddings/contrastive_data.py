"""Pairs and triplets for contrastive training: data sets of the Hub and local files in one form,
and the sampler that mixes them.

Every data set becomes columns anchor, positive, negative_1, ..., negative_n. A batch holds one data
set, drawn with probability proportional to size^alpha (paper, section 4.3).
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import torch
from sentence_transformers.base.sampler import (
    MultiDatasetDefaultBatchSampler,
    NoDuplicatesBatchSampler,
)

from ..common.arguments import check_ranges, option, typed
from ..common.errors import UserError, listed, one_line
from ..common.identity import files_digest
from ..common.rows import FORMATS, check_characters, read_rows, row_columns, row_format


@dataclass(frozen=True)
class PairSource:
    """One data set: an entry of `datasets` in a recipe, or a file of `--pairs`.

    A text is named by a path into the row: `question`, `set.0`, `set.query`, `pos_paras.0.text`;
    `*` is every item: `neg_paras.*.text`.
    """

    name: str
    path: str  # Hub name, or a local file of common.rows
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    anchor: str = "anchor"
    positive: str = "positive"
    # paths; empty: the columns called negative, negative_1, ... of a local file
    negatives: list[str] = field(default_factory=list)
    # of each row; a shorter list is repeated, a row without any is left out
    max_negatives: int = option(8, least=1)
    # {column: value}: only rows whose column is greater
    above: dict[str, float] = field(default_factory=dict)
    # the split lists query-id and corpus-id; the texts are in the subsets queries and corpus
    # (MTEB's layout)
    qrels: bool = False
    max_rows: int | None = option(None, least=1)  # a random sample of this many
    instruction: str = ""  # what the query asks for; put before the anchor

    @property
    def is_local(self):
        return row_format(self.path) is not None

    @property
    def columns(self):
        """The columns of a row that hold all of this."""
        return list(
            dict.fromkeys(
                path.split(".")[0]
                for path in (self.anchor, self.positive, *self.negatives, *self.above)
            )
        )

    @classmethod
    def from_dict(cls, values):
        """Checks one entry of the recipe.

        Raises:
            UserError: unknown or missing keys, values of a wrong type or out of their range.
        """
        if not isinstance(values, dict):
            raise UserError(
                f"each of datasets must be a mapping with name and path, but {values!r} was given"
            )
        missing = [key for key in ("name", "path") if not values.get(key)]
        if missing:
            raise UserError(f"datasets: an entry has no {missing[0]!r}: {values}")
        where, hints = f"of the data set {values['name']!r}", get_type_hints(cls)
        source = cls(**typed(values, hints, where, f"allowed are {', '.join(hints)}"))
        check_ranges(source, f" {where}")
        return source

    @classmethod
    def from_file(cls, path, instruction=""):
        """A local file with columns anchor, positive and perhaps negative, negative_1, ...; its
        name is the file's."""
        if row_format(path) is None:
            raise UserError(
                f"pairs must be files that end in {', '.join(FORMATS)}, but {path} was given"
            )
        return cls(name=Path(path).name.split(".")[0], path=str(path), instruction=instruction)

    def replaced(self, **values):
        return replace(self, **values)


def lookup(row, path):
    """What `path` ("set.0", "neg_paras.*.text") leads to in a row; None where it leads nowhere."""
    return _lookup(row, path.split("."))


def _lookup(value, steps):
    if not steps or value is None:
        return value
    step, *rest = steps
    if step == "*":
        return [_lookup(item, rest) for item in value] if isinstance(value, (list, tuple)) else None
    if isinstance(value, dict):
        return _lookup(value.get(step), rest)
    if isinstance(value, (list, tuple)) and step.isdigit():
        return _lookup(value[int(step)], rest) if int(step) < len(value) else None
    return None


def example(row, source, negative_count):
    """anchor, positive and negative_1 ... of one row, or None where a text is missing or empty.

    Args:
        row: dict.
        source: `DataSource`.
        negative_count: negatives of every example of this data set.
    """
    anchor, positive = lookup(row, source.anchor), lookup(row, source.positive)
    if not _is_text(anchor) or not _is_text(positive):
        return None
    output = {"anchor": anchor, "positive": positive}
    if negative_count:
        found = _negatives(row, source)
        if not found:
            return None
        output.update({f"negative_{i + 1}": found[i % len(found)] for i in range(negative_count)})
    return output


def _negatives(row, source):
    found = []
    for path in source.negatives:
        value = lookup(row, path)
        found += [
            text for text in (value if isinstance(value, list) else [value]) if _is_text(text)
        ]
    return found[: source.max_negatives]


def _is_text(value):
    return isinstance(value, str) and value.strip() != ""


def _is_negative(column):
    return column == "negative" or column.startswith("negative_")


def inspected(source):
    """The source with its negative columns named; a local file is read row by row, and so checked.

    Raises:
        UserError: no such file, a broken row, a column that is missing, negatives in some rows
            only.
    """
    if not source.is_local:
        return source
    alike = None
    if not source.negatives:
        found = sorted(
            filter(_is_negative, row_columns(source.path)), key=lambda name: (len(name), name)
        )
        source, alike = source.replaced(negatives=found), _is_negative
    texts = [path for path in (source.anchor, source.positive) if "." not in path]
    for place, row in read_rows(source.path, source.columns, texts, alike=alike):
        for text in _negatives(row, source):
            check_characters(place, "negatives", text)
    return source


def _is_above(value, lowest):
    return value is not None and value > lowest


def _local_examples(source, count, digest):
    """Examples of a local file; `digest` is that of its content, which the library's cache goes
    by."""
    for _, row in read_rows(source.path, source.columns):
        if all(_is_above(row[column], lowest) for column, lowest in source.above.items()):
            made = example(row, source, count)
            if made is not None:
                yield made


def _load_local(source):
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetsError

    count = max(
        (len(_negatives(row, source)) for _, row in read_rows(source.path, source.columns)),
        default=0,
    )
    names = ["anchor", "positive", *(f"negative_{i + 1}" for i in range(count))]
    features = Features({name: Value("string") for name in names})
    given = {"source": source, "count": count, "digest": files_digest([source.path])}
    try:
        return Dataset.from_generator(_local_examples, features=features, gen_kwargs=given)
    except (
        TypeError,
        ValueError,
        DatasetsError,
    ) as error:  # `above` of what has no order; no row at all
        raise UserError(
            f"{source.name} ({source.path}) has no usable row "
            f"({one_line(error.__cause__ or error)})"
        ) from error


def _load_from_hub(source, seed):
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        data = (
            _load_qrels(source)
            if source.qrels
            else load_dataset(
                source.path, source.subset, split=source.split, revision=source.revision
            )
        )
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(
            f"the data set {source.path} cannot be loaded: {one_line(error)}"
        ) from error
    if source.qrels:
        return data
    for column in source.columns:
        if column not in data.column_names:
            raise UserError(
                f"{source.name} ({source.path}) has no column {column!r}; it has: "
                f"{listed(data.column_names)}"
            )
    for column, lowest in source.above.items():
        data = data.filter(
            lambda values, lowest=lowest: [_is_above(value, lowest) for value in values],
            input_columns=column,
            batched=True,
        )
    # before the work of the conversion
    if source.max_rows is not None and len(data) > source.max_rows:
        data = data.shuffle(seed=seed).select(range(source.max_rows))
    count = 0
    if source.negatives:
        count = max(
            (len(_negatives(row, source)) for row in data.select(range(min(1000, len(data))))),
            default=0,
        )

    def convert(batch):
        rows = (dict(zip(batch, values)) for values in zip(*batch.values()))
        made = [made for row in rows if (made := example(row, source, count)) is not None]
        names = ["anchor", "positive", *(f"negative_{i + 1}" for i in range(count))]
        return {name: [row[name] for row in made] for name in names}

    return data.map(convert, batched=True, remove_columns=data.column_names, desc=source.name)


def load_source(source, seed=0):
    """A data set as a `datasets.Dataset` with columns anchor, positive, negative_1, ....

    Raises:
        UserError: it cannot be loaded, has other columns, or no usable row.
    """
    data = _load_local(source) if source.is_local else _load_from_hub(source, seed)
    if source.max_rows is not None and len(data) > source.max_rows:
        data = data.shuffle(seed=seed).select(range(source.max_rows))
    if not len(data):
        raise UserError(f"{source.name} ({source.path}) has no usable row")
    return data


def _load_qrels(source):
    """anchor and positive from the three subsets of MTEB's retrieval layout; a document's title
    comes before its text, as in MTEB."""
    from datasets import Dataset, load_dataset

    qrels = load_dataset(source.path, "default", split=source.split, revision=source.revision)
    if "score" in qrels.column_names:
        qrels = qrels.filter(
            lambda scores: [score > 0 for score in scores], input_columns="score", batched=True
        )
    wanted = {"queries": qrels["query-id"], "corpus": qrels["corpus-id"]}
    texts = {}
    for subset, ids in wanted.items():
        ids = set(ids)
        data = load_dataset(source.path, subset, split=subset, revision=source.revision)
        rows = [row for row, identifier in enumerate(data["_id"]) if identifier in ids]
        texts[subset] = {
            row["_id"]: f"{row.get('title') or ''} {row['text']}".strip()
            for row in data.select(rows)
        }
    pairs = zip(wanted["queries"], wanted["corpus"])
    pairs = [
        (texts["queries"].get(query), texts["corpus"].get(document)) for query, document in pairs
    ]
    return Dataset.from_dict(
        {"anchor": [pair[0] for pair in pairs], "positive": [pair[1] for pair in pairs]}
    )


def probabilities(sizes, alpha):
    """Probability of each data set, size^alpha / sum of all."""
    weights = [size**alpha for size in sizes]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class SizeAlphaBatchSampler(MultiDatasetDefaultBatchSampler):
    """Every batch from one data set, drawn with probability proportional to size^alpha.

    A small data set is gone through again, in a new order, as often as it is drawn. An epoch has as
    many batches as the data sets together. `group` neighbouring batches hold the same data set: the
    processes of one step, which may then share their negatives.

    Args:
        dataset: ConcatDataset.
        batch_samplers: one sampler a data set.
        alpha: 0 draws all alike, 1 in proportion to their size.
        group: number of processes.
        names: of the data sets, for the message about one without a batch.
    """

    def __init__(
        self, dataset, batch_samplers, generator=None, seed=0, alpha=0.5, group=1, names=None
    ):
        super().__init__(dataset, batch_samplers=batch_samplers, generator=generator, seed=seed)
        # it differs between data sets; accelerate would drop the batches of any other size
        self.batch_size = None
        self.group = group
        self.names = names or range(len(batch_samplers))
        self.probabilities = probabilities([len(part) for part in dataset.datasets], alpha)

    def __iter__(self):
        # The inner samplers seed a generator that they may share with this one; the draws have
        # their own.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        offsets = [0]
        for part in self.dataset.datasets:
            offsets.append(offsets[-1] + len(part))
        weights = torch.tensor(self.probabilities, dtype=torch.float64)
        iterators, rounds = {}, [0] * len(self.batch_samplers)
        for _ in range(len(self) // self.group):
            drawn = int(torch.multinomial(weights, 1, generator=generator))
            for _ in range(self.group):
                if drawn not in iterators:
                    iterators[drawn] = self._restarted(drawn, rounds)
                tries = 0
                while (batch := next(iterators[drawn], None)) is None:
                    # Where most rows share a text with another, a batch may be found in few orders.
                    if (tries := tries + 1) > 100:
                        size = self.batch_samplers[drawn].batch_size
                        raise UserError(
                            f"the data set {self.names[drawn]} has too few different rows for a "
                            f"batch of {size}; lower the batch size"
                        )
                    iterators[drawn] = self._restarted(drawn, rounds)
                yield [index + offsets[drawn] for index in batch]

    def _restarted(self, number, rounds):
        sampler = self.batch_samplers[number]
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch * 1_000_003 + rounds[number] * 101 + number)
        rounds[number] += 1
        return iter(sampler)

    def __len__(self):
        return sum(len(sampler) for sampler in self.batch_samplers) // self.group * self.group


class TextsBatchSampler(NoDuplicatesBatchSampler):
    """Batches without a text that occurs twice (it would be a negative of its own row), cut to
    encoded texts and to different rows.

    Args:
        texts_per_batch: texts of one batch over all its columns (the paper's code: 128), or None
            for `batch_size` rows.
        group: batches in a row without a common text: those of the processes that share their
            negatives.
    """

    def __init__(
        self,
        dataset,
        batch_size,
        drop_last=True,
        texts_per_batch=None,
        group=1,
        generator=None,
        **kwargs,
    ):
        self.group, self.rows = group, rows_per_batch(dataset, batch_size, texts_per_batch, group)
        super().__init__(
            dataset,
            batch_size=self.rows * group,
            drop_last=True,
            generator=torch.Generator(),
            **kwargs,
        )

    def __iter__(self):
        for batch in super().__iter__():
            yield from (
                batch[start : start + self.rows] for start in range(0, len(batch), self.rows)
            )

    def __len__(self):
        return super().__len__() * self.group


def rows_per_batch(dataset, batch_size, texts_per_batch, group=1):
    """Rows in a batch of `dataset`: as many as were asked for, or as many as `group` batches have
    without a common text."""
    columns = [
        name
        for name in dataset.column_names
        if name in ("anchor", "positive") or _is_negative(name)
    ]
    rows = batch_size if texts_per_batch is None else max(2, texts_per_batch // len(columns))
    # The trainer gives every row the name of its data set, which all rows have in common.
    plain = dataset.with_format(None).select_columns(columns)
    # The count depends on the order of the rows: take the minimum of three orders.
    return min(_different_rows(plain, rows * group, seed) for seed in range(3)) // group


def _different_rows(dataset, most, seed):
    """Rows without a common text, at most `most`, that one pass finds; of a large data set over a
    random part."""
    texts, found = set(), 0
    for index in np.random.default_rng(seed).choice(
        len(dataset), min(len(dataset), max(10_000, 50 * most)), replace=False
    ):
        row = set(dataset[int(index)].values())
        if texts.isdisjoint(row):
            texts |= row
            found += 1
            if found == most:
                break
    return found
