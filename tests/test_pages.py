"""Test the pages of docs/.

The commands, scripts, recipes and options of a page exist, and each page starts with its purpose
and a command. A slow test checks that the printed outputs are current.
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
# Subpackages of neobert/ whose options each page may name; `benchmarks` is in the root.
OPTION_PACKAGES = {
    "conversion": ["conversion"],
    "pretraining": ["pretraining"],
    "adaptation": ["pretraining", "contrastive", "evaluation", "benchmarks"],
    "finetuning": ["finetuning", "prediction", "pretraining"],
    "glue": ["finetuning"],
    "embeddings": ["embeddings", "encoding", "contrastive", "evaluation"],
    "distillation": ["distillation", "embeddings"],
    "performance": ["benchmarks", "throughput"],
    "api": [],
    "serving": ["serving", "embeddings"],
    "export": ["export"],
    "compatibility": [],
    "development": [],
    "troubleshooting": [],
}
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in OPTION_PACKAGES
}
# The page about the pull request to transformers has no commands of this package.
NO_COMMANDS = {"native"}
# Options of the trainer of transformers.
TRAINER = {field.name for field in dataclasses.fields(TrainingArguments)}


def commands(page):
    """Yield the arguments of every command in the bash blocks of a page.

    They start with `neobert` or `python`; a launcher or variables before them are omitted.
    """
    for block in re.findall(r"```bash\n(.*?)```", PAGES[page], flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for start in ("neobert", "python"):
                if start in words:
                    yield words[words.index(start) :]
                    break


def options_of(words):
    """Return the names of the options of a command, with underscores.

    Args:
        words: Arguments of the command, which start with `neobert` or `python`.
    """
    if words[1:3] == ["-m", "benchmarks.local_tasks"]:
        words = ["neobert", "mteb"]
    if words[0] == "neobert":
        options = importlib.import_module(f"neobert.{COMMANDS[words[1]].package}.options").OPTIONS[
            words[1]
        ]
        options = options[words[2]] if words[1] == "export" else options
        # The field `for_` declares the option --for.
        declared = {name.rstrip("_") for name in options.fields} | {"config"}
        defaults = getattr(options, "trainer_defaults", getattr(options, "trainer", None))
        return declared if defaults is None else declared | TRAINER

    path = words[1] if words[1] != "-m" else words[2].replace(".", "/") + ".py"
    assert (ROOT / path).is_file(), f"The script {path} does not exist."
    if path == "benchmarks/local_tasks.py":
        return options_of(["neobert", "mteb"])
    sources = [ROOT / path]
    if path == "convert_checkpoint.py":
        sources += (ROOT / "neobert" / "conversion").glob("*.py")
    if "training_parser(" in (ROOT / path).read_text(encoding="utf-8"):
        # The options that all training scripts have.
        sources.append(ROOT / "neobert" / "common" / "scripts.py")
    return options_in(sources)


def package_folder(package):
    """Return the folder of an item of `OPTION_PACKAGES`."""
    return ROOT / package if package == "benchmarks" else ROOT / "neobert" / package


def options_in(paths):
    """Return the names of the options that Python files declare, with underscores.

    Options are fields of option classes or string literals, such as those of argparse. Other
    strings that look like a name are also returned.
    """
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    declared = re.findall(r"^    (\w+): .+? = option\(", source, flags=re.MULTILINE)
    parsed = [name.replace("-", "_") for name in re.findall(r"\"(?:--)?([a-z][a-z-]*)\"", source)]
    # The field `for_` declares the option --for.
    return {name.rstrip("_") for name in (*declared, *parsed)}


def test_every_page_is_checked():
    """A new page must be added to OPTION_PACKAGES."""
    names = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert names == {*OPTION_PACKAGES, *NO_COMMANDS}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page):
    """Check the commands of the bash blocks."""
    for words in commands(page):
        if words[0] == "neobert":
            assert words[1] in COMMANDS, f"The command `neobert {words[1]}` does not exist."
        elif words[1] == "-c" or words[1] == "-m" and not words[2].startswith("benchmarks."):
            continue

        options = options_of(words)
        for word in words:
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                assert "_" not in name, f"Options must be written with dashes, got {word}."
                assert name.replace("-", "_") in options, (
                    f"The command `{' '.join(words[:3])}` has no option {word}."
                )
            elif re.fullmatch(r"(recipes|examples|tests)/[\w./-]+", word):
                assert (ROOT / word).exists(), f"The path {word} does not exist."


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_option_in_the_text_exists(page):
    """Check the file names and options in the text between the code blocks."""
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for name in re.findall(
        r"`((?:examples|recipes|embeddings|finetuning|common|throughput|benchmarks|tests)/[\w./-]+\.(?:py|yaml|tsv))`",
        text,
    ):
        assert (ROOT / name).exists(), f"{page}.md names the file {name}, which does not exist."

    shared = (
        [ROOT / "neobert" / "training" / "lora.py"]
        if {"contrastive", "finetuning"} & set(OPTION_PACKAGES[page])
        else []
    )
    options = (
        options_in(
            [
                *shared,
                *(
                    path
                    for package in OPTION_PACKAGES[page]
                    for path in (package_folder(package)).glob("*.py")
                ),
            ]
        )
        | TRAINER
    )
    for name in re.findall(r"`--([a-z_-]+)", text):
        # Options of other programs.
        others = (
            "help nproc-per-node num_processes no-deps check pooling override-pooler-config task "
            "gpu-memory-utilization enforce-eager"
        )
        assert name in others.split() or "_" not in name and name.replace("-", "_") in options, (
            f"{page}.md names the option --{name}, which does not exist or has underscores."
        )


@pytest.mark.parametrize("page", PAGES)
def test_page_starts_with_purpose_and_command(page):
    parts = PAGES[page].split("```")
    heading, introduction = parts[0].strip().split("\n", 1)
    assert heading.startswith("# ") and len(introduction.strip()) > 60, (
        "The page must start with a heading and a description of its purpose."
    )
    assert parts[1].startswith("bash\n"), "The first code block must be a command."
    assert len(PAGES[page][: PAGES[page].index("```bash")].splitlines()) < 15, (
        "The first command must be within the first 15 lines."
    )


# ------------------------------------------------------------------------------------------------
# Outputs of the pages


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in pages.PAGES if any(pages.examples(page.read_text(encoding="utf-8")))],
    ids=lambda page: page.parent.name if page.stem == "README" else page.stem,
)
def test_outputs_are_current(page):
    """Run the examples of a page and compare their outputs with those on the page."""
    assert not (stale := list(pages.stale(page))), (
        "\n\n".join(stale) + f"\n\nRun `python tests/tools/pages.py --write {page}`."
    )


def test_results_name_the_current_encoder():
    """Pages of results/ name the digest of the bundled encoder, or call theirs an earlier one."""
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
    """Words and integers must be equal, decimals may differ slightly, and times are ignored."""
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


def test_blocks_run_in_order_and_outputs_are_updated(tmp_path):
    """Check which outputs of `PAGE` are reported, and that `written` updates only these."""
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

    # A block that fails is reported if it is not marked as not run.
    page.write_text(PAGE.replace("<!-- not run: needs a GPU -->\n", ""))
    assert any("exit status 1" in text for text in pages.stale(page))


def test_python_blocks_share_no_variables(tmp_path):
    """A Python block has its own variables, and runs after one that ended the interpreter."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nname = 1\nprint(name)\n# 1\n```\n"
        "```python\nprint('name' in globals())\n# False\n```\n"
        "```python\nraise SystemExit(3)\n# nothing\n```\n"
        "```python\nprint(1 / 0)\n# nothing\n```\n"
        "```python\nprint(2)\n# 2\n```\n"
    )
    ended, failed = pages.stale(page)
    assert "exit status 3" in ended
    assert "ZeroDivisionError" in failed
