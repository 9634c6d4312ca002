"""Test the scripts of benchmarks/ on tiny models.

Covers their arithmetic, the result files and the messages about bad input, but not speeds.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import memory, rerank, server, small_vectors, training
from benchmarks.measuring import in_a_process
from benchmarks.memory import CONTRACT
from benchmarks.training import TrainingOptions, draw_batch, forward_operations
from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.errors import UserError
from neobert.throughput import timing


@pytest.fixture(autouse=True)
def small_matrix_product(monkeypatch):
    monkeypatch.setattr(timing, "GEMM_SIZES", {"cpu": (64,)})
    monkeypatch.setattr(timing, "GEMM_SECONDS", 0.0)


def here(function, *arguments, **options):
    """In place of `in_a_process`, which takes seconds to start one."""
    return function(*arguments)


# ------------------------------------------------------------------------------------------------
# processes


def test_a_process_of_its_own():
    assert in_a_process(os.getpid) != os.getpid()
    assert (
        in_a_process(os.getenv, "NEOBERT_TEST_VARIABLE", variables={"NEOBERT_TEST_VARIABLE": "7"})
        == "7"
    )
    assert "NEOBERT_TEST_VARIABLE" not in os.environ, (
        "the variable is that of the other process alone"
    )
    with pytest.raises(FileNotFoundError):
        in_a_process(os.listdir, "/no/such/folder")
    with pytest.raises(UserError, match="was killed, most likely"):
        in_a_process(os._exit, 9)


def test_a_script_ends_with_exit_code_2_for_bad_input():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--layer", "3"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    # Some libraries talk while they are imported.
    last = run.stderr.splitlines()[-1]
    assert last.endswith(".memory: unknown option '--layer'. Did you mean --layers?")
    assert "Traceback" not in run.stderr


# ------------------------------------------------------------------------------------------------
# rerankers, servers


def test_rerankers_are_timed_on_equal_logits(tmp_path, monkeypatch):
    texts = ["a b c d e f", "g"] * rerank.PASSAGES
    given = {name: (["q", "r"], texts) for name in ("GCIDE", "one length")}
    monkeypatch.setattr(rerank, "make_texts", lambda count: given)
    shape = ["--layers", "1", "--hidden", "64", "--queries", "2", "--repeats", "1"]
    assert rerank.main([*shape, "--output", str(tmp_path / "page")]) == 0
    found = json.loads((tmp_path / "page.json").read_text())
    assert found["difference"] < 1e-4, "the padded model is the packed one"
    assert [row["work"] for row in found["rows"]] == 2 * list(rerank.WORKS)
    assert all(
        set(row["times_as_long"]) == {"NeoBERT padded", "BERT", "ModernBERT"}
        for row in found["rows"]
    )


@pytest.mark.slow
def test_a_server_is_asked_and_its_vectors_compared(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(server, "make_texts", lambda count, encoder: {"mixed": ["a", "b c", "d"]})
    name = "neobert serve, float32"
    few = ["--servers", name, "--clients", "1", "2", "--texts", "3", "--rounds", "2"]
    assert server.main([*few, "--work", str(tmp_path), "--output", str(tmp_path / "page")]) == 0
    found = json.loads((tmp_path / "page.json").read_text())
    assert found["vectors"][f"{name}, mixed"]["same_bits"] == 1
    assert found["vectors"][f"{name}, mixed"]["worst_cosine"] > 0.99999
    assert [(row["clients"], len(row["rounds"])) for row in found["rows"]] == [(1, 2), (2, 2)]
    assert all(
        figures["p50"] <= figures["p99"] for row in found["rows"] for figures in row["rounds"]
    )


# ------------------------------------------------------------------------------------------------
# memory


@pytest.mark.slow
def test_memory_of_one_forward():
    """The published width at one layer: at least qkv and the feed-forward of one slice are there at
    once, at most a few times that."""
    growth = in_a_process(
        memory.measure,
        memory.MemoryOptions(device="cpu", threads=1),
        *("neobert", "sdpa", 512, 1),
        variables={"MALLOC_MMAP_THRESHOLD_": "131072"},
    )
    assert 512 * 4096 * 4 < growth < 512 * 4096 * 4 * 8


def test_the_contract_gets_two_packed_texts(tmp_path, monkeypatch):
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
        ), "the texts see each other"
    seen = []

    def note(function, options, *case, variables):
        seen.append(case)
        return 3 * 2**20

    monkeypatch.setattr(memory, "in_a_process", note)
    argv = ["--lengths", "1024", "--check-depth", "2048", "--output", str(tmp_path / "m")]
    assert memory.main(argv) == 0
    models = ("neobert", "modernbert-base")
    assert seen == [
        *((model, "sdpa", 1024, 3) for model in models),
        ("neobert", CONTRACT, 1024, 3),
        *((model, "sdpa", 2048, 0) for model in models),
    ]
    assert "| sdpa | 1,024 | 1,024 | 3 | 3 | 3.0 | 3 | 1.00 |" in (tmp_path / "m.md").read_text()


# ------------------------------------------------------------------------------------------------
# training


def tiny_steps(way="packed", dtype="float32"):
    shape = {"tokens": 100, "steps": 2, "hidden": 64, "layers": 1, "threads": 1}
    return training.measure(TrainingOptions(**shape), "short", dtype, way)


def test_a_step_has_the_tokens_that_were_asked_for():
    lengths, inputs = draw_batch("short", 500, seed=1)
    assert 500 <= sum(lengths) < 500 + max(lengths), "one text fewer would be too few"
    real = inputs["attention_mask"].bool()
    assert real.sum() == sum(lengths)
    masked = inputs["labels"] != -100
    assert not (masked & ~real).any() and 0.1 < masked.sum() / real.sum() < 0.3, (
        "20 % of the real tokens"
    )
    assert (inputs["input_ids"][masked] == 103).all() and (
        inputs["labels"][masked] >= 1000
    ).all(), "[MASK] hides them, labels tell them"
    assert draw_batch("16", 500, 0)[0] == [16] * 32


def test_both_ways_train_to_the_same_losses():
    packed, padded = (tiny_steps(way) for way in ("packed", "padded"))
    assert len(packed["losses"]) == 3 and len(packed["seconds"]) == 2, "the first step is not timed"
    assert packed["losses"] == pytest.approx(padded["losses"], rel=1e-5), (
        "same texts, same masks, same weights"
    )
    assert packed["losses"][0] != packed["losses"][-1], (
        "nothing was trained, so this test would be vacuous"
    )
    assert packed["operations"] == padded["operations"] and packed["tokens"] == padded["tokens"], (
        "what is needed does not depend on the way"
    )
    half = tiny_steps(dtype="bfloat16")
    assert (
        half["losses"] == pytest.approx(packed["losses"], rel=0.02)
        and half["losses"] != packed["losses"]
    ), "autocast acts"


def test_operations_of_a_forward():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = NeoBERTConfig(**shape, intermediate_size=48, vocab_size=100)
    blocks = 2 * (4 * 32 * 32 + 3 * 32 * 32)
    expected = 2 * blocks * 14 + 2 * 100 * 32 * 3 + 4 * 32 * 2 * (100 + 16)
    assert forward_operations(NeoBERTForMaskedLM(config), [10, 4], predicted=3) == expected


def test_the_training_table(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "in_a_process", here)
    argv = f"--output {tmp_path}/t --tokens 60 --steps 1 --repeats 2 --hidden 64 --layers 1"
    assert training.main([*argv.split(), "--threads", "1"]) == 0
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["packed", "padded"] and all(
        len(row["seconds"]) == 2 for row in rows
    )
    page = (tmp_path / "t.md").read_text()
    assert "padded, all logits" in page and "| 1.00 | 1.00 to 1.00 |" in page, (
        "the last way is what the others are compared with"
    )


# ------------------------------------------------------------------------------------------------
# small vectors


def test_small_vectors_are_searched_and_rescored():
    """48 unit vectors, of which the 45th alone has the signs of the query, and not its numbers."""
    queries, documents = np.full((1, 8), 8**-0.5, np.float32), -np.eye(8, dtype=np.float32)
    documents = np.concatenate([np.tile(documents, (6, 1))])
    documents[44] = np.array([1, *[0.01] * 7]) / np.linalg.norm([1, *[0.01] * 7])
    documents[0] = -documents[0]  # as near by its number, with one sign
    made = small_vectors.ways(queries, documents)
    sizes = {name: size for name, (size, _) in made.items()}
    assert sizes["int8"] == "8" and sizes["binary"] == "1" and sizes["float32"] == "32"
    assert sizes["half of the dimensions"] == "16"
    np.testing.assert_allclose(made["float32"][1], queries @ documents.T)
    assert made["binary"][1][0, [0, 1, 44]].tolist() == [-6, -8, 8]
    rescored = made["binary, rescored"][1][0]
    assert np.isfinite(rescored).sum() == small_vectors.BEST and rescored.argmax() == 44
    tests = {"a": (["q"] * 4, range(4))}
    vectors = np.eye(4, 8, dtype=np.float32)[[0, 1, 2, 2]]
    _, found = small_vectors.measure(lambda part: vectors, tests)
    assert found["a"]["float32"]["mrr"] == pytest.approx((1 + 1 + 2 / 1.5) / 4)
