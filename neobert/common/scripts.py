"""Functions for scripts that users copy: rows of a file, and errors in one sentence.

A script ends with `run_script(main)` below `if __name__ == "__main__":`.
"""

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
        optional: Columns that are returned if the first row has them; then every row must.
        texts: Columns that must contain text. By default all that are returned.

    Raises:
        UserError: If the source does not exist, is empty or damaged, or lacks a column.
    """
    first_row = next(rows(source), None)
    if first_row is None:
        raise UserError(f"{source} contains no rows.")

    # The first row decides which optional columns exist: a later row without one is an error.
    names = [*columns, *(name for name in optional if name in first_row)]
    return list(rows(source, names, names if texts is None else texts))
