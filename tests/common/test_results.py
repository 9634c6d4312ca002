"""Tests of result files.

Covers the JSON file and the page of a result, tables, the protection of other files, and the index
of results/.
"""

import json
import re
from pathlib import Path

import pytest

from neobert.common.environment import environment
from neobert.common.errors import UserError
from neobert.common.results import check_result_files, earlier_result, write_result
from neobert.common.tables import markdown_table


RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_a_table_has_a_line_per_row():
    table = markdown_table(["a", "b"], [[1, None], ("x|y", 2.5)])
    assert table == "| a | b |\n| --- | --- |\n| 1 |  |\n| x\\|y | 2.5 |\n"


def test_a_result_is_a_json_file_and_a_page(tmp_path):
    table = markdown_table(["a", "b"], [[1, None]])
    record = environment(dtype="float32")
    page = write_result(tmp_path / "new" / "speed.v2", "Speed", record, {"rows": [1]}, table)

    data = json.loads((tmp_path / "new" / "speed.v2.json").read_text())
    assert data["rows"] == [1]
    assert data["environment"]["dtype"] == "float32"

    assert (tmp_path / "new" / "speed.v2.md").read_text() == page
    assert page.startswith("# Speed\n\n`")
    assert "dtype float32" in page
    assert page.endswith("| 1 |  |\n")

    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["speed.v2.json", "speed.v2.md"]


def test_a_file_is_an_earlier_result_if_it_has_the_keys(tmp_path):
    """Missing and invalid files, and JSON files without the keys, are no earlier results."""
    path = tmp_path / "result.json"
    assert earlier_result(path) is None

    path.write_text('{"rows": [], "seed": 1}')
    assert earlier_result(path, "rows") == {"rows": [], "seed": 1}
    assert earlier_result(path, "rows", "tasks") is None
    path.write_text('["rows"]')
    assert earlier_result(path, "rows") is None
    path.write_text("{")
    assert earlier_result(path) is None


def test_unrelated_files_are_not_replaced(tmp_path):
    """A page may exist only if the command has written an earlier result next to it."""
    check_result_files(tmp_path, "glue", None, "glue.md")
    (tmp_path / "glue.md").write_text("mine")
    check_result_files(tmp_path, "glue", {"rows": []}, "glue.md")
    with pytest.raises(UserError, match="was not written by `neobert glue` and will not be"):
        check_result_files(tmp_path, "glue", None, "glue.json", "glue.md")


def test_the_index_lists_every_result():
    """results/README.md has a link to every page, and to every JSON file without a page."""
    links = re.findall(r"\]\(([^)]+)\)", (RESULTS / "README.md").read_text())
    pages = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.md")}
    without_page = {
        path.relative_to(RESULTS).as_posix()
        for path in RESULTS.glob("*.json")
        if not path.with_suffix(".md").exists()
    }
    assert sorted(links) == sorted((pages | without_page) - {"README.md"})
