"""Pins the README: every Python snippet runs and prints what it says, every command exists, every link and extra leads somewhere.

The snippets load the bundled small model in place of the published one, which cannot be fetched in a test.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from neobert.__main__ import COMMANDS


ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *((path).read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("source", blocks("python"), ids=lambda source: source.splitlines()[-1][:40])
def test_python_snippet(source, bundled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    width = str(json.loads((bundled / "config.json").read_text())["hidden_size"])
    expected = [line[2:].replace("768", width) for line in source.splitlines() if line.startswith("# ")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source.replace('"chandar-lab/NeoBERT"', repr(str(bundled))), "README.md", "exec"), {})
    for line in expected:
        assert line in printed.getvalue(), f"the README promises {line!r}, but the snippet printed {printed.getvalue()!r}"


@pytest.mark.parametrize("command", [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()])
def test_command(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        check = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    elif words[:2] == ["python", "convert_checkpoint.py"]:
        words = [sys.executable, *(word.replace("runs/", f"{tmp_path}/") for word in words[1:])]
        check = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    else:
        pytest.fail(f"no test runs {command!r}")
    assert check.returncode == 0, f"{command!r} failed: {check.stderr[-500:]}"


def test_metadata():
    metadata = yaml.safe_load(README.split("---")[1])
    assert metadata["license"] == "mit" and metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "fill-mask"
    assert "custom_code" in metadata["tags"], "the Hub would not say that the repository holds code"


def test_commands_extras_and_files_exist():
    for page in PAGES:
        for command in re.findall(r"`neobert ([a-z-]+)[ `]", page):
            assert command in COMMANDS, f"there is no command neobert {command}"
    setup = (ROOT / "setup.cfg").read_text()
    for extra in re.findall(r"'\.\[(\w+)\]'", README):
        assert re.search(rf"^{extra} ?=", setup, flags=re.MULTILINE), f"setup.cfg has no extra {extra}"
    for name in re.findall(r"`([\w./-]+\.(?:py|yaml|json|md))`", README) + re.findall(r"\]\(((?!http)[\w./-]+)\)", README):
        assert (ROOT / name).exists(), f"the README names {name}, which does not exist"
