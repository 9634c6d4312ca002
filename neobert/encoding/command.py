"""`neobert encode SOURCE OUTPUT --model MODEL`: embeddings of a corpus of any size, in constant
memory, by any number of processes, GPUs or machines that know nothing of one another.

A part is a range of at most `rows` rows of one input file. Its name follows from both, and it
appears complete or not at all, so that listing OUTPUT tells what is missing. The same command goes
on after an interruption, and adds the texts of input files that are new.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import fsspec
from tqdm.auto import tqdm

from ..common import data
from ..common.errors import UserError, listed
from ..common.folders import apart
from ..common.identity import model_digest
from .columns import copied_columns
from .folder import (
    ABOUT,
    Cut,
    Folder,
    check_same,
    clear,
    part_name,
    part_stem,
    read_metadata,
    schema_of,
)
from .options import OPTIONS


# Options that make the vectors, their columns and their parts.
_SETTINGS = (
    "text_column",
    "keep",
    "prompt",
    "prompt_name",
    "max_length",
    "pooling",
    "tokenizer",
    "attn_implementation",
    "long_texts",
    "window",
    "overlap",
    "normalize",
    "dtype",
    "output_dtype",
    "truncate_dim",
    "rows",
)
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
# Endings of other formats, which are not names of folders.
_OTHER_FORMATS = (
    *data.FORMATS,
    *(".npy", ".npz", ".pt", ".pth", ".bin", ".safetensors", ".pkl", ".h5", ".hdf5"),
    *(".arrow", ".feather", ".orc", ".avro", ".db", ".sqlite", ".faiss", ".index", ".gz", ".zip"),
)
INPUT = "neobert_input"  # key in the metadata of an output file: its input files and their sizes


class Shard(NamedTuple):
    """Which parts are this process' own: number `number` of `count`."""

    number: int = 0
    count: int = 1
    local: int = 0  # number among the processes of this machine

    @classmethod
    def of(cls, text=None):
        """Of "i/n"; without it that of torchrun and accelerate launch, or of a SLURM step (srun);
        alone without a launcher."""
        if text is None:
            for names in _LAUNCHERS:
                if all(name in os.environ for name in names):
                    return cls(*(int(os.environ[name]) for name in names))
            return cls()
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or int(match[1]) >= int(match[2]):
            raise UserError(f"shard must be i/n with i from 0 to n-1, but {text!r} was given")
        return cls(int(match[1]), int(match[2]))

    def owns(self, file, part, files):
        """Whether a part is this process' own. Each reads its files from the beginning, so that
        many files are shared out as such.

        Args:
            file: number of the file.
            part: number of the part in it.
            files: number of all files.
        """
        whole = files >= 8 * self.count
        return (file if whole else file + part) % self.count == self.number


def encode(arguments, progress_bar=True, encoder=None):
    """Embeds the texts of this process' share of a corpus that have no vectors yet.

    Args:
        arguments: `EncodeArguments`.
        encoder: the `PackedEncoder` of these arguments, where it is loaded already.
    Returns:
        dict. Of the parts that are there: "texts", "vectors", "cut": `Cut`, "files": {input file:
        bytes}, "missing": those that lack parts. Of this run: "encoded_texts", "encoded_tokens",
        "seconds".
    Raises:
        UserError: bad input, or the output is another one's.
    """
    shard = Shard.of(arguments.shard)
    files, output = _checked(arguments, shard)
    digest = model_digest(arguments.model)
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    settings["model"] = arguments.model if digest == "unknown" else digest
    is_file = output.endswith(".parquet")
    folder = Folder(f"{output}.work" if is_file else output)
    run = {"encoded_texts": 0, "encoded_tokens": 0, "seconds": 0.0}
    if is_file and (summary := _finished(output, settings, files)):
        folder.remove(output)
        return summary | run

    vectors, parts = folder.vectors(), {}
    if vectors is not None:
        check_same(vectors, settings, folder.url)
        parts = folder.parts(files, settings)
    if todo := [file for file in files if not _is_complete(file, parts)]:
        columns = copied_columns(arguments, files) if vectors is None else None
        # A run with nothing left to do ends without importing torch.
        import torch

        from ..common.loading import choose_device, choose_dtype
        from .parts import Loaded, encode_files

        device = str(choose_device(arguments.device))
        if shard.count > 1 and device == "cuda" and arguments.shard is None:
            device = f"cuda:{shard.local % torch.cuda.device_count()}"
        dtype = vectors["dtype"] if vectors else str(choose_dtype(arguments.dtype, device))[6:]
        loaded = Loaded.of(arguments, dtype, device, encoder)
        if vectors is None:
            vectors = folder.agreed(loaded.described(arguments, settings, digest, columns, files))
            check_same(vectors, settings, folder.url)
            if vectors["dtype"] != loaded.encoder.dtype_name:  # of a process that came before
                loaded = Loaded.of(arguments, vectors["dtype"], device)
        places, start = {file: place for place, file in enumerate(files)}, time.perf_counter()

        def wanted(file, part):
            return (file, part) not in parts and shard.owns(places[file], part, len(files))

        total = None
        if progress_bar and shard.count == 1:
            there = sum(part.texts for (file, _), part in parts.items() if file in todo)
            total = sum(map(data.count_rows, todo)) - there
        with tqdm(total=total, unit="text", disable=not progress_bar) as bar:
            work = encode_files(loaded, arguments, vectors, folder, todo, wanted, bar.update)
            for texts, tokens in work:
                run["encoded_texts"] += texts
                run["encoded_tokens"] += tokens
        run["seconds"] = time.perf_counter() - start
        parts = folder.parts(files, settings)
    summary = {
        "texts": sum(part.texts for part in parts.values()),
        "vectors": sum(part.vectors for part in parts.values()),
        "cut": Cut.total(part.cut for part in parts.values()),
        "files": {file.name: file.size for file in files},
        "missing": [file.name for file in files if not _is_complete(file, parts)],
    }
    if not summary["missing"]:
        clear(folder.filesystem, folder.place(""))
    if is_file and not summary["missing"]:
        names = [part_name(*key) for file in files for key in sorted(parts) if key[0] == file]
        metadata = {ABOUT: json.dumps(vectors), INPUT: json.dumps(summary)}
        folder.join(names, output, schema_of(vectors), metadata)
        folder.remove(output)
    return summary | run


def _checked(arguments, shard):
    """(the input's files, the output as text) of arguments that can be gone with."""
    source, output = arguments.source, arguments.output.rstrip("/")
    single = output.endswith(".parquet")
    if not single and Path(output).suffix.lower() in _OTHER_FORMATS:
        raise UserError(f"OUTPUT must be a folder or end in .parquet, got {output}.")
    if single and shard.count > 1:
        raise UserError(
            "one file is made by one process; give a folder as OUTPUT to share parts out"
        )
    files = data.files(source)
    apart(output, *([source] if not set("*?[") & {*source} else []))
    if Path(arguments.model).exists():
        apart(output, arguments.model)
    stems = [part_stem(file) for file in files]
    if twice := [file.name for file in files if stems.count(part_stem(file)) > 1]:
        raise UserError(f"the parts of {listed(twice)} would have the same names; rename a file")
    return files, output


def _finished(output, settings, files):
    """The summary of an output file that holds these very texts; None where there is no file.

    Raises:
        UserError: another file is there.
    """
    filesystem, path = fsspec.url_to_fs(output)
    filesystem.invalidate_cache()
    if not filesystem.exists(path):
        return None
    _, vectors, summary = read_metadata(filesystem, path, ABOUT, INPUT)
    check_same(vectors, settings, output)
    if summary["files"] != {file.name: file.size for file in files}:
        raise UserError(
            f"{output} is there already, of {listed(summary['files'], 5)}; only folders are added "
            f"to: remove it yourself (rm -r {output}), or choose another output"
        )
    return summary | {"cut": Cut(*summary["cut"])}


def _is_complete(file, parts):
    """Whether all parts of a file are there."""
    number = 0
    while part := parts.get((file, number)):
        if part.last:
            return True
        number += 1
    return False


def main(argv=None):
    """`neobert encode SOURCE OUTPUT --model MODEL`; returns the exit code."""
    (arguments,) = OPTIONS["encode"].read(argv or [])
    print(described(arguments.output, encode(arguments)))
    return 0


def described(output, summary):
    """What the last line says of the summary of `encode`."""
    cut, missing = summary["cut"], summary["missing"]
    windows, lost, state = "", "none cut", "all parts are there"
    if summary["vectors"] != summary["texts"]:
        windows = f" in {summary['vectors']:,} windows"
    if cut.texts:
        lost = f"{cut.texts:,} texts cut by {cut.tokens:,} tokens"
    if missing:
        state = f"{listed(missing, 3)} lack parts, which other shards or this command make"
    work = "nothing new to encode"
    if summary["encoded_texts"]:
        rate = summary["encoded_tokens"] / max(summary["seconds"], 1e-9)
        work = (
            f"this run {summary['encoded_texts']:,} texts of {summary['encoded_tokens']:,} tokens "
            f"in {summary['seconds']:.1f} s ({rate:,.0f} tokens/s)"
        )
    return (
        f"{output}: {summary['texts']:,} texts{windows}; {work}; {lost}, the longest has "
        f"{cut.longest:,} tokens; {state}"
    )
