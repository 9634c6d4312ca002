"""Pins the table of precisions and engines: same texts for all, distance to float32, ratios within
a class, and rows that were not measured."""

import json
import statistics

import numpy as np
import pytest
import torch

from neobert.benchmarks import measuring, precisions
from neobert.benchmarks.engines import Engine
from neobert.common.errors import UserError


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
ENGINES = ["torch-fp32", "torch-bf16", "torch-int8", "st-bert-fp32", "onnx-fp32"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """(rows by engine, page) of a run on models of 64."""
    folder = tmp_path_factory.mktemp("precisions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "GEMM_SIZES", {"cpu": (64,)})
        patch.setattr(measuring, "GEMM_SECONDS", 0.0)
        patch.setattr(precisions, "TEXTS", {"short": 6})
        patch.setattr(precisions, "in_a_process", lambda function, *given: function(*given))
        argv = [
            "--files",
            str(folder / "files"),
            "--output",
            str(folder / "out"),
            "--engines",
            *ENGINES,
            "--sets",
            "short",
        ]
        assert precisions.main([*argv, "--threads", "1", "2", "--repeats", "2"], small=SMALL) == 0
    rows = json.loads((folder / "out.json").read_text())["rows"]
    return {row["engine"]: row for row in rows}, (folder / "out.md").read_text()


def test_every_engine_has_a_row_and_a_missing_one_its_command(result):
    rows, page = result
    assert list(rows) == ENGINES
    assert (
        "neobert export onnx" in rows["onnx-fp32"]["error"]
        and "## Not measured" in page
        and rows["onnx-fp32"]["error"] in page
    )
    for name in ENGINES[:-1]:
        assert [(speed["set"], speed["threads"]) for speed in rows[name]["speeds"]] == [
            ("short", 1),
            ("short", 2),
        ]


def test_vectors_are_those_of_float32(result):
    rows, _ = result
    assert rows["torch-fp32"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert 0.99 < rows["torch-bf16"]["cosine"] < 1 and 0.99 < rows["torch-int8"]["cosine"] < 1
    assert rows["st-bert-fp32"]["cosine"] is None, "BERT has other weights"


def test_speeds_are_tokens_over_seconds(result):
    rows, page = result
    tokens = int(page.partition("short: 6 texts, ")[2].partition(" tokens")[0].replace(",", ""))
    for name in ENGINES[:-1]:
        for speed in rows[name]["speeds"]:
            assert len(speed["seconds"]) == 2
            assert speed["tokens_per_second"] == pytest.approx(
                statistics.median(tokens / second for second in speed["seconds"])
            )


def test_every_row_is_compared_with_float32(result):
    rows, page = result
    table = page.partition("## Times as fast as torch in float32")[2].partition("##")[0]
    for name in ("torch-int8", "st-bert-fp32"):
        row, base = rows[name], rows["torch-fp32"]
        ratios = [
            f"{one['corrected'] / exact['corrected']:.2f}"
            for one, exact in zip(row["speeds"], base["speeds"])
        ]
        assert f"| {' | '.join([row['name'], row['precision'], *ratios])} |" in table


def test_the_batch_is_chosen_once_and_only_where_there_is_one(result):
    rows, _ = result
    batches = [speed["batches"] for speed in rows["st-bert-fp32"]["speeds"]]
    assert batches[0] == batches[1] and batches[0][0] in (1, 4, 6)
    assert all(speed["batches"] == [None] for speed in rows["torch-fp32"]["speeds"])


def test_ours_is_compared_with_the_next_model_of_its_class(result):
    rows, page = result
    for at, threads in enumerate((1, 2)):
        ours, other = (
            rows[name]["speeds"][at]["corrected"] for name in ("torch-fp32", "st-bert-fp32")
        )
        assert (
            f"| fp32 | short | {threads} | torch fp32 |  |  | sentence-transformers, BERT base "
            f"fp32 | {ours / other:.2f} |" in page
        )
    assert "| 16 bit | short |" not in page, "there is no other engine of 16 bit"


def test_engines_of_the_same_weights_and_other_models_are_compared_apart():
    speeds = {
        "torch-fp32": 30.0,
        "torch-compiled": 20.0,
        "onnx-fp32": 15.0,
        "openvino-fp32": 12.0,
        "st-bert-fp32": 40.0,
    }
    groups = dict(zip(speeds, ("ours", "ours", "engine", "engine", "model")))
    rows = [
        {
            "name": name,
            "precision": "",
            "kind": "fp32",
            "group": groups[name],
            "speeds": [{"set": "128", "threads": 1, "corrected": speed}],
        }
        for name, speed in speeds.items()
    ]
    found = [
        precisions.best(rows, "fp32", group, "128", 1) for group in ("ours", "engine", "model")
    ]
    assert found == [("torch-fp32 ", 30.0), ("onnx-fp32 ", 15.0), ("st-bert-fp32 ", 40.0)]
    assert (
        precisions.best(rows, "fp32", "ours", "128", 2) is None
        and precisions.best(rows, "int8", "ours", "128", 1) is None
    )


def test_the_pace_is_that_of_one_thread_for_every_engine(tmp_path, monkeypatch):
    """Threads of an engine that wait busily after a pass would slow a product of all threads. The
    pass itself has those that were asked for."""
    before, during = torch.get_num_threads(), []

    def session(texts):
        during.append(torch.get_num_threads())
        return np.ones((len(texts), 2))

    engine = Engine(
        "x",
        "fp32",
        "",
        lambda files, threads: session,
        lambda files: 0,
    )
    monkeypatch.setattr(precisions, "ENGINES", {"x": engine})
    monkeypatch.setattr(
        precisions, "MatrixProduct", lambda *given: lambda seconds: float(torch.get_num_threads())
    )
    try:
        runs = precisions.measure("x", tmp_path, {"short": [[1]]}, [1, 2], 1)["runs"]
    finally:
        torch.set_num_threads(before)
    assert [(run["threads"], run["rates"]) for run in runs] == [(1, [1.0]), (2, [1.0])]
    assert sorted(set(during)) == [1, 2] and during[-1] == 2


def test_the_worst_cosine():
    exact = {"a": np.array([[1.0, 0.0], [0.0, 2.0]])}
    assert precisions.worst_cosine(
        {"a": np.array([[3.0, 0.0], [1.0, 1.0]])}, exact
    ) == pytest.approx(0.5**0.5)


def test_nothing_could_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(precisions, "in_a_process", lambda function, *given: function(*given))
    argv = [
        "--files",
        str(tmp_path / "files"),
        "--output",
        str(tmp_path / "out"),
        "--engines",
        "onnx-fp32",
        "--sets",
        "short",
    ]
    with pytest.raises(
        UserError, match="no engine could be measured: there is no export/onnx/model.onnx"
    ):
        precisions.main(argv, small=SMALL)
    assert not list(tmp_path.glob("out*")), "nothing is written"
