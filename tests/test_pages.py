"""Test the pages of docs/.

Commands, scripts, recipes and options exist, each page starts with its task, and the printed
outputs are current (slow).
"""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest
from tools import pages
from transformers import TrainingArguments

from neobert.cli import COMMANDS


ROOT = Path(__file__).resolve().parent.parent
# What the options that a page names belong to.
ROOMS = {
    "conversion": ["conversion"],
    "pretraining": ["pretraining"],
    "adaptation": ["pretraining", "contrastive", "evaluation", "benchmarks"],
    "finetuning": ["finetuning", "prediction", "pretraining"],
    "embeddings": ["embeddings", "encoding", "contrastive", "evaluation"],
    "distillation": ["distillation", "embeddings"],
    "performance": ["benchmarks", "throughput"],
    "serving": ["export", "serving", "embeddings"],
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
    if words[1:3] == ["-m", "benchmarks.local_tasks"]:
        words = ["neobert", "mteb"]
    if words[0] == "neobert":
        options = importlib.import_module(f"neobert.{COMMANDS[words[1]].package}.options").OPTIONS[
            words[1]
        ]
        options = options[words[2]] if words[1] == "export" else options
        declared = {name.rstrip("_") for name in options.fields} | {"config"}  # for_ is --for
        defaults = getattr(options, "trainer_defaults", getattr(options, "trainer", None))
        return declared if defaults is None else declared | TRAINER
    path = words[1] if words[1] != "-m" else words[2].replace(".", "/") + ".py"
    assert (ROOT / path).is_file(), f"there is no {path}"
    if path == "benchmarks/local_tasks.py":
        return options_of(["neobert", "mteb"])
    return options_in(
        [
            ROOT / path,
            *(
                (ROOT / "neobert" / "conversion").glob("*.py")
                if path == "convert_checkpoint.py"
                else ()
            ),
        ]
    )


def room_folder(room):
    return ROOT / room if room == "benchmarks" else ROOT / "neobert" / room


def options_in(paths):
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    declared = re.findall(r"^    (\w+): .+? = option\(", source, flags=re.MULTILINE)
    parsed = [name.replace("-", "_") for name in re.findall(r"\"(?:--)?([a-z][a-z-]*)\"", source)]
    return {name.rstrip("_") for name in (*declared, *parsed)}  # for_ is --for


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page):
    for words in commands(page):
        if words[0] == "neobert":
            assert words[1] in COMMANDS, f"there is no command neobert {words[1]}"
        elif words[1] == "-c" or words[1] == "-m" and not words[2].startswith("benchmarks."):
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
        [ROOT / "neobert" / "training" / "lora.py"]
        if {"contrastive", "finetuning"} & set(ROOMS[page])
        else []
    )
    known = (
        options_in(
            [*shared, *(path for room in ROOMS[page] for path in (room_folder(room)).glob("*.py"))]
        )
        | TRAINER
    )
    for name in re.findall(r"`--([a-z_-]+)", text):
        # of other programs
        others = (
            "help nproc-per-node num_processes no-deps check pooling override-pooler-config task "
            "gpu-memory-utilization enforce-eager"
        )
        assert name in others.split() or "_" not in name and name.replace("-", "_") in known, (
            f"{page}.md names the option --{name}"
        )


@pytest.mark.parametrize("page", PAGES)
def test_the_page_opens_with_its_use_and_a_command(page):
    parts = PAGES[page].split("```")
    heading, what = parts[0].strip().split("\n", 1)
    assert heading.startswith("# ") and len(what.strip()) > 60, "what is the page for?"
    assert parts[1].startswith("bash\n"), "The page must open with a command."
    assert len(PAGES[page][: PAGES[page].index("```bash")].splitlines()) < 15, (
        "the command comes late"
    )


# ------------------------------------------------------------------------------------------------
# outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in pages.PAGES if any(pages.examples(page.read_text(encoding="utf-8")))],
    ids=lambda page: page.parent.name if page.stem == "README" else page.stem,
)
def test_every_output_is_todays(page):
    assert not (stale := list(pages.stale(page))), (
        "\n\n".join(stale) + f"\n\nrun: python tests/tools/pages.py --write {page}"
    )


def test_results_name_todays_encoder():
    assert pages.stale_results() == []


@pytest.mark.parametrize(
    "shown, printed, expected",
    [
        ("F1 0.612 over 80 texts", "F1 0.615 over 80 texts", True),
        ("F1 0.612 over 80 texts", "F1 0.628 over 80 texts", False),
        ("F1 0.612 over 80 texts", "F1 0.612 over 81 texts", False),
        ("0.40 an eagle", "0.41 an eagle", True),
        ("0.40 an eagle", "0.40 a violin", False),
        ("in 18.9 s (5,626 tokens/s)", "in 1,234.5 s (1 tokens/s)", True),
        ("difference 6.7e-06", "difference 0.0", True),
        ("digest: 3e7acf64bb1c", "digest: 3e7acf64bb2c", False),
        ("a\n b", "a b", True),
    ],
)
def test_outputs_are_compared_within_a_tolerance(shown, printed, expected):
    assert pages.same(shown, printed) == expected


PAGE = """
```bash
pip install torch
echo one  # a comment
echo 0.54
```

<!-- output -->
```
one
0.50
```

```bash
echo nobody shows this
```

<!-- run -->
```bash
echo $((40 + 2)) > runs/made
```
```python
print(open("runs/made").read(), end="")
# 41
```

<!-- not run: needs a GPU -->
```bash
exit 1
```
```
nothing
```

```bash
seq 1 9; echo the end is $(cat runs/made)
```
```
...
7
...
the end is 3
```
"""


def test_blocks_run_in_their_order_and_their_outputs_are_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    stale = list(pages.stale(page))
    assert [text.splitlines()[0] for text in stale] == [
        "page.md: pip install torch",
        'page.md: print(open("runs/made").read(), end="")',
        "page.md: seq 1 9; echo the end is $(cat runs/made)",
    ]
    page.write_text(pages.written(page))
    expected = PAGE.replace("\n0.50\n", "\n0.54\n").replace("# 41", "# 42").replace("is 3", "is 42")
    assert page.read_text() == expected and not any(pages.stale(page))
    page.write_text(PAGE.replace("<!-- not run: needs a GPU -->\n", ""))
    assert any("exit status 1" in text for text in pages.stale(page))
