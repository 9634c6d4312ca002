"""`neobert throughput`: real tokens per second of NeoBERT and its peers, on fixed lengths and on mixed ones (paper, Table 9 and Figure 3).

Every model is built with random weights. A *set* says how long the texts of a batch are; tokens per second count real tokens only. On the CPU
the models that are compared take turns in every repeat, and so does a plain matrix product, so that a busy machine slows all alike; on a GPU
one model is in memory at a time. Results are written after every set or model: an interrupt keeps what is done, and `--resume` goes on.
"""

import csv
import gc
import io
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from ..common.errors import UserError, one_line
from ..common.files import check_folder, write_json, write_text
from ..common.memory import PeakMemory
from ..common.recipe import read_recipe
from ..common.results import environment, markdown_table
from .throughput_models import IMPLEMENTATIONS, MODELS, NEOBERT_ONLY, build, check_runs
from .throughput_sets import check_set, draw_lengths, lengths_of_file, make_batch


USAGE = """usage: neobert throughput --output FOLDER [--preset cpu|gpu|quick] [--key value ...]

Sets: a number (texts of that length), normal-256 (256 +- 64, 16 to 512), normal-4096 (4,096 +- 1,024, 16 to 8,192), short (log-normal),
fill-30 (512 the longest, 30 % of the batch real; any percentage), and texts (the lengths of --texts FILE, one text a line).
"""

# What each preset sets where the command line does not. The CPU set takes minutes, not days.
PRESETS = {
    "gpu": {
        "models": list(MODELS),
        "implementations": list(IMPLEMENTATIONS),
        "sets": ["512", "1024", "2048", "4096", "8192", "normal-256", "normal-4096", "short", "fill-20", "fill-40", "fill-60", "fill-80"],
        "max_batch": 512,
        "max_tokens": 1 << 20,
        "repeats": 20,
        "warmup": 3,
    },
    "cpu": {
        "models": ["neobert", "modernbert-base", "bert-base"],
        "implementations": ["sdpa", "padded", "published"],
        "sets": ["short", "128", "512", "normal-256", "fill-20", "fill-40", "fill-60", "fill-80"],
        "max_batch": 32,
        "max_tokens": 8192,
        "repeats": 5,
        "warmup": 1,
    },
    "quick": {
        "models": ["neobert", "modernbert-base"],
        "implementations": ["sdpa"],
        "sets": ["short"],
        "max_batch": 8,
        "max_tokens": 1024,
        "repeats": 3,
        "warmup": 1,
    },
}

# Sides of the square matrix product that stands for the machine's own rate (the fastest counts), and how long it runs before and after
# every timed pass.
GEMM_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
GEMM_SECONDS = 0.1
# Smallest peak of an attempt, in bytes, from which that of a larger batch is foretold: less is lost in what malloc had at hand.
LEAST_PEAK = 32 * 2**20


@dataclass
class ThroughputArguments:
    """Options of `neobert throughput`."""

    output: str = field(metadata={"help": "folder for throughput.json, .csv, .md and the plots"})
    preset: str | None = field(default=None, metadata={"help": "gpu, cpu or quick; by default gpu where there is one, else cpu"})
    models: list[str] | None = field(default=None, metadata={"help": f"of {', '.join(MODELS)}"})
    implementations: list[str] | None = field(default=None, metadata={"help": f"of {', '.join(IMPLEMENTATIONS)}"})
    sets: list[str] | None = field(default=None, metadata={"help": "text lengths, see above"})
    texts: str | None = field(default=None, metadata={"help": "text file, one text a line, whose lengths make the set 'texts'"})
    tokenizer: str | None = field(default=None, metadata={"help": "folder or name for --texts; by default the bundled one"})
    device: str | None = field(default=None, metadata={"help": "cuda, cpu"})
    dtype: str | None = field(default=None, metadata={"help": "float32, bfloat16, float16; by default bfloat16 on GPUs, else float32"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads"})
    batch: int | None = field(default=None, metadata={"help": "texts a batch; by default the largest that fits, found by search"})
    max_batch: int | None = field(default=None, metadata={"help": "upper end of the search, in texts"})
    max_tokens: int | None = field(default=None, metadata={"help": "upper end of the search, in padded tokens"})
    memory_gib: float | None = field(
        default=None, metadata={"help": "memory that a batch may take on the CPU; by default half of the free"}
    )
    repeats: int | None = field(default=None, metadata={"help": "timed repeats"})
    warmup: int | None = field(default=None, metadata={"help": "repeats before, not timed"})
    clock: str = field(
        default="wall", metadata={"help": "wall, or processor: CPU seconds of this process, with --threads 1 on a machine in use"}
    )
    seed: int = field(default=0, metadata={"help": "of the lengths and token ids"})
    layers: int | None = field(default=None, metadata={"help": "cut every model to this many layers (a trial run)"})
    resume: bool = field(default=False, metadata={"help": "keep what --output already holds and measure the rest"})
    plots: bool = field(default=True, metadata={"help": "draw the plots (needs matplotlib)"})

    def __post_init__(self):
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.preset = self.preset or ("gpu" if self.device.startswith("cuda") else "cpu")
        if self.preset not in PRESETS:
            raise UserError(f"preset must be one of {', '.join(PRESETS)}, but {self.preset!r} was given")
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.texts is not None and "texts" not in self.sets:
            self.sets = [*self.sets, "texts"]
        self.dtype = self.dtype or ("bfloat16" if self.device.startswith("cuda") else "float32")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise UserError(f"dtype must be float32, bfloat16 or float16, but {self.dtype!r} was given")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError("device cuda was given, but torch sees no GPU here; give --device cpu")
        for name in ("repeats", "max_batch", "max_tokens", "batch", "threads", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, but {value} was given")
        if self.clock not in ("wall", "processor"):
            raise UserError(f"clock must be wall or processor, but {self.clock!r} was given")
        if self.clock == "processor" and (self.device != "cpu" or self.threads != 1):
            raise UserError("clock processor counts the seconds of every thread: give --device cpu --threads 1")
        check_runs(self.models, self.implementations)
        for name in self.sets:
            check_set(name, self.texts)


# -------------------------------------------------------------------------------------------------------------- measurement


def _synchronise(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def out_of_memory(error):
    """Whether an exception says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "can't allocate memory" in str(error))


def largest_batch(attempt, limit):
    """Largest number of texts, 1 to `limit`, for which `attempt(count)` is true: doubling, then halving the gap to an eighth.

    Returns:
        the number; 0 if not even one text fits.
    """
    good, bad = 0, None
    count = 1
    while bad is None and good < limit:
        if attempt(count):
            good, count = count, min(2 * count, limit)
        else:
            bad = count
    while bad is not None and bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if attempt(middle) else (good, middle)
    return good


class MatrixProduct:
    """The machine's own rate: an n x n by n x n product in the same dtype, n chosen as the fastest of a few."""

    def __init__(self, device, dtype, clock=time.perf_counter):
        self.device, self.clock = device, clock
        rates = {}
        for size in GEMM_SIZES[device.partition(":")[0]]:
            self._prepare(size, dtype)
            rates[size] = max(self() for _ in range(5))
        self.size = max(rates, key=rates.get)
        self._prepare(self.size, dtype)

    def _prepare(self, size, dtype):
        self.left, self.right = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))

    def __call__(self, seconds=0.0):
        """Floating-point operations per second, over at least `seconds`."""
        size, count = self.left.shape[0], 0
        _synchronise(self.device)
        start = self.clock()
        while count == 0 or self.clock() - start < seconds:
            torch.mm(self.left, self.right)
            count += 1
            _synchronise(self.device)
        return 2 * size**3 * count / (self.clock() - start)


class Meter:
    """Finds the batch of one set and times runs on it."""

    def __init__(self, arguments, name, file_lengths=None):
        self.arguments, self.name = arguments, name
        self.file_lengths = file_lengths
        self.interrupted = False
        free = torch.cuda.mem_get_info()[0] if arguments.device.startswith("cuda") else _available_memory() / 2
        self.budget = arguments.memory_gib * 2**30 if arguments.memory_gib else free

    def lengths(self, count):
        return draw_lengths(self.name, count, self.arguments.seed, self.file_lengths)

    def search(self, run):
        """Largest number of texts that fits.

        On the CPU the peak of an attempt foretells that of others, and what surely fits or surely does not is not run at all.
        """
        limit, cpu = self.arguments.max_batch, not self.arguments.device.startswith("cuda")
        while limit > 1 and limit * max(self.lengths(limit)) > self.arguments.max_tokens:
            limit -= 1
        peaks = {}

        def attempt(count):
            lengths = self.lengths(count)
            # Grows with the padded tokens, and for expanded masks with the length once more.
            size = count * max(lengths) ** 2
            if cpu and peaks and peaks[max(peaks)] >= LEAST_PEAK:
                foretold = peaks[max(peaks)] * size / max(peaks)
                if foretold > self.budget or foretold < self.budget / 2:
                    return foretold < self.budget
            try:
                with PeakMemory(self.arguments.device) as peak, torch.inference_mode():
                    run(*make_batch(lengths, self.arguments.device))
                    _synchronise(self.arguments.device)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                fits = False
            else:
                peaks[size] = peak.growth or 0
                fits = not cpu or peaks[size] <= self.budget
            if not cpu:
                torch.cuda.empty_cache()
            return fits

        return largest_batch(attempt, limit)

    def measure(self, runs, counts, product, progress):
        """Times `runs`, each on its batch of `counts` texts, in turns.

        An interrupt after the first whole repeat keeps the whole ones and sets `interrupted`.

        Returns:
            one dictionary a run; that of a run that failed has "error" and no figures.
        """
        device, rows, ready, peaks = self.arguments.device, [], [], []
        for run, count in zip(runs, counts):
            try:
                lengths, batch, peak = self._first_passes(run, count)
            except Exception as error:  # the others go on
                rows.append({"set": self.name, "model": run.name, "implementation": run.implementation, "error": _sentence(error)})
            else:
                ready.append((run, lengths, batch))
                peaks.append(peak)
            progress.update(1)
        seconds, rates = [[] for _ in ready], [[] for _ in ready]
        try:
            with torch.inference_mode():
                for _ in range(self.arguments.repeats):
                    for i, (run, _, batch) in enumerate(ready):
                        before = product(GEMM_SECONDS)
                        _synchronise(device)
                        start = product.clock()
                        run(*batch)
                        _synchronise(device)
                        second = product.clock() - start
                        rates[i].append((before + product(GEMM_SECONDS)) / 2)
                        seconds[i].append(second)
                        progress.update(1)
        except KeyboardInterrupt:
            whole = min(map(len, seconds), default=0)
            if not whole:
                raise
            self.interrupted = True
            seconds, rates = ([values[:whole] for values in lists] for lists in (seconds, rates))
        return rows + [self._row(run, n, seconds[i], rates[i], peaks[i], product.size) for i, (run, n, _) in enumerate(ready)]

    @torch.inference_mode()
    def _first_passes(self, run, count):
        """Untimed passes: lengths and batch of `count` texts, and the peak memory.

        Where the search chose `count`, and memory has since been broken into pieces, an eighth fewer texts are tried.
        """
        arguments = self.arguments
        while True:
            lengths = self.lengths(count)
            try:
                batch = make_batch(lengths, arguments.device, arguments.seed)
                with PeakMemory(arguments.device) as memory:
                    run(*batch)
                    _synchronise(arguments.device)
                for _ in range(arguments.warmup - 1):
                    run(*batch)
                return lengths, batch, memory.peak if memory.device.type == "cuda" else memory.growth
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            if arguments.batch or count == 1:
                raise MemoryError(f"out of memory with {count} text{'s' if count > 1 else ''}")
            count -= max(1, count // 8)

    def _row(self, run, lengths, seconds, rates, peak, size):
        tokens = sum(lengths)
        speeds = [tokens / second for second in seconds]
        shares = [run.flops(lengths) / second / rate for second, rate in zip(seconds, rates)]
        return {
            "set": self.name,
            "model": run.name,
            "implementation": run.implementation,
            "backend": run.backend,
            "batch": len(lengths),
            "longest": max(lengths),
            "fill": tokens / (len(lengths) * max(lengths)),
            "real_tokens": tokens,
            "tokens_per_second": statistics.median(speeds),
            "quartiles": _quartiles(speeds),
            "seconds": seconds,
            "peak_memory_mib": None if peak is None else peak / 2**20,
            "gemm_gflops": statistics.median(rates) / 1e9,
            "gemm_size": size,
            "gemm_rates": rates,
            "share_of_gemm": statistics.median(shares),
        }


def _sentence(error):
    """What went wrong, short enough for a table."""
    return one_line(error, 160) or type(error).__name__


def _quartiles(values):
    return statistics.quantiles(values, n=4)[::2] if len(values) > 1 else [values[0], values[0]]


def _available_memory():
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 2**30


# ------------------------------------------------------------------------------------------------------------------ results


def ratios(rows):
    """Speed of NeoBERT over every other run of the same set: {set: {"model/implementation": {"ratio", "quartiles"}}}.

    The ratio is the median over repeats of the ratio of neighbouring measurements, which a change of the machine's pace cancels from.
    """
    result = {}
    for mine in rows:
        if (mine["model"], mine["implementation"]) != ("neobert", "sdpa") or not mine.get("seconds"):
            continue
        for other in rows:
            if other["set"] != mine["set"] or other is mine or not other.get("seconds"):
                continue
            pairs = zip(mine["seconds"], other["seconds"])
            per_repeat = [mine["real_tokens"] / a * b / other["real_tokens"] for a, b in pairs]
            entry = {"ratio": statistics.median(per_repeat), "quartiles": _quartiles(per_repeat)}
            result.setdefault(mine["set"], {})[f"{other['model']}/{other['implementation']}"] = entry
    return result


_COLUMNS = ("set", "model", "implementation", "batch", "longest", "fill", "tokens_per_second", "quartiles", "share_of_gemm",
            "peak_memory_mib")  # fmt: skip


def tables(data):
    """The results as a markdown text, with the environment that they were measured in."""
    env, lines = data["environment"], []
    kept = {(row.get("commit"), row.get("date")): None for row in data["rows"] if not row.get("error")}
    kept.pop((env["commit"], env["date"]), None)
    kept = ", ".join(f"commit {commit}, {date}" for commit, date in kept)
    for row in data["rows"]:
        if row.get("error"):
            lines.append([row["set"], row["model"], row["implementation"], *[""] * 4, row["error"], "", ""])
            continue
        low, high = row["quartiles"]
        peak = row["peak_memory_mib"]
        numbers = [f"{row['fill']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{row['share_of_gemm']:.2f}"]
        peak = "" if peak is None else f"{peak:,.0f}"
        lines.append([row["set"], row["model"], row["implementation"], row["batch"], row["longest"], *numbers, peak])
    header = ["set", "model", "implementation", "texts", "longest", "fill", "real tokens/s", "quartiles", "share of GEMM", "peak MiB"]
    text = [
        "# Throughput\n",
        f"`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, {env['threads']} threads, {env['dtype']}, "
        + f"{data['settings']['clock']} time, "
        + ", ".join(f"{name} {version}" for name, version in env["versions"].items())
        + (f". Some rows were kept from earlier runs ({kept})" if kept else "")
        + ".\n",
        "Medians over repeats; padding is not counted as tokens or as work. Share: floating-point operations that the real tokens need, "
        "over those that a plain matrix product did in the same time. Peak: reserved memory on CUDA; on the CPU resident memory beyond "
        "the weights.\n",
        markdown_table(header, lines),
        "## NeoBERT (sdpa) over\n",
    ]
    table = [
        [name, other, f"{value['ratio']:.2f}", "{:.2f} to {:.2f}".format(*value["quartiles"])]
        for name, others in ratios(data["rows"]).items()
        for other, value in others.items()
    ]
    return "\n".join([*text, markdown_table(["set", "model/implementation", "times as fast", "quartiles"], table)])


def write_results(folder, data, plots=True):
    """throughput.json, .csv, .md and, with `plots`, fixed.png and fill.png."""
    folder = Path(folder)
    data = {**data, "ratios": ratios(data["rows"])}
    write_json(folder / "throughput.json", data)
    buffer = io.StringIO()
    columns = [*_COLUMNS, "error"]
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows(data["rows"])
    write_text(folder / "throughput.csv", buffer.getvalue())
    write_text(folder / "throughput.md", tables(data))
    if plots:
        from .throughput_plots import draw

        draw(folder, data)


def _settings(arguments):
    """What must be the same for results to stand in one table."""
    names = ("device", "dtype", "threads", "clock", "batch", "max_batch", "max_tokens", "seed", "layers", "texts", "repeats")
    return {name: getattr(arguments, name) for name in names}


def load_done(arguments):
    """Rows that an earlier run left in --output, for --resume; without it there must be none.

    Raises:
        UserError: --output is a file, or holds results that this run would replace, or that were measured with other settings.
    """
    check_folder(arguments.output, "output")
    path = Path(arguments.output) / "throughput.json"
    if not path.is_file():
        return []
    if not arguments.resume:
        raise UserError(f"{path} holds results already; add to them with --resume true, or give another --output")
    try:
        data = json.loads(path.read_text())
        settings, rows = data["settings"], data["rows"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(f"{path} is not a result of neobert throughput; give another --output") from None
    changed = [name for name, value in _settings(arguments).items() if settings.get(name) != value]
    if changed:
        was = ", ".join(f"{name}={settings.get(name)}" for name in changed)
        raise UserError(f"{path} was measured with {was}; give the same, or another --output")
    return rows


# --------------------------------------------------------------------------------------------------------------------- main


def planned(arguments):
    """[(model, implementation)] to measure."""
    pairs = [(model, i) for model in arguments.models for i in arguments.implementations]
    return [(model, i) for model, i in pairs if model == "neobert" or i not in NEOBERT_ONLY]


def main(argv=None, small=None):
    """Runs the benchmark; `small` replaces configuration fields (tests). Returns the exit status, 130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        print("\n".join(f"  --{name}: {f.metadata['help']}" for name, f in ThroughputArguments.__dataclass_fields__.items()))
        return 0
    (arguments,) = read_recipe((ThroughputArguments,), argv, prog="neobert throughput")
    rows = load_done(arguments)
    file_lengths = lengths_of_file(arguments.texts, arguments.tokenizer) if arguments.texts else None
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.layers:
        small = {**(small or {}), "num_hidden_layers": arguments.layers}
    done = {(row["set"], row["model"], row["implementation"]) for row in rows}
    todo = [(name, [pair for pair in planned(arguments) if (name, *pair) not in done]) for name in arguments.sets]
    data = {"environment": environment(dtype=arguments.dtype), "settings": _settings(arguments), "options": asdict(arguments), "rows": rows}
    steps = sum(len(pairs) for _, pairs in todo) * (arguments.repeats + 1)
    status = 0
    with tqdm(total=steps, desc="throughput", unit="pass") as progress:
        try:
            _measure_all(arguments, todo, data, small, file_lengths, progress)
        except KeyboardInterrupt:
            status = 130
            tqdm.write("interrupted; what is done is kept, and --resume goes on", file=sys.stderr)
    if data["rows"]:
        write_results(arguments.output, data, arguments.plots)
        print(tables({**data, "rows": data["rows"]}))
    return status


def _measure_all(arguments, todo, data, small, file_lengths, progress):
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    product = MatrixProduct(arguments.device, getattr(torch, arguments.dtype), clock)
    built = {}
    for name, pairs in todo:
        meter = Meter(arguments, name, file_lengths)
        longest = max(meter.lengths(arguments.batch or arguments.max_batch))
        # On the CPU all take turns; on a GPU each has the memory for itself.
        groups = [[pair] for pair in pairs] if arguments.device.startswith("cuda") else [pairs]
        for group in groups:
            runs, counts = [], []
            for pair in group:
                progress.set_postfix_str(f"{name} {'/'.join(pair)}")
                row = {"set": name, "model": pair[0], "implementation": pair[1]}
                if longest > MODELS[pair[0]][2]:
                    data["rows"].append({**row, "error": f"takes texts of at most {MODELS[pair[0]][2]} tokens"})
                    continue
                try:
                    run = _build(pair, arguments, small, built)
                    count = arguments.batch or meter.search(run)
                except Exception as error:  # an implementation that is not installed or fails here has a row that says so
                    data["rows"].append({**row, "error": _sentence(error)})
                    continue
                if count == 0:
                    data["rows"].append({**row, "error": "out of memory with one text"})
                    continue
                runs.append(run)
                counts.append(count)
            # Compared on the same texts where the search stopped alike; a model that fits fewer texts keeps its own batch.
            if runs:
                stamp = {name: data["environment"][name] for name in ("commit", "date")}
                data["rows"] += [{**row, **stamp} for row in meter.measure(runs, counts, product, progress)]
            if meter.interrupted:
                raise KeyboardInterrupt
            if arguments.device.startswith("cuda"):
                runs.clear()
                run = None
                built.clear()
                torch._dynamo.reset()
                gc.collect()
            if data["rows"]:
                write_results(arguments.output, data, plots=False)


def _build(pair, arguments, small, built):
    if pair not in built:
        same = next((run for (model, _), run in built.items() if model == pair[0] == "neobert"), None)
        shared = same and (same.model.model if same.layout == "published" else same.model)
        built[pair] = build(*pair, arguments.device, getattr(torch, arguments.dtype), small, shared)
    return built[pair]
