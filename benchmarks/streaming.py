"""How fast a streamed run is fed: tokens a second and rank, and that the loader workers of all ranks tokenise every row once.

    python -m neobert.benchmarks.streaming

Files of web-like texts, whose number is not a multiple of the readers, are read by the readers of all ranks as in `neobert pretrain`, one reader after
another in this one process. What a rank gets with workers of its own is their tokens over the CPU seconds of the slowest of them: it
needs a core for each worker.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from tqdm import tqdm

from ..common import local_text
from ..common.arguments import Arguments, option, read_arguments
from ..common.commands import guarded
from ..common.loading import TOKENIZER, load_tokenizer
from ..common.results import environment, markdown_table, write_result
from ..pretraining.batches import BatchSpec, SpecialTokens, batch_counts
from ..pretraining.masking import TokenMasking
from ..pretraining.prepared import Tokenise
from ..pretraining.sources import load_rows, parse_sources
from ..pretraining.streaming import StreamedBatches, TokenStream


# The paper's two stages, and the tokens a second that each of its 8 GPUs took: 2.1e12 tokens in 6,000 GPU hours.
STAGES = {
    "stage 1": BatchSpec(texts=32, length=1024),
    "stage 2": BatchSpec(texts=8, length=4096, mixture={0: 0.2, 1024: 0.4, 2048: 0.4}),
}
NEEDED = 97_000


@dataclass
class StreamingArguments(Arguments):
    """Options of `python -m neobert.benchmarks.streaming`."""

    output: str = option("results/streaming", "path of the result without its ending")
    ranks: int = option(8, "processes of the run", least=1)
    workers: int = option(4, "loader workers of each", least=1)
    files: int = option(83, "parquet files of the data", least=1)
    texts: int = option(12_000, "texts in them, at most", least=1)


def web_like_texts(count, seed=0):
    """Texts of log-normal length, median about 400 tokens, a tenth above 1,200, made of dictionary entries in random order."""
    draw = np.random.default_rng(seed)
    entries = [row["text"] for source in (local_text.wordnet_entries, local_text.gcide_entries) for row in source()]
    draw.shuffle(entries)
    texts, parts, words, goal = [], [], 0, draw.lognormal(5.65, 0.95)
    for entry in entries:
        parts.append(entry)
        words += len(entry.split())
        if words >= goal:
            texts.append(" ".join(parts))
            parts, words, goal = [], 0, draw.lognormal(5.65, 0.95)
    return texts[:count]


def write_files(texts, folder, files):
    """The texts in parquet files of uneven size."""
    bounds = np.sort(np.random.default_rng(1).choice(np.arange(1, len(texts)), files - 1, replace=False))
    for number, part in enumerate(np.split(np.array(texts, dtype=object), bounds)):
        Dataset.from_dict({"text": list(part)}).to_parquet(str(folder / f"part-{number:05d}.parquet"))


class Counting:
    """`Tokenise` that counts rows and tokens."""

    def __init__(self, tokenise):
        self.tokenise, self.rows, self.tokens = tokenise, 0, 0

    def __call__(self, batch):
        result = self.tokenise(batch)
        self.rows += len(batch["text"])
        self.tokens += sum(map(len, result["input_ids"]))
        return result


def rows_of_one_pass(stream, worker):
    """Rows that one worker tokenises until its share of the data has been read once, for the first part of the mixture."""
    reader = stream.readers(worker)[0]
    while reader.number == 0:
        before = stream.source.tokenise.rows
        reader.next()
    return before


def measure(stream, worker, batches):
    """(used tokens, tokenised tokens, CPU seconds) of one worker's first micro-batches."""
    used, start = 0, time.process_time()
    for _, batch in zip(range(batches), stream.batches_of(worker)):
        used += int(batch_counts(batch)["tokens"])
    return used, stream.source.tokenise.tokens, time.process_time() - start


def run_stage(spec, given, sources, tokenizer, rows):
    """The figures of one stage."""

    def stream(rank):
        loaded = load_rows(sources, streaming=True)
        counting = Counting(Tokenise(tokenizer))
        tokens = TokenStream(loaded, counting, SpecialTokens.of(tokenizer))
        return StreamedBatches(tokens, TokenMasking(tokenizer), spec, 10**6, rank, given.ranks, given.workers)

    readers = [(rank, worker) for rank in range(given.ranks) for worker in range(given.workers)]
    shares = [rows_of_one_pass(stream(rank), worker) for rank, worker in tqdm(readers, desc="one pass")]
    # As many batches as a reader's share of the data makes in stage 1, so that no reader begins a second pass there.
    batches = max(2, rows // len(readers) // 40)
    found = [measure(stream(rank), worker, batches) for rank, worker in tqdm(readers, desc="batches")]
    ranks = [found[rank * given.workers : (rank + 1) * given.workers] for rank in range(given.ranks)]
    return {
        "rows_tokenised_in_one_pass": sum(shares),
        "rows_of_a_reader": [min(shares), max(shares)],
        "batches_of_a_reader": batches,
        "used_tokens_per_cpu_second": [used / seconds for used, _, seconds in found],
        "used_share_of_tokenised": sum(used for used, *_ in found) / sum(tokenised for _, tokenised, _ in found),
        "tokens_per_second_and_rank": [sum(used for used, *_ in rank) / max(seconds for *_, seconds in rank) for rank in ranks],
    }


def page(given, rows, stages):
    """The result in markdown."""
    lines = []
    for name, found in stages.items():
        low, high = found["rows_of_a_reader"]
        speeds = found["used_tokens_per_cpu_second"]
        slowest = min(found["tokens_per_second_and_rank"])
        lines.append(
            [name, f"{found['rows_tokenised_in_one_pass']:,} of {rows:,}", f"{low:,} to {high:,}", f"{statistics.median(speeds):,.0f}",
             f"{min(speeds):,.0f} to {max(speeds):,.0f}", f"{found['used_share_of_tokenised']:.2f}", f"{slowest:,.0f}", f"{slowest / NEEDED:.1f}"]
        )  # fmt: skip
    header = ["recipe", "rows tokenised in one pass", "rows of a reader", "used tokens a CPU second and worker (median)", "range"]
    header += ["used share of the tokenised", f"tokens a second of the slowest rank, {given.workers} workers", "times the paper's need"]
    return (
        f"{given.ranks} ranks with {given.workers} workers each read {given.files} files. Each of the {given.ranks * given.workers} readers has "
        "files of its own, so every row is tokenised once, and not once in every rank. Used tokens are those in micro-batches, after cutting "
        "to the recipe's length and, in stage 2, after leaving out texts that are too short for two of its three parts, each of which reads on its "
        f"own. The last column but one is extrapolated from CPU seconds: a core for each worker. The paper's run took about {NEEDED:,} tokens a second "
        "and GPU, padding included.\n\n" + markdown_table(header, lines)
    )


def main(argv=None):
    """Measures, writes and prints the table; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = read_arguments((StreamingArguments,), argv, "python -m neobert.benchmarks.streaming", __doc__)
    tokenizer = load_tokenizer(TOKENIZER)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        texts = web_like_texts(given.texts)
        write_files(texts, Path(folder), given.files)
        sources = parse_sources(folder)
        stages = {name: run_stage(spec, given, sources, tokenizer, len(texts)) for name, spec in STAGES.items()}
    data = {"ranks": given.ranks, "workers": given.workers, "files": given.files, "rows": len(texts), "stages": stages}
    env = environment(tokenizer="bundled WordPiece", texts="WordNet and GCIDE entries joined to log-normal lengths")
    print(write_result(given.output, "Streaming: how fast a run is fed", env, data, page(given, len(texts), stages)))
    return 0


if __name__ == "__main__":
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(guarded("python -m neobert.benchmarks.streaming", main))
