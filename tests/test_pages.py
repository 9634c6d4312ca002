"""Pins the commands of the pages in docs/: every command, script, recipe and option in them exists
today, and each opens with its use."""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest
from transformers import TrainingArguments

from neobert.__main__ import COMMANDS


ROOT = Path(__file__).resolve().parent.parent
# What the options that a page names belong to.
ROOMS = {
    "conversion": ["conversion"],
    "pretraining": ["pretraining"],
    "adaptation": ["pretraining", "embeddings", "benchmarks"],
    "finetuning": ["finetuning", "pretraining"],
    "embeddings": ["embeddings"],
    "distillation": ["embeddings"],
    "performance": ["benchmarks", "throughput"],
    "serving": ["export"],
    "compatibility": [],
    "development": [],
    "troubleshooting": [],
}
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ROOMS}
TRAINER = {field.name for field in dataclasses.fields(TrainingArguments)}


def commands(page):
    """The words of every command line of a page's bash blocks, without comments and the launcher
    before them."""
    for block in re.findall(r"```bash\n(.*?)```", PAGES[page], flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for start in ("neobert", "python"):
                if start in words:
                    yield words[words.index(start) :]
                    break


def options_of(words):
    """Names that a command's options may have, by its code."""
    if words[0] == "neobert":
        options = importlib.import_module(f"neobert.{COMMANDS[words[1]].room}.options").OPTIONS[
            words[1]
        ]
        options = options[words[2]] if words[1] == "export" else options
        fields = (field for group in options.groups for field in dataclasses.fields(group))
        declared = {field.name.rstrip("_") for field in fields}  # for_ is --for
        return declared if options.trainer is None else declared | TRAINER
    path = (
        words[1]
        if words[1] != "-m"
        else words[2].removeprefix("neobert.").replace(".", "/") + ".py"
    )
    assert (ROOT / path).is_file(), f"there is no {path}"
    return options_in(
        [
            ROOT / path,
            *((ROOT / "conversion").glob("*.py") if path == "convert_checkpoint.py" else ()),
        ]
    )


def options_in(paths):
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    declared = re.findall(r"^    (\w+): .+? = option\(", source, flags=re.MULTILINE)
    parsed = [name.replace("-", "_") for name in re.findall(r"\"(?:--)?([a-z][a-z-]*)\"", source)]
    return {name.rstrip("_") for name in (*declared, *parsed)}  # for_ is --for


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page):
    found = list(commands(page))
    assert len(found) > 1 or page in (
        "conversion",
        "compatibility",
        "development",
        "troubleshooting",
    ), "vacuous: the page has hardly a command"
    for words in found:
        if words[0] == "neobert":
            assert words[1] in COMMANDS, f"there is no command neobert {words[1]}"
        elif words[1] == "-c" or words[1] == "-m" and not words[2].startswith("neobert."):
            continue
        known = options_of(words)
        for word in words:
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                assert "_" not in name, f"{word}: options are written with dashes"
                assert name.replace("-", "_") in known, (
                    f"{' '.join(words[:3])} has no option {word}"
                )
            elif re.fullmatch(r"(recipes|examples|tests)/[\w./-]+", word):
                assert (ROOT / word).exists(), f"there is no {word}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_option_in_the_text_exists(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for name in re.findall(
        r"`((?:examples|recipes|embeddings|finetuning|common|throughput|benchmarks|tests)/[\w./-]+\.(?:py|yaml|tsv))`",
        text,
    ):
        assert (ROOT / name).exists(), f"{page}.md names {name}"
    shared = (
        [ROOT / "common" / "lora.py"] if {"embeddings", "finetuning"} & set(ROOMS[page]) else []
    )
    known = (
        options_in(
            [*shared, *(path for room in ROOMS[page] for path in (ROOT / room).glob("*.py"))]
        )
        | TRAINER
    )
    for name in re.findall(r"`--([a-z_-]+)", text):
        # of other programs
        others = (
            "help",
            "nproc-per-node",
            "num_processes",
            "no-deps",
            "check",
            "pooling",
            "override-pooler-config",
            "task",
            "gpu-memory-utilization",
            "enforce-eager",
        )
        assert name in others or "_" not in name and name.replace("-", "_") in known, (
            f"{page}.md names the option --{name}"
        )


@pytest.mark.parametrize("page", PAGES)
def test_the_page_opens_with_its_use_and_a_command_with_its_output(page):
    parts = PAGES[page].split("```")
    heading, what = parts[0].strip().split("\n", 1)
    assert heading.startswith("# ") and len(what.strip()) > 60, "what is the page for?"
    assert parts[1].startswith("bash\n") and parts[3].startswith("\n") and parts[3].strip(), (
        "a command and then its output"
    )
    assert len(PAGES[page][: PAGES[page].index("```bash")].splitlines()) < 15, (
        "the command comes late"
    )
