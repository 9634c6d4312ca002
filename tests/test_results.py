"""Pins what every published figure carries: the processor with its units, one environment line, one
way to write a result and one to draw it."""

import json

import pytest

from neobert.common import figures, results
from neobert.common.results import (
    environment,
    environment_line,
    hardware,
    markdown_table,
    mean_and_deviation,
    processor_units,
    shown,
    write_result,
)


XEON = """processor\t: 0
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8
"""
EPYC = """model name\t: AMD EPYC 7763 64-Core Processor
flags\t\t: fpu sse avx2
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp sve bf16 i8mm\n"


@pytest.mark.parametrize(
    ("cpuinfo", "units"),
    [
        (XEON, ["AVX2", "AVX-512", "VNNI", "AVX512-BF16", "AVX512-FP16", "AMX-BF16", "AMX-INT8"]),
        (EPYC, ["AVX2"]),
        (GRAVITON, ["SVE", "dot product", "i8mm", "bf16"]),
        ("", []),
    ],
)
def test_the_processor_is_named_with_its_units(cpuinfo, units, tmp_path, monkeypatch):
    """Whoever reads a bf16 or int8 figure must see whether the machine has the units for it."""
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(results, "Path", lambda path: tmp_path / "cpuinfo")
    monkeypatch.setattr(results.os, "cpu_count", lambda: 2)
    assert processor_units() == units
    if cpuinfo == XEON:
        assert hardware().startswith(
            "Intel(R) Xeon(R) Processor (family 6, model 207), 2 cores, AVX2, AVX-512, VNNI, "
        )
    if cpuinfo == EPYC:
        assert hardware().startswith("AMD EPYC 7763 64-Core Processor, 2 cores, AVX2")


def test_the_environment_line_says_all_that_the_environment_holds():
    full = {
        "command": "neobert throughput",
        "commit": "abc1234",
        "date": "2026-01-02 03:04 UTC",
        "hardware": "A CPU, 2 cores",
        "threads": 1,
    }
    full |= {
        "python": "3.12.1",
        "versions": {"torch": "2.13.0"},
        "dtype": ["float32", "bfloat16"],
        "batch_sizes": {"short": 8},
        "note": None,
    }
    assert environment_line(full) == (
        "`neobert throughput`, commit abc1234, 2026-01-02 03:04 UTC, A CPU, 2 cores, 1 thread, "
        "dtype float32, bfloat16, "
        "batch sizes short 8, torch 2.13.0"
    )
    assert environment_line({"hardware": "A CPU", "commit": None}) == "A CPU", (
        "what is not known is not printed"
    )


def test_a_copy_without_git_is_told_its_commit(monkeypatch):
    def no_git(*arguments, **options):
        raise OSError("git is not installed")

    monkeypatch.setattr(results.subprocess, "run", no_git)
    monkeypatch.delenv("NEOBERT_COMMIT", raising=False)
    assert environment()["commit"] is None
    monkeypatch.setenv("NEOBERT_COMMIT", "abc1234")
    assert environment(note="x")["commit"] == "abc1234" and environment(note="x")["note"] == "x"


def test_a_result_is_a_json_file_and_a_page(tmp_path):
    page = write_result(
        tmp_path / "new" / "speed.v2",
        "Speed",
        environment(dtype="float32"),
        {"rows": [1]},
        markdown_table(["a", "b"], [[1, None]]),
    )
    data = json.loads((tmp_path / "new" / "speed.v2.json").read_text())
    assert data["rows"] == [1] and data["environment"]["dtype"] == "float32", (
        "the figures and where they were measured"
    )
    assert (tmp_path / "new" / "speed.v2.md").read_text() == page
    assert (
        page.startswith("# Speed\n\n`") and "dtype float32" in page and page.endswith("| 1 |  |\n")
    )
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "speed.v2.json",
        "speed.v2.md",
    ], "nothing else is left there"


# ------------------------------------------------------------------------------------------------
# plots


def test_bars_start_at_zero_and_tell_their_values():
    pytest.importorskip("matplotlib")
    for horizontal in (False, True):
        _, axes = figures.subplots("Scores")
        figures.bars(
            axes,
            ["M0", "M1", "M2"],
            [79.2, None, 84.0],
            [(78.0, 81.0), None, 0.5],
            horizontal=horizontal,
        )
        low, high = axes.get_xlim() if horizontal else axes.get_ylim()
        assert low == 0 and high > 84.5, (
            "a bar that does not start at 0 shows a difference larger than it is"
        )
        assert [text.get_text() for text in axes.texts] == ["79.2", "84.0"], (
            "a missing value has no figure"
        )
        (errors,) = axes.collections
        across = [segment[:, 0 if horizontal else 1].tolist() for segment in errors.get_segments()]
        assert across[0] == pytest.approx([78.0, 81.0]) and across[2] == pytest.approx(
            [83.5, 84.5]
        ), "a range, and a deviation"


def test_the_labels_of_a_length_axis_do_not_collide():
    """Lengths that are near each other at the end, in the narrowest panel that a result has."""
    figure, axes = figures.subplots(size=(4.4, 4))
    figures.line(axes, [1000, 4000, 16000, 48000], [1, 2, 3, 4], "a", 0)
    figures.length_axis(axes, [1000, 4000, 16000, 48000])
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) == 4 and all(
        left.x1 + 2 < right.x0 for left, right in zip(boxes, boxes[1:])
    ), boxes


def test_lines_differ_in_colour_and_marker():
    pytest.importorskip("matplotlib")
    _, axes = figures.subplots("Speed", "length", "tokens a second")
    for series in range(len(figures.COLOURS)):
        figures.line(axes, [128, 512], [1.0, 2.0], str(series), series)
    figures.line(axes, [128, 512], [1.0, 2.0], "own", 0, spread=[(0.5, 1.5), (2.0, 2.0)], own=True)
    figures.length_axis(axes, [512, 128, 512])
    looks = {
        (container.lines[0].get_color(), container.lines[0].get_marker())
        for container in axes.containers
    }
    assert len(looks) == len(figures.COLOURS) + 1, "two lines look the same"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "512"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("length", "tokens a second")


def test_a_figure_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figure, _ = figures.subplots("Anything")
    env = {
        "hardware": "A CPU, 2 cores",
        "threads": 1,
        "dtype": "float32",
        "commit": "abc1234",
        "date": "2026-01-02",
    }
    assert figures.caption(env) == "A CPU, 2 cores, 1 thread, float32, commit abc1234, 2026-01-02"
    path = figures.save(figure, tmp_path / "new" / "plot.png", env)
    assert path.read_bytes()[:4] == b"\x89PNG" and list(path.parent.iterdir()) == [path]
    assert figure.texts[0].get_text() == figures.caption(env)
    drawn = path.read_bytes()

    def full_disk(file, **options):
        with open(file, "wb") as half:
            half.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(figure, "savefig", full_disk)
    with pytest.raises(OSError, match="No space"):
        figures.save(figure, path)
    assert path.read_bytes() == drawn and list(path.parent.iterdir()) == [path], (
        "the old plot stays, and nothing beside it"
    )


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("/home/somebody/models/encoder", "models/encoder"),
        ("--model=/home/somebody/models/encoder", "--model=models/encoder"),
        ("runs/encoder", "runs/encoder"),
        ("org/encoder", "org/encoder"),
        ("--lr=1e-3", "--lr=1e-3"),
        ("/encoder", "/encoder"),
    ],
)
def test_a_result_does_not_tell_whose_machine_it_is_from(argument, expected):
    assert shown(argument) == expected


def test_mean_and_deviation_are_those_of_a_sample():
    """Of 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7."""
    assert mean_and_deviation([1, 2, 6], ".2f") == "3.00 ± 2.65"
    assert mean_and_deviation([1000, 2000], "+,.0f") == "+1,500 ± 707"
    assert mean_and_deviation([0.25]) == "0.2"
