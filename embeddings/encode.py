"""`neobert encode IN OUT --model MODEL`: embeddings of a corpus of any size, in constant memory, by several processes or GPUs, resumable.

The input is read window by window (`shard_rows` rows or `shard_characters` characters, whichever is first). A window is tokenized, sorted by
length, packed into batches of `tokens_per_batch` tokens, and written as one part in the input's order. A part appears whole or not at
all, so an interrupted run continues with the first missing part.
"""

import json
import multiprocessing
import os
import queue
import shutil
import struct
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from ..common.errors import UserError, require
from ..common.files import check_apart, check_folder, check_replaceable, remove_set_aside, set_aside, write_json
from ..common.identity import weights_digest
from ..common.loading import choose_device, choose_dtype
from ..common.recipe import read_recipe
from ..common.results import environment
from ..common.rows import check_corpus, corpus_columns, read_corpus
from .packed_encoder import TOKENS_HELP, PackedEncoder


USAGE = """usage: neobert encode IN OUT --model MODEL [--key value ...]

IN   a .jsonl or .parquet file with a text column
OUT  a file (.parquet or .safetensors), or a folder of parts
"""
FORMATS = ("parquet", "safetensors")
MANIFEST = "encode.json"
# Names of a folder's parts, finished and on the way.
PARTS = tuple(f"{dot}part-*.{format}{end}" for format in FORMATS for dot, end in (("", ""), (".", ".*")))
# In a single file's own metadata, so that it can be told from a file of somebody else.
MARK = {"neobert": "encode"}


@dataclass
class EncodeArguments:
    """Options of `neobert encode`."""

    model: str = field(metadata={"help": "sentence encoder or bare encoder: a folder or a Hub name"})
    text_column: str = field(default="text", metadata={"help": "column that holds the text"})
    keep: str | None = field(
        default=None, metadata={"help": "columns to copy to a parquet output, separated by commas; 'id' where there is one"}
    )
    format: str = field(default="parquet", metadata={"help": "parquet or safetensors, where OUT is a folder"})
    prompt_name: str | None = field(default=None, metadata={"help": "name of one of the model's prompts to put before each text"})
    prompt: str | None = field(default=None, metadata={"help": "text to put before each text"})
    pooling: str = field(default="mean", metadata={"help": "mean or cls, for a bare encoder"})
    tokenizer: str | None = field(default=None, metadata={"help": "tokenizer, where the model's folder has none"})
    max_length: int | None = field(default=None, metadata={"help": "tokens per text; longer texts are truncated"})
    normalize: bool = field(default=False, metadata={"help": "scale the vectors to length 1"})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, float16 or bfloat16 for the model"})
    output_dtype: str = field(default="float32", metadata={"help": "float32 or float16 in the output"})
    attn_implementation: str | None = field(default=None, metadata={"help": "attention implementation of transformers"})
    tokens_per_batch: int | None = field(default=None, metadata={"help": TOKENS_HELP})
    shard_rows: int = field(default=8192, metadata={"help": "most rows in a part"})
    shard_characters: int = field(default=32_000_000, metadata={"help": "most characters in a part (a longer text is a part of its own)"})
    processes: int | None = field(default=None, metadata={"help": "worker processes; one a GPU, or one"})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, cuda:1, ...; GPUs are shared out among the processes"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run the model repository's own code"})
    overwrite: bool = field(default=False, metadata={"help": "make OUT anew where neobert encode wrote it; any other file is left alone"})

    def __post_init__(self):
        for name in ("shard_rows", "shard_characters"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, but {getattr(self, name)} was given")
        for name in ("processes", "tokens_per_batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, but {getattr(self, name)} was given")
        if self.format not in FORMATS:
            raise UserError(f"format must be one of {', '.join(FORMATS)}, but {self.format!r} was given")
        if self.output_dtype not in ("float32", "float16"):
            raise UserError(f"output_dtype must be float32 or float16, but {self.output_dtype!r} was given")
        if self.prompt is not None and self.prompt_name is not None:
            raise UserError("give either prompt or prompt_name, not both")
        choose_dtype(self.dtype, "cpu")
        choose_device(self.device)


# Settings that change the vectors or how they lie in the parts: a run is only continued with the same ones.
_FIXED = (
    "model", "text_column", "keep", "format", "prompt_name", "prompt", "pooling", "tokenizer", "max_length", "normalize", "dtype",
    "output_dtype", "shard_rows", "shard_characters",
)  # fmt: skip


def windows(rows, text_column, shard_rows, shard_characters):
    """Yields lists of rows in order, each at most `shard_rows` rows and `shard_characters` characters, or a single row."""
    window, characters = [], 0
    for row in rows:
        length = len(row[text_column])
        if window and (len(window) == shard_rows or characters + length > shard_characters):
            yield window
            window, characters = [], 0
        window.append(row)
        characters += length
    if window:
        yield window


def build_encoder(arguments, device, encoder=None):
    """The `PackedEncoder` of these arguments on `device` (or the one given), and the text of its prompt."""
    encoder = encoder or PackedEncoder.from_arguments(arguments, device)
    return encoder, encoder.prompt(arguments.prompt_name) if arguments.prompt is None else arguments.prompt


def write_part(path, rows, vectors, arguments, keep):
    """Writes one part whole or not at all.

    Args:
        vectors: (N, width).
        keep: {column to copy: its Arrow type}, the same for all parts.
    """
    if arguments.normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    vectors = vectors.astype(arguments.output_dtype, copy=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({"embeddings": np.ascontiguousarray(vectors)}, temporary, metadata=MARK)
    else:
        import pyarrow
        import pyarrow.parquet

        values = pyarrow.array(vectors.reshape(-1))
        columns = {name: pyarrow.array([row[name] for row in rows], kind) for name, kind in keep.items()}
        columns["embedding"] = pyarrow.FixedSizeListArray.from_arrays(values, vectors.shape[1])
        # Vectors of floats do not compress.
        pyarrow.parquet.write_table(pyarrow.table(columns, metadata=MARK), temporary, compression="none", use_dictionary=False)
    os.replace(temporary, path)


def encode_windows(encoder, prompt, jobs, arguments, keep, progress):
    """Encodes and writes `jobs`, an iterator of (path, rows); the next window is tokenized while one is embedded.

    Args:
        progress: called with (rows, tokens) of each finished batch or part.
    """

    def tokenized():
        job = next(jobs, None)
        return job and (*job, encoder.tokenize([row[arguments.text_column] for row in job[1]], prompt))

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(tokenized)
        while (job := following.result()) is not None:
            path, rows, tokens = job
            following = pool.submit(tokenized)
            vectors = encoder.embed(tokens, lambda count: progress(count, 0))
            write_part(path, rows, vectors, arguments, keep)
            progress(0, sum(map(len, tokens)))


def _worker(number, jobs, reports, arguments, keep, device, threads):
    """A process: takes (path, rows) from `jobs` until None comes, and reports ("progress", rows, tokens), ("done",) or ("error", text)."""
    try:
        torch.set_num_threads(threads)
        encoder, prompt = build_encoder(arguments, device)
        encode_windows(encoder, prompt, iter(jobs.get, None), arguments, keep, lambda *counts: reports.put(("progress", *counts)))
        reports.put(("done",))
    except KeyboardInterrupt:
        pass
    except BaseException:
        reports.put(("error", f"process {number}: {traceback.format_exc()}"))


def encode_in_processes(count, jobs, arguments, keep, progress):
    """`encode_windows` shared out among `count` processes; at most 2 windows a process wait in memory."""
    context = multiprocessing.get_context("spawn")
    waiting, reports = context.Queue(maxsize=2 * count), context.Queue()
    gpus = torch.cuda.device_count() if choose_device(arguments.device) == torch.device("cuda") else 0
    threads = max(1, torch.get_num_threads() // count)
    workers = []
    for number in range(count):
        device = f"cuda:{number % gpus}" if gpus else str(choose_device(arguments.device))
        job = (number, waiting, reports, arguments, keep, device, threads)
        workers.append(context.Process(target=_worker, args=job, daemon=True))
        workers[-1].start()
    done, pending, ends = 0, next(jobs, None), 0
    try:
        while done < count:
            while ends < count:
                try:
                    waiting.put_nowait(pending)
                except queue.Full:
                    break
                ends += pending is None
                pending = next(jobs, None)
            try:
                kind, *values = reports.get(timeout=0.2)
            except queue.Empty:
                dead = next((worker for worker in workers if worker.exitcode not in (None, 0)), None)
                if dead is not None:
                    raise RuntimeError(f"a worker process ended with code {dead.exitcode}; the finished parts are kept") from None
                continue
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
        waiting.cancel_join_thread()


def merge_parts(parts, output):
    """One file from its parts, part by part, whole or not at all; rows keep their order."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        (_merge_safetensors if output.suffix == ".safetensors" else _merge_parquet)(parts, temporary)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)


def _merge_parquet(parts, target):
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(parts[0])
    with pyarrow.parquet.ParquetWriter(target, schema, compression="none", use_dictionary=False) as writer:
        for part in parts:
            writer.write_table(pyarrow.parquet.read_table(part).cast(schema))


def _merge_safetensors(parts, target):
    """The library writes a file from tensors in memory only; the format is 8 bytes of header size, a JSON header, and the data."""
    from safetensors import safe_open

    def load(part):
        with safe_open(part, framework="numpy") as file:
            return file.get_tensor("embeddings")

    rows, (_, width) = 0, load(parts[0]).shape
    for part in parts:
        with safe_open(part, framework="numpy") as file:
            rows += file.get_slice("embeddings").get_shape()[0]
    dtype = load(parts[0]).dtype
    size = rows * width * dtype.itemsize
    name = {"float32": "F32", "float16": "F16"}[dtype.name]
    header = {"__metadata__": MARK, "embeddings": {"dtype": name, "shape": [rows, width], "data_offsets": [0, size]}}
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    with open(target, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for part in parts:
            file.write(load(part).tobytes())


def _prepare(source, output, arguments):
    """Checks everything that can be checked before work begins; returns the parts' folder, {kept column: type}, the columns to read, the rows."""
    check_apart(output, source)
    single = output.suffix[1:] in FORMATS
    if single:
        arguments.format = output.suffix[1:]
    elif output.suffix and not output.is_dir():
        raise UserError(f"OUT must end in .parquet or .safetensors, or be a folder, but {output} was given")
    check_folder(output.parent if single else output, "OUT")
    available = corpus_columns(source) if source.is_file() and source.suffix in (".jsonl", ".parquet") else []
    keep = [name.strip() for name in arguments.keep.split(",") if name.strip()] if arguments.keep else []
    if keep and arguments.format == "safetensors":
        raise UserError("safetensors holds no other columns (row i belongs to row i of the input); leave out --keep, or write parquet")
    if arguments.keep is None and "id" in available and arguments.format == "parquet":
        keep = ["id"]
    if "embedding" in keep:
        raise UserError("the output's own column is called 'embedding'; leave it out of --keep")
    columns = [arguments.text_column, *(name for name in keep if name != arguments.text_column)]
    by_itself = {"id"} if arguments.keep is None and arguments.format == "parquet" else set()
    rows, keep = check_corpus(source, columns, [arguments.text_column], keep, by_itself.__contains__)
    folder = output.with_name(f"{output.name}.parts") if single else output
    if single and output.exists():
        if not arguments.overwrite:
            raise UserError(f"{output} exists already; choose another name, or give --overwrite")
        if not _is_ours(output):
            raise UserError(
                f"{output} was not written by neobert encode, so it is not replaced; choose another name, or remove it yourself"
            )
    if arguments.overwrite and folder.is_dir() and any(folder.iterdir()):
        check_replaceable(folder, "encode", PARTS)
    return folder, keep, columns, rows


def _is_ours(path):
    """Whether a single file carries the mark of `neobert encode`."""
    import pyarrow.parquet
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".parquet":
            metadata = pyarrow.parquet.read_schema(path).metadata or {}
            return all(metadata.get(name.encode()) == value.encode() for name, value in MARK.items())
        with safe_open(path, framework="numpy") as file:
            return MARK.items() <= (file.metadata() or {}).items()
    except (OSError, ValueError, SafetensorError):
        return False


def _manifest(source, arguments, rows):
    stat = source.stat()
    return {
        "command": "encode",
        "input": {"name": source.name, "bytes": stat.st_size, "modified": stat.st_mtime_ns, "rows": rows},
        "settings": {name: asdict(arguments)[name] for name in _FIXED} | {"weights": weights_digest(arguments.model)},
    }


def _open_folder(folder, manifest):
    """Creates the parts' folder, or checks that it holds a run with the same input and settings."""
    path = folder / MANIFEST
    if path.is_file():
        begun = json.loads(path.read_text())
        for part, what in (("input", "another input"), ("settings", "other settings")):
            changed = [name for name, value in manifest[part].items() if begun.get(part, {}).get(name) != value]
            if changed:
                raise UserError(f"{folder} was begun with {what} ({', '.join(changed)} differ); choose another OUT, or give --overwrite")
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} holds other files; choose another OUT")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, manifest)


def encode(source, output, arguments, progress_bar=True, encoder=None):
    """Embeds a corpus.

    Args:
        source: .jsonl or .parquet file.
        output: .parquet or .safetensors file, or a folder of parts.
        arguments: `EncodeArguments`.
        encoder: the `PackedEncoder` of these arguments, where it is loaded already; for one process.
    Returns:
        dict with rows, the tokens and seconds of this run, and the number of parts.
    Raises:
        UserError: bad input, before any work; or OUT holds something else.
    """
    source, output = Path(source), Path(os.path.realpath(output))
    folder, keep, columns, total = _prepare(source, output, arguments)
    processes = arguments.processes
    if processes is None:
        processes = max(1, torch.cuda.device_count()) if choose_device(arguments.device) == torch.device("cuda") else 1
    single_encoder = build_encoder(arguments, arguments.device, encoder) if processes == 1 else None
    if single_encoder is None:
        build_encoder(arguments, "cpu")  # a model that cannot be loaded is found before any process starts
    if arguments.overwrite and folder.is_dir() and any(folder.iterdir()):
        set_aside(folder, "encode", PARTS)
    _open_folder(folder, manifest := _manifest(source, arguments, total))
    for left in (*folder.glob(".part-*"), *output.parent.glob(f".{output.name}.[0-9]*")):  # of a killed run
        left.unlink(missing_ok=True)

    parts, counts, start = [], {"rows": 0, "tokens": 0}, time.perf_counter()
    with tqdm(total=total, desc="texts", unit="text", disable=not progress_bar) as bar:

        def progress(rows, tokens):
            bar.update(rows)
            counts["rows"] += rows
            counts["tokens"] += tokens

        def jobs():
            rows = read_corpus(source, columns)
            for number, window in enumerate(windows(rows, arguments.text_column, arguments.shard_rows, arguments.shard_characters)):
                path = folder / f"part-{number:06d}.{arguments.format}"
                parts.append(path)
                if path.exists():
                    bar.update(len(window))
                    bar.refresh()
                else:
                    yield path, window

        if single_encoder is not None:
            encode_windows(*single_encoder, jobs(), arguments, keep, progress)
        else:
            encode_in_processes(processes, jobs(), arguments, keep, progress)
    seconds = time.perf_counter() - start
    summary = {"rows": total, "parts": len(parts), "encoded_rows": counts["rows"], "encoded_tokens": counts["tokens"], "seconds": seconds}
    if output != folder:
        merge_parts(parts, output)
        shutil.rmtree(folder)
    else:
        write_json(folder / MANIFEST, {**manifest, "finished": summary, "environment": environment(dtype=arguments.dtype)})
    remove_set_aside(folder, "encode", PARTS)
    return summary


def main(argv=None):
    """`neobert encode IN OUT --model MODEL`; returns the exit code."""
    argv = list(argv or [])
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        read_recipe((EncodeArguments,), ["--help"], prog="neobert encode IN OUT")
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        raise UserError("give the input and the output first: neobert encode IN OUT --model MODEL")
    require("eval", "sentence_transformers", "pyarrow")
    source, output, *rest = argv
    (arguments,) = read_recipe((EncodeArguments,), rest, prog="neobert encode IN OUT")
    summary = encode(source, output, arguments)
    rate = summary["encoded_tokens"] / max(summary["seconds"], 1e-9)
    print(
        f"{output}: {summary['rows']:,} texts; this run {summary['encoded_rows']:,} texts of {summary['encoded_tokens']:,} tokens "
        f"in {summary['seconds']:.1f} s ({rate:,.0f} tokens/s)"
    )
    return 0
