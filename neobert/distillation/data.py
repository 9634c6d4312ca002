"""Training data of a student: texts of local files, split by hash, and embeddings of the teacher.

The embeddings of N texts are stored in a file `NAME.npy`, (N, D) float16. `NAME.json` next to it
contains the number of embeddings that are finished, so an interrupted run resumes.
"""

import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
from msgspec import Meta
from safetensors import SafetensorError
from tqdm.auto import tqdm

from ..common.data import file_format, hash_fraction, normalized_text, rows
from ..common.errors import UserError, listed, one_line
from ..common.files import read_json, write_json
from ..common.options import convert
from ..embeddings.packed_encoder import PackedEncoder


logger = logging.getLogger("neobert.distillation")

# Number of texts whose embeddings are written at once.
CHUNK_SIZE = 65_536
# Number of texts that are held out by default, unless they are more than 5 % of all.
MIN_VALIDATION_TEXTS = 100
# A rank correlation over the pairs of 2 texts, a single pair, is not defined.
MIN_EVALUATED_TEXTS = 3
# Names of the texts of a run in its results.
RESERVED_NAMES = ("train", "validation")


@dataclass(frozen=True)
class TextSource:
    """One entry of `texts` or `validation_texts` in a recipe.

    Attributes:
        path: File of texts: .jsonl, .parquet, or .txt with one text per line.
        column: Column of the text, or a list of columns.
        share: Fraction of the rows that is used, selected by hash.
        name: Name of the texts in the model card. By default the name of the file.
        license: License of the texts in the model card.
    """

    path: str
    column: str | list[str] = "text"
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    name: str = ""
    license: str | None = None

    @classmethod
    def from_entry(cls, entry: str | Mapping[str, Any], option: str = "texts") -> "TextSource":
        """Return the source of a path, or of a mapping with the attributes of this class.

        Args:
            entry: Path or mapping.
            option: Name of the option that contains the entry, for the messages.

        Raises:
            UserError: If there is no such file, or the mapping has unknown keys or wrong values.
        """
        # An entry comes from a recipe, whose values have not been checked.
        values = {"path": entry} if isinstance(entry, str) else dict(entry)
        hints = get_type_hints(cls, include_extras=True)
        converted = convert(values, hints, f" of {entry!r} in {option}")
        path = converted.get("path")
        if not path:
            raise UserError(f"an entry of `{option}` must have a `path`, got {entry!r}.")
        if not Path(path).is_file():
            raise UserError(f"`{option}` must contain files, but there is no file {path}.")
        name = converted.pop("name", "") or Path(path).stem
        return cls(name=name, **converted)

    def read(self) -> Iterator[str]:
        """Yield the texts that are not empty, in file order, without surrounding spaces."""
        columns = [self.column] if isinstance(self.column, str) else self.column
        # Lines of a text file have no columns, and are read as rows with the column "text".
        if file_format(self.path) == ".txt":
            columns = ["text"]
        for row in rows(self.path, columns, text_columns=columns):
            texts = [row[column].strip() for column in columns]
            texts = [text for text in texts if text]
            # The hash decides about all texts of a row together. Its prefix makes it independent of
            # that of `is_validation_text`.
            if texts and hash_fraction(f"share {texts[0]}") < self.share:
                yield from texts


def is_validation_text(text: str, percent: float) -> bool:
    """Return whether a text is held out for evaluation.

    The result depends on the words of the text only, so copies with other spaces or capital
    letters are held out, too.
    """
    return hash_fraction(normalized_text(text)) < percent / 100


@dataclass(frozen=True)
class Texts:
    """Texts of a run without duplicates.

    Attributes:
        train: Texts to learn from.
        validation: Held-out texts of the same sources.
        other: Validation texts of other types, {name: texts}.
    """

    train: list[str]
    validation: list[str]
    other: dict[str, list[str]]

    @property
    def evaluated(self) -> dict[str, list[str]]:
        """Texts by name on which the agreement is evaluated, at least 3 per name."""
        by_name = {"validation": self.validation, **self.other}
        return {name: texts for name, texts in by_name.items() if len(texts) >= MIN_EVALUATED_TEXTS}

    def check_evaluated(self) -> None:
        """Raise UserError if there is no text to evaluate on."""
        if not self.evaluated:
            total = len(self.train) + len(self.validation)
            raise UserError(
                f"at least 3 held-out texts are needed for the evaluation, got "
                f"{len(self.validation)} of {total}. Pass a larger --validation-percent, or more "
                "texts."
            )


def default_validation_percent(count: int) -> float:
    """Return the percentage of texts to hold out: 1 %, or more for 100 texts, but at most 5 %."""
    return max(1.0, min(5.0, 100 * MIN_VALIDATION_TEXTS / max(count, 1)))


def check_validation_names(sources: Iterable[TextSource]) -> None:
    """Raise UserError if two sources of validation texts have one name, or one is reserved."""
    # The names identify the sets in results and metrics, next to the texts of the run.
    names = [source.name for source in sources]
    invalid_names = [name for name in names if names.count(name) > 1 or name in RESERVED_NAMES]
    if invalid_names:
        raise UserError(
            "`validation_texts` must have different names other than "
            f"{' and '.join(RESERVED_NAMES)}, got {listed(invalid_names)}. Set `name` in the "
            "recipe."
        )


def read_texts(
    sources: Iterable[TextSource],
    validation_sources: Sequence[TextSource],
    percent: float | None,
    max_texts: int,
) -> Texts:
    """Read the texts of a run.

    Args:
        sources: Sources of training texts.
        validation_sources: Sources of validation texts of other types.
        percent: Percentage of the texts of `sources` that is held out, or None for
            `default_validation_percent`.
        max_texts: Maximum number of texts in each validation set; those with the lowest hashes are
            kept.

    Raises:
        UserError: If there are fewer than 2 texts to learn from.
    """
    # A dictionary keeps the order of the texts.
    seen = dict.fromkeys(text for source in sources for text in source.read())
    if percent is None:
        percent = default_validation_percent(len(seen))

    train: list[str] = []
    validation: list[str] = []
    # The hash decides, so a text is held out in every run and in every order.
    for text in seen:
        (validation if is_validation_text(text, percent) else train).append(text)
    if len(train) < 2:
        raise UserError(f"`texts` must contain at least 2 different texts, got {len(train)}.")

    other = {}
    normalized = {normalized_text(text) for text in seen} if validation_sources else set()
    for source in validation_sources:
        # A validation text that is also trained on would look better than it is.
        new_texts = {text for text in source.read() if normalized_text(text) not in normalized}
        other[source.name] = _lowest_hashes(new_texts, max_texts)
        if len(new_texts) < MIN_EVALUATED_TEXTS:
            logger.warning(
                "%s is not evaluated: it has %d texts that `texts` do not contain, and at least %d "
                "are needed.",
                source.path,
                len(new_texts),
                MIN_EVALUATED_TEXTS,
            )
    return Texts(train, _lowest_hashes(validation, max_texts), other)


def count_overlap(train: Iterable[str], texts: Iterable[str]) -> int:
    """Return the number of different texts that training texts contain as well.

    Copies with other spaces or capital letters count, too.
    """
    normalized = {normalized_text(text) for text in texts}
    return len(normalized.intersection(map(normalized_text, train)))


def _lowest_hashes(texts: Iterable[str], max_texts: int) -> list[str]:
    """Return a random sample of texts that does not depend on their order."""
    return sorted(texts, key=hash_fraction)[:max_texts]


def texts_digest(texts: Iterable[str]) -> str:
    """Return twelve hex digits of texts in their order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def teacher_embeddings(path: Path, texts: Sequence[str], teacher: PackedEncoder) -> np.ndarray:
    """Return the embeddings of texts by the teacher, (N, D) float16, memory-mapped.

    Embeddings that the file does not contain yet are computed first.

    Args:
        path: File of the embeddings, .npy, for these texts and this teacher alone.
        texts: Texts.
        teacher: Encoder.
    """
    progress_path = path.with_suffix(".json")
    # Someone may have deleted the large file alone, to save space.
    has_rows = path.is_file() and progress_path.is_file()
    done = read_json(progress_path)["done"] if has_rows else 0
    if done < len(texts):
        path.parent.mkdir(parents=True, exist_ok=True)

        shape = (len(texts), teacher.embedding_dimension)
        # The file has its final size from the start; `progress_path` counts the rows that are
        # written.
        mode = "r+" if done else "w+"
        # A truncated file is an error if it is opened for reading. Opened for writing, it would be
        # extended by zeros.
        with check_readable(path):
            if done:
                np.load(path, mmap_mode="r")
            embeddings = np.lib.format.open_memmap(path, mode, np.float16, shape)
        _reserve_space(path)
        with tqdm(total=len(texts), initial=done, desc=f"teacher, {path.stem}") as bar:
            for start in range(done, len(texts), CHUNK_SIZE):
                end = min(start + CHUNK_SIZE, len(texts))
                # The student reproduces `teacher.encode`, which prepends the default prompt.
                prompt = teacher.default_prompt
                tokens = teacher.tokenize(texts[start:end], prompt)
                embeddings[start:end] = teacher.embed(tokens, bar.update, prompt)
                # The rows must be on disk before the progress counts them.
                embeddings.flush()
                write_json(progress_path, {"done": end})
    with check_readable(path):
        return np.load(path, mmap_mode="r")


@contextlib.contextmanager
def check_readable(path: Path) -> Iterator[None]:
    """Report errors in the content of a file of the work directory, such as a truncated copy.

    Raises:
        UserError: If the file is damaged.
    """
    try:
        yield
    except (ValueError, EOFError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error)}). Remove the file to compute it again."
        ) from error


def _reserve_space(path: Path) -> None:
    """Allocate the space of a sparse file, if the system supports it.

    Writing to the memory map of a sparse file on a full disk ends the process without a message.

    Raises:
        OSError: If the disk is full.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    with open(path, "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            # Some file systems cannot allocate space.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                error.filename = str(path)
                raise
