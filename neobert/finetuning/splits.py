"""Splits of labeled rows into training, validation and test rows."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..common.data import normalized_text
from ..common.errors import UserError
from ..common.task_file import CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKENS
from .finetune_options import DataOptions
from .label_encoding import encode_labels
from .rows import RawRows, find_columns, read_rows
from .tag_encoding import encode_tags
from .text_tasks import Examples, TextTask, infer_task


logger = logging.getLogger("neobert.finetuning")


@dataclass(frozen=True)
class Splits:
    """Rows of a run.

    Attributes:
        train: Rows to train on.
        validation: Rows that select the checkpoint.
        test: Rows that measure the result.
    """

    train: Examples
    validation: Examples
    test: Examples

    def sizes(self) -> dict[str, int]:
        """Return the numbers of rows."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: len(part) for name, part in parts.items()}


def read_splits(
    options: DataOptions, known_labels: dict[str, int] | None = None
) -> tuple[TextTask, Splits]:
    """Read the rows of a run, infer its task, and split the rows.

    Args:
        options: Options of the command.
        known_labels: Label numbers of the model to start from.

    Raises:
        UserError: If the rows cannot be read, or there are too few.
    """
    text_columns, label_columns = find_columns(
        options.train, options.text_column, options.label_column
    )
    raw = _read_files(options, text_columns, label_columns)

    # The training rows decide the task, because the other files are optional.
    task = infer_task(raw["train"], text_columns, label_columns, options.task)
    encode = encode_tags if task.name == TOKENS else encode_labels
    task, examples = encode(task, [*raw.values()], known_labels)
    encoded = dict(zip(raw, examples))
    train = encoded["train"]
    validation = encoded.get("validation")
    test = encoded.get("test")

    # A part with a file of its own takes no training rows.
    fractions = [
        0.0 if validation is not None else options.validation_percent / 100,
        0.0 if test is not None else options.test_percent / 100,
    ]
    kept, validation_rows, test_rows = split_rows(task, train, fractions, options.split_seed)
    splits = Splits(
        train=train.select(kept),
        validation=validation or train.select(validation_rows),
        test=test or train.select(test_rows),
    )
    _check_sizes(task, splits, options)
    _report(task, splits)
    return task, splits


def _read_files(
    options: DataOptions, text_columns: Sequence[str], label_columns: Sequence[str]
) -> dict[str, RawRows]:
    """Return the rows of each file, {"train", "validation" or "test": rows}."""
    sources = {
        "train": options.train,
        "validation": options.validation_file,
        "test": options.test_file,
    }
    raw = {}
    for name, source in sources.items():
        if source:
            raw[name] = read_rows(source, text_columns, label_columns)

    for rows in raw.values():
        if rows.omitted:
            logger.info(
                "%s: %s rows without a text or a label are left out.",
                rows.source,
                f"{rows.omitted:,}",
            )
    return raw


def _check_sizes(task: TextTask, splits: Splits, options: DataOptions) -> None:
    """Check that each part has at least two rows.

    Raises:
        UserError: If a part has fewer rows.
    """
    own_files = {"validation": options.validation_file, "test": options.test_file}
    for name, count in splits.sizes().items():
        if count >= 2:
            continue
        if own_files.get(name) is not None:
            remedy = "Add rows with a text and a label to its file."
        elif name == "train":
            remedy = "Add rows, or lower --validation-percent or --test-percent."
        else:
            remedy = f"Add rows, or raise --{name}-percent."
            if task.name == CLASSIFICATION:
                remedy += " Labels of fewer than 3 texts stay in the training rows."
        raise UserError(f"the {name} split must have at least 2 rows, got {count}. {remedy}")


def split_rows(
    task: TextTask, examples: Examples, fractions: Sequence[float], seed: int
) -> tuple[list[int], list[int], list[int]]:
    """Split rows at random, with the same fractions of every label.

    Rows whose texts are equal, up to capital letters and spaces, stay in one part. Labels of fewer
    than 3 texts stay in the training rows.

    Args:
        task: Task of the rows.
        examples: Rows.
        fractions: Fractions of the validation rows and of the test rows.
        seed: Seed of the random order.

    Returns:
        The indices of the training, validation and test rows, in ascending order.
    """
    # Equal texts form a group, which is the unit of the split. A copy of a training text in the
    # test would make the model look better than it is.
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, texts in enumerate(examples.texts):
        groups.setdefault(tuple(map(normalized_text, texts)), []).append(index)
    members = list(groups.values())

    # A rare label needs its rows for training.
    keys = _strata(task, [examples.labels[rows[0]] for rows in members])
    counts = Counter(keys)
    is_class = task.name == CLASSIFICATION
    splittable = [i for i, key in enumerate(keys) if counts[key] >= 3 or not is_class]

    # In the order of the labels, with a random order within a label, evenly spaced rows have the
    # same fraction of every label.
    order = np.random.default_rng(seed).permutation(splittable)
    order = np.array(sorted(order, key=lambda i: keys[i]), dtype=np.int64)

    # The interval [0, 1) is divided into validation, test and training rows. A value below the
    # first bound belongs to part 1, one below the second bound to part 2, and any other to part 3.
    bounds = np.cumsum([0.0, *fractions])
    parts: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for position, group in enumerate(order):
        # A sequence of low discrepancy; the golden ratio spaces its values most evenly.
        value = (position * 0.6180339887498949) % 1.0
        part = int(np.searchsorted(bounds, value, side="right"))
        parts[part].extend(members[group])

    # The rows of rare labels are training rows, too.
    validation_rows = sorted(parts[1])
    test_rows = sorted(parts[2])
    chosen = {*validation_rows, *test_rows}
    train_rows = [index for index in range(len(examples)) if index not in chosen]
    return train_rows, validation_rows, test_rows


def _strata(task: TextTask, labels: Sequence) -> list[tuple]:
    """Return the key of each label; rows with the same key are spread over the parts."""
    if task.name == CLASSIFICATION:
        return [(label,) for label in labels]
    if task.name == MULTI_LABEL:
        sets = [tuple(label) for label in labels]
        counts = Counter(sets)
        # Rare sets are together, so they are split as well.
        return [key if counts[key] >= 10 else (-1.0,) for key in sets]
    # The keys of values are their deciles, and those of tagged texts their numbers of entities.
    if task.name == REGRESSION:
        ranks = np.argsort(np.argsort(labels, kind="stable"), kind="stable")
        return [(int(rank * 10 / len(labels)),) for rank in ranks]
    return [(min(3, sum(tag[:2] != "I-" and tag != "O" for tag in tags)),) for tags in labels]


def _report(task: TextTask, splits: Splits) -> None:
    """Log the task and the sizes. Warn about labels and texts that make the result doubtful.

    These are labels with several spellings or without training rows, and texts of several parts.
    """
    logger.info("Task: %s", task.describe())
    sizes = [f"{name} {count:,}" for name, count in splits.sizes().items()]
    logger.info("Rows: %s", ", ".join(sizes))

    _warn_about_spellings(task.labels)
    # A model that remembers these texts looks better than it is.
    _warn_about_repeated_texts("validation", splits.validation, "training", splits.train)
    _warn_about_repeated_texts("test", splits.test, "training", splits.train)
    _warn_about_repeated_texts("test", splits.test, "validation", splits.validation)
    if task.name == CLASSIFICATION:
        missing = set(range(len(task.labels))) - set(splits.train.labels)
        if missing:
            names = ", ".join(task.labels[number] for number in sorted(missing))
            logger.warning("There are no training rows of the labels %s.", names)


def _warn_about_spellings(labels: Sequence[str]) -> None:
    """Warn about labels that differ in white space or capital letters only, or as 1 and True."""
    spellings: dict[str, list[str]] = {}
    for label in labels:
        plain = " ".join(label.split()).casefold()
        plain = {"true": "1", "false": "0"}.get(plain, plain)
        spellings.setdefault(plain, []).append(label)

    for similar in spellings.values():
        if len(similar) > 1:
            logger.warning(
                "The labels %s look like spellings of one class, but are different classes. Write "
                "a label in the same way in all rows.",
                ", ".join(map(repr, similar)),
            )


def _warn_about_repeated_texts(
    name: str, examples: Examples, other_name: str, other: Examples
) -> None:
    """Warn about texts of a part that another part contains, too, up to capitals and spaces."""
    other_texts = {tuple(map(normalized_text, texts)) for texts in other.texts}
    repeated = sum(tuple(map(normalized_text, texts)) in other_texts for texts in examples.texts)
    if repeated:
        logger.warning(
            "%s of %s %s texts also occur in the %s rows, so the %s metrics are too high.",
            f"{repeated:,}",
            f"{len(examples):,}",
            name,
            other_name,
            name,
        )
