"""`neobert encode SOURCE OUTPUT --model MODEL`: embeddings of a corpus of any size, in constant memory, by several processes, GPUs or machines.

The corpus is read once to plan its windows (`shard_rows` rows or `shard_characters` characters, whichever is first). A window is tokenized,
sorted by length, packed into batches of `tokens_per_batch` tokens, and written as one part in the order of the corpus. A part appears completely
or not at all, so that an interrupted run continues with the missing parts, on whatever machine shares the folder.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..common.errors import UserError
from ..common.files import redacted, remove_left_overs, write_json
from ..common.identity import model_digest
from ..common.loading import choose_device, choose_dtype
from ..common.locks import FolderLock
from ..common.outputs import check_apart, check_folder, check_replaceable, remove_set_aside, set_aside
from ..common.results import environment
from ..common.rows import check_column, row_columns, row_files
from .encode_parts import CUT, Cut, Plan, is_output, make_plan, merge_parts
from .encode_workers import Rank, Run, build_encoder, encode_in_processes, encode_windows
from .options import FORMATS, OPTIONS


MANIFEST, PLAN = "encode.json", "plan.json"
# Files that a run has in its folder beside the manifest.
WORKING_FILES = (PLAN, ".lock", *(f"{dot}part-[0-9]*.{format}{end}" for format in FORMATS for dot, end in (("", ""), (".", ".*"))))
MARK = {"neobert": "encode"}


# Settings that change the vectors or how they are laid out in the parts: a run is only continued with the same ones.
_FIXED = (
    "model", "text_column", "keep", "format", "prompt_name", "prompt", "pooling", "tokenizer", "max_length", "normalize", "dtype",
    "output_dtype", "shard_rows", "shard_characters",
)  # fmt: skip


@dataclass(frozen=True)
class _Target:
    """What a run writes: `output`, a folder of parts or one file; the parts are in `folder`."""

    output: Path
    folder: Path
    format: str

    @property
    def is_file(self):
        return self.output != self.folder

    @classmethod
    def of(cls, arguments):
        """Checks that the output can be made, and that it is apart from what is read; changes nothing."""
        output = Path(os.path.realpath(arguments.output))
        check_apart(output, arguments.source, *([arguments.model] if Path(arguments.model).exists() else []))
        single = output.suffix[1:] in FORMATS
        if single and output.is_dir():
            raise UserError(f"{output} is a folder, but {output.suffix} names a file; choose another name")
        if not single and output.suffix and not output.is_dir():
            raise UserError(f"OUTPUT must end in .parquet or .safetensors, or be a folder, but {output} was given")
        check_folder(output.parent if single else output, "OUTPUT")
        folder = output.with_name(f"{output.name}.parts") if single else output
        return cls(output, folder, output.suffix[1:] if single else arguments.format)


def _kept_columns(arguments, format):
    """Columns to copy, and what to ask of the others (`alike` of `read_rows`)."""
    if arguments.keep is None:
        by_itself = format == "parquet"
        return ["id"] if by_itself and "id" in row_columns(arguments.source) else [], "id".__eq__ if by_itself else None
    keep = [name.strip() for given in arguments.keep for name in given.split(",") if name.strip()]
    if keep and format == "safetensors":
        raise UserError("safetensors holds no other columns (row i belongs to row i of the input); leave out --keep, or write parquet")
    if "embedding" in keep:
        raise UserError("the output's own column is called 'embedding'; leave it out of --keep")
    return keep, None


def _manifest(arguments, format):
    """What a run is known by: its input and all settings that change its output."""
    stats = [file.stat() for file in row_files(arguments.source)]
    source = {"name": Path(arguments.source).name, "files": len(stats), "bytes": sum(stat.st_size for stat in stats)}
    source["modified"] = max(stat.st_mtime_ns for stat in stats)
    settings = {name: asdict(arguments)[name] for name in _FIXED} | {"format": format, "model_digest": model_digest(arguments.model)}
    return redacted({"command": "encode", "input": source, "settings": settings})


def _begun(folder, manifest):
    """The manifest of a run in `folder`, {} where there is none.

    Raises:
        UserError: it is a run with another input or other settings, or the folder holds something else.
    """
    try:
        begun = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        parts = [("input", begun["input"], "another input"), ("settings", begun["settings"], "other settings")]
        changes = [(what, [name for name, value in manifest[part].items() if old.get(name) != value]) for part, old, what in parts]
    except FileNotFoundError:
        if folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
            raise UserError(f"{folder} holds other files; choose another output") from None
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / MANIFEST} is damaged or not of neobert encode; choose another output") from None
    for what, changed in changes:
        if changed:
            raise UserError(f"{folder} was begun with {what} ({', '.join(changed)} differ); choose another output, or give --overwrite")
    return begun


def _check_overwrite(folder):
    """Raises UserError unless all that `folder` holds was written by this command."""
    check_replaceable(folder, "encode", WORKING_FILES)
    for path in folder.glob("part-*"):
        if not is_output(path, MARK):
            raise UserError(f"{path} was not written by neobert encode, so {folder} is not replaced; move it, or choose another output")


def encode(arguments, progress_bar=True, encoder=None):
    """Embeds a corpus; under a launcher, this rank's share of it.

    Args:
        arguments: `EncodeArguments`.
        encoder: the `PackedEncoder` of these arguments, where it is loaded already; for one process.
    Returns:
        dict with the rows and parts of the corpus, the rows, tokens and seconds of this run, and in the first rank "cut": how many texts
        of the corpus were longer than the limit, how many of their tokens were not read, the tokens of the longest text.
    Raises:
        UserError: bad input, before any work; or the output holds something else.
    """
    choose_device(arguments.device)
    rank, target = Rank.from_environment(), _Target.of(arguments)
    keep, alike = _kept_columns(arguments, target.format)
    manifest = _manifest(arguments, target.format)
    mark = MARK | {"run": hashlib.sha256(json.dumps(manifest).encode()).hexdigest()[:16]}
    if arguments.overwrite and rank.world > 1:
        raise UserError("--overwrite is not possible with several ranks, which would take the old parts for the new; remove them first")
    if target.is_file and target.output.exists() and not _check_single(target.output, mark, arguments.overwrite):
        return {"rows": None, "parts": 0, "encoded_rows": 0, "encoded_tokens": 0, "seconds": 0.0, "finished": True}
    begun, replaces = {}, False
    try:
        begun = _begun(target.folder, manifest)
    except UserError:
        if not arguments.overwrite:
            raise
        replaces = True
    if replaces or (arguments.overwrite and "finished" in begun):
        _check_overwrite(target.folder)
        begun, replaces = {}, True
    if rank.rank > 0:
        begun = _await_first_rank(target.folder, manifest)
    device = _device(arguments, rank)
    dtype = begun.get("dtype") or str(choose_dtype(arguments.dtype, device)).removeprefix("torch.")
    arguments = replace(arguments, dtype=dtype, device=device)
    plan = Plan.load(target.folder / PLAN, Path(arguments.source)) if begun else None
    if plan is None:
        check_column(row_files(arguments.source), arguments.text_column, "--text-column")
        # A model that cannot be loaded is found before the corpus is read.
        one = build_encoder(arguments, device if _processes(arguments, rank) == 1 else "cpu", encoder)
        encoder = one[0] if _processes(arguments, rank) == 1 else None
        plan = make_plan(Path(arguments.source), arguments.text_column, keep, arguments.shard_rows, arguments.shard_characters, alike)
        if replaces:
            set_aside(target.folder, "encode", WORKING_FILES)
    run = Run(arguments, Path(arguments.source), target.folder, target.format, plan, mark)
    with FolderLock(target.folder, joins=rank.world > 1):
        if not begun:
            begun = {**manifest, "dtype": dtype, "files": {}}
            write_json(target.folder / MANIFEST, begun)
        if not (target.folder / PLAN).is_file():
            plan.save(target.folder / PLAN)  # last: the other ranks wait for it
        summary = _work(run, rank, encoder, progress_bar)
        if rank.rank == 0:
            summary["cut"] = run.cut()._asdict()
            _finish(run, target, begun, summary, rank)
    return summary


def _check_single(output, mark, overwrite):
    """Whether an output file that exists is to be made; False where this very run wrote it."""
    if not is_output(output, MARK):
        raise UserError(f"{output} was not written by neobert encode, so it is not replaced; choose another name, or remove it yourself")
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
    return max(1, torch.cuda.device_count()) if rank.world == 1 and arguments.device == "cuda" else 1


def _await_first_rank(folder, manifest):
    """The manifest that the first rank writes when it has planned the windows."""
    print(f"waiting until rank 0 has planned {folder}", file=sys.stderr)
    while not (folder / PLAN).is_file():
        time.sleep(0.2)
    return _begun(folder, manifest)


def _work(run, rank, encoder, progress_bar):
    """Encodes this rank's windows; the first rank waits for the parts of the others."""
    arguments, windows = run.arguments, run.plan.windows
    counts, start = {"rows": 0, "tokens": 0}, time.perf_counter()
    own = rank.share([window.characters for window in windows])
    with tqdm(total=sum(windows[i].rows for i in own), desc="texts", unit="text", disable=not progress_bar or rank.rank > 0) as bar:

        def progress(rows, tokens):
            bar.update(rows)
            counts["rows"] += rows
            counts["tokens"] += tokens

        remove_left_overs(run.folder, "part-")
        missing = run.missing(own, bar.update)
        if missing and _processes(arguments, rank) > 1:
            encode_in_processes(_processes(arguments, rank), run, missing, progress)
        elif missing:
            encode_windows(*build_encoder(arguments, arguments.device, encoder), run, missing, progress)
        if rank.rank == 0 and rank.world > 1:
            _await_others(run)
    encoded = {"encoded_rows": counts["rows"], "encoded_tokens": counts["tokens"], "seconds": time.perf_counter() - start}
    return {"rows": run.plan.rows, "parts": len(windows), **encoded}


def _await_others(run):
    """Returns when the parts of all ranks are there."""
    missing = run.missing(range(len(run.plan.windows)))
    if missing:
        print(f"waiting for {len(missing)} parts of other ranks; start a rank that died again", file=sys.stderr)
    while any(not run.path(number).exists() for number in missing):
        time.sleep(0.2)


def _finish(run, target, manifest, summary, rank):
    """The file made of all parts, or the manifest of a finished folder; then what the run needed on its way is removed."""
    if target.is_file:
        parts = [run.path(number) for number in range(len(run.plan.windows))]
        merge_parts(parts, target.output, {**run.mark, CUT: Cut(**summary["cut"]).text()})
        remove_left_overs(target.output.parent, target.output.name)
    remove_set_aside(run.folder, "encode", WORKING_FILES)
    if not target.is_file and (summary["encoded_rows"] or "finished" not in manifest):
        made = environment(dtype=run.arguments.dtype, ranks=rank.world)
        write_json(run.folder / MANIFEST, {**manifest, "finished": summary, "environment": made})
    elif target.is_file:
        try:
            _check_overwrite(run.folder)
            shutil.rmtree(run.folder)
        except UserError as error:
            print(f"{target.output} is complete; {run.folder} stays: {error}", file=sys.stderr)


def main(argv=None):
    """`neobert encode SOURCE OUTPUT --model MODEL`; returns the exit code."""
    (arguments,) = OPTIONS["encode"].read(argv or [])
    summary = encode(arguments)
    if summary.get("finished"):
        print(f"{arguments.output}: finished already with these settings; --overwrite makes it anew")
        return 0
    rate = summary["encoded_tokens"] / max(summary["seconds"], 1e-9)
    print(
        f"{arguments.output}: {summary['rows']:,} texts; this run {summary['encoded_rows']:,} texts of {summary['encoded_tokens']:,} tokens "
        f"in {summary['seconds']:.1f} s ({rate:,.0f} tokens/s){_told(summary.get('cut'))}"
    )
    return 0


def _told(cut):
    """What the last line says of texts that were cut; the first rank alone knows."""
    if cut is None:
        return ""
    if not cut["texts"]:
        return f"; none cut, the longest has {cut['longest']:,} tokens"
    return f"; {cut['texts']:,} texts cut by {cut['tokens']:,} tokens, the longest has {cut['longest']:,}"
