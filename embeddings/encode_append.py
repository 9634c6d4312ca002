"""`neobert encode --append`: texts that are added to a finished output.

The parts of the new texts are made beside the output, in a run of their own. When all are complete
they come into it: a file is written anew and replaces the old one in one rename; into a folder they
are put as further parts, and then its manifest names them in one rename. Until then the output is
as it was. The output says which runs it holds, so that a killed one neither comes in twice nor is
lost.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from ..common.errors import UserError, listed
from ..common.files import link_or_copy, read_json, remove_left_overs, write_json
from ..common.runs import locked, split_files, stamps
from .encode_parts import (
    CUT,
    MARK,
    PLACES,
    PLAN,
    TEXTS,
    Cut,
    is_output,
    is_part,
    is_regular,
    merge_parts,
    part_path,
    read_mark,
)
from .stamps import Stamp


MANIFEST = "encode.json"
APPENDED = "neobert_appended"  # key of the ids of the runs that were added, in a file's metadata


@dataclass(frozen=True)
class Base:
    """A finished output.

    Attributes:
        output: file or folder.
        runs: ids of the runs whose texts it holds.
        texts: their number.
        parts: paths of a folder's parts; the file itself.
        stamp: of its vectors.
        metadata: of the file, or of the first part.
    """

    output: Path
    runs: list
    texts: int
    parts: list
    stamp: Stamp
    metadata: dict

    @classmethod
    def of(cls, output, is_file):
        """The base at `output`. UserError where there is none that can be added to."""
        if not os.path.lexists(output):
            raise UserError(f"there is no {output} to append to; leave out --append")
        if is_file:
            if not is_output(output, MARK):
                raise UserError(f"{output} was not written by neobert encode, or was changed since")
            metadata = read_mark(output)[1]
            runs = [metadata["run"], *json.loads(metadata.get(APPENDED, "[]"))]
            parts, texts = [output], int(metadata.get(TEXTS, 0))
        else:
            manifest = _manifest(output)
            runs = [manifest["run"], *(one["run"] for one in manifest.get("appended", []))]
            names = sorted(name for name in manifest["files"] if name.startswith("part-"))
            parts, texts = [output / name for name in names], manifest["finished"]["rows"]
            metadata = (read_mark(parts[0]) or (0, {}))[1]
        stamp = Stamp.read(metadata)
        if stamp is None:
            raise UserError(
                f"{output} does not say what made its vectors, as those of older versions do not; "
                "make it anew"
            )
        return cls(output, runs, texts, parts, stamp, metadata)

    @property
    def is_file(self):
        return self.parts == [self.output]

    @property
    def format(self):
        """ "parquet" or "safetensors"."""
        return self.parts[0].suffix[1:]

    @property
    def mark(self):
        """What a run that adds to it remembers of it."""
        return {"runs": self.runs, "texts": self.texts}

    @property
    def columns(self):
        """Arrow schema of the columns that are copied from the input."""
        if self.format == "safetensors":
            return pyarrow.schema([])
        schema = pyarrow.parquet.read_schema(self.parts[0])
        own = ["embedding"] if self.stamp.long_texts == "cut" else [*PLACES, "embedding"]
        return pyarrow.schema([field for field in schema if field.name not in own])

    def check_columns(self, schema):
        """Raises UserError for copied columns of another name or type."""
        before, now = (
            listed(f"{field.name} ({field.type})" for field in given) or "none"
            for given in (self.columns, schema)
        )
        if before != now:
            raise UserError(
                f"{self.output} has the columns {before} beside its vectors, but the input gives "
                f"{now}; give the same columns"
            )

    @contextlib.contextmanager
    def claimed(self, folder):
        """Within it nobody else works in the output. Removes what killed runs left.

        Args:
            folder: of the parts that are to be added.
        Raises:
            UserError: another run is at work.
        """
        with contextlib.nullcontext() if self.is_file else locked(self.output):
            with locked(folder):
                remove_left_overs(folder)
                if self.is_file:
                    remove_left_overs(self.output.parent, self.output.name)
                else:
                    remove_left_overs(self.output)
                left = read_json(folder / MANIFEST) if is_regular(folder / MANIFEST) else {}
                if left.get("run") in self.runs:  # killed after its texts had come into the output
                    remove_run(folder, left["run"])
            yield

    def check_unchanged(self):
        """Raises UserError if the output is no longer as it was read."""
        if Base.of(self.output, self.is_file) != self:
            raise UserError(f"{self.output} was changed meanwhile; give the command again")

    def check_same(self, mark, run):
        """Raises UserError if the output is no longer what a run that adds to it began with."""
        self.check_unchanged()
        if self.mark != mark:
            raise UserError(
                f"{self.output} changed since texts were begun to be added to it; remove "
                f"{run.folder}, and give the command again"
            )

    def add(self, run, job, cut):
        """Brings the complete parts of a run into the output.

        Args:
            run, job: of the texts that are added.
            cut: `Cut` of these texts.
        """
        self.check_unchanged()
        parts = [job.path(number) for number in range(len(job.plan.windows))]
        (self._add_to_file if self.is_file else self._add_to_folder)(run, job, cut, parts)

    def _add_to_file(self, run, job, cut, parts):
        total = Cut.total([Cut.read(self.metadata), cut])
        mark = {
            **self.metadata,
            CUT: total.text(),
            TEXTS: str(self.texts + job.plan.rows),
            APPENDED: json.dumps([*self.runs[1:], run.id]),
        }
        mark.pop("ARROW:schema", None)
        before = stamps(self.output.parent, [self.output.name])

        def check():
            if stamps(self.output.parent, [self.output.name]) != before:
                raise UserError(f"{self.output} was changed meanwhile; nothing was added to it")

        merge_parts([self.output, *parts], self.output, mark, check)

    def _add_to_folder(self, run, job, cut, parts):
        manifest, names = _manifest(self.output), []
        for number, part in enumerate(parts, len(self.parts)):
            path = part_path(self.output, number, self.format)
            names.append(path.name)
            if not os.path.lexists(path):
                link_or_copy(part, path)
            elif not is_part(path, job.part_mark(number - len(self.parts))):
                raise UserError(
                    f"{path} is not a part of this run; move it, and give the same command again"
                )
        finished = manifest["finished"]
        finished["rows"] += job.plan.rows
        finished["parts"] += len(parts)
        finished["vectors"] += sum(read_mark(part)[0] for part in parts)
        finished["cut"] = Cut.total([Cut(**finished["cut"]), cut])._asdict()
        added = {"run": run.id, "input": run.settings["input"]["name"], "rows": job.plan.rows}
        manifest["appended"] = [*manifest.get("appended", []), {**added, "files": names}]
        manifest["files"] |= stamps(self.output, names)
        write_json(self.output / MANIFEST, manifest)


def _manifest(folder):
    """The manifest of a finished folder, its parts as they were written."""
    path = folder / MANIFEST
    manifest = read_json(path, 2**26) if is_regular(path) else {}
    if manifest.get("command") != "encode":
        raise UserError(f"{folder} was not written by neobert encode")
    if "files" not in manifest:
        raise UserError(f"{folder} is not finished; give the command that began it again")
    missing = manifest["files"].keys() - {
        path.name for path in split_files(folder, manifest["files"])[0]
    }
    if missing:
        raise UserError(f"{folder} lacks files, or they were changed: {listed(sorted(missing), 5)}")
    return manifest


def remove_run(folder, run):
    """Removes what a run made in `folder` on its way, its marker last."""
    for path in folder.glob("part-*"):
        if is_part(path, MARK | {"run": run}):
            path.unlink()
    for name in (PLAN, MANIFEST):
        (folder / name).unlink(missing_ok=True)
