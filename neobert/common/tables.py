"""Tables in markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a markdown table. None is an empty cell, other values are converted by `str`."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(_line(line) for line in lines)


def _line(cells: Iterable[object]) -> str:
    # A label may contain the character that separates cells.
    texts = ["" if cell is None else str(cell).replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(texts)} |\n"
