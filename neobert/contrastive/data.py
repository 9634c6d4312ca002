"""Pairs and triplets for contrastive training, and the sampler that mixes datasets.

Datasets of the Hub and local files are converted to the columns anchor, positive, negative_1, ...,
negative_n. All rows of a batch are from one dataset, which is sampled with probability proportional
to size^alpha (paper, section 4.3).
"""

import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import torch
from msgspec import Meta
from sentence_transformers.base.sampler import (
    MultiDatasetDefaultBatchSampler,
    NoDuplicatesBatchSampler,
)

from ..common.data import file_format, hash_fraction, normalized_text, replace_surrogates, rows
from ..common.errors import UserError, one_line
from ..common.identity import files_digest
from ..common.options import convert
from ..evaluation.retrieval import is_text, negative_columns


if TYPE_CHECKING:
    from datasets import Dataset
    from torch.utils.data import ConcatDataset


logger = logging.getLogger("neobert.contrastive")

# Bounds of the number of queries that are held out from the training data by default.
MIN_VALIDATION_QUERIES = 20
MAX_VALIDATION_QUERIES = 500
# Data with fewer queries is not split.
MIN_QUERIES_TO_SPLIT = 200
# Column of the cached rows with the reason why a row is left out.
SKIP_REASON = "skip_reason"


@dataclass(frozen=True)
class PairSource:
    """One dataset: an entry of `datasets` in a recipe, or a file of `--pairs`.

    A text is located by a path into the row: `question`, `set.0`, `set.query`, `pos_paras.0.text`.
    `*` stands for every item of a list: `neg_paras.*.text`.

    Attributes:
        name: Name of the dataset.
        path: Name on the Hub, or a local file.
        subset: Configuration of a dataset on the Hub.
        split: Split of a dataset on the Hub.
        revision: Revision of a dataset on the Hub.
        anchor: Path of the anchor.
        positive: Path of the positive.
        negatives: Paths of the negatives. By default the columns negative, negative_1, ... of a
            local file.
        max_negatives: Maximum number of negatives per row. If a row has fewer negatives than the
            row with the most, its negatives are repeated. Rows without negatives are left out if
            other rows have negatives.
        above: Thresholds, {column: value}. Rows whose value is not greater are left out.
        qrels: Whether the dataset has MTEB's layout: the split has the columns query-id and
            corpus-id, and the texts are in the subsets queries and corpus.
        instruction: Instruction before the anchor.
    """

    name: str
    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    anchor: str = "anchor"
    positive: str = "positive"
    negatives: list[str] = field(default_factory=list)
    max_negatives: Annotated[int, Meta(ge=1)] = 8
    above: dict[str, float] = field(default_factory=dict)
    qrels: bool = False
    instruction: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the dataset is a local file."""
        return file_format(self.path) is not None

    @property
    def columns(self) -> list[str]:
        """Columns of the dataset that are read."""
        paths = (self.anchor, self.positive, *self.negatives, *self.above)
        return list(dict.fromkeys(path.split(".")[0] for path in paths))

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "PairSource":
        """Return the dataset of an entry of `datasets` in a recipe.

        Raises:
            UserError: If keys are unknown or missing, or a value has a wrong type or is out of
                range.
        """
        for key in ("name", "path"):
            if not entry.get(key):
                raise UserError(f"an entry of `datasets` must have a {key!r}, got {entry}.")

        # The ranges of the values are in the annotations, which `include_extras` keeps.
        hints = get_type_hints(cls, include_extras=True)
        where = f" of the dataset {entry['name']!r}"
        fallback = f"Allowed keys are {', '.join(hints)}."
        return cls(**convert(entry, hints, where, fallback=fallback))


def lookup(value: Any, path: str) -> Any:
    """Return the value at a path such as "set.0" or "neg_paras.*.text", or None if there is none.

    Args:
        value: Row, or a part of a row.
        path: Keys and positions separated by dots; `*` stands for every item of a list.
    """
    if not path or value is None:
        return value

    # Each call resolves the first step of the path, and leaves the rest to a recursive call.
    step, _, rest = path.partition(".")
    if step == "*":
        items = value if isinstance(value, (list, tuple)) else None
        return items and [lookup(item, rest) for item in items]
    if isinstance(value, dict):
        return lookup(value.get(step), rest)
    if isinstance(value, (list, tuple)) and step.isdigit() and int(step) < len(value):
        return lookup(value[int(step)], rest)
    return None


def reason_to_skip(row: Mapping[str, Any], source: PairSource, negative_count: int) -> str | None:
    """Return why a row is left out, or None for a row that is used."""
    for name, path in (("anchor", source.anchor), ("positive", source.positive)):
        if not is_text(lookup(row, path)):
            return f"without {name}"
    if negative_count and not _negatives(row, source):
        return "without negative"
    # `not ... >` also leaves out NaN, for which every comparison is false.
    for column, threshold in source.above.items():
        if row[column] is None or not float(row[column]) > threshold:
            return f"with a {column} not above {threshold:g}"
    return None


def build_example(
    row: Mapping[str, Any], source: PairSource, negative_count: int
) -> dict[str, str]:
    """Return the columns anchor, positive, negative_1, ... of a usable row.

    Args:
        row: Row of the dataset.
        source: Dataset.
        negative_count: Number of negatives of every example. A shorter list is repeated.
    """
    # All rows of a dataset must have the same columns, so a short list of negatives is repeated.
    texts = _negatives(row, source)
    negatives = [texts[i % len(texts)] for i in range(negative_count)]
    values = [lookup(row, source.anchor), lookup(row, source.positive), *negatives]
    return dict(zip(_columns(negative_count), map(replace_surrogates, values)))


def _negatives(row: Mapping[str, Any], source: PairSource) -> list[str]:
    """Return the negatives of a row, at most `max_negatives`, without missing and blank texts."""
    texts: list[str] = []
    for path in source.negatives:
        value = lookup(row, path)
        texts += filter(is_text, value if isinstance(value, list) else [value])
    return texts[: source.max_negatives]


def with_negatives(source: PairSource) -> PairSource:
    """Return the dataset with the negative columns of its local file, unless it names some."""
    if not source.is_local or source.negatives:
        return source
    return replace(source, negatives=negative_columns(source.path))


def load_source(source: PairSource) -> "Dataset":
    """Load a dataset with the columns anchor, positive, negative_1, ...

    Raises:
        UserError: If the dataset cannot be loaded, lacks a column, or has no usable row.
    """
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        # `from_generator` caches its result by a hash of the arguments. Without a digest of the
        # content among them, a file that has changed would be read from the cache.
        cache_key = files_digest([source.path]) if source.is_local else _rows(source)

        # A first iteration counts the negatives, because the columns must be known in advance.
        all_rows = _rows(source) if source.negatives else ()
        count = max((len(_negatives(row, source)) for row in all_rows), default=0)
        data = Dataset.from_generator(
            _examples,
            features=Features({name: Value("string") for name in (*_columns(count), SKIP_REASON)}),
            gen_kwargs={"source": source, "count": count, "cache_key": cache_key},
        )
    except (UserError, OSError, TypeError, ValueError, DatasetsError) as error:
        # The library has no exception type for a generator without items.
        if "corresponds to no data" in str(error):
            raise UserError(
                f"{source.path} has no row with an anchor and a positive. Pass a file with one "
                "pair per line."
            ) from error

        # An exception in the generator is the cause of the exception of the library.
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        reason = one_line(cause, 400)
        raise UserError(
            f"the dataset {source.name} ({source.path}) cannot be read: {reason}."
        ) from error
    return _select_usable(data, source)


def _rows(source: PairSource) -> Iterable[dict[str, Any]]:
    """Return the rows of a dataset, with only the columns that are used."""
    from datasets import load_dataset

    if source.is_local:
        return _local_rows(source)
    if source.qrels:
        return _join_qrels(source)
    data = load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    return data.select_columns(source.columns)


def _local_rows(source: PairSource) -> Iterator[dict[str, Any]]:
    """Yield the rows of a local dataset, which may lack columns of negatives.

    Raises:
        UserError: If a row lacks another column, or no row has a column of negatives.
    """
    required = replace(source, negatives=[]).columns
    unseen = set(source.columns) - set(required)
    for row in rows(source.path, required, optional_columns=sorted(unseen)):
        unseen.difference_update(row)
        yield row
    if unseen:
        raise UserError(f"{source.path} has no row with the column {min(unseen)!r}.")


def _examples(source: PairSource, count: int, cache_key: Any) -> Iterator[dict[str, str | None]]:
    """Yield the example of every row, or the reason why the row is left out.

    The library does not run this generator if the result is in its cache, so messages of the
    generator would be missing from later runs.

    Args:
        source: Dataset.
        count: Number of negatives of every example.
        cache_key: Digest of the file, or dataset. It is not used here: the library computes the
            key of its cache from all arguments.
    """
    for row in _rows(source):
        reason = reason_to_skip(row, source, count)
        columns = dict.fromkeys(_columns(count)) if reason else build_example(row, source, count)
        yield {**columns, SKIP_REASON: reason}


def _columns(count: int) -> list[str]:
    """Return the names of the columns of an example."""
    return ["anchor", "positive", *(f"negative_{i + 1}" for i in range(count))]


def _select_usable(data: "Dataset", source: PairSource) -> "Dataset":
    """Return the examples of a dataset, and log how many rows are left out and why.

    Raises:
        UserError: If all rows are left out.
    """
    reasons = data[SKIP_REASON][:]
    used = [i for i, reason in enumerate(reasons) if reason is None]
    counts = Counter(reason for reason in reasons if reason)
    summary = ", ".join(f"{number:,} {reason}" for reason, number in counts.items())
    if not used:
        raise UserError(
            f"{source.path} has no usable row: {summary}. Check the columns and thresholds of the "
            "dataset."
        )

    if counts:
        logger.warning(
            "%s: %s of %s rows are left out: %s.",
            source.name,
            f"{counts.total():,}",
            f"{len(reasons):,}",
            summary,
        )
        data = data.select(used)
    return data.remove_columns(SKIP_REASON)


def _join_qrels(source: PairSource) -> "Dataset":
    """Join the three subsets of MTEB's retrieval layout to the columns anchor and positive.

    The title of a document is prepended to its text, as in MTEB.
    """
    from datasets import Dataset, load_dataset

    def load(subset: str, split: str) -> "Dataset":
        return load_dataset(source.path, subset, split=split, revision=source.revision)

    # A judgment with the score 0 states that the document does not answer the query.
    judgments = [row for row in load("default", source.split) if row["score"] > 0]

    # Only judged queries and documents are read, because a corpus may have millions of documents.
    texts = {}
    for subset, key in (("queries", "query-id"), ("corpus", "corpus-id")):
        judged = {row[key] for row in judgments}
        data = load(subset, subset)
        indices = [index for index, name in enumerate(data["_id"]) if name in judged]
        for row in data.select(indices):
            # Queries and documents may have the same ids.
            texts[key, row["_id"]] = f"{row.get('title') or ''} {row['text']}".strip()

    # A judgment whose text is missing has None here, and its row is left out later.
    columns = (("anchor", "query-id"), ("positive", "corpus-id"))
    return Dataset.from_dict(
        {name: [texts.get((key, row[key])) for row in judgments] for name, key in columns}
    )


# ------------------------------------------------------------------------------------------------
# validation queries


def choose_validation_queries(queries: Iterable[str], percent: float) -> set[str]:
    """Return the queries that are held out from training, selected by hash.

    Args:
        queries: Queries of the training data, which may repeat.
        percent: Percentage of the distinct queries to hold out.

    Returns:
        Between `MIN_VALIDATION_QUERIES` and `MAX_VALIDATION_QUERIES` queries. The set is
        empty if `percent` is 0 or there are fewer than `MIN_QUERIES_TO_SPLIT` queries.
    """
    if percent == 0:
        return set()
    distinct = set(queries)
    if len(distinct) < MIN_QUERIES_TO_SPLIT:
        return set()

    # The order of the rows does not affect a selection by hash, and data that grows keeps most of
    # its validation queries.
    count = max(MIN_VALIDATION_QUERIES, int(len(distinct) * percent / 100))
    count = min(count, MAX_VALIDATION_QUERIES)
    return set(heapq.nsmallest(count, distinct, key=hash_fraction))


def split_queries(data: "Dataset", queries: Collection[str]) -> "tuple[Dataset, Dataset]":
    """Split a dataset into the rows without and the rows with one of these queries.

    Args:
        data: Dataset with the columns anchor and positive.
        queries: Queries to hold out.

    Returns:
        The rows in which none of the queries is the anchor or the positive, and the rows whose
        anchor is one of the queries. Neither contains a row with a query as positive only: the
        row may be the reverse of a validation pair, and other rows may train on its anchor. Nor
        does either contain a copy of a query with other capital letters or spaces.
    """
    held_out_texts = set(map(normalized_text, queries))
    remaining: list[int] = []
    held_out: list[int] = []
    for index, (anchor, positive) in enumerate(zip(data["anchor"], data["positive"])):
        if anchor in queries:
            held_out.append(index)
        elif held_out_texts.isdisjoint((normalized_text(anchor), normalized_text(positive))):
            remaining.append(index)

    # Rows of a complete dataset are faster to read than rows that `select` has chosen.
    if len(remaining) == len(data):
        return data, data.select([])
    return data.select(remaining), data.select(held_out)


# ------------------------------------------------------------------------------------------------
# batches


@dataclass(frozen=True)
class MixturePart:
    """One dataset of a mixture.

    Attributes:
        data: Rows with the columns anchor, positive, negative_1, ...
        batch_rows: Number of rows per batch.
        probability: Probability that a batch is taken from this dataset.
    """

    data: "Dataset"
    batch_rows: int
    probability: float


def build_parts(
    datasets: "Mapping[str, Dataset]", batch_size: int, batch_texts: int | None, alpha: float
) -> dict[str, MixturePart]:
    """Return the parts of a mixture, {name: part}.

    Args:
        datasets: Datasets by name.
        batch_size: Number of rows per batch.
        batch_texts: Number of texts per batch, which replaces `batch_size`.
        alpha: Exponent of the dataset size in the sampling probability.
    """
    sampling_probabilities = probabilities([len(data) for data in datasets.values()], alpha)
    parts = {}
    for (name, data), probability in zip(datasets.items(), sampling_probabilities):
        batch_rows = rows_per_batch(data, batch_size, batch_texts)
        parts[name] = MixturePart(data, batch_rows, probability)
    return parts


def probabilities(sizes: Sequence[int], alpha: float) -> list[float]:
    """Return the sampling probability of each dataset, size^alpha / sum of all size^alpha."""
    weights = [size**alpha for size in sizes]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class SizeAlphaBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batch sampler over datasets that are sampled with probability proportional to size^alpha.

    A small dataset is repeated in a new order as often as needed. An epoch has as many batches as
    all datasets together. `num_processes` consecutive batches are from the same dataset: the
    batches of all processes in one step, whose texts may be negatives of one another.

    Args:
        dataset: Concatenated datasets.
        batch_samplers: One batch sampler per dataset.
        generator: Not used; the sampler has its own generator.
        seed: Random seed.
        alpha: Exponent of the size: 0 samples datasets uniformly, 1 in proportion to their size.
        num_processes: Number of processes.
    """

    def __init__(
        self,
        dataset: "ConcatDataset",
        batch_samplers: list[Any],
        generator: torch.Generator | None = None,
        seed: int = 0,
        alpha: float = 0.5,
        num_processes: int = 1,
    ) -> None:
        super().__init__(dataset, batch_samplers=batch_samplers, generator=generator, seed=seed)
        # The library sets the batch size of the first dataset, but datasets have batches of
        # different sizes. accelerate would drop the batches of all other sizes.
        self.batch_size = None  # type: ignore[assignment]
        self.num_processes = num_processes
        parts: list[Any] = list(dataset.datasets)
        self.probabilities = probabilities([len(part) for part in parts], alpha)

    def __iter__(self) -> Iterator[list[int]]:
        # A separate generator is needed, because the samplers of the datasets may seed the one of
        # the library during the epoch.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)

        # Batches contain indices of a single dataset, and the loader takes those of all datasets
        # concatenated.
        offsets = [0]
        parts: list[Any] = list(self.dataset.datasets)
        for part in parts:
            offsets.append(offsets[-1] + len(part))
        weights = torch.tensor(self.probabilities, dtype=torch.float64)
        batches = [self._batches(number) for number in range(len(self.batch_samplers))]

        # accelerate gives each process one of `num_processes` consecutive batches.
        for _ in range(len(self) // self.num_processes):
            dataset_index = int(torch.multinomial(weights, 1, generator=generator))
            for _ in range(self.num_processes):
                yield [index + offsets[dataset_index] for index in next(batches[dataset_index])]

    def _batches(self, number: int) -> Iterator[list[int]]:
        """Yield batches of one dataset without end, and shuffle the dataset for each repetition."""
        sampler = self.batch_samplers[number]
        for repetition in itertools.count():
            # The samplers seed their order with the epoch. The factors give every epoch, repetition
            # and dataset another order.
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch * 1_000_003 + repetition * 101 + number)
            yield from sampler

    def __len__(self) -> int:
        # An incomplete last group would leave a process without a batch.
        num_batches = sum(len(sampler) for sampler in self.batch_samplers)
        return num_batches - num_batches % self.num_processes


class DistinctTextsBatchSampler(NoDuplicatesBatchSampler):
    """Batch sampler whose batches contain no text twice.

    A text that occurs twice in a batch would be a negative of its own row.

    Args:
        dataset: Rows of texts.
        batch_size: Number of rows per batch.
        drop_last: Not used; an incomplete last batch is always dropped.
        batch_texts: Number of texts per batch over all columns, which replaces `batch_size`. The
            authors' code uses 128.
        generator: Not used; the sampler has its own generator.
        **kwargs: Arguments of the library's sampler.
    """

    def __init__(
        self,
        dataset: "Dataset",
        batch_size: int,
        drop_last: bool = True,
        batch_texts: int | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        # The library passes the same generator to all samplers. Each would seed it for the others.
        size = rows_per_batch(dataset, batch_size, batch_texts)
        super().__init__(dataset, size, drop_last=True, generator=torch.Generator(), **kwargs)


def rows_per_batch(dataset: "Dataset", batch_size: int, batch_texts: int | None = None) -> int:
    """Return the number of rows per batch of a dataset.

    Args:
        dataset: Rows of texts.
        batch_size: Number of rows per batch.
        batch_texts: Number of texts per batch over all columns, which replaces `batch_size`. The
            result is at least 2, because the other rows of a batch are the negatives.
    """
    if batch_texts is None:
        return batch_size
    # The trainer adds the column dataset_name, which is no text.
    texts = [name for name in dataset.column_names if name != "dataset_name"]
    return max(2, batch_texts // len(texts))


def check_batch(source: PairSource, data: "Dataset", size: int) -> None:
    """Raise UserError if no batch of `size` rows with distinct texts can be formed."""
    # Without this check, the sampler of the dataset would yield nothing in an endless loop.
    if next(iter(DistinctTextsBatchSampler(data, size)), None) is None:
        raise UserError(
            f"{source.name} ({source.path}): cannot form a batch of {size} rows with distinct "
            f"texts from {len(data):,} usable rows. Reduce --batch-texts (or, without it, "
            "--per-device-train-batch-size), or add rows."
        )
