"""Pairs and triplets for contrastive training: data sets of the Hub and local files in one form,
and the sampler that mixes them.

Every data set becomes columns anchor, positive, negative_1, ..., negative_n. A batch holds one data
set, drawn with probability proportional to size^alpha (paper, section 4.3).
"""

import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_type_hints

import torch
from sentence_transformers.base.sampler import (
    MultiDatasetDefaultBatchSampler,
    NoDuplicatesBatchSampler,
)

from ..common.arguments import check_ranges, option, typed
from ..common.data import FORMATS, file_format, files, rows, schema
from ..common.errors import UserError, listed, one_line
from ..common.identity import files_digest


@dataclass(frozen=True)
class PairSource:
    """One data set: an entry of `datasets` in a recipe, or a file of `--pairs`.

    A text is named by a path into the row: `question`, `set.0`, `set.query`, `pos_paras.0.text`;
    `*` is every item: `neg_paras.*.text`.
    """

    name: str
    path: str  # Hub name, or a file of common.data
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
        return file_format(self.path) is not None

    @property
    def columns(self):
        """The columns of a row that hold all of this."""
        paths = (self.anchor, self.positive, *self.negatives, *self.above)
        return list(dict.fromkeys(path.split(".")[0] for path in paths))

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
        if file_format(path) is None:
            raise UserError(
                f"pairs must be files that end in {', '.join(FORMATS)}, but {path} was given"
            )
        return cls(name=Path(path).name.split(".")[0], path=str(path), instruction=instruction)


def lookup(value, path):
    """What `path` ("set.0", "neg_paras.*.text") leads to in a row; None where it leads nowhere."""
    if not path or value is None:
        return value
    step, _, rest = path.partition(".")
    if step == "*":
        items = value if isinstance(value, (list, tuple)) else None
        return items and [lookup(item, rest) for item in items]
    if isinstance(value, dict):
        return lookup(value.get(step), rest)
    if isinstance(value, (list, tuple)) and step.isdigit() and int(step) < len(value):
        return lookup(value[int(step)], rest)
    return None


def unusable(row, source, negative_count):
    """Why a row is left out, in a few words; None for one that is trained on."""
    for name, path in (("anchor", source.anchor), ("positive", source.positive)):
        if not _is_text(lookup(row, path)):
            return f"without {name}"
    if negative_count and not _negatives(row, source):
        return "without negative"
    for column, lowest in source.above.items():
        if row[column] is None or not row[column] > lowest:
            return f"with a {column} not above {lowest:g}"
    return None


def example(row, source, negative_count):
    """anchor, positive and negative_1 ... of a usable row.

    Args:
        row: dict.
        source: `PairSource`.
        negative_count: negatives of every example of this data set; a shorter list is repeated.
    """
    output = {"anchor": lookup(row, source.anchor), "positive": lookup(row, source.positive)}
    texts = _negatives(row, source)
    for i in range(negative_count):
        output[f"negative_{i + 1}"] = texts[i % len(texts)]
    return output


def _negatives(row, source):
    texts = []
    for path in source.negatives:
        value = lookup(row, path)
        texts += filter(_is_text, value if isinstance(value, list) else [value])
    return texts[: source.max_negatives]


def _is_text(value):
    return isinstance(value, str) and value.strip() != ""


def _is_negative(column):
    return column == "negative" or column.startswith("negative_")


def _names(negative_count):
    return ["anchor", "positive", *(f"negative_{i + 1}" for i in range(negative_count))]


def with_negatives(source):
    """The source with the negative columns of its file named, where it names none itself."""
    if source.is_local and not source.negatives:
        columns = filter(_is_negative, schema(files(source.path)[0]).names)
        columns = sorted(columns, key=lambda name: (len(name), name))
        return replace(source, negatives=columns)
    return source


def _local_examples(source, count, digest):
    """Examples of a local file; `digest` is that of its content, which the library's cache goes
    by."""
    for row in rows(source.path, source.columns):
        if unusable(row, source, count) is None:
            yield example(row, source, count)


def _load_local(source):
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetsError

    try:
        every = rows(source.path, source.columns)
        count = max((len(_negatives(row, source)) for row in every), default=0)
        every = rows(source.path, source.columns)
        _say_left_out(source, Counter(unusable(row, source, count) for row in every))
        features = Features({name: Value("string") for name in _names(count)})
        settings = {"source": source, "count": count, "digest": files_digest([source.path])}
        return Dataset.from_generator(_local_examples, features=features, gen_kwargs=settings)
    except UserError:
        raise
    except (TypeError, ValueError, DatasetsError) as error:  # `above` of what has no order
        raise UserError(
            f"{source.name} ({source.path}) has no usable row "
            f"({one_line(error.__cause__ or error)})"
        ) from error


def _say_left_out(source, reasons):
    """Prints how many rows are not trained on, and why.

    Args:
        reasons: {what `unusable` says: rows}.
    """
    used = reasons.pop(None, 0)
    if reasons:
        print(
            f"{source.name}: {reasons.total():,} of {used + reasons.total():,} rows left out: "
            + ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()),
            file=sys.stderr,
        )


def _load_from_hub(source, seed):
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        if source.qrels:
            return _load_qrels(source)
        data = load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision
        )
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(
            f"the data set {source.path} cannot be loaded: {one_line(error)}"
        ) from error
    for column in source.columns:
        if column not in data.column_names:
            raise UserError(
                f"{source.name} ({source.path}) has no column {column!r}; it has: "
                f"{listed(data.column_names)}"
            )
    for column, lowest in source.above.items():
        data = data.filter(
            lambda values, lowest=lowest: [
                value is not None and value > lowest for value in values
            ],
            input_columns=column,
            batched=True,
        )
    data = _sampled(data, source, seed)  # before the work of the conversion
    first = data.select(range(min(1000, len(data))))
    count = max((len(_negatives(row, source)) for row in first), default=0)

    def convert(batch):
        every = (dict(zip(batch, values)) for values in zip(*batch.values()))
        made = [
            example(row, source, count) for row in every if unusable(row, source, count) is None
        ]
        return {name: [row[name] for row in made] for name in _names(count)}

    used = data.map(convert, batched=True, remove_columns=data.column_names, desc=source.name)
    left_out = {"without anchor, positive or negative": len(data) - len(used)}
    _say_left_out(source, Counter({None: len(used)}) + Counter(left_out))
    return used


def _sampled(data, source, seed):
    """At most `max_rows` of the rows, by the seed."""
    if source.max_rows is None or len(data) <= source.max_rows:
        return data
    return data.shuffle(seed=seed).select(range(source.max_rows))


def load_source(source, seed=0):
    """A data set as a `datasets.Dataset` with columns anchor, positive, negative_1, ....

    Raises:
        UserError: it cannot be loaded, has other columns, or no usable row.
    """
    data = _load_local(source) if source.is_local else _load_from_hub(source, seed)
    data = _sampled(data, source, seed)
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
        wanted_rows = [row for row, identifier in enumerate(data["_id"]) if identifier in ids]
        texts[subset] = {
            row["_id"]: f"{row.get('title') or ''} {row['text']}".strip()
            for row in data.select(wanted_rows)
        }
    queries = [texts["queries"].get(identifier) for identifier in wanted["queries"]]
    documents = [texts["corpus"].get(identifier) for identifier in wanted["corpus"]]
    return Dataset.from_dict({"anchor": queries, "positive": documents})


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
    """

    def __init__(self, dataset, batch_samplers, generator=None, seed=0, alpha=0.5, group=1):
        super().__init__(dataset, batch_samplers=batch_samplers, generator=generator, seed=seed)
        # it differs between data sets; accelerate would drop the batches of any other size
        self.batch_size = None
        self.group = group
        self.probabilities = probabilities([len(part) for part in dataset.datasets], alpha)

    def __iter__(self):
        # The inner samplers seed a generator that they may share with this one; the draws have
        # their own.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        offsets = [0]
        for part in self.dataset.datasets:
            offsets.append(offsets[-1] + len(part))
        weights = torch.tensor(self.probabilities, dtype=torch.float64)
        batches = [self._batches(number) for number in range(len(self.batch_samplers))]
        for _ in range(len(self) // self.group):
            drawn = int(torch.multinomial(weights, 1, generator=generator))
            for _ in range(self.group):
                yield [index + offsets[drawn] for index in next(batches[drawn])]

    def _batches(self, number):
        """The batches of one data set, without an end: each time through in a new order."""
        for times in itertools.count():
            sampler = self.batch_samplers[number]
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch * 1_000_003 + times * 101 + number)
            yield from sampler

    def __len__(self):
        return sum(len(sampler) for sampler in self.batch_samplers) // self.group * self.group


class TextsBatchSampler(NoDuplicatesBatchSampler):
    """Batches without a text that occurs twice, which would be a negative of its own row.

    Args:
        batch_size: rows of a batch.
        texts_per_batch: texts of one batch over all its columns (the paper's code: 128), in place
            of `batch_size`.
    """

    def __init__(
        self, dataset, batch_size, drop_last=True, texts_per_batch=None, generator=None, **others
    ):
        size = rows_per_batch(dataset, batch_size, texts_per_batch)
        super().__init__(dataset, size, drop_last=True, generator=torch.Generator(), **others)


def rows_per_batch(dataset, batch_size, texts_per_batch=None):
    """Rows in a batch of `dataset`."""
    if texts_per_batch is None:
        return batch_size
    # The trainer adds a column with the name of the data set.
    texts = [name for name in dataset.column_names if name != "dataset_name"]
    return max(2, texts_per_batch // len(texts))


def check_batch(source, data, size):
    """Raises UserError where a batch of `size` rows without a common text cannot be found."""
    if next(iter(TextsBatchSampler(data, size)), None) is None:
        raise UserError(
            f"{source.name} ({source.path}): {size} rows without a common text make a batch, and "
            f"its {len(data):,} usable rows have not so many; give a smaller "
            "--per-device-train-batch-size"
        )
