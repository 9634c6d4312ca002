"""Functions for scripts that users copy: rows of a file, and errors in one sentence.

A script ends with `run_script(main)` below `if __name__ == "__main__":`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .commands import guarded
from .data import rows
from .errors import UserError


def run_script(main: Callable[[], object]) -> NoReturn:
    """Run `main` and exit. An error becomes one sentence and exit code 2, as in the commands.

    With NEOBERT_DEBUG=1 the traceback is printed as well.
    """
    name = Path(sys.argv[0]).name

    def run() -> int:
        try:
            main()
        except KeyboardInterrupt:
            # The message of the commands says that a run resumes, which scripts do not.
            print(f"{name}: interrupted", file=sys.stderr)
            return 130
        return 0

    sys.exit(guarded(name, run))


def training_parser(
    description: str | None, output: str, batch_size: int
) -> argparse.ArgumentParser:
    """Return a parser of the options that all training scripts have.

    These are `--model`, `--data`, `--output`, `--epochs`, `--batch-size` and `--learning-rate`.

    Args:
        description: Text of `--help`.
        output: Default of `--output`.
        batch_size: Default of `--batch-size`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    # Input and output.
    parser.add_argument(
        "--model",
        default="chandar-lab/NeoBERT",
        help="Directory or name on the Hub. (default: %(default)s)",
    )
    parser.add_argument("--data", required=True, help="Directory with train.jsonl and test.jsonl.")
    parser.add_argument(
        "--output", default=output, help="New output directory. (default: %(default)s)"
    )

    # Training.
    parser.add_argument(
        "--epochs",
        type=float,
        default=3.0,
        help="Number of training epochs. (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=batch_size,
        help="Number of rows per step and device. (default: %(default)s)",
    )
    parser.add_argument(
        "--learning-rate", type=float, help="Peak learning rate. (default: by the hidden size)"
    )
    return parser


def load_rows(
    source: str | Path,
    columns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    texts: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return all rows of a file, folder, glob or URL, see `neobert.common.data`.

    Args:
        source: Rows as .jsonl, .csv, .tsv or .parquet.
        columns: Columns that every row must have. Other columns are left out.
        optional: Columns that are returned if any row has them. Other rows then have None, unless
            the column must contain text.
        texts: Columns that must contain text in every row. By default all that are returned.

    Raises:
        UserError: If the source does not exist, is empty or damaged, or lacks a column.
    """
    # In .jsonl each row has its own columns, so one row does not determine those of the file.
    all_columns: set[str] = set()
    for row in rows(source):
        all_columns.update(row)
    if not all_columns:
        raise UserError(f"{source} contains no rows.")

    # A column that must contain text must also exist in every row.
    available = [name for name in optional if name in all_columns]
    required = [*columns, *(name for name in available if texts is None or name in texts)]
    other = [name for name in available if name not in required]
    checked = rows(
        source,
        required,
        text_columns=required if texts is None else texts,
        optional_columns=other,
    )
    return [{**row, **{name: row.get(name) for name in other}} for row in checked]
