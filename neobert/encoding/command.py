"""`neobert encode SOURCE OUTPUT --model MODEL`: compute the embeddings of a corpus of any size.

Memory use is constant, and the work can be distributed over any number of processes, GPUs or
machines, which need no communication. A part contains the embeddings of at most `rows` rows of one
input file. The name of a part is determined by the file and the range of rows, and a part appears
complete or not at all, so a listing of OUTPUT shows which parts are missing. Running the command
again resumes an interrupted run, and adds the texts of new input files.
"""

import contextlib
import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from tqdm.auto import tqdm

from ..common import data
from ..common.errors import UserError, listed
from ..common.folders import LOCK, check_disjoint, locked
from ..common.identity import model_digest
from ..common.options import identity, log_options
from ..embeddings.options import check_limit
from .columns import copied_columns
from .folder import (
    MANIFEST_KEY,
    Folder,
    Parts,
    is_local,
    part_name,
    part_stem,
    read_metadata,
    remove_stale_temporary_files,
)
from .manifest import Manifest, Truncation
from .options import OPTIONS, CorpusOptions, EncodeOptions


if TYPE_CHECKING:
    from ..embeddings.packed_encoder import PackedEncoder
    from .corpus_encoder import CorpusEncoder

# Environment variables of torchrun and accelerate, and of srun: rank, number of processes, and rank
# on the machine.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
# Suffixes of files. An output with such a name is a mistake and not the name of a directory.
_OTHER_FORMATS = (
    *data.FORMATS,
    *(".npy", ".npz", ".pt", ".pth", ".bin", ".safetensors", ".pkl", ".h5", ".hdf5"),
    *(".arrow", ".feather", ".orc", ".avro", ".db", ".sqlite", ".faiss", ".index", ".gz", ".zip"),
)
# Key of the summary in the metadata of an output file.
SUMMARY_KEY = "neobert_input"


@dataclass(frozen=True)
class Shard:
    """Shard of the parts that this process encodes.

    Attributes:
        number: Index of the shard.
        count: Number of shards.
        local: Rank among the processes of this machine, which selects the GPU.
    """

    number: int = 0
    count: int = 1
    local: int = 0

    @classmethod
    def from_text(cls, text: str | None = None) -> "Shard":
        """Return the shard "i/n", or by default the shard for the rank of this process.

        Raises:
            UserError: If `text` is not a shard.
        """
        if text is None:
            for names in _LAUNCHERS:
                if all(name in os.environ for name in names):
                    return cls(*(int(os.environ[name]) for name in names))
            return cls()

        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or int(match[1]) >= int(match[2]):
            raise UserError(f"`shard` must be i/n with i from 0 to n-1, got {text!r}.")
        return cls(int(match[1]), int(match[2]))

    def owns(self, file: int, part: int, files: int) -> bool:
        """Return whether a part belongs to this shard.

        A process reads a file from its beginning to reach a part. Whole files are therefore
        distributed if there are many, and single parts otherwise.

        Args:
            file: Index of the file.
            part: Index of the part in the file.
            files: Number of files.
        """
        # Eight files per shard divide the work evenly enough. With fewer files, the sum of both
        # indices distributes files of a single part, too.
        is_by_file = files >= 8 * self.count
        return (file if is_by_file else file + part) % self.count == self.number


@dataclass(frozen=True)
class EncodeSummary:
    """Summary of an output and of one run.

    Attributes:
        texts: Number of texts in the output.
        embeddings: Number of embeddings in the output.
        truncation: Truncation statistics of the output.
        files: Input files, {name: bytes}.
        missing: Names of the input files whose parts are incomplete.
        encoded_texts: Number of texts that this run encoded.
        encoded_tokens: Number of tokens that this run encoded.
        seconds: Time of the encoding in this run.
    """

    texts: int
    embeddings: int
    truncation: Truncation
    files: dict[str, int]
    missing: list[str]
    encoded_texts: int = 0
    encoded_tokens: int = 0
    seconds: float = 0.0

    def describe(self, output: str) -> str:
        """Return the line that the command prints."""
        # Only windows give a text more than one embedding.
        windows = ""
        if self.embeddings != self.texts:
            windows = f" in {self.embeddings:,} windows"

        work = "nothing new to encode"
        if self.encoded_texts:
            rate = self.encoded_tokens / max(self.seconds, 1e-9)
            work = (
                f"this run {self.encoded_texts:,} texts of {self.encoded_tokens:,} tokens in "
                f"{self.seconds:.1f} s ({rate:,.0f} tokens/s)"
            )

        truncated = "none truncated"
        if self.truncation.texts:
            truncated = (
                f"{self.truncation.texts:,} texts truncated by {self.truncation.tokens:,} tokens"
            )

        state = "all parts are complete"
        if self.missing:
            state = (
                f"parts of {listed(self.missing, 3)} are missing; other shards or the same command "
                "without a shard encode them"
            )
        return (
            f"{output}: {self.texts:,} texts{windows}; {work}; {truncated}, the longest has "
            f"{self.truncation.longest:,} tokens; {state}"
        )


@dataclass(frozen=True)
class RunCounts:
    """Texts and tokens that one run encoded, and the time of the encoding in seconds."""

    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0


def encode(
    options: EncodeOptions, progress_bar: bool = True, encoder: "PackedEncoder | None" = None
) -> EncodeSummary:
    """Encode the texts of a corpus that belong to this process and have no embeddings yet.

    Args:
        options: Options of the command.
        progress_bar: Whether to show a progress bar.
        encoder: Encoder that has been loaded with these options; loaded by default.

    Raises:
        UserError: If an input is invalid, or if the output was written with other options.
    """
    shard = Shard.from_text(options.inference.shard)
    files, output = _check_paths(options.corpus, options.model.model, shard.count)

    # The output is identified by the options and the weights, wherever the model is stored. The
    # digest of a model that is not cached yet is unknown, and then its name identifies it.
    digest = model_digest(options.model.model)
    settings = identity(options)
    if digest != "unknown":
        settings["model"] = digest

    # The parts of a single file are written to a temporary directory and joined at the end.
    is_file = output.endswith(".parquet")
    folder = Folder(f"{output}.work" if is_file else output)
    finished = _finished_file(output, settings, files) if is_file else None
    if finished is not None and not folder.names():
        return finished

    lock = _locked(folder) if is_file else contextlib.nullcontext()
    with lock:
        # Another process may have finished the file before the directory was locked.
        finished = _finished_file(output, settings, files) if is_file else None
        if finished is not None:
            # A process that was killed after it had written the file has left its parts.
            folder.remove(output)
            return finished

        manifest = folder.read_manifest()
        parts: Parts = {}
        if manifest is not None:
            manifest.check_settings(settings, folder.url)
            parts = folder.parts(files, settings)

        counts = RunCounts()
        if not all(_is_complete(file, parts) for file in files):
            run = EncodeRun(options, settings, digest, shard, files, folder, parts)
            counts = run.encode(progress_bar, encoder)
            # The directory is listed again, because other shards have also written parts.
            manifest = folder.read_manifest()
            parts = folder.parts(files, settings)
        summary = _summarize(files, parts, counts)

        # Until all parts are complete, temporary files may belong to running processes.
        if not summary.missing:
            remove_stale_temporary_files(folder.filesystem, folder.path_of(""))
            if is_file and manifest is not None:
                _join(folder, output, manifest, summary, files, parts)
        return summary


def _summarize(files: Sequence[data.File], parts: Parts, counts: RunCounts) -> EncodeSummary:
    """Return the summary of an output with these parts, and of one run."""
    return EncodeSummary(
        texts=sum(part.texts for part in parts.values()),
        embeddings=sum(part.embeddings for part in parts.values()),
        truncation=sum((part.truncation for part in parts.values()), Truncation()),
        files={file.name: file.size for file in files},
        missing=[file.name for file in files if not _is_complete(file, parts)],
        encoded_texts=counts.texts,
        encoded_tokens=counts.tokens,
        seconds=counts.seconds,
    )


@contextlib.contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    """Lock the directory of the parts of a single file, if it is on a disk.

    Raises:
        UserError: If another process has locked the directory, or it contains other files.
    """
    # A directory of another program must not get a lock file.
    folder.read_manifest()
    if not is_local(folder.filesystem):
        yield
        return

    with locked(folder.path):
        try:
            yield
        finally:
            # An error before the first part leaves no directory.
            if folder.names() == [LOCK]:
                folder.filesystem.rm(folder.path, recursive=True)


@dataclass(frozen=True)
class EncodeRun:
    """Run that encodes the missing parts of an output.

    Attributes:
        options: Options of the command.
        settings: Options and weights that identify the output.
        digest: Digest of the model.
        shard: Shard of this process.
        files: Input files.
        folder: Directory of the parts.
        parts: Parts that exist.
    """

    options: EncodeOptions
    settings: dict[str, Any]
    digest: str
    shard: Shard
    files: Sequence[data.File]
    folder: Folder
    parts: Parts

    def encode(self, progress_bar: bool, encoder: "PackedEncoder | None") -> RunCounts:
        """Encode the missing parts of this shard.

        Args:
            progress_bar: Whether to show a progress bar.
            encoder: Encoder to use; loaded by default.

        Raises:
            UserError: If a column cannot be copied, or the model cannot be used with the options.
        """
        manifest = self.folder.read_manifest()
        if manifest is None:
            corpus_encoder, manifest = self._start_output(encoder)
        else:
            corpus_encoder = self._load(manifest.dtype, encoder)
        manifest.check_prompt(corpus_encoder.prompt, self.folder.url)

        # A run with nothing left to do ends before torch is imported.
        from .parts import encode_files

        # The generator writes the parts, and yields the counts of each block.
        todo = [file for file in self.files if not _is_complete(file, self.parts)]
        total = self._count_texts(todo) if progress_bar and self.shard.count == 1 else None
        texts = 0
        tokens = 0
        start = time.perf_counter()
        with tqdm(total=total, unit="text", disable=not progress_bar) as bar:
            blocks = encode_files(
                corpus_encoder,
                manifest,
                self.folder,
                todo,
                self.options.corpus,
                self._is_wanted,
                bar.update,
            )
            for block_texts, block_tokens in blocks:
                texts += block_texts
                tokens += block_tokens
        seconds = time.perf_counter() - start
        return RunCounts(texts, tokens, seconds)

    def _start_output(self, encoder: "PackedEncoder | None") -> "tuple[CorpusEncoder, Manifest]":
        """Write the manifest of a new output, and return it with the encoder."""
        # A column that cannot be copied is reported before the model is loaded.
        options = self.options
        is_windows = options.long_texts.long_texts == "windows"
        columns = copied_columns(options.corpus, self.files, is_windows)

        from ..common.loading import choose_dtype, dtype_name

        # All parts must have the same precision, so "auto" is measured only for a new output.
        dtype = dtype_name(choose_dtype(options.inference.dtype, self._device()))
        corpus_encoder = self._load(dtype, encoder)
        ranges = None
        if options.embeddings.output_dtype == "int8":
            ranges = corpus_encoder.ranges(self.files, options.corpus.text_column)

        # Shards may start at the same time. The first manifest is valid for all of them.
        new_manifest = corpus_encoder.manifest(self.settings, self.digest, columns, ranges)
        manifest = self.folder.write_manifest(new_manifest)
        manifest.check_settings(self.settings, self.folder.url)
        if manifest.dtype != corpus_encoder.encoder.dtype_name:
            # The process that wrote the manifest measured another precision as the fastest.
            corpus_encoder = self._load(manifest.dtype)
        return corpus_encoder, manifest

    def _load(self, dtype: str, encoder: "PackedEncoder | None" = None) -> "CorpusEncoder":
        """Return the corpus encoder, which loads a model unless `encoder` is one."""
        from ..embeddings.packed_encoder import PackedEncoder
        from .corpus_encoder import CorpusEncoder

        options = self.options
        if encoder is None:
            encoder = PackedEncoder(
                options.model.model,
                dtype,
                self._device(),
                options.inference.batch_tokens,
                **options.encoder.settings(),
            )
        # The encoder reduces a length above the limit of the model silently.
        check_limit("max_length", options.encoder.max_length, encoder.max_length)
        return CorpusEncoder(encoder, options.model, options.long_texts, options.embeddings)

    def _device(self) -> str:
        """Return the device of this process."""
        import torch

        from ..common.loading import choose_device

        # Under a launcher, each process uses the GPU of its local rank. A shard of the option
        # `--shard` may run on any GPU.
        device = str(choose_device(self.options.inference.device))
        if self.shard.count > 1 and device == "cuda" and self.options.inference.shard is None:
            device = f"cuda:{self.shard.local % torch.cuda.device_count()}"
        return device

    def _is_wanted(self, file: data.File, part: int) -> bool:
        """Return whether this process must encode a part."""
        # This is called for every row, so the position of a file is looked up, not searched.
        is_owned = self.shard.owns(self._positions[file], part, len(self.files))
        return is_owned and (file, part) not in self.parts

    @cached_property
    def _positions(self) -> dict[data.File, int]:
        """Positions of the input files."""
        return {file: position for position, file in enumerate(self.files)}

    def _count_texts(self, todo: Sequence[data.File]) -> int:
        """Return the number of texts of incomplete files that have no embeddings."""
        incomplete = set(todo)
        finished = sum(part.texts for (file, _), part in self.parts.items() if file in incomplete)
        return sum(map(data.count_rows, todo)) - finished


def _check_paths(
    corpus: CorpusOptions, model: str, shard_count: int
) -> tuple[list[data.File], str]:
    """Return the input files and the output.

    Raises:
        UserError: If the paths cannot be used.
    """
    source = corpus.source
    output = data.with_slashes(corpus.output).rstrip("/")
    is_file = output.endswith(".parquet")
    if not is_file and Path(output).suffix.lower() in _OTHER_FORMATS:
        raise UserError(
            f"`output` must be a directory or end in .parquet, got {output}. Convert the parquet "
            "file afterwards if you need another format."
        )
    if is_file and shard_count > 1:
        raise UserError(
            "`output` must be a directory for several shards, got a .parquet file. Parts are "
            "distributed over processes in a directory only."
        )

    # An output inside of the source would be read as input by the next run.
    files = data.files(source)
    if not data.is_glob(source):
        check_disjoint(output, source)
    parts_folder = f"{output}.work" if is_file else output
    outputs = [f"{parts_folder}/{part_name(file, 0)}" for file in files]
    data.check_not_matched(source, *([output, *outputs] if is_file else outputs))
    if Path(model).exists():
        check_disjoint(output, model)

    # Parts are named after their input file, so "a.csv" and "a.jsonl" would overwrite each other.
    counts = Counter(part_stem(file) for file in files)
    duplicates = [file.name for file in files if counts[part_stem(file)] > 1]
    if duplicates:
        raise UserError(
            f"input files must have different names without their suffixes, got "
            f"{listed(duplicates)}. Rename a file."
        )
    hidden = [file.name for file in files if part_stem(file).startswith(("_", "."))]
    if hidden and not is_file:
        raise UserError(
            f"the names of input files must not start with _ or . if the output is a directory, "
            f"got {listed(hidden)}. Readers of parquet directories would skip the embeddings. "
            "Rename the files, or use a single .parquet file as output."
        )
    return files, output


def _finished_file(
    output: str, settings: dict[str, Any], files: Sequence[data.File]
) -> EncodeSummary | None:
    """Return the summary of a finished output file, or None if the file does not exist.

    Raises:
        UserError: If the file was written with other settings or from other texts.
    """
    # fsspec caches listings, and another process may have written the file since then.
    filesystem, path = fsspec.url_to_fs(output)
    filesystem.invalidate_cache()
    if not filesystem.exists(path):
        return None

    _, manifest, summary = read_metadata(filesystem, path, MANIFEST_KEY, SUMMARY_KEY)
    Manifest.from_json(manifest, output).check_settings(settings, output)
    if summary["files"] != {file.name: file.size for file in files}:
        names = listed([file.name for file in files], 5)
        raise UserError(
            f"{output} must contain the current texts of {names}, got an earlier output of "
            f"{listed(summary['files'], 5)}. Remove it (rm -r {output}), or use a directory as "
            "output, to which texts can be added."
        )
    truncation = Truncation(**summary.pop("truncation"))
    return EncodeSummary(**summary, truncation=truncation)


def _join(
    folder: Folder,
    output: str,
    manifest: Manifest,
    summary: EncodeSummary,
    files: Sequence[data.File],
    parts: Parts,
) -> None:
    """Write all parts as one file, and remove them."""
    # The rows have the order of the input files and of the rows in them.
    order = {file: index for index, file in enumerate(files)}
    keys = sorted(parts, key=lambda key: (order[key[0]], key[1]))
    names = [part_name(file, number) for file, number in keys]

    # The file describes the output, and not the run that completed it.
    summary_fields = dataclasses.asdict(summary)
    for name in ("encoded_texts", "encoded_tokens", "seconds"):
        del summary_fields[name]
    metadata = {MANIFEST_KEY: manifest.to_json(), SUMMARY_KEY: json.dumps(summary_fields)}
    folder.join(names, output, manifest.arrow_schema, metadata)
    folder.remove(output)


def _is_complete(file: data.File, parts: Parts) -> bool:
    """Return whether all parts of a file exist."""
    # The number of parts is unknown until the file has been read. The last part records that it is.
    number = 0
    while part := parts.get((file, number)):
        if part.last:
            return True
        number += 1
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert encode`, and return the exit code."""
    options = OPTIONS["encode"].read(argv or [])
    log_options(options)
    print(encode(options).describe(options.corpus.output))
    return 0
