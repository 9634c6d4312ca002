"""Output files of `neobert predict`: rows with predictions as csv, jsonl or parquet.

Parts of an output are encoded separately and joined at the end.
"""

import csv
import io
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from ..common import data
from ..common.errors import UserError, listed
from ..common.task_file import CLASSIFICATION, MULTI_LABEL, REGRESSION
from ..encoding.columns import column_array, inferred_types
from ..finetuning.text_tasks import TextTask


FORMATS = (".csv", ".jsonl", ".parquet")
# Type of an entity. `start` and `end` are character positions in the text.
_ENTITY = pyarrow.struct(
    [
        ("start", pyarrow.int64()),
        ("end", pyarrow.int64()),
        ("label", pyarrow.string()),
        ("text", pyarrow.string()),
        ("probability", pyarrow.float64()),
    ]
)


def output_columns(
    task: TextTask, all_probabilities: bool = False, is_split: bool = False
) -> dict[str, pyarrow.DataType]:
    """Return the columns of the predictions of a task, {name: type}.

    Args:
        task: Task of the model.
        all_probabilities: Whether to add a column with the probability of each label.
        is_split: Whether texts are lists of words, each of which has a tag.
    """
    if task.name == REGRESSION:
        return {"prediction": pyarrow.float64()}
    if task.name not in (CLASSIFICATION, MULTI_LABEL):
        columns: dict[str, pyarrow.DataType] = {"prediction": pyarrow.list_(_ENTITY)}
        if is_split:
            columns["predicted_tags"] = pyarrow.list_(pyarrow.string())
        return columns

    columns = {"prediction": pyarrow.string(), "probability": pyarrow.float64()}
    # A text has any number of labels, and one probability for each.
    if task.name == MULTI_LABEL:
        columns = {name: pyarrow.list_(arrow_type) for name, arrow_type in columns.items()}
    if all_probabilities:
        columns |= {f"probability_{label}": pyarrow.float64() for label in task.labels}
    return columns


@dataclass(frozen=True)
class Table:
    """Format and columns of an output file.

    Attributes:
        format: ".csv", ".jsonl" or ".parquet".
        input_columns: Columns of the input, which are copied.
        prediction_columns: Columns of the predictions, {name: type}.
        schema: Arrow schema of all columns, for parquet.
    """

    format: str
    input_columns: tuple[str, ...]
    prediction_columns: Mapping[str, pyarrow.DataType]
    schema: pyarrow.Schema | None = None

    @classmethod
    def from_files(
        cls,
        files: Sequence[data.File],
        output_format: str,
        input_columns: Sequence[str],
        text_columns: Sequence[str],
        prediction_columns: Mapping[str, pyarrow.DataType],
    ) -> "Table":
        """Return the table of input files and predictions.

        Args:
            files: Input files.
            output_format: ".csv", ".jsonl" or ".parquet".
            input_columns: Columns of the input.
            text_columns: Those of them that contain the texts.
            prediction_columns: Columns of the predictions, {name: type}.

        Raises:
            UserError: If the input has a column with the name of a prediction.
        """
        conflicts = [name for name in input_columns if name in prediction_columns]
        if conflicts:
            raise UserError(
                f"the input must have no columns with the names of the predictions, got "
                f"{listed(conflicts)}. Rename the columns."
            )

        # Only parquet files have types.
        if output_format != ".parquet":
            return cls(output_format, tuple(input_columns), prediction_columns)

        # The types of a parquet input are copied. Those of text formats are inferred. A parquet
        # file without rows may lack the types.
        first = next(file for file in files if not data.is_empty(file))
        if first.format == ".parquet":
            input_schema = data.schema(first)
            fields = [(name, input_schema.field(name).type) for name in input_columns]
        else:
            # A text such as "42" does not become a number.
            types = dict.fromkeys(text_columns, pyarrow.string())
            types |= inferred_types(files, [name for name in input_columns if name not in types])
            fields = [(name, types[name]) for name in input_columns]
        schema = pyarrow.schema([*fields, *prediction_columns.items()])
        return cls(output_format, tuple(input_columns), prediction_columns, schema)

    def encode(
        self,
        file: data.File,
        rows: Sequence[Mapping[str, Any]],
        predictions: Sequence[Mapping[str, Any]],
    ) -> bytes:
        """Return rows with their predictions as the content of a part.

        Args:
            file: Input file of the rows.
            rows: Rows of the input.
            predictions: Columns of the predictions of each row.

        Raises:
            UserError: If a value does not have the type of its column in a parquet file.
        """
        if self.format == ".jsonl":
            lines = [_json({**row, **prediction}) for row, prediction in zip(rows, predictions)]
            # Escapes of JSON can contain lone surrogates, which UTF-8 cannot encode.
            return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")

        if self.format == ".csv":
            table_rows = []
            for row, prediction in zip(rows, predictions):
                values = [row[name] for name in self.input_columns]
                values += [prediction.get(name) for name in self.prediction_columns]
                table_rows.append(_csv_line([_cell(value) for value in values]))
            return b"".join(table_rows)

        # Copied values are checked against the inferred types. Predictions always have their types.
        assert self.schema is not None
        columns: dict[str, Any] = {}
        for name in self.input_columns:
            values = [row[name] for row in rows]
            columns[name] = column_array(
                values, self.schema.field(name), file, "Use an output that ends in .jsonl."
            )
        for name, arrow_type in self.prediction_columns.items():
            values = [prediction.get(name) for prediction in predictions]
            columns[name] = pyarrow.array(values, arrow_type)

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=self.schema), buffer)
        return buffer.getvalue()

    def join(self, parts: Sequence[Path], output: BinaryIO) -> None:
        """Write the parts as one file."""
        # A parquet file ends with an index of its content, so files cannot be concatenated.
        if self.format == ".parquet":
            assert self.schema is not None
            with pyarrow.parquet.ParquetWriter(output, self.schema) as writer:
                for part in parts:
                    writer.write_table(pyarrow.parquet.read_table(part))
            return

        # The parts have no header, so they can be concatenated.
        if self.format == ".csv":
            output.write(_csv_line([*self.input_columns, *self.prediction_columns]))

        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, output)


def _json(value: Any) -> str:
    """Return a value as JSON; dates and similar values become text, NaN and infinity null."""
    return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    """Return a value with None instead of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


def _csv_line(cells: Sequence[Any]) -> bytes:
    """Return cells as a line of a CSV file."""
    line = io.StringIO()
    # Python 3.11 quotes a cell with a line break only if the line terminator contains the character
    # of the line break. A lone carriage return would end a row for readers.
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    text = line.getvalue().removesuffix("\r\n")
    return f"{text}\n".encode("utf-8", "backslashreplace")


def _cell(value: Any) -> Any:
    """Return the value of a CSV cell, with lists and mappings as JSON."""
    return _json(value) if isinstance(value, (list, dict)) else value
