"""Test the scripts of benchmarks/ on tiny models.

The tests cover calculations, result files and error messages, but no speeds.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from benchmarks import memory, rerank, server, small_vectors, training, transfer_curve
from benchmarks.measuring import run_in_process
from benchmarks.memory import CONTRACT
from benchmarks.training import TrainingOptions, forward_operations, sample_batch
from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.errors import UserError
from neobert.throughput import timing


@pytest.fixture(autouse=True)
def small_matrix_product(monkeypatch):
    """Shorten the matrix product that measures the speed of the machine."""
    monkeypatch.setattr(timing, "GEMM_SIZES", {"cpu": (64,)})
    monkeypatch.setattr(timing, "GEMM_SECONDS", 0.0)


def here(function, *arguments, **options):
    """Call a function in this process. A replacement for `run_in_process`, which takes seconds."""
    return function(*arguments)


# ------------------------------------------------------------------------------------------------
# Processes


def test_run_in_process():
    """`run_in_process` runs a function in a new process with its own environment variables.

    An exception of the function is raised here, and a killed process is a `UserError`.
    """
    assert run_in_process(os.getpid) != os.getpid()
    assert (
        run_in_process(os.getenv, "NEOBERT_TEST_VARIABLE", variables={"NEOBERT_TEST_VARIABLE": "7"})
        == "7"
    )
    assert "NEOBERT_TEST_VARIABLE" not in os.environ, (
        "The variable must not be set in this process."
    )

    with pytest.raises(FileNotFoundError):
        run_in_process(os.listdir, "/no/such/folder")
    with pytest.raises(UserError, match="was killed, most likely"):
        run_in_process(os._exit, 9)


@pytest.mark.slow
def test_a_script_ends_with_exit_code_2_for_bad_input():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--layer", "3"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    # Some libraries print messages when they are imported, so only the last line is checked.
    last = run.stderr.splitlines()[-1]
    assert last.endswith(".memory: unknown option '--layer'. Did you mean --layers?")
    assert "Traceback" not in run.stderr


# ------------------------------------------------------------------------------------------------
# Rerankers and servers


def test_padded_and_packed_rerankers_have_equal_logits(tmp_path, monkeypatch):
    """The padded and the packed reranker give the same logits, and all workloads have a row."""
    passages = ["a b c d e f", "g"] * rerank.PASSAGES
    texts = {name: (["q", "r"], passages) for name in ("GCIDE", "one length")}
    monkeypatch.setattr(rerank, "make_texts", lambda count: texts)
    shape = ["--layers", "1", "--hidden", "64", "--queries", "2", "--repeats", "1"]

    assert rerank.main([*shape, "--output", str(tmp_path / "page")]) == 0

    result = json.loads((tmp_path / "page.json").read_text())
    assert result["difference"] < 1e-4, "The padded and the packed model must give equal logits."
    assert [row["work"] for row in result["rows"]] == 2 * list(rerank.WORKS)
    assert all(
        set(row["times_as_long"]) == {"NeoBERT padded", "BERT", "ModernBERT"}
        for row in result["rows"]
    )


@pytest.mark.slow
def test_server_benchmark_compares_embeddings(tmp_path, monkeypatch):
    """The results contain all rounds, and the server returns the expected embeddings."""
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(server, "make_texts", lambda count, encoder: {"mixed": ["a", "b c", "d"]})
    name = "neobert serve, float32"
    argv = ["--servers", name, "--clients", "1", "2", "--texts", "3", "--rounds", "2"]

    assert server.main([*argv, "--work", str(tmp_path), "--output", str(tmp_path / "page")]) == 0

    result = json.loads((tmp_path / "page.json").read_text())
    assert result["vectors"][f"{name}, mixed"]["same_bits"] == 1
    assert result["vectors"][f"{name}, mixed"]["worst_cosine"] > 0.99999
    assert [(row["clients"], len(row["rounds"])) for row in result["rows"]] == [(1, 2), (2, 2)]
    assert all(
        figures["p50"] <= figures["p99"] for row in result["rows"] for figures in row["rounds"]
    )


# ------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.slow
def test_peak_memory_of_forward_pass():
    """The peak memory of a forward pass is one to eight times that of the feed-forward activations.

    The model has the published hidden size and one layer. The activations are 4096 float32 values
    for each of 512 tokens.
    """
    growth = run_in_process(
        memory.measure,
        memory.MemoryOptions(device="cpu", threads=1),
        *("neobert", "sdpa", 512, 1),
        variables={"MALLOC_MMAP_THRESHOLD_": "131072"},
    )
    assert 512 * 4096 * 4 < growth < 512 * 4096 * 4 * 8


def test_flash_contract_separates_packed_texts(tmp_path, monkeypatch):
    """`flash_contract` computes attention within each packed text, and the script measures it.

    It has the arguments of flash attention, but runs with SDPA on a CPU.
    """
    assert memory.lengths_of(CONTRACT, 512, 2) == [512, 256, 512, 256]
    assert memory.lengths_of("sdpa", 512, 2) == [512, 512]

    q, k, v = torch.randn(3, 1, 2, 7, 4).unbind(0)
    packed, _ = memory.flash_contract(
        None, q, k, v, None, scaling=0.5, cu_seq_lens_q=torch.tensor([0, 3, 7])
    )
    for start, stop in ((0, 3), (3, 7)):
        part = slice(start, stop)
        scores = (q[0, :, part] @ k[0, :, part].transpose(1, 2) * 0.5).softmax(-1)
        assert torch.allclose(
            packed[0, part], (scores @ v[0, :, part]).transpose(0, 1), atol=1e-6
        ), "A packed text must not attend to another text."

    cases = []

    def note(function, options, *case, variables):
        """Record a case and return 3 MiB."""
        cases.append(case)
        return 3 * 2**20

    monkeypatch.setattr(memory, "run_in_process", note)
    argv = ["--lengths", "1024", "--check-depth", "2048", "--output", str(tmp_path / "m")]
    assert memory.main(argv) == 0
    models = ("neobert", "modernbert-base")
    assert cases == [
        *((model, "sdpa", 1024, 3) for model in models),
        ("neobert", CONTRACT, 1024, 3),
        *((model, "sdpa", 2048, 0) for model in models),
    ]
    assert "| sdpa | 1,024 | 1,024 | 3 | 3 | 3.0 | 3 | 1.00 |" in (tmp_path / "m.md").read_text()


# ------------------------------------------------------------------------------------------------
# Training


def tiny_steps(way="packed", dtype="float32"):
    """Measure a few training steps of a tiny model and return the results."""
    shape = {"tokens": 100, "steps": 2, "hidden": 64, "layers": 1, "threads": 1}
    return training.measure(TrainingOptions(**shape), "short", dtype, way)


def test_batch_has_the_requested_number_of_tokens():
    """A batch has the requested number of tokens, and about 20 % of them are masked."""
    lengths, inputs = sample_batch("short", 500, seed=1)
    assert 500 <= sum(lengths) < 500 + max(lengths), (
        "The batch must end with the text that reaches the number of tokens."
    )
    not_padding = inputs["attention_mask"].bool()
    assert not_padding.sum() == sum(lengths)

    masked = inputs["labels"] != -100
    assert not (masked & ~not_padding).any() and 0.1 < masked.sum() / not_padding.sum() < 0.3, (
        "About 20 % of the non-padding tokens must be masked."
    )
    assert (inputs["input_ids"][masked] == 103).all() and (
        inputs["labels"][masked] >= 1000
    ).all(), "Masked positions must have [MASK] as input and the original token as label."

    assert sample_batch("16", 500, 0)[0] == [16] * 32


def test_packed_and_padded_training_have_equal_losses():
    """Packed and padded batches give the same losses, and bfloat16 gives similar ones."""
    packed, padded = (tiny_steps(way) for way in ("packed", "padded"))
    assert len(packed["losses"]) == 3 and len(packed["seconds"]) == 2, (
        "The first step must not be timed."
    )
    assert packed["losses"] == pytest.approx(padded["losses"], rel=1e-5), (
        "Both layouts must have the same texts, masks and initial weights."
    )
    assert packed["losses"][0] != packed["losses"][-1], (
        "The loss must change, or the comparison shows nothing about training."
    )
    assert packed["operations"] == padded["operations"] and packed["tokens"] == padded["tokens"], (
        "The required operations must not depend on the layout."
    )

    bfloat16 = tiny_steps(dtype="bfloat16")
    assert (
        bfloat16["losses"] == pytest.approx(packed["losses"], rel=0.02)
        and bfloat16["losses"] != packed["losses"]
    ), "Autocast must change the losses slightly."


def test_forward_operations():
    """The operations equal those of the linear layers, the predicted tokens and the attention."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = NeoBERTConfig(**shape, intermediate_size=48, vocab_size=100)
    blocks = 2 * (4 * 32 * 32 + 3 * 32 * 32)
    expected = 2 * blocks * 14 + 2 * 100 * 32 * 3 + 4 * 32 * 2 * (100 + 16)
    assert forward_operations(NeoBERTForMaskedLM(config), [10, 4], predicted=3) == expected


@pytest.mark.slow
def test_the_training_table(tmp_path, monkeypatch):
    """The result files have one row per layout, and ratios to the last layout."""
    monkeypatch.setattr(training, "run_in_process", here)
    argv = f"--output {tmp_path}/t --tokens 60 --steps 1 --repeats 2 --hidden 64 --layers 1"
    assert training.main([*argv.split(), "--threads", "1"]) == 0
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["packed", "padded"] and all(
        len(row["seconds"]) == 2 for row in rows
    )
    page = (tmp_path / "t.md").read_text()
    assert "padded, all logits" in page and "| 1.00 | 1.00 to 1.00 |" in page, (
        "The last layout must be the reference of the ratios."
    )


# ------------------------------------------------------------------------------------------------
# Small embeddings


def test_small_embeddings_are_searched_and_rescored():
    """Check the sizes and scores of small embeddings, and the rescoring of binary candidates.

    Only one of the 48 documents, number 44, has the same signs as the query.
    """
    queries = np.full((1, 8), 8**-0.5, np.float32)
    documents = -np.eye(8, dtype=np.float32)
    documents = np.concatenate([np.tile(documents, (6, 1))])
    documents[44] = np.array([1, *[0.01] * 7]) / np.linalg.norm([1, *[0.01] * 7])
    # This document has a similar exact score, but only one positive value.
    documents[0] = -documents[0]

    forms = small_vectors.score_embedding_forms(queries, documents)

    sizes = {name: size for name, (size, _) in forms.items()}
    assert sizes["int8"] == "8" and sizes["binary"] == "1" and sizes["float32"] == "32"
    assert sizes["half of the dimensions"] == "16"
    np.testing.assert_allclose(forms["float32"][1], queries @ documents.T)
    assert forms["binary"][1][0, [0, 1, 44]].tolist() == [-6, -8, 8]
    rescored = forms["binary, rescored"][1][0]
    assert np.isfinite(rescored).sum() == small_vectors.NUM_CANDIDATES and rescored.argmax() == 44

    # The last two documents are equal, so both have the rank 1.5.
    tests = {"a": (["q"] * 4, range(4))}
    embeddings = np.eye(4, 8, dtype=np.float32)[[0, 1, 2, 2]]
    _, figures = small_vectors.measure(lambda part: embeddings, tests)
    assert figures["a"]["float32"]["mrr"] == pytest.approx((1 + 1 + 2 / 1.5) / 4)


# ------------------------------------------------------------------------------------------------
# plot of training time


def test_curve_has_a_line_for_each_series(tmp_path, monkeypatch):
    """The plot shows ratios to the teacher against core hours."""
    series = {"a": [{"minutes": 30, "mrr": 0.3}, {"minutes": 60, "mrr": 0.4}], "b": []}
    (tmp_path / "runs.json").write_text(json.dumps({"teacher": 0.5, "series": series}))
    lines = []
    plot = Axes.plot

    def recorded_plot(self, x, y, **kwargs):
        lines.append((x, y, kwargs["label"]))
        return plot(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "plot", recorded_plot)
    transfer_curve.main([str(tmp_path / "runs.json"), str(tmp_path / "curve.png")])
    assert lines == [([0.5, 1.0], [0.6, 0.8], "a"), ([], [], "b")]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
