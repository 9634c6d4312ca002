"""The output folder of a command that works for long: whose run it holds, whether that is finished,
and that no second process has it.

    output = Output("runs/mine", "contrastive", settings)
    if output.state() == "finished": ...
    with output.claim():                  # checkpoints and what else the work needs go into it
        with output.final_files() as folder:
            model.save_pretrained(folder)
        output.finish(steps=100)

`run.json` says which run has begun in a folder. `result.json`, the last file, says that it is
finished. Nothing that is there before is ever replaced or removed.
"""

import contextlib
import json
import os
import re
import shutil
from dataclasses import asdict, fields
from pathlib import Path

from .errors import UserError, listed
from .files import read_json, redacted, write_json
from .folders import LOCK, check_folder, flush, locked


RUN, RESULT = "run.json", "result.json"
_FINAL = ".final.tmp"


def run_settings(*options):
    """{name: value} of the options that a run is known by: all fields of these dataclasses but
    those with `free=True`."""
    values = {}
    for group in options:
        known = {f.name for f in fields(group) if f.init and not f.metadata.get("free")}
        values |= {name: value for name, value in asdict(group).items() if name in known}
    return values


def differences(previous, settings):
    """What differs between two dicts of settings, in words: "seed 1, now 2"; "" where nothing
    does."""
    return listed(
        (
            f"{name} {previous.get(name)!r:.60}, now {settings.get(name)!r:.60}"
            for name in {**previous, **settings}
            if previous.get(name) != settings.get(name)
        ),
        5,
    )


class Output:
    """The run of a command in its output folder.

    Args:
        folder: may not be there yet.
        command: name of the command.
        settings: what the run is known by: options, and digests of what is read.
        result: name of the last file.
        beside: names of what may be in the folder before the run: `prepared`, for example.
    Attributes:
        settings: of JSON types and without secrets.
    """

    def __init__(self, folder, command, settings, result=RESULT, beside=()):
        self.folder, self.command = Path(folder), command
        self.settings = json.loads(json.dumps(redacted(settings), default=str))
        self.result, self.beside = self.folder / result, {*beside, LOCK}

    def state(self):
        """ "new", "begun" or "finished", as the folder says; changes nothing.

        Raises:
            UserError: it holds other files, or a run with other settings that has written some.
        """
        check_folder(self.folder)
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        names = {path.name for path in paths if not re.fullmatch(r"\..*\.tmp", path.name)}
        for path, state in ((self.result, "finished"), (self.folder / RUN, "begun")):
            if path.name not in names:
                continue
            record = read_json(path)
            if record.get("neobert") != self.command:
                break
            other = differences(record["settings"], self.settings)
            if not other:
                return state
            if not names - self.beside - {RUN}:
                return "new"  # that run ended before it had written anything
            raise UserError(
                f"{self.folder} holds a run with other settings ({other}); give the same, or "
                "choose another output"
            )
        if others := sorted(names - self.beside):
            raise UserError(
                f"{self.folder} holds other files ({listed(others, 3)}); choose another output, or "
                "remove it yourself"
            )
        return "new"

    @contextlib.contextmanager
    def claim(self):
        """Within it no other process has the folder, which is made if it is not there.

        Raises:
            UserError: another process has it, or as `state`.
        """
        self.state()
        with locked(self.folder):
            if self.state() == "new":
                write_json(self.folder / RUN, {"neobert": self.command, "settings": self.settings})
            yield self

    @property
    def scratch(self):
        """The folder of `final_files`."""
        return self.folder / _FINAL

    @contextlib.contextmanager
    def final_files(self):
        """An empty folder, whose files come into the output, one rename each, when the block ends
        well."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        yield self.scratch
        for path in sorted(path for path in self.scratch.rglob("*") if path.is_file()):
            flush(path)
            target = self.folder / path.relative_to(self.scratch)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        shutil.rmtree(self.scratch)

    def finish(self, **content):
        """Writes the last file: the command, the settings, and `content`."""
        record = {"neobert": self.command, "settings": self.settings, **redacted(content)}
        write_json(self.folder / RUN, record)
        os.replace(self.folder / RUN, self.result)
