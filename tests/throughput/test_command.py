"""Test `neobert throughput`.

Covers workloads, operation counts, ratios, and the tables and plots of a tiny run. Measured speeds
are not tested.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from neobert.common import measures
from neobert.common.errors import UserError
from neobert.throughput import command, timing
from neobert.throughput.command import comparison, main, ratios
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
    """Make the reference measurements fast, because these tests ignore their values."""
    monkeypatch.setattr(timing, "GEMM_SIZES", {"cpu": (64,)})
    monkeypatch.setattr(timing, "GEMM_SECONDS", 0.0)
    # A garbage collection takes half a second. tests/model/test_memory.py tests it.
    monkeypatch.setattr(measures, "gc", SimpleNamespace(collect=lambda: 0))


def tiny(output, *arguments):
    """Run the command with small models and few repeats, and return the exit code."""
    return main(["--output", str(output), *TINY, *arguments], small=SMALL)


def rows_of(output):
    """Return the rows of throughput.json."""
    return json.loads((output / "throughput.json").read_text())["rows"]


# ------------------------------------------------------------------------------------------------
# workloads


@pytest.mark.parametrize(
    "name,mean,spread,low,high",
    (("normal-256", 256, 64, 16, 512), ("normal-4096", 4096, 1024, 16, 8192)),
)
def test_normal_workloads(name, mean, spread, low, high):
    """Lengths are sampled from a clipped normal distribution that the seed determines."""
    lengths = torch.tensor(draw_lengths(name, 4000), dtype=torch.float)
    assert low <= lengths.min() and lengths.max() <= high, "The lengths must be clipped."
    assert abs(lengths.mean() - mean) < 4 * spread / math.sqrt(4000), (
        "The mean differs from that of the workload."
    )
    assert abs(lengths.std() - spread) < 0.05 * spread, "The standard deviation differs."
    assert draw_lengths(name, 8) == draw_lengths(name, 8), (
        "The same seed must give the same lengths."
    )
    assert draw_lengths(name, 8) != draw_lengths(name, 8, seed=1), (
        "Another seed must give other lengths."
    )


def test_fill_of_the_short_workload():
    """About 30 % of a batch of 32 short sequences are non-padding tokens."""
    logarithms = torch.tensor(draw_lengths("short", 4000), dtype=torch.float).log()
    # The lengths are log-normal with median 48 and sigma 0.7.
    assert abs(logarithms.mean() - math.log(48)) < 0.05 and abs(logarithms.std() - 0.7) < 0.05

    fills = []
    for seed in range(100):
        lengths = draw_lengths("short", 32, seed)
        fills.append(sum(lengths) / 32 / max(lengths))
    assert 0.25 < sum(fills) / 100 < 0.35, "The mean fraction must be about 0.3."


@pytest.mark.parametrize("percent", (10, 30, 60, 90))
@pytest.mark.parametrize("count", (8, 32))
def test_fill_workloads(percent, count):
    """The longest sequence has 512 tokens, and the others give the requested fraction of tokens."""
    lengths = draw_lengths(f"fill-{percent}", count)
    assert len(lengths) == count and max(lengths) == 512, (
        "The longest sequence must have 512 tokens."
    )
    # Each of the other sequences has at least one token.
    expected = max(percent / 100, (512 + count - 1) / count / 512)
    assert sum(lengths) / count / 512 == pytest.approx(expected, abs=0.02)


def test_lengths_of_a_file(tmp_path, tokenizer_dir):
    """The workload "texts" samples the lengths of the non-empty lines of a file."""
    path = tmp_path / "texts.txt"
    path.write_text("hello world\n\nthe quick brown fox\n")
    lengths = lengths_of_file(path, tokenizer_dir)
    assert lengths == [4, 6], "The lengths must include [CLS] and [SEP]."
    assert set(draw_lengths("texts", 50, file_lengths=lengths)) == {4, 6}


@pytest.mark.parametrize(
    "argv,words",
    (
        (["--sets", "long"], "got 'long'"),
        (["--sets", "texts"], "The workload texts needs --texts FILE"),
        ("--clock processor --device cpu --threads 2".split(), "Add --device cpu --threads 1"),
        (["--device", "mps"], "`--device` must be cpu or cuda, got 'mps'."),
    ),
)
def test_invalid_options_are_reported(argv, words, tmp_path):
    """Check the messages about invalid options."""
    with pytest.raises(UserError, match=words):
        main(["--output", str(tmp_path / "out"), *argv])
    assert not (tmp_path / "out").exists(), (
        "The options must be checked before the output is created."
    )


@pytest.mark.parametrize(
    "argv,words",
    (
        ("--tokenizer x", "`--tokenizer` requires --texts, got x"),
        (
            "--models bert-base --implementations padded published",
            "must not contain bert-base for the implementations padded and published, which",
        ),
    ),
)
def test_options_without_effect_are_reported(argv, words):
    """A tokenizer without texts, and models without an implementation, raise an error."""
    options = OPTIONS["throughput"].read(["--output", "out", "--device", "cpu", *argv.split()])
    with pytest.raises(UserError, match=words):
        Plan.from_options(options)


# ------------------------------------------------------------------------------------------------
# measurement


def test_calls_are_interleaved():
    """Each repeat times every call once, so that all calls see the same changes of speed."""
    order = []
    clock = iter(range(1000))
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = in_turns(calls, 3, clock=lambda: next(clock))
    assert order == list("ababab")
    # This clock advances by one at each reading.
    assert timings == {"a": Timing([1, 1, 1]), "b": Timing([1, 1, 1])}


def test_ratios_and_rates_are_medians_over_repeats():
    """Ratios and rates are computed for each repeat, and summarized by median and quartiles."""
    # The ratios of the repeats are 2, 3 and 1.
    assert ratio([2.0, 6.0, 2.0], [1.0, 2.0, 2.0]) == {"ratio": 2.0, "quartiles": [1.0, 3.0]}
    # The quartiles of two repeats are their minimum and maximum.
    assert ratio([1.0, 4.0], [1.0, 1.0]) == {"ratio": 2.5, "quartiles": [1.0, 4.0]}

    timing = Timing([1.0, 2.0, 4.0], [100.0, 100.0, 50.0])
    assert timing.per_second(8) == {"median": 4.0, "quartiles": [2.0, 8.0]}
    # The repeats reach 0.5, 0.25 and 0.25 of the rate of the matrix product at that time.
    assert timing.fraction_of_product(50.0) == 0.25


@pytest.mark.parametrize("name", list(MODELS))
def test_operation_count(name):
    """Check the number of operations of two layers against a formula.

    A layer has 2 operations per weight and token, and 2 dot products of size D per pair of tokens
    that attend to each other.
    """
    run = build(name, "sdpa", "cpu", torch.float32, SMALL)
    inner = 32 if name == "neobert" else 48
    matrices = 3 if name in ("neobert", "modernbert-base", "modernbert-large") else 2
    linear = 2 * (4 * 32 * 32 + matrices * 32 * inner)

    # Padding tokens are not counted.
    assert flops(run.encoder, [10, 4]) == 2 * linear * 14 + 2 * 4 * 32 * (100 + 16)
    if name.startswith("modernbert"):
        # In the second layer, a token attends to 64 tokens on each side.
        assert flops(run.encoder, [1000]) == 2 * linear * 1000 + 4 * 32 * 1000 * (1000 + 129)


@torch.no_grad()
def test_implementations_have_the_same_hidden_states():
    """All three implementations have the same hidden states of non-padding tokens."""
    batch = make_batch([9, 4, 1])
    is_token = batch.attention_mask.bool()
    packed = build("neobert", "sdpa", "cpu", torch.float32, SMALL)
    outputs = [packed(batch)]
    for implementation in ("padded", "published"):
        outputs.append(
            build("neobert", implementation, "cpu", torch.float32, SMALL, shared=packed.encoder)(
                batch
            )
        )
        difference = (outputs[-1] - outputs[0])[is_token].abs().max()
        assert difference < 1e-5 * outputs[0].abs().max(), (
            f"The hidden states of {implementation} differ."
        )

    # The packed implementation skips padding, and the others compute on it.
    assert (outputs[0][~is_token] == 0).all(), "The implementation sdpa must skip padding."
    for padded in outputs[1:]:
        assert (padded[~is_token] != 0).any(), "Padded implementations must compute on padding."


def test_failing_model_does_not_end_the_run(tmp_path, monkeypatch):
    """An exception of a model is recorded in its rows, and the other models are measured."""

    def build_broken(name, *arguments):
        candidate = build(name, *arguments)
        if name == "bert-base":
            candidate.model.forward = lambda **inputs: (_ for _ in ()).throw(
                TypeError("kernel takes no such argument")
            )
        return candidate

    monkeypatch.setattr(command, "build", build_broken)
    names = ["--models", "bert-base", "neobert", "--implementations", "sdpa"]
    assert tiny(tmp_path / "out", *names) == 0

    rows = rows_of(tmp_path / "out")
    assert [row.get("error") for row in rows] == ["kernel takes no such argument", None] * 2
    assert "kernel takes no such argument" in (tmp_path / "out" / "throughput.md").read_text()


def test_sequence_above_max_length_is_recorded_as_error(tmp_path):
    """A sequence above the maximum length of a model is recorded as an error of the row."""
    arguments = ["--sets", "600", "--models", "bert-base", "--implementations", "sdpa"]
    # The exit code reports that every measurement failed.
    assert tiny(tmp_path / "out", *arguments) == 1
    assert rows_of(tmp_path / "out")[0]["error"] == "takes texts of at most 512 tokens"
    page = (tmp_path / "out" / "throughput.md").read_text()
    assert "- 600, bert-base, sdpa: takes texts of at most 512 tokens\n" in page


def test_models_that_no_implementation_can_run_are_refused(tmp_path):
    """A requested model is not omitted silently."""
    arguments = ["--models", "neobert", "bert-base", "--implementations", "padded"]
    with pytest.raises(
        UserError, match="must not contain bert-base for the implementations padded"
    ):
        tiny(tmp_path / "out", *arguments)


# ------------------------------------------------------------------------------------------------
# results


@pytest.mark.parametrize("preset", ("quick", "cpu"))
def test_presets_write_all_outputs(preset, tmp_path):
    """The presets of the documentation write all rows and files, here with small models."""
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
    """Check the values of the rows, the tables, and that an existing output is not replaced."""
    arguments = ["--implementations", "sdpa", "padded"]
    assert tiny(tmp_path / "out", *arguments) == 0

    rows = rows_of(tmp_path / "out")
    for row in rows:
        assert len(row["seconds"]) == 2 and row["gemm_gflops"] > 0, (
            "Each row must have two repeats."
        )
        median = sum(row["real_tokens"] / s for s in row["seconds"]) / 2
        assert row["tokens_per_second"] == pytest.approx(median)
    short = rows[2]
    lengths = draw_lengths("short", 3)
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


def test_speedup_is_median_over_repeats():
    """The speedup over another model is computed within each repeat, and is the median of those."""
    row = {"set": "short", "implementation": "sdpa", "tokens_per_second": 100.0}
    mine = {**row, "model": "neobert", "seconds": [1.0, 2.0, 1.0], "real_tokens": 100}
    other = {**row, "model": "bert-base", "seconds": [1.0, 2.0, 3.0], "real_tokens": 50}
    speedups = ratios([mine, other, {"set": "short", "error": "none"}], "sdpa")
    # NeoBERT processes twice as many tokens per batch, so the speedups are 2, 2 and 6.
    assert speedups["short"]["bert-base/sdpa"]["ratio"] == 2.0


def test_comparison_of_other_implementation():
    """Runs without sdpa are compared by their first implementation, and single runs not at all."""
    row = {"set": "2048", "implementation": "compiled", "seconds": [2.0, 2.0], "real_tokens": 100}
    mine = {**row, "model": "neobert"}
    other = {**row, "model": "modernbert-base", "seconds": [1.0, 1.0]}
    page = comparison([mine, other])

    assert page.startswith("## Speedup of NeoBERT (compiled)\n")
    assert "| 2048 | modernbert-base/compiled | 0.50 | 0.50 to 0.50 |" in page
    assert comparison([mine]) == ""
