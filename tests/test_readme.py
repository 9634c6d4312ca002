"""Pins the README: every Python snippet runs and prints what it says, every command exists, every link and extra leads somewhere, every figure is
that of its file, and every published score is marked as such and the paper's.

The snippets load the bundled masked LM in place of the published one, which cannot be fetched in a test.
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
from neobert.common.published import GLUE, MTEB


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
    encoder = ROOT / "examples" / "sentence-encoder"
    for name, folder in (("chandar-lab/NeoBERT", bundled), ("runs/demo", bundled), ("examples/sentence-encoder", encoder)):
        source = source.replace(f'"{name}"', repr(str(folder)))
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {})
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


def table(heading):
    """Cells of the rows below a heading, without the header."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")][2:]


def test_published_scores_are_the_papers():
    assert "not measured here" in README.split("## Scores")[1].split("## ")[0]
    rows = table("Scores")
    assert rows[0] == ["NeoBERT-4096", "245M", "89.0", "51.3"]
    for name, _, glue, mteb in rows:
        assert (float(glue), float(mteb)) == (GLUE[name][-1], MTEB[name][-1]), f"{name} has other scores in the paper"


def test_figures_are_those_of_the_results():
    file, checked = None, 0
    for _, figure, named in table("Numbers"):
        file = file if named == "same file" else ROOT / named.strip("`")
        for number in re.findall(r"\b\d+\.\d+", figure):
            text = file.read_text(encoding="utf-8")
            assert re.search(rf"\b{re.escape(number)}\b", text), f"{file.name} has no {number}, which the README takes from it"
            checked += 1
    assert checked >= 9


def test_commands_extras_and_files_exist():
    for page in PAGES:
        for command in re.findall(r"`neobert ([a-z-]+)[ `]", page):
            assert command in COMMANDS, f"there is no command neobert {command}"
    setup = (ROOT / "setup.cfg").read_text()
    for extra in re.findall(r"'\.\[(\w+)\]'", README):
        assert re.search(rf"^{extra} ?=", setup, flags=re.MULTILINE), f"setup.cfg has no extra {extra}"
    for name in re.findall(r"`([\w./-]+\.(?:py|yaml|json|md))`", README) + re.findall(r"\]\(((?!http)[\w./-]+)\)", README):
        assert (ROOT / name).exists(), f"the README names {name}, which does not exist"
