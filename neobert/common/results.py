"""Result files: the figures of a measurement as JSON, and a page with the same figures.

Both contain the environment of the measurement, see `neobert.common.environment`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .environment import environment_line
from .errors import UserError
from .files import json_text, read_json, write_text


def write_result(
    output: str | Path,
    title: str,
    environment: Mapping[str, Any],
    data: Mapping[str, Any],
    text: str,
) -> str:
    """Write OUTPUT.json with the figures, and the page OUTPUT.md.

    Args:
        output: Path of the files without the suffix.
        title: Heading of the page.
        environment: Result of `environment()`: the field "environment" of the JSON file, and a line
            below the heading of the page.
        data: Other fields of the JSON file.
        text: Text of the page below that line, in markdown.

    Returns:
        The page.
    """
    page = f"# {title}\n\n{environment_line(environment)}.\n\n{text.strip()}\n"
    write_text(f"{output}.json", json_text({"environment": environment, **data}))
    write_text(f"{output}.md", page)
    return page


def earlier_result(path: str | Path, *keys: str) -> dict[str, Any] | None:
    """Return the JSON object of a result file that a command adds to.

    Returns:
        None if the file does not exist, cannot be read, or lacks one of `keys`.
    """
    try:
        data = read_json(path)
    except UserError:
        return None
    return data if isinstance(data, dict) and set(keys) <= data.keys() else None


def check_result_files(
    folder: str | Path, command: str, earlier: Mapping[str, Any] | None, *names: str
) -> None:
    """Check that a command only replaces files that it has written itself.

    Args:
        folder: Directory of the results.
        command: Name of the command.
        earlier: Earlier results of the command in `folder`. Without them none of the files may
            exist.
        names: Names of the files that the command writes to `folder`.

    Raises:
        UserError: If another program has written one of the files.
    """
    # An earlier run of the command has written the files.
    if earlier:
        return
    for name in names:
        path = Path(folder) / name
        if os.path.lexists(path):
            raise UserError(
                f"{path} was not written by `neobert {command}` and will not be replaced. Move the "
                "file, or choose another directory."
            )
