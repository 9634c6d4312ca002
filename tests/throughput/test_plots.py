"""Test the plots of `neobert throughput`: points, axes, and plots that are omitted."""

import numpy as np
import pytest


matplotlib = pytest.importorskip("matplotlib")

from neobert.throughput import plots  # noqa: E402


def row(workload, model, longest, fill, speed):
    """Return a row of throughput.json.

    Args:
        workload: Name of the workload.
        model: Name of the model.
        longest: Length of the longest sequence in tokens.
        fill: Fraction of non-padding tokens.
        speed: Throughput in tokens per second.
    """
    return {
        "set": workload,
        "model": model,
        "implementation": "sdpa",
        "longest": longest,
        "fill": fill,
        "tokens_per_second": speed,
        "quartiles": [speed - 10, speed + 20],
    }


ROWS = [
    row("1024", "neobert", 1024, 1.0, 300.0),
    row("512", "neobert", 512, 1.0, 400.0),
    row("512", "modernbert-base", 512, 1.0, 500.0),
    row("short", "neobert", 195, 0.31, 420.0),
    {"set": "512", "model": "bert-base", "implementation": "sdpa", "error": "not installed"},
]


@pytest.fixture
def saved(monkeypatch):
    """Return the list of figures that are saved. No files are written."""
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda self, path: figures.append(self))
    return figures


def test_length_plot_contains_workloads_without_padding(saved, tmp_path):
    """A line contains the workloads without padding, sorted by sequence length."""
    assert plots.plot_lengths(ROWS, tmp_path / "x.png", "a CPU")
    (axes,) = saved[0].axes
    # ModernBERT was measured at a single length, and therefore has no line.
    (container,) = axes.containers
    assert container.get_label() == "neobert (sdpa)"
    assert np.array_equal(container.lines[0].get_xydata(), [[512, 400], [1024, 300]])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "1,024"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "Sequence length (tokens)",
        "Throughput (tokens/s)",
    )


def test_speedup_plot_by_non_padding_fraction(saved, tmp_path):
    """The x axis shows the percentage of non-padding tokens of each workload."""

    def value(ratio):
        return {"ratio": ratio, "quartiles": [ratio - 0.1, ratio + 0.1]}

    ratios = {"short": {"neobert/padded": value(3.0)}, "512": {"neobert/padded": value(1.0)}}
    assert plots.plot_speedup(ROWS, ratios, tmp_path / "x.png")
    (container,) = saved[0].axes[0].containers
    assert np.allclose(container.lines[0].get_xydata(), [[31, 3.0], [100, 1.0]])


def test_plot_with_a_single_point_is_omitted(saved, tmp_path):
    """A plot is omitted if no line has at least two points."""
    assert not plots.plot_lengths(ROWS[1:], tmp_path / "x.png")
    assert not plots.plot_speedup(ROWS, {}, tmp_path / "x.png")
    assert not saved


def test_plot_is_written_as_png(tmp_path):
    """The plot is written as a PNG file."""
    assert plots.plot_lengths(ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
