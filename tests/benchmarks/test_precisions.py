"""Test the benchmark of precisions and engines.

The tests cover the distance to the float32 embeddings, the speedups over float32, engines that
could not be measured, and results of other CPUs.
"""

import json

import numpy as np
import pytest

from benchmarks import precisions
from neobert.common.errors import UserError
from neobert.throughput import timing


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
ENGINES = ["torch-fp32", "torch-bf16", "torch-int8", "onnx-fp32"]


def measure_little(patch, texts):
    """Patch the benchmark to measure a few texts and a small matrix product in this process.

    Args:
        patch: `MonkeyPatch`.
        texts: Number of texts.
    """
    patch.setattr(timing, "GEMM_SIZES", {"cpu": (64,)})
    patch.setattr(timing, "GEMM_SECONDS", 0.0)
    patch.setattr(precisions, "TEXTS", {"short": texts})
    patch.setattr(precisions, "run_in_process", lambda function, *arguments: function(*arguments))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Run the benchmark on tiny models and return its rows by engine and its page."""
    folder = tmp_path_factory.mktemp("precisions")
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch, texts=6)
        argv = f"--files {folder}/files --output {folder}/out --sets short --repeats 2".split()
        argv += ["--threads", "1", "2", "--engines", *ENGINES]
        assert precisions.main(argv, small=SMALL) == 0

    rows = json.loads((folder / "out.json").read_text())["rows"]
    return {row["engine"]: row for row in rows}, (folder / "out.md").read_text()


def test_engine_rows_and_missing_model_error(result):
    """Every engine has a row, and the error of a missing model contains the export command."""
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


def test_low_precision_embeddings_are_close_to_float32(result):
    """Embeddings of low precisions are similar to those of float32, but not identical."""
    rows, _ = result
    assert rows["torch-fp32"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert 0.99 < rows["torch-bf16"]["cosine"] < 1 and 0.99 < rows["torch-int8"]["cosine"] < 1


def test_speedups_are_relative_to_float32(result):
    """The speedup of an engine is its corrected speed divided by that of float32."""
    rows, page = result
    table = page.partition("## Speedup over torch in float32")[2].partition("##")[0]
    row = rows["torch-int8"]
    base = rows["torch-fp32"]
    ratios = [
        f"{speed['corrected'] / base_speed['corrected']:.2f}"
        for speed, base_speed in zip(row["speeds"], base["speeds"])
    ]
    assert f" | torch | int8 | {' | '.join(ratios)} |" in table and "| torch | fp32 |" not in table


@pytest.fixture
def of_two_cpus(tmp_path, monkeypatch):
    """Return a function that runs the script with an OUTPUT.json that has results of another CPU.

    The function returns the content of OUTPUT.json and the page.
    """
    measure_little(monkeypatch, texts=2)

    def main(*arguments, cpu="this CPU"):
        monkeypatch.setattr(precisions, "hardware", lambda: cpu)
        monkeypatch.setattr("neobert.common.environment.hardware", lambda: cpu)
        argv = f"--files {tmp_path}/files --output {tmp_path}/out --repeats 1 --threads 1"
        argv = [*argv.split(), "--engines", "torch-fp32", "torch-bf16", *arguments]
        assert precisions.main(argv, small=SMALL) == 0
        return json.loads((tmp_path / "out.json").read_text()), (tmp_path / "out.md").read_text()

    main("--sets", "short", cpu="another CPU")
    return main


def test_results_of_other_cpus_are_kept(of_two_cpus):
    """A run keeps the results of other CPUs and shows them below its own."""
    earlier, _ = of_two_cpus("--sets", "short", cpu="another CPU")

    data, page = of_two_cpus("--sets", "short")
    assert data["environment"]["hardware"] == "this CPU"
    assert data["other_cpus"] == [{"environment": earlier["environment"], "rows": earlier["rows"]}]
    for table in (page.partition("## Speedup")[0], page.partition("## Speedup")[2]):
        assert table.index("| this CPU | torch | ") < table.index("| another CPU | torch | ")
    assert "## Measurements on the other CPUs" in page

    # A repeated run replaces the results of its CPU.
    data, page = of_two_cpus("--sets", "short")
    assert [other["environment"]["hardware"] for other in data["other_cpus"]] == ["another CPU"]
    assert page.count("| this CPU | torch | fp32 |") == 2


def test_results_of_other_workloads_are_refused(of_two_cpus, monkeypatch):
    """Results of another CPU with other workloads are an error, before anything is measured."""
    monkeypatch.setattr(precisions, "measure_all", None)
    with pytest.raises(UserError, match="other workloads or numbers of threads"):
        of_two_cpus("--sets", "128")


def test_speeds_are_corrected_for_machine_speed():
    """The corrected speed takes the speed of the machine into account.

    Two engines need 1 and 2 seconds for 10 tokens, and the machine was half as fast during the
    second measurement. Their corrected speeds are equal.
    """
    results = {
        "torch-fp32": {"runs": [run(1.0, 200.0)], "vectors": {"a": np.eye(2)}},
        "torch-bf16": {"runs": [run(2.0, 100.0)], "vectors": {"a": np.eye(2)}},
    }
    for result in results.values():
        result |= {"memory_bytes": 1, "disk_bytes": 1}

    first, second = precisions.summarize(results, {"a": [[1] * 4, [1] * 6]})
    speeds = first["speeds"][0], second["speeds"][0]
    assert [speed["tokens_per_second"] for speed in speeds] == [10.0, 5.0]
    assert speeds[0]["corrected"] == speeds[1]["corrected"] == 10.0 * 150 / 200


def run(seconds, rate):
    """Return a result of three runs with the same time and the same speed of the machine."""
    return {"set": "a", "threads": 1, "batch": None, "seconds": [seconds] * 3, "rates": [rate] * 3}
