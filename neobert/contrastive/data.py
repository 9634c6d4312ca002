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
from typing import get_type_hints

import torch
from sentence_transformers.base.sampler import (
    MultiDatasetDefaultBatchSampler,
    NoDuplicatesBatchSampler,
)

from ..common.arguments import check_ranges, option, typed
from ..common.data import file_format, files, rows, schema
from ..common.errors import UserError, one_line
from ..common.identity import files_digest


@dataclass(frozen=True)
class PairSource:
    """One data set: an entry of `datasets` in a recipe, or one of `--pairs`.

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
        missing = [key for key in ("name", "path") if not values.get(key)]
        if missing:
            raise UserError(f"datasets: an entry has no {missing[0]!r}: {values}")
        where, hints = f"of the data set {values['name']!r}", get_type_hints(cls)
        source = cls(**typed(values, hints, where, f"allowed are {', '.join(hints)}"))
        check_ranges(source, f" {where}")
        return source


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
        if row[column] is None or not float(row[column]) > lowest:
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


def with_negatives(source):
    """The source with the negative columns of its file named, where it names none itself."""
    if not source.is_local or source.negatives:
        return source
    columns = schema(files(source.path)[0]).names
    names = [name for name in columns if name == "negative" or name.startswith("negative_")]
    return replace(source, negatives=names)


def load_source(source):
    """A data set as a `datasets.Dataset` with columns anchor, positive, negative_1, ....

    Raises:
        UserError: it cannot be loaded, has other columns, or no usable row.
    """
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        # What the library's cache goes by.
        content = files_digest([source.path]) if source.is_local else _rows(source)
        every = _rows(source) if source.negatives else ()
        count = max((len(_negatives(row, source)) for row in every), default=0)
        names = ["anchor", "positive", *(f"negative_{i + 1}" for i in range(count))]
        return Dataset.from_generator(
            _examples,
            features=Features({name: Value("string") for name in names}),
            gen_kwargs={"source": source, "count": count, "content": content},
        )
    except (UserError, OSError, TypeError, ValueError, DatasetsError) as error:
        if "corresponds to no data" in str(error):
            raise UserError(
                f"{source.path} has no row with an anchor and a positive. Pass a file with "
                "one pair per line."
            ) from error
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        raise UserError(
            f"the data set {source.name} ({source.path}) gives no pairs: {one_line(cause, 400)}"
        ) from error


def _rows(source):
    """The rows of a data set, dicts with the columns that are read."""
    from datasets import load_dataset

    if source.is_local:
        return rows(source.path, source.columns)
    if source.qrels:
        return _qrels(source)
    data = load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    return data.select_columns(source.columns)


def _examples(source, count, content):
    """The examples of a data set; says on stderr how many rows are left out, and why."""
    reasons = Counter()
    for row in _rows(source):
        reason = unusable(row, source, count)
        reasons[reason] += 1
        if reason is None:
            yield example(row, source, count)
    total, used = reasons.total(), reasons.pop(None, 0)
    if reasons:
        words = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
        print(
            f"{source.name}: {total - used:,} of {total:,} rows left out: {words}", file=sys.stderr
        )


def _qrels(source):
    """anchor and positive from the three subsets of MTEB's retrieval layout; a document's title
    comes before its text, as in MTEB."""
    from datasets import Dataset, load_dataset

    def load(subset, split):
        return load_dataset(source.path, subset, split=split, revision=source.revision)

    judgements = [row for row in load("default", source.split) if row["score"] > 0]
    texts = {}
    for subset, key in (("queries", "query-id"), ("corpus", "corpus-id")):
        wanted, data = {row[key] for row in judgements}, load(subset, subset)
        numbers = [number for number, name in enumerate(data["_id"]) if name in wanted]
        for row in data.select(numbers):
            texts[key, row["_id"]] = f"{row.get('title') or ''} {row['text']}".strip()
    columns = (("anchor", "query-id"), ("positive", "corpus-id"))
    return Dataset.from_dict(
        {name: [texts.get((key, row[key])) for row in judgements] for name, key in columns}
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
