"""Rows with predictions in files: csv, jsonl or parquet, in parts that are joined at the end."""

import csv
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from ..common import data
from ..common.errors import UserError, listed
from ..encoding.columns import column_array, inferred_types
from ..finetuning.rows import CLASSIFICATION, MULTI_LABEL, REGRESSION, TextTask


FORMATS = (".csv", ".jsonl", ".parquet")
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
    """Return the columns of the predictions of a task, with their types.

    Args:
        task: Task of the model.
        all_probabilities: Whether there is one column per label.
        is_split: Whether texts are lists of words, which get one tag each.
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
        columns = {name: pyarrow.list_(kind) for name, kind in columns.items()}
    if all_probabilities:
        columns |= {f"probability_{label}": pyarrow.float64() for label in task.labels}
    return columns


@dataclass(frozen=True)
class Table:
    """Format and columns of an output file.

    Attributes:
        format: ".csv", ".jsonl" or ".parquet".
        copied: Columns of the input.
        added: Columns of the predictions, with their types.
        schema: Arrow schema of all columns, for parquet.
    """

    format: str
    copied: tuple[str, ...]
    added: Mapping[str, pyarrow.DataType]
    schema: pyarrow.Schema | None = None

    @classmethod
    def for_files(
        cls,
        files: Sequence[data.File],
        output_format: str,
        copied: Sequence[str],
        added: Mapping[str, pyarrow.DataType],
    ) -> "Table":
        """Return the table of input files and predictions.

        Raises:
            UserError: If the input has a column with the name of a prediction.
        """
        if taken := [name for name in copied if name in added]:
            raise UserError(
                f"the input must have no columns with the names of the predictions, got "
                f"{listed(taken)}. Rename the columns."
            )
        if output_format != ".parquet":
            return cls(output_format, tuple(copied), added)

        # The types of a parquet input are copied. Those of text formats are inferred.
        if files[0].format == ".parquet":
            known = data.schema(files[0])
            fields = [(name, known.field(name).type) for name in copied]
        else:
            fields = [*inferred_types(files, copied).items()]
        schema = pyarrow.schema([*fields, *added.items()])
        return cls(output_format, tuple(copied), added, schema)

    def encode(
        self,
        file: data.File,
        rows: Sequence[Mapping[str, Any]],
        predictions: Sequence[Mapping[str, Any]],
    ) -> bytes:
        """Return rows with their predictions as the content of a part."""
        if self.format == ".jsonl":
            lines = [_json({**row, **more}) for row, more in zip(rows, predictions)]
            # Escapes of JSON can contain lone surrogates, which UTF-8 cannot encode.
            return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")

        if self.format == ".csv":
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            for row, more in zip(rows, predictions):
                values = [row[name] for name in self.copied]
                values += [more.get(name) for name in self.added]
                writer.writerow([_cell(value) for value in values])
            return text.getvalue().encode("utf-8", "backslashreplace")

        assert self.schema is not None
        columns: dict[str, Any] = {}
        for name in self.copied:
            values = [row[name] for row in rows]
            columns[name] = column_array(values, self.schema.field(name), file)
        for name, kind in self.added.items():
            columns[name] = pyarrow.array([more.get(name) for more in predictions], kind)

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=self.schema), buffer)
        return buffer.getvalue()

    def join(self, parts: Sequence[Path], output: BinaryIO) -> None:
        """Write the parts as one file."""
        if self.format == ".parquet":
            assert self.schema is not None
            with pyarrow.parquet.ParquetWriter(output, self.schema) as writer:
                for part in parts:
                    writer.write_table(pyarrow.parquet.read_table(part))
            return

        # The parts have no header, so that they can be concatenated.
        if self.format == ".csv":
            header = io.StringIO()
            csv.writer(header, lineterminator="\n").writerow([*self.copied, *self.added])
            output.write(header.getvalue().encode())

        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, output)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _cell(value: Any) -> Any:
    """Return the text of a table's cell: lists and mappings as JSON."""
    return _json(value) if isinstance(value, (list, dict)) else value
