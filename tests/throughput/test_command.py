"""Test `neobert throughput`.

Workloads, operation counts, tables and plots of a tiny run. Speeds are not tested.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from neobert.common import measures
from neobert.common.errors import UserError
from neobert.throughput import command, timing
from neobert.throughput.command import main, ratios
from neobert.throughput.models import (
    MODELS,
    build,
    draw_lengths,
    flops,
    lengths_of_file,
    make_batch,
)
from neobert.throughput.options import OPTIONS, Plan
from neobert.throughput.timing import Timing, in_turns, ratio


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL["intermediate_size"] = 48
TINY = "--preset cpu --device cpu --sets 16 short --batch 3 --repeats 2 --models neobert".split()


@pytest.fixture(autouse=True)
def small_matrix_product(monkeypatch):
    monkeypatch.setattr(timing, "GEMM_SIZES", {"cpu": (64,)})
    monkeypatch.setattr(timing, "GEMM_SECONDS", 0.0)
    # Half a second a time; tests/model/test_memory.py has it.
    monkeypatch.setattr(measures, "gc", SimpleNamespace(collect=lambda: 0))


def tiny(output, *more):
    return main(["--output", str(output), *TINY, *more], small=SMALL)


def rows_of(output):
    return json.loads((output / "throughput.json").read_text())["rows"]


# ------------------------------------------------------------------------------------------------
# sets


@pytest.mark.parametrize(
    "name,mean,spread,low,high",
    (("normal-256", 256, 64, 16, 512), ("normal-4096", 4096, 1024, 16, 8192)),
)
def test_normal_sets(name, mean, spread, low, high):
    lengths = torch.tensor(draw_lengths(name, 4000), dtype=torch.float)
    assert low <= lengths.min() and lengths.max() <= high, "lengths are clipped"
    assert abs(lengths.mean() - mean) < 4 * spread / math.sqrt(4000), "the mean is the issued one"
    assert abs(lengths.std() - spread) < 0.05 * spread, "the deviation is the issued one"
    assert draw_lengths(name, 8) == draw_lengths(name, 8), "a seed gives the same lengths"
    assert draw_lengths(name, 8) != draw_lengths(name, 8, seed=1), "another seed gives others"


def test_short_texts_fill_about_a_third():
    logarithms = torch.tensor(draw_lengths("short", 4000), dtype=torch.float).log()
    # Log-normal, median 48, sigma 0.7.
    assert abs(logarithms.mean() - math.log(48)) < 0.05 and abs(logarithms.std() - 0.7) < 0.05
    fills = []
    for seed in range(100):
        lengths = draw_lengths("short", 32, seed)
        fills.append(sum(lengths) / 32 / max(lengths))
    assert 0.25 < sum(fills) / 100 < 0.35, "a batch of 32 is about 0.3 full"


@pytest.mark.parametrize("percent", (10, 30, 60, 90))
@pytest.mark.parametrize("count", (8, 32))
def test_fill_sets(percent, count):
    lengths = draw_lengths(f"fill-{percent}", count)
    assert len(lengths) == count and max(lengths) == 512, "one text has 512 tokens"
    wanted = max(percent / 100, (512 + count - 1) / count / 512)
    assert sum(lengths) / count / 512 == pytest.approx(wanted, abs=0.02)


def test_lengths_of_a_file(tmp_path, tokenizer_dir):
    path = tmp_path / "texts.txt"
    path.write_text("hello world\n\nthe quick brown fox\n")
    lengths = lengths_of_file(path, tokenizer_dir)
    assert lengths == [4, 6], "one length a non-empty line, with [CLS] and [SEP]"
    assert set(draw_lengths("texts", 50, file_lengths=lengths)) == {4, 6}


@pytest.mark.parametrize(
    "argv,words",
    (
        (["--sets", "long"], "got 'long'"),
        (["--sets", "texts"], "The workload texts needs --texts FILE"),
        ("--clock processor --device cpu --threads 2".split(), "Add --device cpu --threads 1"),
    ),
)
def test_bad_input_is_one_sentence(argv, words, tmp_path):
    with pytest.raises(UserError, match=words):
        main(["--output", str(tmp_path / "out"), *argv])
    assert not (tmp_path / "out").exists(), "nothing is written before the input is checked"


# ------------------------------------------------------------------------------------------------
# measurement


def test_calls_take_turns():
    order, clock = [], iter(range(1000))
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = in_turns(calls, 3, clock=lambda: next(clock))
    assert order == list("ababab")
    # One tick of this clock from before a call to after it.
    assert timings == {"a": Timing([1, 1, 1]), "b": Timing([1, 1, 1])}


def test_ratios_and_shares_are_medians_of_neighbors():
    # Repeat by repeat: 2, 3 and 1.
    assert ratio([2.0, 6.0, 2.0], [1.0, 2.0, 2.0]) == {"ratio": 2.0, "quartiles": [1.0, 3.0]}
    # Of two repeats: the lower and the higher.
    assert ratio([1.0, 4.0], [1.0, 1.0]) == {"ratio": 2.5, "quartiles": [1.0, 4.0]}
    timing = Timing([1.0, 2.0, 4.0], [100.0, 100.0, 50.0])
    assert timing.per_second(8) == {"median": 4.0, "quartiles": [2.0, 8.0]}
    # 0.5, 0.25 and 0.25 of the rate that the matrix product had then.
    assert timing.share(50.0) == 0.25


@pytest.mark.parametrize("name", list(MODELS))
def test_operation_count(name):
    """2 operations a weight and token, and 2 products of D a pair of tokens that see each other, in
    every layer."""
    run = build(name, "sdpa", "cpu", torch.float32, SMALL)
    inner = 32 if name == "neobert" else 48
    matrices = 3 if name in ("neobert", "modernbert-base", "modernbert-large") else 2
    linear = 2 * (4 * 32 * 32 + matrices * 32 * inner)
    # Weights and pairs, of real tokens only.
    assert flops(run.encoder, [10, 4]) == 2 * linear * 14 + 2 * 4 * 32 * (100 + 16)
    if name.startswith("modernbert"):
        # The second layer sees 64 tokens to each side.
        assert flops(run.encoder, [1000]) == 2 * linear * 1000 + 4 * 32 * 1000 * (1000 + 129)


@torch.no_grad()
def test_the_published_construction_computes_the_same():
    batch = make_batch([9, 4, 1])
    real = batch.attention_mask.bool()
    ours = build("neobert", "sdpa", "cpu", torch.float32, SMALL)
    outputs = [ours(batch)]
    for implementation in ("padded", "published"):
        outputs.append(
            build("neobert", implementation, "cpu", torch.float32, SMALL, shared=ours.encoder)(
                batch
            )
        )
        difference = (outputs[-1] - outputs[0])[real].abs().max()
        assert difference < 1e-5 * outputs[0].abs().max(), f"{implementation} is the same model"
    assert (outputs[0][~real] == 0).all(), "NeoBERT under sdpa packs"
    for padded in outputs[1:]:
        assert (padded[~real] != 0).any(), "padded and published compute on padding"


def test_a_peer_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    """Whatever a library raises: the row says it, the others are measured."""

    def broken(name, *others):
        candidate = build(name, *others)
        if name == "bert-base":
            candidate.model.forward = lambda **inputs: (_ for _ in ()).throw(
                TypeError("kernel takes no such argument")
            )
        return candidate

    monkeypatch.setattr(command, "build", broken)
    names = ["--models", "bert-base", "neobert", "--implementations", "sdpa"]
    assert tiny(tmp_path / "out", *names) == 0
    rows = rows_of(tmp_path / "out")
    assert [row.get("error") for row in rows] == ["kernel takes no such argument", None] * 2
    assert "kernel takes no such argument" in (tmp_path / "out" / "throughput.md").read_text()


def test_a_text_that_a_model_cannot_take(tmp_path):
    more = ["--sets", "600", "--models", "bert-base", "--implementations", "sdpa"]
    assert tiny(tmp_path / "out", *more) == 0
    assert rows_of(tmp_path / "out")[0]["error"] == "takes texts of at most 512 tokens"


# ------------------------------------------------------------------------------------------------
# results


@pytest.mark.parametrize("preset", ("quick", "cpu"))
def test_a_preset_runs_to_its_end(preset, tmp_path):
    """With its tables, as its command is on the pages; the models alone are small."""
    argv = ["--preset", preset, "--device", "cpu", "--output", str(tmp_path / "speed")]
    if preset == "cpu":
        argv += ["--max-batch", "3", "--repeats", "2"]
    assert main(argv, small={**SMALL, "num_hidden_layers": 1}) == 0
    plan = Plan.from_options(OPTIONS["throughput"].read(argv))
    names = [
        (row["set"], row["model"], row["implementation"]) for row in rows_of(tmp_path / "speed")
    ]
    pairs = plan.pairs()
    assert names == [(name, *pair) for name in plan.sets for pair in pairs]
    files = {path.name for path in (tmp_path / "speed").iterdir()}
    plots = {"by_fill.png"} if preset == "cpu" else set()
    assert files - {"throughput.png"} == {"throughput.json", "throughput.md"} | plots


def test_a_tiny_run_writes_its_tables(tmp_path, capsys):
    more = ["--implementations", "sdpa", "padded"]
    assert tiny(tmp_path / "out", *more) == 0
    rows = rows_of(tmp_path / "out")
    for row in rows:
        assert len(row["seconds"]) == 2 and row["gemm_gflops"] > 0, "two timed repeats"
        median = sum(row["real_tokens"] / s for s in row["seconds"]) / 2
        assert row["tokens_per_second"] == pytest.approx(median)
    short, lengths = rows[2], draw_lengths("short", 3)
    assert short["set"] == "short" and short["real_tokens"] == sum(lengths)
    assert short["fill"] == pytest.approx(sum(lengths) / 3 / max(lengths))
    data = json.loads((tmp_path / "out" / "throughput.json").read_text())
    assert data["environment"]["versions"]["torch"] and data["environment"]["dtype"] == "float32"
    table = (tmp_path / "out" / "throughput.md").read_text()
    assert "| short | neobert | padded |" in table and "| Tokens/s |" in table
    assert "| short | neobert | padded |" in capsys.readouterr().out
    with pytest.raises(UserError, match="already exists"):
        tiny(tmp_path / "out")
    assert rows_of(tmp_path / "out") == rows


def test_ratios_pair_neighbors():
    row = {"set": "short", "implementation": "sdpa", "tokens_per_second": 100.0}
    mine = {**row, "model": "neobert", "seconds": [1.0, 2.0, 1.0], "real_tokens": 100}
    other = {**row, "model": "bert-base", "seconds": [1.0, 2.0, 3.0], "real_tokens": 50}
    found = ratios([mine, other, {"set": "short", "error": "none"}])
    # 100 tokens in 1 s against 50 in 1 s; repeat by repeat 2, 2 and 6.
    assert found["short"]["bert-base/sdpa"]["ratio"] == 2.0
