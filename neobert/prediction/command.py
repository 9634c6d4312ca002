"""`neobert predict INPUT OUTPUT --model MODEL`: predictions for a file of any size.

The rows are read in parts of `--rows` rows. Each part is stored in OUTPUT.work/ when it is
complete, and the parts become OUTPUT at the end. Running the command again resumes an interrupted
run. OUTPUT.json describes the run: options, model, counts and environment.
"""

import dataclasses
import itertools
import logging
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..common import data
from ..common.environment import environment
from ..common.errors import UserError
from ..common.files import read_json, write_json, write_record
from ..common.folders import check_disjoint, new_file
from ..common.identity import model_digest
from ..common.loading import check_model
from ..common.options import identity, log_options
from ..common.output import RUN, Output, differences, is_record_of
from ..common.task_file import CLASSIFICATION, MULTI_LABEL, TOKENS
from ..encoding.manifest import Truncation
from ..finetuning.rows import parsed_list
from .classifier import PackedClassifier, TaskRecord
from .options import OPTIONS, PredictOptions
from .table import FORMATS, Table, output_columns


logger = logging.getLogger("neobert.prediction")

# Name of the command in its records.
COMMAND = "predict"


@dataclass(frozen=True)
class Summary:
    """Summary of an output.

    Attributes:
        rows: Number of rows.
        missing: Number of rows without a text, which have no prediction.
        tokens: Number of tokens of all texts.
        truncation: Truncation statistics.
    """

    rows: int = 0
    missing: int = 0
    tokens: int = 0
    truncation: Truncation = Truncation()

    def __add__(self, other: "Summary") -> "Summary":
        return Summary(
            self.rows + other.rows,
            self.missing + other.missing,
            self.tokens + other.tokens,
            self.truncation + other.truncation,
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Summary":
        """Return the summary that `dataclasses.asdict` has written."""
        return cls(**{**values, "truncation": Truncation(**values["truncation"])})

    def describe(self) -> str:
        """Return the counts as text."""
        parts = [f"{self.rows:,} rows, {self.tokens:,} tokens"]
        if self.missing:
            parts.append(f"{self.missing:,} rows without a text")
        truncated = "no text truncated"
        if self.truncation.texts:
            truncated = (
                f"{self.truncation.texts:,} texts truncated by {self.truncation.tokens:,} tokens "
                "(use --long-texts windows to read all of them)"
            )
        return ", ".join([*parts, truncated])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert predict`, and return the exit code."""
    options = OPTIONS["predict"].read(sys.argv[1:] if argv is None else argv)
    log_options(options)
    summary = predict(options)
    print(f"{options.data.output}: {summary.describe()}")
    return 0


def predict(options: PredictOptions, progress_bar: bool = True) -> Summary:
    """Predict the rows of a file, unless the output is complete.

    Args:
        options: Options of the command.
        progress_bar: Whether to show a progress bar.

    Returns:
        Summary of the output.

    Raises:
        UserError: If an input is invalid, or if the output exists and was not written with these
            options.
    """
    run = Prediction(options)
    if run.is_finished():
        logger.info("%s: the output is already complete. Nothing is written.", options.data.output)
        # A run that was killed after it had written the output has left its parts.
        run.remove_parts()
        return run.finished_summary()

    # Invalid input is refused before anything is written.
    writer = run.prepare()
    # Another process with the same output is refused while this one is running.
    with run.work_folder.claim():
        # It may have finished since the first check.
        if run.is_finished():
            summary = run.finished_summary()
        else:
            parts, summary = run.write_parts(writer, progress_bar)
            run.join(writer.table, parts, summary)
    run.remove_parts()
    return summary


class Prediction:
    """One run of the command.

    Args:
        options: Options of the command.

    Attributes:
        work_folder: Directory of the parts, which records what identifies the run: the options, the
            digest of the model, and the input files.
        work: Path of this directory.
        record_path: Path of the file that describes the run.
    """

    def __init__(self, options: PredictOptions) -> None:
        self.options = options
        source = options.data.input
        model = options.model.model
        self.output = Path(options.data.output)
        self.format = self.output.suffix.lower()
        if self.format not in FORMATS:
            raise UserError(
                f"`output` must end in one of {', '.join(FORMATS)}, got {options.data.output!r}."
            )

        check_model(model)
        self.files = data.files(source)
        self.work = self.output.with_name(f"{self.output.name}.work")
        self.record_path = self.output.with_name(f"{self.output.name}.json")
        # The output must not replace an input.
        inputs = [path for path in (source, model) if Path(path).exists()]
        for path in (self.output, self.work, self.record_path):
            check_disjoint(path, *inputs)
        # Nor must the next run read the output or its parts.
        parts = [self.work / f"000000{suffix}" for suffix in (self.format, ".json")]
        data.check_not_matched(source, *map(str, (self.output, self.record_path, *parts)))

        # A run resumes only with the same options, weights and input files.
        settings = {
            **identity(options),
            "model": model_digest(model),
            "files": {file.name: file.size for file in self.files},
        }
        self.work_folder = Output(self.work, COMMAND, settings)

    def is_finished(self) -> bool:
        """Return whether the output is complete.

        Raises:
            UserError: If the output exists, but is not one of this command with these options.
        """
        if self.output.is_dir():
            raise UserError(f"{self.output} must be a file, got a directory.")
        # A file without a record of this command is never replaced, nor is another file that has
        # the name of the record.
        record: Any = read_json(self.record_path) if self.record_path.is_file() else None
        is_own = is_record_of(COMMAND, record)
        if record is not None and not is_own:
            raise UserError(
                f"{self.record_path} already exists, and was not written by neobert predict. "
                "Choose another output."
            )
        if not self.output.exists():
            return False
        if not is_own:
            raise UserError(
                f"{self.output} already exists, and is no output of neobert predict. Remove it (rm "
                f"{self.output}), or choose another output."
            )

        changes = differences(record["settings"], self.work_folder.settings)
        if changes:
            raise UserError(
                f"{self.output} was written with other settings ({changes}). Remove it (rm "
                f"{self.output}), or choose another output."
            )
        return True

    def finished_summary(self) -> Summary:
        """Return the summary of a complete output."""
        return Summary.from_json(read_json(self.record_path)["summary"])

    def remove_parts(self) -> None:
        """Remove the directory of the parts, unless another program has written it."""
        record_path = self.work / RUN
        if record_path.is_file() and is_record_of(COMMAND, read_json(record_path)):
            shutil.rmtree(self.work, ignore_errors=True)

    def prepare(self) -> "PartWriter":
        """Read the task of the model, check the columns of the input, and return the writer.

        Raises:
            UserError: If the input or an option does not suit the model.
        """
        record = TaskRecord.from_model(
            self.options.model.model, self.options.model.trust_remote_code
        )
        columns, text_columns = self._columns(record)
        # The options may name other text columns than those of the training.
        record = dataclasses.replace(
            record, task=dataclasses.replace(record.task, text_columns=text_columns)
        )
        if self.options.long_texts.long_texts == "windows" and len(text_columns) > 1:
            raise UserError(
                "`--long-texts windows` needs one text column, got a model of pairs. Use "
                "--long-texts truncate."
            )
        all_probabilities = self.options.data.probabilities
        if all_probabilities and record.task.name not in (CLASSIFICATION, MULTI_LABEL):
            raise UserError(
                "`probabilities` requires a model that predicts labels of texts, got a model for "
                f"{record.task.name}. Omit `--probabilities`."
            )

        has_word_lists = record.task.name == TOKENS and self._has_word_lists(text_columns[0])
        is_split = record.task.has_spaces or has_word_lists
        predictions = output_columns(record.task, all_probabilities, is_split)
        return PartWriter(
            record=record,
            table=Table.from_files(self.files, self.format, columns, text_columns, predictions),
            has_word_lists=has_word_lists,
            all_probabilities=all_probabilities,
        )

    def write_parts(self, writer: "PartWriter", progress_bar: bool) -> tuple[list[Path], Summary]:
        """Write the missing parts, and return the files and the summary of all parts."""
        # A run with nothing left to do does not load the model.
        classifier: PackedClassifier | None = None
        total = Summary()
        start = time.perf_counter()
        new_tokens = 0
        parts: list[Path] = []
        with tqdm(unit="row", disable=not progress_bar) as bar:
            for number, file, rows in self._read_parts():
                path = self.work / f"{number:06d}{self.format}"
                parts.append(path)
                # A finished part has no rows here, but a summary in its .json file.
                if rows is not None:
                    if classifier is None:
                        classifier = PackedClassifier(self.options, writer.record)
                    part = writer.write(classifier, path, file, rows)
                    new_tokens += part.tokens
                else:
                    part = Summary.from_json(read_json(path.with_suffix(".json")))
                total += part
                bar.update(part.rows)

        # The parts of an earlier run do not count toward the speed.
        if new_tokens:
            seconds = time.perf_counter() - start
            logger.info("%s tokens/s", f"{new_tokens / seconds:,.0f}")
        return parts, total

    def _columns(self, record: TaskRecord) -> tuple[list[str], tuple[str, ...]]:
        """Return the columns of the input, and those of them that contain the texts.

        Raises:
            UserError: If the input has no rows or no text columns of the model.
        """
        # The columns are those of the first file that has rows.
        first = next((file for file in self.files if not data.is_empty(file)), None)
        if first is None:
            raise UserError(f"{self.options.data.input} must contain at least one row, got none.")

        columns = list(data.schema(first).names)
        text_columns = tuple(self.options.data.text_column or record.task.text_columns)
        missing = [name for name in text_columns if name not in columns]
        # A model of pairs needs two columns, any other model one.
        counts = record.column_counts
        # Without an option, a column named text replaces a missing column of the training.
        has_default = self.options.data.text_column is None and "text" in columns
        if missing and has_default and counts != (2,):
            text_columns = ("text",)
            missing = []

        if missing:
            noun = "columns" if len(text_columns) > 1 else "column"
            remedy = data.separator_remedy(columns) or f"Name the text {noun} with --text-column."
            raise UserError(
                f"{first.url} has no column {missing[0]!r}, only {data.listed_columns(columns)}. "
                f"{remedy}"
            )
        if len(text_columns) not in counts:
            noun = "column" if counts == (1,) else "columns"
            raise UserError(
                f"`text_column` must name {' or '.join(map(str, counts))} {noun} for this model, "
                f"got {len(text_columns)}."
            )
        return columns, text_columns

    def _has_word_lists(self, column: str) -> bool:
        """Return whether a column contains lists of words; the first row with a text decides."""
        for file in self.files:
            for _, row in data.numbered_rows(file, [column]):
                value = parsed_list(row[column])
                if not _is_missing(value):
                    return _is_word_list(value)
        return False

    def _read_parts(self) -> Iterator[tuple[int, data.File, list[tuple[int, Any]] | None]]:
        """Yield the number, the file and the rows of each part.

        A part is a range of the rows of one file. The rows of a finished part are None.
        """
        size = self.options.data.rows
        # A part of this run is written after its rows have been read.
        finished_parts = {path.stem for path in self.work.glob("*.json")}
        number = 0
        for file in self.files:
            # The parts of all files are numbered in one sequence, which continues in the next file.
            first = number

            # A default argument binds the current value: a closure would see that of later files.
            def is_wanted(row: int, first: int = first) -> bool:
                return f"{first + row // size:06d}" not in finished_parts

            # Rows of finished parts are counted, but not decoded.
            numbered = data.numbered_rows(file, is_wanted=is_wanted)
            for _, group in itertools.groupby(numbered, lambda item: item[0] // size):
                rows = list(group)
                # A row group of a parquet file may contain rows of a finished part.
                has_rows = rows[0][1] is not None and is_wanted(rows[0][0])
                yield number, file, rows if has_rows else None
                number += 1

    def join(self, table: Table, parts: Sequence[Path], summary: Summary) -> None:
        """Write the record and then the output, which is complete when it exists."""
        content = {
            "neobert": COMMAND,
            "settings": self.work_folder.settings,
            "summary": dataclasses.asdict(summary),
            "environment": environment(dtype=self.options.inference.dtype),
        }
        write_record(self.record_path, content)
        with new_file(self.output) as file:
            table.join(parts, file)


@dataclass(frozen=True)
class PartWriter:
    """Predicts the rows of a part, and stores the part in a file.

    Attributes:
        record: Task of the model.
        table: Columns and format of the output.
        has_word_lists: Whether the texts are lists of words.
        all_probabilities: Whether to store the probabilities of all labels.
    """

    record: TaskRecord
    table: Table
    has_word_lists: bool
    all_probabilities: bool

    def write(
        self,
        classifier: PackedClassifier,
        path: Path,
        file: data.File,
        rows: Sequence[tuple[int, Any]],
    ) -> Summary:
        """Predict the rows of a part and store them; the .json file with the summary is last."""
        known_columns = set(self.table.input_columns)
        texts = []
        # Index in the part of each row that has a text.
        indices = []
        for index, (number, row) in enumerate(rows):
            position = f"{file.url}, row {number + 1:,}"
            self._check_columns(position, row, known_columns)
            row_texts = self._texts(position, row)
            if row_texts is not None:
                indices.append(index)
                texts.append(row_texts[0] if len(row_texts) == 1 else row_texts)

        results, truncation, tokens = classifier.predict(texts, self.all_probabilities)

        # Rows without a text stay in the output, with empty predictions.
        predictions: list[dict[str, Any]] = [
            dict.fromkeys(self.table.prediction_columns) for _ in rows
        ]
        for index, result in zip(indices, results):
            predictions[index] = result
        content = self.table.encode(file, [row for _, row in rows], predictions)
        with new_file(path) as part:
            part.write(content)

        # A part is complete when its .json file exists, so this file is written last.
        summary = Summary(len(rows), len(rows) - len(texts), tokens, truncation)
        write_json(path.with_suffix(".json"), dataclasses.asdict(summary))
        return summary

    def _check_columns(
        self, position: str, row: Mapping[str, Any], known_columns: Collection[str]
    ) -> None:
        """Check that the columns of a row are those of the output.

        Args:
            position: File and number of the row, for messages.
            row: Row of the input.
            known_columns: Columns of the first row of the input.

        Raises:
            UserError: If the row lacks a column, or has one that the output cannot contain.
        """
        text_columns = self.record.task.text_columns
        needed: Sequence[str] = text_columns
        # The rows of a .jsonl output may have different columns.
        if self.table.format != ".jsonl":
            needed = (*text_columns, *self.table.input_columns)
        missing = [name for name in needed if name not in row]
        if missing:
            remedy = " Add the column to the row, or write to .jsonl."
            if missing[0] in text_columns:
                remedy = ""
            raise UserError(f"{position}: there is no column {missing[0]!r}.{remedy}")

        # The columns of other outputs are those of the first row.
        added = [name for name in row if name not in known_columns]
        conflicts = [name for name in added if name in self.table.prediction_columns]
        if conflicts:
            raise UserError(
                f"{position}: the column {conflicts[0]!r} has the name of a prediction. Rename the "
                "column."
            )
        if added and self.table.format != ".jsonl":
            raise UserError(
                f"{position}: the first row has no column {added[0]!r}, so the output would lack "
                "it. Add the column to the first row, or write to .jsonl."
            )

    def _texts(self, position: str, row: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the texts of a row, or None if one of them is missing.

        Raises:
            UserError: If a value is not a text.
        """
        values = [row[name] for name in self.record.task.text_columns]
        if self.has_word_lists:
            values = [parsed_list(value) for value in values]
        # A pair with only one text has no prediction either.
        if any(_is_missing(value) for value in values):
            return None
        for value in values:
            self._check_text(position, value)
        return tuple(values)

    def _check_text(self, position: str, value: Any) -> None:
        """Raise UserError unless a value is a text, or a list of words for a token classifier."""
        if isinstance(value, str):
            return

        # The columns of the output depend on the first text. If it is a string, later lists of
        # words would have tags without a column.
        if _is_word_list(value) and "predicted_tags" in self.table.prediction_columns:
            return
        raise UserError(f"{position}: the text must be a string, got {value!r:.60}.")


def _is_missing(value: Any) -> bool:
    """Return whether a text is missing or blank."""
    return not value.strip() if isinstance(value, str) else value is None or value == []


def _is_word_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)
