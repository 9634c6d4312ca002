"""Pins `neobert throughput`: the arithmetic of its sets and of its operation count, the batch
search, what an interrupted run leaves and
`--resume` adds, and the tables of a tiny run. Speeds are not pinned."""

import csv
import json
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from neobert.benchmarks import measuring, throughput
from neobert.benchmarks.measuring import BatchLimit, Timing, in_turns, largest_batch, ratio
from neobert.benchmarks.throughput import Benchmark, main
from neobert.benchmarks.throughput_models import IMPLEMENTATIONS, MODELS, build
from neobert.benchmarks.throughput_results import ratios, tables
from neobert.benchmarks.throughput_sets import draw_lengths, make_batch
from neobert.common import memory
from neobert.common.errors import UserError

from .reference import install_flash


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
TINY = [
    "--device",
    "cpu",
    "--sets",
    "16",
    "short",
    "--batch",
    "3",
    "--repeats",
    "2",
    "--plots",
    "false",
]


@pytest.fixture(autouse=True)
def small_matrix_product(monkeypatch):
    monkeypatch.setattr(measuring, "GEMM_SIZES", {"cpu": (64,)})
    monkeypatch.setattr(measuring, "GEMM_SECONDS", 0.0)
    # Half a second a time; tests/test_memory.py has it.
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=lambda: 0))


def tiny(output, *more):
    return main(
        [
            "--output",
            str(output),
            "--preset",
            "cpu",
            *TINY,
            "--models",
            "neobert",
            "modernbert-base",
            *more,
        ],
        small=SMALL,
    )


def rows_of(output):
    return json.loads((output / "throughput.json").read_text())["rows"]


# ------------------------------------------------------------------------------------------------
# sets


def test_fixed_sets():
    assert draw_lengths("512", 3) == [512, 512, 512], "a number is the length of every text"


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
    assert abs(logarithms.mean() - math.log(48)) < 0.05 and abs(logarithms.std() - 0.7) < 0.05, (
        "log-normal, median 48, sigma 0.7"
    )
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
    assert sum(lengths) / count / 512 == pytest.approx(wanted, abs=0.02), (
        "the batch is as full as its name says"
    )


def test_lengths_of_a_file(tmp_path, tokenizer_dir):
    path = tmp_path / "texts.txt"
    path.write_text("hello world\n\nthe quick brown fox\n")
    lengths = throughput.lengths_of_file(path, tokenizer_dir)
    assert lengths == [4, 6], "one length a non-empty line, with [CLS] and [SEP]"
    assert set(draw_lengths("texts", 50, file_lengths=lengths)) == {4, 6}, (
        "drawn from the lengths of the file"
    )


@pytest.mark.parametrize(
    "argv,words",
    (
        (["--sets", "long"], "there is no set 'long'"),
        (["--sets", "texts"], "needs --texts"),
        (["--models", "gpt"], "models must be one of neobert, .*, but 'gpt' was given"),
        (
            ["--implementations", "xformers"],
            "implementations must be one of sdpa, .*, but 'xformers' was given",
        ),
        (["--dtype", "int8"], "dtype must be one of float32"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--preset", "huge"], "preset must be one of"),
        (
            ["--clock", "processor", "--device", "cpu", "--threads", "2"],
            "give --device cpu --threads 1",
        ),
        (["--memory-gib", "0"], "memory_gib must be above 0"),
        (["--reapets", "3"], "did you mean --repeats"),
    ),
)
def test_bad_input_is_one_sentence(argv, words, tmp_path):
    with pytest.raises(UserError, match=words):
        main(["--output", str(tmp_path / "out"), *argv])
    assert not (tmp_path / "out").exists(), "nothing is written before the input is checked"


# ------------------------------------------------------------------------------------------------
# measurement


@pytest.mark.parametrize(
    "limit,fits", ((512, 512), (512, 100), (512, 1), (512, 0), (24, 24), (24, 17), (1, 1))
)
def test_batch_search(limit, fits):
    tried = []
    found = largest_batch(lambda count: tried.append(count) or count <= fits, limit)
    assert found <= fits and max(tried) <= limit, (
        "a batch that does not fit is not returned, and the limit is kept"
    )
    assert found >= fits * 7 / 8, "it is within an eighth of the largest"
    assert len(tried) <= 14, "few batches are tried"


def test_out_of_memory_ends_the_search():
    limit, seen = BatchLimit(texts=64, tokens=4096, memory=1000 * 2**30), []

    def run(batch):
        seen.append(len(batch.lengths))
        if len(batch.lengths) > 5:
            raise torch.OutOfMemoryError("out of memory")

    assert limit.search(run, lambda count: [16] * count, "cpu") == 5, (
        "a batch for which memory ran out is not used"
    )
    assert seen == [1, 2, 4, 8, 6, 5], "every size is tried, doubled, then in the gap"
    seen.clear()
    assert BatchLimit(texts=64, tokens=48).search(run, lambda count: [16] * count, "cpu") == 3, (
        "at most so many padded tokens"
    )

    def broken(batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        limit.search(broken, lambda count: [16] * count, "cpu")


def test_calls_take_turns_and_complete_repeats_survive_an_interrupt():
    order, clock = [], iter(range(1000))

    def call(name, at=None):
        order.append(name)
        if len(order) == at:
            raise KeyboardInterrupt

    calls = {name: lambda name=name: call(name) for name in "ab"}
    timings, interrupted = in_turns(calls, 3, clock=lambda: next(clock))
    assert order == list("ababab") and not interrupted, "the calls take turns"
    assert timings == {"a": Timing([1, 1, 1]), "b": Timing([1, 1, 1])}, (
        "one tick of this clock from before a call to after it"
    )
    order.clear()
    timings, interrupted = in_turns({name: lambda name=name: call(name, at=4) for name in "ab"}, 3)
    assert interrupted and [len(timing.seconds) for timing in timings.values()] == [1, 1], (
        "the half repeat is dropped for both"
    )
    order.clear()
    with pytest.raises(KeyboardInterrupt):
        in_turns({name: lambda name=name: call(name, at=2) for name in "ab"}, 3)


def test_ratios_and_shares_are_medians_of_neighbours():
    assert ratio([2.0, 6.0, 2.0], [1.0, 2.0, 2.0]) == {"ratio": 2.0, "quartiles": [1.0, 3.0]}, (
        "repeat by repeat: 2, 3 and 1"
    )
    assert ratio([1.0, 4.0], [1.0, 1.0]) == {"ratio": 2.5, "quartiles": [1.0, 4.0]}, (
        "of two repeats: the lower and the higher"
    )
    timing = Timing([1.0, 2.0, 4.0], [100.0, 100.0, 50.0])
    assert timing.per_second(8) == {"median": 4.0, "quartiles": [2.0, 8.0]}
    assert timing.share(50.0) == 0.25, (
        "0.5, 0.25 and 0.25 of the rate that the matrix product had then"
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_operation_count(name):
    """2 operations a weight and token, and 2 products of D a pair of tokens that see each other, in
    every layer."""
    run = build(name, "sdpa", "cpu", torch.float32, SMALL)
    inner = 32 if name == "neobert" else 48
    ffn = (
        3 * 32 * inner
        if name in ("neobert", "modernbert-base", "modernbert-large")
        else 2 * 32 * inner
    )
    linear = 2 * (4 * 32 * 32 + ffn)
    assert run.flops([10, 4]) == 2 * linear * 14 + 2 * 4 * 32 * (100 + 16), (
        "weights and pairs, of real tokens only"
    )
    if name.startswith("modernbert"):
        assert run.flops([1000]) == 2 * linear * 1000 + 4 * 32 * 1000 * (1000 + 129), (
            "the second layer sees 64 tokens to each side"
        )


@torch.no_grad()
def test_the_published_construction_computes_the_same():
    batch = make_batch([9, 4, 1])
    real = batch.attention_mask.bool()
    ours = build("neobert", "sdpa", "cpu", torch.float32, SMALL)
    outputs = [ours(batch)]
    for implementation in ("padded", "published"):
        outputs.append(
            build("neobert", implementation, "cpu", torch.float32, SMALL, shared=ours.model)(batch)
        )
        difference = (outputs[-1] - outputs[0])[real].abs().max()
        assert difference < 1e-5 * outputs[0].abs().max(), f"{implementation} is the same model"
    assert (outputs[0][~real] == 0).all(), "NeoBERT under sdpa packs"
    for padded in outputs[1:]:
        assert (padded[~real] != 0).any(), "padded and published compute on padding"


def test_what_a_batch_without_padding_is_given():
    """No mask under sdpa, as the peers; a mask of ones under "masked"; padding always has its mask.
    Nobody reads the mask to know."""
    seen = []
    for implementation, lengths in (("sdpa", [5, 5]), ("masked", [5, 5]), ("sdpa", [5, 3])):
        run = build("neobert", implementation, "cpu", torch.float32, SMALL)
        run.model.forward = lambda input_ids, attention_mask: (
            seen.append(attention_mask) or SimpleNamespace(last_hidden_state=None)
        )
        run(make_batch(lengths))
    assert (
        seen[0] is None
        and seen[1].tolist() == [[1] * 5] * 2
        and seen[2].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    )


@pytest.mark.parametrize("implementation", ("flash_attention_2", "flash_attention_2-packed"))
@pytest.mark.parametrize("name", ("neobert", "bert-base", "modernbert-base"))
@torch.no_grad()
def test_peers_on_a_flash_kernel(name, implementation, monkeypatch):
    """With a stand-in for flash-attn: every model computes on real tokens alone there, and the same
    as under sdpa."""
    batch = make_batch([9, 4, 1])
    real = batch.attention_mask.bool()
    plain = build(name, "sdpa", "cpu", torch.float32, SMALL)
    flash, kernel = (
        build(name, "sdpa", "cpu", torch.float32, SMALL, shared=plain.model),
        install_flash(monkeypatch),
    )
    flash.model.config._attn_implementation = "flash_attention_2"
    flash.layout = IMPLEMENTATIONS[implementation][1]
    output = flash(batch)
    assert kernel.calls and {call["q"].shape[0] for call in kernel.calls} == {14}, (
        "the kernel sees 14 real tokens of 27"
    )
    output = output[0] if output.shape[0] == 1 else output[real]
    expected = plain(batch)[real]
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max(), (
        "packed by the caller or not, it is the same model"
    )


def test_a_batch_packed_by_the_caller():
    batch = make_batch([3, 1])
    packed, rows = batch.packed, batch.input_ids.tolist()
    assert (
        batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
        and rows[1][1:] == [0, 0]
        and batch.has_padding
    )
    assert packed["input_ids"].tolist() == [[*rows[0], rows[1][0]]] and packed[
        "position_ids"
    ].tolist() == [[0, 1, 2, 0]]
    assert not make_batch([3, 3]).has_padding
    assert packed["cu_seq_lens_q"].tolist() == [0, 3, 4] and packed["max_length_k"] == 3
    assert packed["cu_seq_lens_q"].dtype == torch.int32, "flash-attn takes int32 offsets"


class PretendedGpu:
    """A device that holds `capacity` padded tokens of a model's batch; models run on the CPU,
    torch.cuda's counters are stand-ins."""

    def __init__(self, monkeypatch, capacity):
        self.capacity, self.passes, self.built = capacity, [], []
        for name, value in (
            ("is_available", True),
            ("synchronize", None),
            ("empty_cache", None),
            ("reset_peak_memory_stats", None),
            ("memory_reserved", 2**20),
            ("max_memory_reserved", 3 * 2**20),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *arguments, value=value: value)
        product, build = throughput.MatrixProduct, throughput.build
        for module in (throughput, measuring):
            monkeypatch.setattr(
                module,
                "make_batch",
                lambda lengths, device, *seed: make_batch(lengths, "cpu", *seed),
            )
        monkeypatch.setattr(
            throughput, "MatrixProduct", lambda device, *others: product("cpu", *others)
        )
        monkeypatch.setattr(
            throughput,
            "build",
            lambda name, kind, device, *others: self.wrap(build(name, kind, "cpu", *others)),
        )

    def wrap(self, run):
        self.built.append(weakref.ref(run))
        call = run.model.forward

        def limited(*arguments, **inputs):
            self.passes.append((run.name, *inputs["input_ids"].shape))
            if inputs["input_ids"].numel() > self.capacity[run.name]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return call(*arguments, **inputs)

        run.model.forward = limited
        return run

    def measure(self, output, *more):
        argv = [
            "--output",
            str(output),
            "--preset",
            "gpu",
            "--device",
            "cuda",
            "--dtype",
            "float32",
            "--implementations",
            "sdpa",
        ]
        argv += [
            "--models",
            "neobert",
            "bert-base",
            "modernbert-base",
            "--repeats",
            "2",
            "--warmup",
            "1",
            "--max-batch",
            "32",
        ]
        return main([*argv, "--plots", "false", *more], small=SMALL)


@pytest.mark.slow
def test_the_largest_batch_on_a_gpu(tmp_path, monkeypatch):
    """Each model gets its own largest batch; one that cannot hold a single text has a row that says
    so; nothing ends the run."""
    gpu = PretendedGpu(monkeypatch, {"neobert": 16 * 21, "bert-base": 15, "modernbert-base": 10**6})
    assert gpu.measure(tmp_path, "--sets", "16") == 0
    rows = {row["model"]: row for row in rows_of(tmp_path)}
    assert 18 <= rows["neobert"]["batch"] <= 21, "21 texts fit; the search ends within an eighth"
    assert rows["modernbert-base"]["batch"] == 32, "the search ends at --max-batch"
    assert rows["bert-base"]["error"] == "out of memory with one text"
    assert rows["neobert"]["peak_memory_mib"] == 3.0, (
        "on a GPU: what the allocator reserved, with the weights"
    )
    assert len(rows["neobert"]["seconds"]) == 2 and rows["neobert"]["share_of_gemm"] > 0
    assert max(texts for name, texts, _ in gpu.passes if name == "neobert") <= 32
    order = [name for name, *_ in gpu.passes]
    assert order == sorted(order, key=["neobert", "bert-base", "modernbert-base"].index), (
        "one model after the other"
    )
    assert [run() for run in gpu.built] == [None] * 3, (
        "none is kept: each has the memory for itself"
    )


def test_memory_that_is_short_after_the_search(tmp_path, monkeypatch):
    """What fitted once may not fit again; a batch given by the user is not made smaller in
    silence."""
    gpu = PretendedGpu(
        monkeypatch, {"neobert": 16 * 20, "bert-base": 16 * 20, "modernbert-base": 16 * 20}
    )
    search = BatchLimit.search
    monkeypatch.setattr(BatchLimit, "search", lambda *given: search(*given) + 8)
    assert gpu.measure(tmp_path / "a", "--sets", "16", "--models", "neobert") == 0
    (row,) = rows_of(tmp_path / "a")
    assert 16 <= row["batch"] <= 20 and len(row["seconds"]) == 2, "an eighth fewer, until it fits"
    assert gpu.measure(tmp_path / "b", "--sets", "16", "--batch", "24") == 0
    assert {row["error"] for row in rows_of(tmp_path / "b")} == {"out of memory with 24 texts"}, (
        "every row says so"
    )


@pytest.mark.slow
def test_an_interrupt_on_a_gpu_and_resume(tmp_path, monkeypatch):
    gpu = PretendedGpu(
        monkeypatch, {"neobert": 10**6, "bert-base": 10**6, "modernbert-base": 10**6}
    )
    monkeypatch.setattr(throughput, "gc", SimpleNamespace(collect=lambda: 0))
    search = BatchLimit.search

    def interrupted(self, run, *others):
        if run.name == "modernbert-base":
            raise KeyboardInterrupt
        return search(self, run, *others)

    monkeypatch.setattr(BatchLimit, "search", interrupted)
    assert gpu.measure(tmp_path, "--sets", "16", "short") == 130
    first = rows_of(tmp_path)
    assert [row["model"] for row in first] == ["neobert", "bert-base"], (
        "the models that were measured are kept, in the middle of a set"
    )
    monkeypatch.setattr(BatchLimit, "search", search)
    gpu.passes.clear()
    assert gpu.measure(tmp_path, "--sets", "16", "short", "--resume") == 0
    rows = rows_of(tmp_path)
    assert rows[:2] == first and len(rows) == 6, "they are not measured again; the rest is added"
    assert gpu.passes[0][0] == "modernbert-base", "it goes on where it stopped"


def test_a_peer_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    """Whatever a library raises: the row says it, the others are measured."""
    build = throughput.build

    def broken(name, *others):
        run = build(name, *others)
        if name == "bert-base":
            run.model.forward = lambda **inputs: (_ for _ in ()).throw(
                TypeError("kernel takes no such argument")
            )
        return run

    monkeypatch.setattr(throughput, "build", broken)
    argv = [
        "--output",
        str(tmp_path),
        "--preset",
        "cpu",
        *TINY,
        "--models",
        "bert-base",
        "neobert",
        "--implementations",
        "sdpa",
    ]
    assert main(argv, small=SMALL) == 0
    rows = rows_of(tmp_path)
    assert [row.get("error") for row in rows] == ["kernel takes no such argument", None] * 2
    assert "kernel takes no such argument" in (tmp_path / "throughput.md").read_text()


# ------------------------------------------------------------------------------------------------
# results


def test_a_tiny_run_writes_its_tables(tmp_path):
    assert tiny(tmp_path, "--implementations", "sdpa", "padded") == 0
    rows = rows_of(tmp_path)
    names = [(row["set"], row["model"], row["implementation"]) for row in rows]
    each = [("neobert", "sdpa"), ("neobert", "padded"), ("modernbert-base", "sdpa")]
    assert names == [(name, *pair) for name in ("16", "short") for pair in each], (
        "every set and model has its row"
    )
    for row in rows:
        assert (
            len(row["seconds"]) == 2 and row["tokens_per_second"] > 0 and row["gemm_gflops"] > 0
        ), "two timed repeats"
        median = sum(row["real_tokens"] / s for s in row["seconds"]) / 2
        assert row["tokens_per_second"] == pytest.approx(median), (
            "real tokens over seconds, the median over repeats"
        )
    short = next(row for row in rows if row["set"] == "short")
    lengths = draw_lengths("short", 3)
    assert short["real_tokens"] == sum(lengths) and short["fill"] == pytest.approx(
        sum(lengths) / 3 / max(lengths)
    )
    data = json.loads((tmp_path / "throughput.json").read_text())
    assert data["environment"]["versions"]["torch"] and data["environment"]["dtype"] == "float32", (
        "the environment is in the file"
    )
    table = (tmp_path / "throughput.md").read_text()
    assert "| short | neobert | padded |" in table and "real tokens/s" in table
    with open(tmp_path / "throughput.csv") as file:
        assert len(list(csv.DictReader(file))) == 6, "the CSV has the same rows"


def test_ratios_pair_neighbours():
    mine = {
        "set": "short",
        "model": "neobert",
        "implementation": "sdpa",
        "real_tokens": 100,
        "seconds": [1.0, 2.0, 1.0],
    }
    other = {
        "set": "short",
        "model": "bert-base",
        "implementation": "sdpa",
        "real_tokens": 50,
        "seconds": [1.0, 2.0, 3.0],
    }
    result = ratios([mine, other])["short"]["bert-base/sdpa"]
    assert result["ratio"] == 2.0, (
        "100 tokens in 1 s against 50 in 1 s; repeat by repeat 2, 2 and 6"
    )


def test_interrupt_keeps_what_is_done_and_resume_adds_the_rest(tmp_path, monkeypatch):
    measure = Benchmark.measure

    def interrupted(self, name, *others):
        if name == "short":
            raise KeyboardInterrupt
        return measure(self, name, *others)

    monkeypatch.setattr(Benchmark, "measure", interrupted)
    assert tiny(tmp_path, "--implementations", "sdpa") == 130, (
        "130 is the exit status of an interrupt"
    )
    first = rows_of(tmp_path)
    assert [row["set"] for row in first] == ["16", "16"], "the finished set is kept"
    monkeypatch.setattr(Benchmark, "measure", measure)
    assert tiny(tmp_path, "--implementations", "sdpa", "--resume") == 0
    rows = rows_of(tmp_path)
    assert rows[:2] == first, "what was measured is not measured again"
    assert [row["set"] for row in rows] == ["16", "16", "short", "short"], "the rest is added"
    data = json.loads((tmp_path / "throughput.json").read_text())
    assert all(row["date"] and "commit" in row for row in rows), (
        "every row says when and of which commit it is"
    )
    data["rows"][0].update(commit="abc1234", date="1999-01-01 00:00 UTC")
    assert "kept from earlier runs (commit abc1234, 1999-01-01 00:00 UTC)" in tables(data), (
        "the table names the other commit"
    )
    with pytest.raises(
        UserError,
        match=(
            "throughput.json holds results already; add to them with --resume, or give "
            "another --output"
        ),
    ):
        tiny(tmp_path, "--sets", "64")
    assert rows_of(tmp_path) == rows, "what was measured is still there"
    with pytest.raises(UserError, match="was measured with repeats=2"):
        tiny(tmp_path, "--implementations", "sdpa", "--resume", "--repeats", "5")


def test_output_must_be_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Benchmark, "run", lambda *given: pytest.fail("the run began"))
    for name in ("throughput.json", "throughput.md", "throughput.csv", "fixed.png", "fill.png"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(UserError, match=f"{name} was not made by neobert throughput"):
            tiny(tmp_path, "--resume")
        (tmp_path / name).unlink()
    (tmp_path / "out").write_text("mine")
    with pytest.raises(
        UserError, match="output must be a folder or a new name, but .*out is a file"
    ):
        tiny(tmp_path / "out")


def test_a_text_that_a_model_cannot_take(tmp_path):
    argv = [
        "--output",
        str(tmp_path),
        "--preset",
        "quick",
        "--sets",
        "600",
        "--models",
        "bert-base",
        "--batch",
        "1",
        "--plots",
        "false",
    ]
    assert main(argv, small=SMALL) == 0
    assert rows_of(tmp_path)[0]["error"] == "takes texts of at most 512 tokens", (
        "it has a row that says so"
    )


def row(model, implementation, name, seconds, fill=1.0):
    speed = 100 / seconds
    sizes = {"real_tokens": 100, "longest": int(name) if name.isdigit() else 512, "fill": fill}
    figures = {"seconds": [seconds] * 3, "tokens_per_second": speed, "quartiles": [speed, speed]}
    return {"set": name, "model": model, "implementation": implementation, **sizes, **figures}


def test_plots_show_every_measured_point(tmp_path, monkeypatch):
    """Mixed batches against their fill, full ones against their length; models of the same speed
    are beside each other."""
    pytest.importorskip("matplotlib")
    from neobert.benchmarks import throughput_plots

    rows = [
        row("neobert", "sdpa", "short", 1.0, 0.3),
        row("neobert", "sdpa", "128", 1.0),
        row("neobert", "sdpa", "512", 2.0),
    ]
    rows += [row(model, "sdpa", "128", 0.5) for model in ("bert-base", "roberta-base")]
    rows += [
        row("neobert", "padded", "short", 3.0, 0.3),
        row("neobert", "padded", "512", 2.0),
        {"error": "none", "set": "512"},
    ]
    drawn = {}
    monkeypatch.setattr(
        throughput_plots,
        "save",
        lambda figure, path, environment: drawn.setdefault(path.name, figure),
    )
    throughput_plots.draw(tmp_path, {"rows": rows, "environment": {}})

    def points(axes):
        return {
            c.get_label(): [(x, y) for x, y in zip(*c.lines[0].get_data())] for c in axes.containers
        }

    (fixed,) = drawn["fixed.png"].axes
    assert [round(y) for _, y in points(fixed)["NeoBERT"]] == [100, 50] and fixed.get_ylim()[0] == 0
    assert (
        len({points(fixed)[name][0][0] for name in ("BERT base", "RoBERTa base", "NeoBERT")}) == 3
    ), "one hides behind another"
    mixed, full = drawn["fill.png"].axes
    assert [y for _, y in points(mixed)["NeoBERT, padded"]] == [3.0], (
        "three times as fast as padded"
    )
    assert [y for _, y in points(full)["NeoBERT, padded"]] == [1.0], (
        "the full-length batches are there"
    )
    assert [y for _, y in points(full)["BERT base, sdpa"]] == [0.5], (
        "and so are those where NeoBERT is slower"
    )
    assert [label.get_text() for label in full.get_xticklabels()] == ["128", "512"]


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    argv = ["--output", str(tmp_path), "--preset", "cpu", *TINY[:-1], "true", "--models", "neobert"]
    assert main([*argv, "--implementations", "sdpa", "padded"], small=SMALL) == 0
    for name in ("fixed.png", "fill.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG", f"{name} is drawn"
