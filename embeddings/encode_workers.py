"""Who encodes which windows: this process, worker processes of one machine, or the ranks of
torchrun, accelerate launch and SLURM."""

import multiprocessing
import multiprocessing.connection
import os
import queue
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..common.errors import UserError
from ..common.loading import choose_device
from .encode_parts import (
    CUT,
    TEXTS,
    Cut,
    Plan,
    WindowReader,
    is_part,
    is_regular,
    part_columns,
    part_path,
    read_mark,
    write_part,
)
from .long_texts import Windows, WindowSettings, tokenize_windows
from .packed_encoder import NotFinite, PackedEncoder
from .stamps import STAMP, Stamp


@dataclass(frozen=True)
class Job:
    """What every process of a run knows.

    Attributes:
        arguments: `EncodeArguments`; dtype is no longer "auto".
        folder: of the parts.
        format: of the parts.
        plan: the windows.
        mark: in the metadata of every part.
        digest: of the model.
        first: number of the first text, where the output has others before it.
    """

    arguments: object
    folder: Path
    format: str
    plan: Plan
    mark: dict
    digest: str
    first: int = 0

    @property
    def source(self):
        """The corpus."""
        return Path(self.arguments.source)

    def path(self, number):
        return part_path(self.folder, number, self.format)

    def part_mark(self, number):
        """What the metadata of a part must have."""
        return {**self.mark, TEXTS: str(self.plan.windows[number].rows)}

    def totals(self):
        """(vectors, `Cut` of all texts) of the corpus, when all parts are there."""
        found = [read_mark(self.path(number)) for number in range(len(self.plan.windows))]
        return sum(rows for rows, _ in found), Cut.total(Cut.read(marks) for _, marks in found)

    def missing(self, numbers, progress=None):
        """Those of the windows whose part is not there; a damaged part is removed.

        Args:
            progress: called with the rows of each part that is there.
        Raises:
            UserError: a file has the name of a part and is not of this run.
        """
        missing = []
        for number in numbers:
            path = self.path(number)
            if os.path.lexists(path) and (not is_regular(path) or read_mark(path) is not None):
                if not is_part(path, self.part_mark(number)):
                    raise UserError(
                        f"{path} is not a part of this run; move it, or choose another output"
                    )
                if progress is not None:
                    progress(self.plan.windows[number].rows)
                continue
            path.unlink(missing_ok=True)
            missing.append(number)
        return missing


@dataclass(frozen=True)
class Rank:
    """This process among those that a launcher started on all machines."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls):
        """Of torchrun and accelerate launch (RANK), or of a SLURM step (srun); alone without a
        launcher."""
        for names in (
            ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        ):
            if os.environ.get(names[0]) and os.environ.get(names[1]):
                given = [os.environ.get(name) or "0" for name in names]
                if not all(number.isdigit() for number in given) or not int(given[0]) < int(
                    given[1]
                ):
                    raise UserError(
                        f"{names[0]}={given[0]} and {names[1]}={given[1]} must be the number of a "
                        "process and of all processes"
                    )
                return cls(*map(int, given))
        return cls()

    def share(self, sizes):
        """Numbers of this rank's windows: neighbours, together about as large as any other rank's.
        Every window has one rank.

        Args:
            sizes: of all windows.
        """
        sizes = np.asarray(sizes, dtype=np.float64) + 1
        owners = ((sizes.cumsum() - sizes / 2) / sizes.sum() * self.world).astype(int)
        return np.flatnonzero(owners == self.rank).tolist()


class Loaded(NamedTuple):
    """A `PackedEncoder` as the arguments use it: the text of its prompt, and `WindowSettings` where
    texts are not cut."""

    encoder: PackedEncoder
    prompt: str
    windows: WindowSettings | None

    def stamp(self, arguments, digest):
        """The `Stamp` of its vectors; `digest` is that of the model."""
        return Stamp.of(self.encoder, self.prompt, arguments, digest, self.windows)

    def tokenize(self, texts):
        """(`Windows`, `Cut`) of texts."""
        lengths = []
        if self.windows is None:
            tokens = self.encoder.tokenize(texts, self.prompt, lengths)
            return Windows(tokens), Cut.of(tokens, lengths)
        found = tokenize_windows(self.encoder, texts, self.prompt, self.windows, lengths)
        return found, Cut(0, 0, max(lengths))


def build_encoder(arguments, device, encoder=None):
    """`Loaded` by these arguments on `device`, or of the encoder given."""
    encoder = encoder or PackedEncoder.from_arguments(arguments, device)
    named = arguments.prompt is None
    prompt = encoder.prompt(arguments.prompt_name) if named else arguments.prompt
    windows = None
    if arguments.long_texts == "windows":
        windows = WindowSettings.of(encoder, prompt, arguments.window, arguments.overlap)
    return Loaded(encoder, prompt, windows)


def encode_windows(loaded, job, numbers, progress):
    """Encodes and writes the windows `numbers`; the next one is read and tokenized while one is
    embedded.

    Args:
        loaded: `Loaded`.
        numbers: an iterator.
        progress: called with (rows, tokens) of each finished batch or part.
    """
    arguments, plan = job.arguments, job.plan
    columns = dict.fromkeys([arguments.text_column, *plan.schema.names])
    reader = WindowReader(job.source, columns, plan.windows)
    mark = {**job.mark, STAMP: loaded.stamp(arguments, job.digest).text()}
    numbers = iter(numbers)

    def tokenized():
        number = next(numbers, None)
        if number is None:
            return None
        rows = reader.read(number)
        return number, rows, *loaded.tokenize([row[arguments.text_column] for _, row in rows])

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(tokenized)
        while (window := following.result()) is not None:
            number, rows, found, cut = window
            following = pool.submit(tokenized)
            try:
                vectors = loaded.encoder.embed(
                    found.tokens,
                    _in_rows(progress, len(rows), len(found.tokens)),
                    loaded.prompt,
                )
            except NotFinite as error:
                row = error.index if found.rows is None else found.rows[error.index]
                raise UserError(f"{rows[row][0]}: {error}") from None
            if arguments.normalize:
                vectors = vectors / np.maximum(
                    np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12
                )
            first = job.first + sum(window.rows for window in plan.windows[:number])
            write_part(
                job.path(number),
                part_columns(rows, plan.schema, found, first),
                vectors.astype(arguments.output_dtype, copy=False),
                {**mark, CUT: cut.text(), TEXTS: str(len(rows))},
            )
            progress(0, sum(map(len, found.tokens)))


def _in_rows(progress, rows, sequences):
    """Tells `progress` of finished sequences of the model as a share of so many rows."""
    done = 0

    def told(count):
        nonlocal done
        before, done = done, done + count
        progress(done * rows // sequences - before * rows // sequences, 0)

    return told


# ------------------------------------------------------------------------------------------------
# processes of one machine


def _end_with_parent():
    """Ends this process when its parent is gone, also after a kill -9."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _worker(number, jobs, reports, job, device, threads):
    """A process: takes numbers of windows from `jobs` until None comes; reports ("progress", rows,
    tokens), ("done",), ("error", text)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(threads)
        encode_windows(
            build_encoder(job.arguments, device),
            job,
            iter(jobs.get, None),
            lambda *counts: reports.put(("progress", *counts)),
        )
        reports.put(("done",))
    except KeyboardInterrupt:
        pass
    except UserError as error:
        reports.put(("refused", str(error)))
    except BaseException:
        reports.put(("error", f"process {number}: {traceback.format_exc()}"))


def encode_in_processes(count, job, numbers, progress):
    """`encode_windows` shared out among `count` processes; each takes the next window when it is
    ready."""
    context = multiprocessing.get_context("spawn")
    jobs, reports = context.Queue(), context.Queue()
    for number in (*numbers, *[None] * count):
        jobs.put(number)
    device = choose_device(job.arguments.device)
    gpus = torch.cuda.device_count() if device == torch.device("cuda") else 0
    threads = max(1, torch.get_num_threads() // count)
    workers = []
    for number in range(count):
        place = f"cuda:{number % gpus}" if gpus else str(device)
        workers.append(
            context.Process(
                target=_worker, args=(number, jobs, reports, job, place, threads), daemon=True
            )
        )
        workers[-1].start()
    done = 0
    try:
        while done < count:
            try:
                kind, *values = reports.get(timeout=0.5)
            except queue.Empty:
                dead = next(
                    (worker for worker in workers if worker.exitcode not in (None, 0)), None
                )
                if dead is not None:
                    raise RuntimeError(
                        f"a worker process ended with code {dead.exitcode}; the finished parts are "
                        "kept"
                    ) from None
                continue
            if kind == "refused":
                raise UserError(values[0])
            if kind == "error":
                raise RuntimeError(f"a worker failed; the finished parts are kept\n{values[0]}")
            if kind == "progress":
                progress(*values)
            done += kind == "done"
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        jobs.cancel_join_thread()
