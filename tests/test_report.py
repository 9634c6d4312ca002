"""Pins `neobert report`: an index, every result with its plots and its environment once, the
published figures, bad input in one sentence."""

import json
import re
from pathlib import Path

import pytest

from neobert.benchmarks import report
from neobert.benchmarks.report import collect, main, read_environment
from neobert.common.errors import UserError
from neobert.common.results import markdown_table, write_result


ENVIRONMENT = {
    "command": "neobert throughput --preset cpu",
    "commit": "abc1234",
    "date": "2026-01-02 03:04 UTC",
    "hardware": "A CPU, 2 cores",
}
ENVIRONMENT |= {"threads": 2, "versions": {"torch": "2.13.0"}, "dtype": "float32"}


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    table = markdown_table(
        ["model", "tokens/s"], [["NeoBERT <tiny>", "12,345"], ["other & more", "1,000 to 2,000"]]
    )
    write_result(
        folder / "throughput" / "throughput",
        "Throughput",
        ENVIRONMENT,
        {"rows": []},
        f"Real *tokens*.\n\n## Each\n\n{table}",
    )
    (folder / "throughput" / "lengths.png").write_bytes(b"x")
    (folder / "glue").mkdir()
    glue = markdown_table(
        ["model", "source", "MNLI"],
        [["BERT base", "published", 84.0], ["ours", "measured", "70.0 ± 1.0"]],
    )
    (folder / "glue" / "table.md").write_text(glue)
    (folder / "glue" / "table.json").write_text(
        json.dumps({"environment": {**ENVIRONMENT, "command": "neobert glue"}})
    )
    (folder / "ablations_small.md").write_text("| rung | score |\n| --- | --- |\n| M0 | 77.7 |\n")
    (folder / "ablations_small.json").write_text("{")
    (folder / "mteb" / "cache").mkdir(parents=True)
    (folder / "mteb" / "cache" / "run.md").write_text("a cache")
    (folder / "surprise.md").write_text("# Surprise\n\nSomething else.")
    (folder / "README.md").write_text("not a result")
    return folder


def build(results):
    assert main(["--results", str(results)]) == 0
    return (results / "report.md").read_text()


def test_every_result_is_there_once_with_its_environment(results):
    text = build(results)
    for expected in (
        "| NeoBERT <tiny> | 12,345 |",
        "other & more",
        "70.0 ± 1.0",
        "77.7",
        "Something else.",
    ):
        assert text.count(expected) == 1, f"{expected} is in the page {text.count(expected)} times"
    for command in ("neobert throughput --preset cpu", "neobert glue"):
        assert text.count(f"`{command}`") == 1 and f"| {command} |" in text, (
            f"the environment of {command} is missing, or told twice"
        )
    assert "torch 2.13.0" in text and "2 threads" in text
    assert "not a result" not in text and "a cache" not in text
    assert build(results) == text, "the report reported itself"


def test_the_index_names_every_page(results):
    text = build(results)
    index = (
        "| [throughput/throughput](throughput/throughput.md) | 2026-01-02 03:04 UTC | "
        "abc1234 | neobert throughput --preset cpu |"
    )
    assert index in text and "| [surprise](surprise.md) |  |  |  |" in text
    assert re.findall(r"^# (.*)$", text, flags=re.M) == ["NeoBERT: measured results"]
    assert (
        "\n### Each\n" in text
        and "\n## throughput/throughput\n" in text
        and "# Surprise" not in text
    )


def test_published_figures_are_at_the_end(results):
    text = build(results)
    published = text[text.index("## Published figures") :]
    for figure in ("| NeoBERT | 24.5 |", "1.47 at 4,096", "61.6", "about 6,000", "87.3"):
        assert figure in published, f"the published {figure} is missing"


def test_runs_below_a_table_are_not_results_of_their_own(results):
    for run in ("glue/mine/sst2/run-1", "glue/mine/sst2/run-2"):
        (results / run).mkdir(parents=True)
        (results / run / "result.md").write_text("a run")
    (results / "throughput" / "fill.png").write_bytes(b"x")
    (results / "surprise.png").write_bytes(b"x")
    (results / "a_gpu_PENDING.md").write_text("# Throughput on a GPU: not measured yet\n\ntext")
    found = [path.relative_to(results).as_posix() for path in collect(results)]
    assert found == [
        "ablations_small.md",
        "glue/table.md",
        "surprise.md",
        "throughput/throughput.md",
        "a_gpu_PENDING.md",
    ]
    plots = re.findall(r"!\[(.*)\]\((.*)\)", build(results))
    assert plots == [
        ("surprise", "surprise.png"),
        ("fill", "throughput/fill.png"),
        ("lengths", "throughput/lengths.png"),
    ]


def test_environment_of_a_damaged_or_foreign_file_is_empty(tmp_path):
    for name, data in (("a", {"environment": ENVIRONMENT}), ("b", {"environment": 1}), ("c", [1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert read_environment(tmp_path / "a.json") == ENVIRONMENT
    assert [read_environment(tmp_path / f"{name}.json") for name in "bcd"] == [{}] * 3


def test_the_page_may_lie_elsewhere(results, tmp_path):
    assert (
        main(
            [
                "--results",
                str(results),
                "--output",
                str(tmp_path / "docs" / "page.md"),
                "--title",
                "Mine",
            ]
        )
        == 0
    )
    text = (tmp_path / "docs" / "page.md").read_text()
    assert text.startswith("# Mine\n") and "(../results/throughput/lengths.png)" in text


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        main(["--results", str(tmp_path / "nothing")])
    with pytest.raises(UserError, match="holds no results"):
        main(["--results", str(tmp_path)])
    with pytest.raises(UserError, match="must end in .md"):
        main(["--results", str(tmp_path), "--output", str(tmp_path / "x.html")])
    (tmp_path / "file").write_text("")
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(
        UserError, match="output must be a folder or a new name, but .*file is a file"
    ):
        main(["--results", str(tmp_path), "--output", str(tmp_path / "file" / "x.md")])
    assert len(list(tmp_path.iterdir())) == 2, "something was written for bad input"


def test_only_an_earlier_report_is_replaced(results, tmp_path):
    (tmp_path / "report.md").write_text("# My report\n\nMine.\n")
    (tmp_path / "folder.md").mkdir()
    for output in (tmp_path / "report.md", results / "surprise.md", tmp_path / "folder.md"):
        before = output.is_file() and output.read_bytes()
        with pytest.raises(
            UserError,
            match=(
                f"{output.name} was not made by neobert report, so it is not replaced; move "
                "it, or give"
            ),
        ):
            main(["--results", str(results), "--output", str(output)])
        assert before == (output.is_file() and output.read_bytes()), (
            "what is not a report was changed"
        )
    below, texts = results / "mine.md", []
    for title in ("One", "One", "Two"):
        assert main(["--results", str(results), "--output", str(below), "--title", title]) == 0
        texts.append(below.read_text())
    assert texts[0] == texts[1] and texts[2].startswith("# Two\n"), (
        "a report of any name is replaced, and no result of the next one"
    )


def test_the_committed_page_is_that_of_the_committed_results():
    root = Path(report.__file__).resolve().parent.parent
    page = root / "results" / "report.md"
    assert page.read_text() == report.build(
        root / "results", "NeoBERT: measured results", page.parent
    ), "run `neobert report`"
