"""Text and JSON files: read within bounds, written completely or not at all, without secrets."""

import json
import os
from pathlib import Path

from .errors import UserError, one_line
from .folders import new_file
from .secrets import redacted


LARGEST = 64 * 2**20  # bytes of a file that is read at once: a stranger's may be anything


def check_file(path):
    """Raises UserError unless `path` is a file: a pipe or a device may never end."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file" if os.path.exists(path) else f"no file {path}")


def read_text(path):
    """The content of a UTF-8 file; UserError where it cannot be read or is too large."""
    check_file(path)
    try:
        if os.path.getsize(path) > LARGEST:
            raise UserError(f"{path} has more than {LARGEST:,} bytes, too large for what it is")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)})") from None


def read_json(path):
    """The content of a JSON file; UserError where it cannot be read."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({one_line(error)})") from None


def write_text(path, text):
    """Writes a file completely or not at all. Lone surrogates (file names that are not UTF-8) are
    written as escapes: "\\udce9"."""
    with new_file(path) as file:
        file.write(bytes(text, "utf-8", "backslashreplace"))


def json_text(data):
    """The one form of JSON files here: indented, characters as they are."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def write_json(path, data):
    """Writes `data` as `json_text`, completely or not at all, without secrets (`redacted`)."""
    write_text(path, json_text(redacted(data)))
