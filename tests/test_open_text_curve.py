"""Pins the curve of quality over training and size: CPU hours of an output, each text asked once of
the teacher, and a page whose counts are those of its figures."""

import json

import numpy as np
import pytest


pytest.importorskip("sentence_transformers")

from neobert.benchmarks import open_text_curve


def test_cpu_hours_are_those_of_all_processes_and_runs(tmp_path):
    def run(steps, seconds, processes):
        losses = [{"step": 1, "cpu_seconds": 1.0}, {"step": steps, "cpu_seconds": seconds}]
        return {"steps": steps, "losses": losses, "environment": {"processes": processes}}

    before = {"steps": 500, "losses": [{"step": 500}], "environment": {}}
    figures = {**run(30, 1800.0, 2), "earlier": [before, run(10, 900.0, 1)]}
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    assert open_text_curve.spent(tmp_path) == (40, 1.25)
    (tmp_path / "figures.json").write_text(json.dumps(before))
    assert open_text_curve.spent(tmp_path) == (0, 0.0)


def test_a_text_is_encoded_once():
    asked = []

    def encode(texts):
        asked.extend(texts)
        return np.array([[float(len(text))] for text in texts])

    remembered = open_text_curve.kept(encode)
    assert remembered(["a", "bbb", "a"]).tolist() == [[1], [3], [1]]
    assert remembered(["bbb", "cc"]).tolist() == [[3], [2]] and asked == ["a", "bbb", "cc"]
    assert remembered(["a"]).tolist() == [[1]] and asked == ["a", "bbb", "cc"]


def test_the_page_counts_what_is_above(tmp_path):
    def point(step, ours, both):
        figures = {"ours": {"mrr": ours, "share": ours / 0.8}, "BM25": {"mrr": 0.5}}
        figures["BM25 + ours"] = {"mrr": both}
        figures["BM25 + ours, weighted"] = {"mrr": 0.9}
        return {
            "step": step,
            "cpu_hours": step / 100,
            "blocks": 4,
            "mb": 22.3,
            "retrieval": {"first test": figures},
            "agreement": {"prose": {"spearman": 0.7}},
        }

    points = [point(0, 0.4, 0.6), point(50, 0.6, 0.55)]
    page = open_text_curve.page(points)
    assert "| 50 | 0.50 | 4 | 22.3 | 0.750 |" in page and "| 0 | 0.00 | 4 | 22.3 | 0.700 |" in page
    assert (
        "| 0 | 0.00 | 4 | 22.3 | 0 | 1 | 1 |" in page
        and "| 50 | 0.50 | 4 | 22.3 | 1 | 0 | 1 |" in page
    )
    for over in open_text_curve.AXES:
        path = open_text_curve.plot(points, over, tmp_path / "curve.png", {})
        assert path.read_bytes().startswith(b"\x89PNG")
