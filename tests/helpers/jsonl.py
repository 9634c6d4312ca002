"""Rows as a .jsonl file, for the tests of commands that read them."""

import json


def write_jsonl(path, rows):
    """Writes `rows` a line each, makes the folder where there is none, and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
