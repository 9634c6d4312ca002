"""`neobert throughput`: real tokens per second of NeoBERT and its peers, on fixed lengths and on
mixed ones (paper, Table 9 and Figure 3).

Every model is built with random weights. A *set* says how long the texts of a batch are; tokens per
second count real tokens only. On the CPU the models that are compared take turns in every repeat,
and so does a plain matrix product, so that a busy machine slows all alike; on a GPU one model is in
memory at a time. Results are written after every set or model: an interrupt keeps what is done, and
`--resume` goes on.
"""

import gc
import sys
from dataclasses import asdict

import torch
from tqdm import tqdm

from ..common.errors import one_line
from ..common.memory import PeakMemory
from ..common.results import environment
from .measuring import CLOCKS, BatchLimit, MatrixProduct, in_turns, out_of_memory, synchronise
from .options import OPTIONS
from .throughput_models import MODELS, build
from .throughput_results import load_done, tables, write_results
from .throughput_sets import draw_lengths, lengths_of_file, make_batch


class Benchmark:
    """One run of the command: what it measures, and the models that are in memory.

    Attributes:
        data: what throughput.json will hold; "rows" grows.
    """

    def __init__(self, arguments, rows, small=None, save=None):
        """Args:
        arguments: `ThroughputArguments`.
        rows: what an earlier run left; they are not measured again.
        small: configuration fields that replace the published ones.
        save: function of `data`, called after every set or model.
        """
        self.arguments, self.save = arguments, save
        self.cuda = arguments.device.startswith("cuda")
        # On the CPU all take turns; on a GPU each has the memory for itself while its largest batch
        # is searched.
        self.alone = self.cuda and arguments.search and not arguments.batch
        self.dtype = getattr(torch, arguments.dtype)
        self.small = {
            **(small or {}),
            **({"num_hidden_layers": arguments.layers} if arguments.layers else {}),
        }
        self.file_lengths = (
            lengths_of_file(arguments.texts, arguments.tokenizer) if arguments.texts else None
        )
        self.limit = BatchLimit(
            arguments.max_batch,
            arguments.max_tokens,
            arguments.memory_gib and arguments.memory_gib * 2**30,
        )
        self.built = {}
        settings = {"settings": arguments.settings(), "options": asdict(arguments)}
        self.data = {"environment": environment(dtype=arguments.dtype), **settings, "rows": rows}

    def run(self):
        """Measures all that is not there yet; returns the exit status, 130 after an interrupt."""
        arguments, rows = self.arguments, self.data["rows"]
        done = {(row["set"], row["model"], row["implementation"]) for row in rows}
        todo = [
            (name, [pair for pair in arguments.planned() if (name, *pair) not in done])
            for name in arguments.sets
        ]
        steps = sum(len(pairs) for _, pairs in todo) * (arguments.repeats + 1)
        with tqdm(total=steps, desc="throughput", unit="pass", disable=None) as progress:
            try:
                product = MatrixProduct(arguments.device, self.dtype, CLOCKS[arguments.clock])
                for name, pairs in todo:
                    for group in [[pair] for pair in pairs] if self.alone else [pairs]:
                        self.measure(name, group, product, progress)
                        if self.alone:
                            self._release()
                        if rows and self.save:
                            self.save(self.data)
            except KeyboardInterrupt:
                tqdm.write(
                    "interrupted; what is done is kept, and --resume goes on", file=sys.stderr
                )
                return 130
        return 0

    def lengths(self, name, count):
        return draw_lengths(name, count, self.arguments.seed, self.file_lengths)

    def measure(self, name, pairs, product, progress):
        """Adds a row for each of `pairs` on the set `name`. One that fails has a row that says why.

        Raises:
            KeyboardInterrupt: after an interrupt; complete repeats are in the rows.
        """
        ready = {}
        for pair in pairs:
            progress.set_postfix_str(f"{name} {'/'.join(pair)}")
            row = {"set": name, "model": pair[0], "implementation": pair[1]}
            try:
                ready[pair] = (row, *self._prepare(name, pair))
            # an implementation that is not installed or fails here has a row that says so
            except Exception as error:
                self.data["rows"].append({**row, "error": one_line(error, 160)})
            progress.update(1)
        if ready:
            calls = {
                pair: lambda run=run, batch=batch: run(batch)
                for pair, (_, run, batch, _) in ready.items()
            }
            given = {
                "device": self.arguments.device,
                "product": product,
                "clock": product.clock,
                "progress": progress.update,
            }
            with torch.inference_mode():
                timings, interrupted = in_turns(calls, self.arguments.repeats, **given)
            stamp = {key: self.data["environment"][key] for key in ("commit", "date")}
            for pair, (row, run, batch, peak) in ready.items():
                self.data["rows"].append(
                    {**row, **_figures(run, batch, timings[pair], peak, product.size), **stamp}
                )
            if interrupted:
                raise KeyboardInterrupt

    def _release(self):
        """Frees the models and their graphs."""
        self.built.clear()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()

    def _prepare(self, name, pair):
        """(run, batch, peak memory in bytes) of a model on the batch that fits."""
        arguments, longest = self.arguments, MODELS[pair[0]][2]
        if max(self.lengths(name, arguments.batch or arguments.max_batch)) > longest:
            raise ValueError(f"takes texts of at most {longest} tokens")
        if pair not in self.built:
            self.built[pair] = self._build(pair)
        run = self.built[pair]
        count = arguments.batch or self._count(run, name)
        if count == 0:
            raise MemoryError("out of memory with one text")
        # Compared on the same texts where the search stopped alike; a model that fits fewer texts
        # keeps its own batch.
        return run, *self._first_passes(run, name, count)

    def _count(self, run, name):
        """Texts of a batch."""

        def lengths(count):
            return self.lengths(name, count)

        return (
            self.limit.search(run, lengths, self.arguments.device)
            if self.arguments.search
            else self.limit.most(lengths)
        )

    def _build(self, pair):
        # One set of weights for all variants of NeoBERT.
        same = next(
            (run for (model, _), run in self.built.items() if model == pair[0] == "neobert"), None
        )
        shared = same and (same.model.model if same.layout == "published" else same.model)
        return build(*pair, self.arguments.device, self.dtype, self.small, shared)

    @torch.inference_mode()
    def _first_passes(self, run, name, count):
        """Untimed passes: the batch of `count` texts, and the peak memory.

        Where the search chose `count`, and memory has since been broken into pieces, an eighth
        fewer texts are tried.
        """
        arguments = self.arguments
        while True:
            try:
                batch = make_batch(self.lengths(name, count), arguments.device, arguments.seed)
                with PeakMemory(arguments.device) as memory:
                    run(batch)
                    synchronise(arguments.device)
                for _ in range(arguments.warmup - 1):
                    run(batch)
                return batch, memory.peak if self.cuda else memory.growth
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            if arguments.batch or count == 1:
                raise MemoryError(f"out of memory with {count} text{'s' if count > 1 else ''}")
            count -= max(1, count // 8)


def _figures(run, batch, timing, peak, size):
    """The measured fields of a row."""
    tokens, texts, longest = sum(batch.lengths), len(batch.lengths), max(batch.lengths)
    speed = timing.per_second(tokens)
    return {
        "backend": run.backend,
        "batch": texts,
        "longest": longest,
        "fill": tokens / (texts * longest),
        "real_tokens": tokens,
        "tokens_per_second": speed["median"],
        "quartiles": speed["quartiles"],
        "seconds": timing.seconds,
        "peak_memory_mib": None if peak is None else peak / 2**20,
        "gemm_gflops": sorted(timing.rates)[len(timing.rates) // 2] / 1e9,
        "gemm_size": size,
        "gemm_rates": timing.rates,
        "share_of_gemm": timing.share(run.flops(batch.lengths)),
    }


def main(argv=None, small=None):
    """Runs the benchmark; `small` replaces configuration fields (tests). Returns the exit status,
    130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else argv
    (arguments,) = OPTIONS["throughput"].read(argv)
    rows = load_done(arguments.output, arguments.settings(), arguments.resume)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    benchmark = Benchmark(
        arguments, rows, small, save=lambda data: write_results(arguments.output, data)
    )
    status = benchmark.run()
    if benchmark.data["rows"]:
        write_results(arguments.output, benchmark.data)
        if arguments.plots:
            from .throughput_plots import draw

            draw(arguments.output, benchmark.data)
        print(tables(benchmark.data))
    return status
