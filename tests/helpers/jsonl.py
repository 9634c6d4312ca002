"""Writing of .jsonl files for the tests of commands that read them."""

import json


def write_jsonl(path, rows):
    """Write one row per line to a file, whose directory is created, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
