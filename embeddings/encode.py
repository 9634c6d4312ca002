"""`neobert encode SOURCE OUTPUT --model MODEL`: embeddings of a corpus of any size, in constant
memory, by several processes, GPUs or machines.

The corpus is read once to plan its windows (`shard_rows` rows or `shard_characters` characters,
whichever is first). A window is tokenized, sorted by length, packed into batches of
`tokens_per_batch` tokens, and written as one part in the order of the corpus. A part appears
completely or not at all, so that an interrupted run continues with the missing parts, on whatever
machine shares the folder.
"""

import contextlib
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..common.errors import UserError, listed
from ..common.files import remove_left_overs
from ..common.identity import model_digest
from ..common.loading import choose_device, choose_dtype
from ..common.outputs import check_apart, check_folder
from ..common.results import environment
from ..common.rows import check_column, row_columns, row_files
from ..common.runs import LOCK, Run, run_settings, stamps
from .encode_append import Base, remove_run
from .encode_options import FORMATS
from .encode_parts import (
    CUT,
    MARK,
    PLACES,
    PLAN,
    TEXTS,
    Plan,
    is_output,
    is_part,
    make_plan,
    merge_parts,
    read_mark,
)
from .encode_workers import Job, Rank, build_encoder, encode_in_processes, encode_windows
from .options import OPTIONS
from .stamps import STAMP, Stamp


_ADDED = ".append"  # folder in a folder of parts, for those that are to be added


@dataclass(frozen=True)
class _Target:
    """What a run writes: `output`, a folder of parts or one file; its own parts are in `folder`.
    `base`: the output that is there, where texts are added to it."""

    output: Path
    folder: Path
    format: str
    is_file: bool
    base: Base | None = None

    @property
    def before(self):
        """Number of the texts that are there."""
        return self.base.texts if self.base else 0

    @classmethod
    def of(cls, arguments):
        """Checks that the output can be made, and that it is apart from what is read; changes
        nothing."""
        output = Path(os.path.realpath(arguments.output))
        check_apart(
            output, arguments.source, *([arguments.model] if Path(arguments.model).exists() else [])
        )
        single = output.suffix[1:] in FORMATS
        if single and output.is_dir():
            raise UserError(
                f"{output} is a folder, but {output.suffix} names a file; choose another name"
            )
        if not single and output.suffix and not output.is_dir():
            raise UserError(
                f"OUTPUT must end in .parquet or .safetensors, or be a folder, but {output} was "
                "given"
            )
        check_folder(output.parent if single else output, "OUTPUT")
        folder = output.with_name(f"{output.name}.parts") if single else output
        if arguments.append:
            base = Base.of(output, single)
            return cls(output, folder if single else output / _ADDED, base.format, single, base)
        return cls(output, folder, output.suffix[1:] if single else arguments.format, single)


def _kept_columns(arguments, format, base=None):
    """Columns to copy, and what to ask of the others (`alike` of `read_rows`)."""
    if arguments.keep is None and base is not None:
        return base.columns.names, None
    if arguments.keep is None:
        by_itself = format == "parquet"
        return ["id"] if by_itself and "id" in row_columns(
            arguments.source
        ) else [], "id".__eq__ if by_itself else None
    keep = [name.strip() for given in arguments.keep for name in given.split(",") if name.strip()]
    if keep and format == "safetensors":
        raise UserError(
            "safetensors holds no other columns (row i belongs to row i of the input); leave out "
            "--keep, or write parquet"
        )
    own = {"embedding", *(PLACES if arguments.long_texts == "windows" else ())}
    if taken := own & {*keep}:
        raise UserError(
            f"the output's own columns are called {listed(sorted(own))}; leave "
            f"{listed(sorted(taken))} out of --keep"
        )
    return keep, None


def _input(arguments):
    """What the input is known by: name, size and time of every file."""
    files = row_files(arguments.source)
    return {
        "name": Path(arguments.source).name,
        "files": stamps(files[0].parent, [file.name for file in files]),
    }


def _remove_parts(run):
    """Removes the plan and the parts of an unfinished run that this one replaces."""
    if run.before and "files" not in run.before:
        (run.folder / PLAN).unlink(missing_ok=True)
        for path in run.folder.glob("part-*"):
            if is_part(path, MARK | {"run": run.before["run"]}):
                path.unlink()


def encode(arguments, progress_bar=True, encoder=None):
    """Embeds a corpus; under a launcher, this rank's share of it.

    Args:
        arguments: `EncodeArguments`.
        encoder: the `PackedEncoder` of these arguments, where it is loaded already; for one
            process.
    Returns:
        dict with the rows and parts of the corpus, the rows, tokens and seconds of this run, and in
        the first rank "vectors": their number, and "cut": how many texts of the corpus were longer
        than the limit, how many of their tokens were not read, the tokens of the longest text. Of
        texts that were added, "before": the number of those that were there.
    Raises:
        UserError: bad input, before any work; or the output holds something else.
    """
    choose_device(arguments.device)
    rank, target = Rank.from_environment(), _Target.of(arguments)
    keep, alike = _kept_columns(arguments, target.format, target.base)
    settings = run_settings(arguments) | {
        "format": target.format,
        "model_digest": model_digest(arguments.model),
    }
    run = Run(target.folder, "encode", {"input": _input(arguments), **settings})
    if arguments.overwrite and rank.world > 1:
        raise UserError(
            "--overwrite is not possible with several ranks, which would take the old parts for "
            "the new; remove them first"
        )
    with _claimed(run, target, arguments, rank) as finished:
        if finished:
            return {
                "rows": None,
                "parts": 0,
                "encoded_rows": 0,
                "encoded_tokens": 0,
                "seconds": 0.0,
                "finished": True,
            }
        arguments = replace(
            arguments,
            dtype=_dtype(arguments, run, target.base, rank),
            device=_device(arguments, rank),
        )
        plan = Plan.load(run.folder / PLAN, Path(arguments.source)) if run.state != "new" else None
        if plan is None:
            plan, encoder = _begin(run, target, arguments, (keep, alike), rank, encoder)
        job = Job(
            arguments=arguments,
            folder=run.folder,
            format=target.format,
            plan=plan,
            mark=MARK | {"run": run.id},
            digest=settings["model_digest"],
            first=target.before,
        )
        summary = _work(job, rank, encoder, progress_bar)
        if rank.rank == 0:
            _finish(run, job, target, summary, rank)
    return summary


def _dtype(arguments, run, base, rank):
    """The dtype that the run began with; of a new one, that of the vectors that are there, or by
    choice."""
    if run.state != "new" and "dtype" in run.marker:
        return run.marker["dtype"]
    if base is not None and arguments.dtype == "auto":
        return base.stamp.dtype
    return str(choose_dtype(arguments.dtype, _device(arguments, rank))).removeprefix("torch.")


def _begin(run, target, arguments, columns, rank, encoder):
    """Checks model and corpus, and marks the run. Returns its plan, and the encoder where this
    process is to go on with it.

    Args:
        columns: those to copy, and `alike`.
    """
    check_column(row_files(arguments.source), arguments.text_column, "--text-column")
    # A model that cannot be loaded is found before the corpus is read.
    alone, base = _processes(arguments, rank) == 1, target.base
    loaded = build_encoder(arguments, arguments.device if alone else "cpu", encoder)
    if base is not None:
        base.stamp.check_same(loaded.stamp(arguments, run.settings["model_digest"]), base.output)
    plan = make_plan(
        Path(arguments.source),
        arguments.text_column,
        columns[0],
        arguments.shard_rows,
        arguments.shard_characters,
        columns[1],
    )
    if base is not None:
        base.check_columns(plan.schema)
    if run.state == "new":
        _remove_parts(run)
        run.begin(dtype=arguments.dtype, **({"base": base.mark} if base else {}))
    plan.save(run.folder / PLAN)  # last: the other ranks wait for it
    return plan, loaded.encoder if alone else None


@contextlib.contextmanager
def _claimed(run, target, arguments, rank):
    """Claims the run for the first rank. Yields whether the output has its texts already; of a
    folder of its own parts, the run tells it."""
    base, mark = target.base, MARK | {"run": run.id}
    if base is None:
        there = target.is_file and not _check_single(target.output, mark, arguments.overwrite)
    else:
        there = run.id in base.runs
    with contextlib.ExitStack() as stack:
        if rank.rank > 0:
            if not there:
                stack.enter_context(_planned(run))
        elif base is None:
            if not there:
                stack.enter_context(run.claim(arguments.overwrite, begin=False))
        else:
            stack.enter_context(base.claimed(target.folder))
            if not there:
                stack.enter_context(run.claim(None, begin=False))
                base.check_same(run.marker["base"] if run.state != "new" else base.mark, run)
        yield there


def _check_single(output, mark, overwrite):
    """Whether an output file is to be made; False where this very run wrote it. UserError for one
    that may not be replaced."""
    if not os.path.lexists(output):
        return True
    if not is_output(output, MARK):
        raise UserError(
            f"{output} was not written by neobert encode, so it is not replaced; choose another "
            "name, or remove it yourself"
        )
    if not overwrite and not is_output(output, mark):
        raise UserError(f"{output} exists already; choose another name, or give --overwrite")
    return overwrite


def _device(arguments, rank):
    """The device of this process: of a rank, the GPU of its number on its machine."""
    device = choose_device(arguments.device)
    if rank.world > 1 and device == torch.device("cuda"):
        return f"cuda:{rank.local % torch.cuda.device_count()}"
    return str(device)


def _processes(arguments, rank):
    if arguments.processes is not None:
        return arguments.processes
    return (
        max(1, torch.cuda.device_count()) if rank.world == 1 and arguments.device == "cuda" else 1
    )


@contextlib.contextmanager
def _planned(run):
    """Waits until the first rank has planned the windows."""
    print(f"waiting until rank 0 has planned {run.folder}", file=sys.stderr)
    while run.inspect() == "new" or not (run.folder / PLAN).is_file():
        time.sleep(0.2)
    yield


def _work(job, rank, encoder, progress_bar):
    """Encodes this rank's windows; the first rank waits for the parts of the others."""
    arguments, windows = job.arguments, job.plan.windows
    counts, start = {"rows": 0, "tokens": 0}, time.perf_counter()
    own = rank.share([window.characters for window in windows])
    with tqdm(
        total=sum(windows[i].rows for i in own),
        desc="texts",
        unit="text",
        disable=not progress_bar or rank.rank > 0,
    ) as bar:

        def progress(rows, tokens):
            bar.update(rows)
            counts["rows"] += rows
            counts["tokens"] += tokens

        remove_left_overs(job.folder, "part-")
        missing = job.missing(own, bar.update)
        if missing and _processes(arguments, rank) > 1:
            encode_in_processes(_processes(arguments, rank), job, missing, progress)
        elif missing:
            encode_windows(
                build_encoder(arguments, arguments.device, encoder), job, missing, progress
            )
        if rank.rank == 0 and rank.world > 1:
            _await_others(job)
    encoded = {
        "encoded_rows": counts["rows"],
        "encoded_tokens": counts["tokens"],
        "seconds": time.perf_counter() - start,
    }
    return {"rows": job.plan.rows, "parts": len(windows), **encoded}


def _await_others(job):
    """Returns when the parts of all ranks are there."""
    missing = job.missing(range(len(job.plan.windows)))
    if missing:
        print(
            f"waiting for {len(missing)} parts of other ranks; start a rank that died again",
            file=sys.stderr,
        )
    while any(not job.path(number).exists() for number in missing):
        time.sleep(0.2)


def _finish(run, job, target, summary, rank):
    """The file made of all parts, or the marker of a finished folder; then what the run needed on
    its way is removed."""
    numbers = range(len(job.plan.windows))
    if job.missing(numbers) or _input(job.arguments)["files"] != run.settings["input"]["files"]:
        raise UserError(
            f"{job.source} or the parts in {run.folder} changed while the run worked; begin anew "
            "with --overwrite"
        )
    vectors, cut = job.totals()
    summary |= {"vectors": vectors, "cut": cut._asdict()}
    parts = [job.path(number) for number in numbers]
    if target.base is not None:
        target.base.add(run, job, cut)
        summary["before"] = target.base.texts
        remove_run(run.folder, run.id)
        return
    metadata = read_mark(parts[0])[1]
    if not target.is_file:
        if summary["encoded_rows"] or run.state != "finished":
            made = environment(dtype=job.arguments.dtype, ranks=rank.world)
            added = [name for one in run.marker.get("appended", []) for name in one["files"]]
            run.finish(
                [PLAN, *(path.name for path in parts), *added],
                finished=summary,
                vectors=asdict(Stamp.read(metadata)),
                environment=made,
            )
        return
    mark = {**job.mark, STAMP: metadata[STAMP], CUT: cut.text(), TEXTS: str(job.plan.rows)}
    merge_parts(
        parts,
        target.output,
        mark,
        lambda: _check_single(target.output, job.mark, job.arguments.overwrite),
    )
    remove_left_overs(target.output.parent, target.output.name)
    for path in (*parts, run.folder / PLAN, run.path):
        path.unlink(missing_ok=True)
    if others := [path.name for path in run.folder.iterdir() if path.name != LOCK]:
        print(
            f"{target.output} is complete; {run.folder} stays: it holds {listed(others, 5)}",
            file=sys.stderr,
        )


def main(argv=None):
    """`neobert encode SOURCE OUTPUT --model MODEL`; returns the exit code."""
    (arguments,) = OPTIONS["encode"].read(argv or [])
    summary = encode(arguments)
    if summary.get("finished"):
        again = "finished already with these settings; --overwrite makes it anew"
        print(
            f"{arguments.output}: {'these texts are in it already' if arguments.append else again}"
        )
        return 0
    rate = summary["encoded_tokens"] / max(summary["seconds"], 1e-9)
    many = ""
    if "vectors" in summary and arguments.long_texts == "windows":
        many = f" in {summary['vectors']:,} windows"
    before = f" added to {summary['before']:,}" if "before" in summary else ""
    print(
        f"{arguments.output}: {summary['rows']:,} texts{many}{before}; this run "
        f"{summary['encoded_rows']:,} texts of {summary['encoded_tokens']:,} tokens "
        f"in {summary['seconds']:.1f} s ({rate:,.0f} tokens/s){_told(summary.get('cut'))}"
    )
    return 0


def _told(cut):
    """What the last line says of texts that were cut; the first rank alone knows."""
    if cut is None:
        return ""
    if not cut["texts"]:
        return f"; none cut, the longest has {cut['longest']:,} tokens"
    return (
        f"; {cut['texts']:,} texts cut by {cut['tokens']:,} tokens, the longest has "
        f"{cut['longest']:,}"
    )
