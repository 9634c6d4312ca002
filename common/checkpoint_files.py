"""The checkpoint folders of a run: which are complete, which are damaged, which may go.

A checkpoint holds `complete.json`. It is begun before everything else, and written last with the
size and the digest of every file. Only what it names is ever removed.
"""

import contextlib
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import UserError, printable
from .files import TEXT_LIMIT, read_json, settle, sha256, write_json
from .runs import remove_empty


MANIFEST = "complete.json"
_REMOVING = "removing.json"  # what the manifest is called while the checkpoint is removed
# Whole names: `checkpoint-best` or `damaged-checkpoint-8-copy` is a user's own.
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DAMAGED = re.compile(r"damaged-checkpoint-(\d+)(?:\.\d+)?")
# One of these holds the optimizer's state: of Trainer, DeepSpeed, FSDP.
_OPTIMIZER = re.compile(r"optimizer\.(pt|bin)|optimizer_\d+/.+|global_step\d+/.*optim_states\.pt")


def _numbered(folder, name):
    """(step, folder) of the folders in `folder` that are called so."""
    found = [
        (name.fullmatch(path.name), path)
        for path in Path(folder).glob("*checkpoint-*")
        if path.is_dir()
    ]
    return sorted((int(match[1]), path) for match, path in found if match)


def checkpoints(folder):
    """{step: folder} of a run's checkpoints in order, complete or not."""
    return dict(_numbered(folder, CHECKPOINT))


def complete(folder):
    """Those of `checkpoints` that were written to their end."""
    return {
        step: path for step, path in checkpoints(folder).items() if read_manifest(path) is not None
    }


def _digest(path):
    """Size and SHA-256 of a file that is on the disk by then, not in memory alone."""
    settle(path)
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(checkpoint, step, spent=None):
    """Marks a checkpoint as complete.

    Args:
        spent: {"seconds", "cpu_seconds"} of the training so far, to go on counting from.
    """
    files = sorted(
        path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST
    )
    with ThreadPoolExecutor(4) as pool:
        digests = dict(
            zip(
                (path.relative_to(checkpoint).as_posix() for path in files),
                pool.map(_digest, files),
            )
        )
    write_json(checkpoint / MANIFEST, {"step": step, **(spent or {}), "files": digests})


def damage(checkpoint):
    """What keeps a checkpoint from being continued from, in a few words, or None for a complete
    one."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        whole = (checkpoint / MANIFEST).exists() and read_manifest(
            checkpoint, complete=False
        ) is None
        return f"{MANIFEST} is damaged" if whole else "it was not written to its end"
    files = manifest["files"]
    if not any(_OPTIMIZER.fullmatch(name) for name in files):
        return "it has no state of the optimizer"
    for name, file in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{printable(name)} is missing"
        if path.stat().st_size != file["size"]:
            return (
                f"{printable(name)} has {path.stat().st_size:,} bytes in place of {file['size']:,}"
            )
    with ThreadPoolExecutor(4) as pool:
        for name, digest in zip(files, pool.map(sha256, (checkpoint / name for name in files))):
            if digest != files[name]["sha256"]:
                return f"{printable(name)} has changed since it was written"
    return None


def read_manifest(checkpoint, complete=True, name=MANIFEST):
    """The manifest of a checkpoint; with `complete` None for one that is not written to its end."""
    try:
        manifest = read_json(checkpoint / name, 16 * TEXT_LIMIT)
        files = manifest["files"] if complete else manifest.get("files", {})
        good = all(
            isinstance(file["size"], int) and isinstance(file["sha256"], str)
            for file in files.values()
        )
    except (UserError, KeyError, TypeError, AttributeError):
        return None
    return manifest if good else None


def remove_checkpoint(checkpoint):
    """Removes what the run wrote of a checkpoint, as its manifest says, and the folder where
    nothing else is in it."""
    begun, going = read_manifest(checkpoint, complete=False), checkpoint / _REMOVING
    if checkpoint.is_symlink():
        return
    # it was being written when the run was killed, or the disk was full
    if begun is not None and "files" not in begun:
        shutil.rmtree(checkpoint, ignore_errors=True)
        return
    if begun is not None:
        # first, so that what is half removed is never taken
        os.replace(checkpoint / MANIFEST, going)
    if (manifest := read_manifest(checkpoint, name=_REMOVING)) is not None:
        place = Path(os.path.realpath(checkpoint))
        for path in (
            Path(os.path.normpath(place / name)) for name in (*manifest["files"], _REMOVING)
        ):
            if place in path.parents and Path(os.path.realpath(path.parent)).is_relative_to(place):
                path.unlink(missing_ok=True)
                remove_empty(path.parent, place)


def newest_complete(folder):
    """The newest checkpoint of a run that can be continued from, or None. Changes nothing.

    Each one is verified, from the newest down; one line on stderr names what is damaged and what is
    taken in its place.
    """
    damaged = []
    chosen = None
    for path in reversed(checkpoints(folder).values()):
        problem = damage(path)
        if problem is None:
            chosen = path
            break
        damaged.append(f"{path.name} ({problem})")
    if damaged:
        place = (
            f"going on from {chosen.name}"
            if chosen
            else "there is no complete checkpoint, beginning anew"
        )
        print(f"{folder}: damaged: {', '.join(damaged)}; {place}", file=sys.stderr, flush=True)
    return chosen


def set_aside(folder, step):
    """Renames the checkpoints after `step`, which are damaged, so that new ones may take their
    names; half ones go. `forget` removes them."""
    for number, path in checkpoints(folder).items():
        if number > step:
            if read_manifest(path) is None:
                remove_checkpoint(path)
            if path.exists():
                names = (
                    Path(folder) / f"damaged-{path.name}{suffix}"
                    for suffix in ("", *(f".{i}" for i in range(1, 1000)))
                )
                path.rename(next(name for name in names if not name.exists()))


def forget(folder, limit, keep_every, best=None, keep=()):
    """Keeps the newest `limit` complete checkpoints (all if None), every `keep_every`-th step's,
    those of the steps `keep` and the best; removes the others.

    What `set_aside` kept goes as soon as the run has come as far again.
    """
    finished = complete(folder)
    newest = max(finished, default=-1)
    for step, path in (*_numbered(folder, _DAMAGED), *checkpoints(folder).items()):
        if step <= newest and path not in finished.values():  # the latter: half removed
            remove_checkpoint(path)
    for step in list(finished)[:-limit] if limit else []:
        path = finished[step]
        kept = step in keep or (keep_every and step % keep_every == 0)
        if not kept and path.name != Path(best or "").name:
            remove_checkpoint(path)


def remove_checkpoints(folder):
    """Removes the checkpoints of a finished run, and their folder where nothing else is in it."""
    for _, path in (*_numbered(folder, CHECKPOINT), *_numbered(folder, _DAMAGED)):
        remove_checkpoint(path)
    for path in (*Path(folder).glob("*/"), Path(folder)):  # evaluators make an empty folder
        with contextlib.suppress(OSError):
            path.rmdir()
