"""Test README.md, docs/troubleshooting.md, SECURITY.md, CITATION.cff and CHANGELOG.md.

Python snippets run and print the output that is shown. Commands, links and extras exist. Figures
equal those of the result files, and published scores equal those of the paper.

The snippets load the bundled masked language model instead of the published model, because tests
run without network access.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from test_pages import options_of
from tools import sync

from neobert.cli import COMMANDS
from neobert.common.published import GLUE, GLUE_TASKS, MTEB, MTEB_TYPES


ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def blocks(language, page=README):
    """Return the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def run(source, bundled):
    """Run a Python snippet with bundled models, and return its output and its variables."""
    names = {}
    printed = io.StringIO()
    encoder = ROOT / "examples" / "sentence-encoder"
    for name, folder in (("chandar-lab/NeoBERT", bundled), ("examples/sentence-encoder", encoder)):
        source = source.replace(f'"{name}"', repr(str(folder)))
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), names)
    return printed.getvalue(), names


def test_readme_starts_with_published_weights():
    """The README starts with snippets that load the published weights without a clone."""
    install = README.index("pip install")
    first = README.index("```python")
    assert install < first < README.index("make demo") < README.index("examples/sentence-encoder")
    for snippet in blocks("python")[:2]:
        assert 'chandar-lab/NeoBERT", trust_remote_code=True' in snippet, (
            "The first snippets must work without a clone, because the Hub shows the README."
        )


@pytest.mark.parametrize(
    "source",
    blocks("python") + blocks("python", TROUBLESHOOTING),
    ids=lambda source: source.splitlines()[-1][:40],
)
def test_python_snippet(source, bundled, tmp_path, monkeypatch):
    """A snippet prints the lines of its comments, with the hidden size of the bundled model."""
    monkeypatch.chdir(tmp_path)
    hidden_size = str(json.loads((bundled / "config.json").read_text())["hidden_size"])
    expected = [
        line[2:].replace("768", hidden_size)
        for line in source.splitlines()
        if line.startswith("# ")
    ]

    printed, _ = run(source, bundled)

    assert printed or "print" not in source, "The snippet calls print, but prints nothing."
    for line in expected:
        assert line in printed, f"The page shows {line!r}, but the snippet printed {printed!r}."


def test_lora_snippet_trains_and_saves_the_head(bundled, tmp_path):
    """The LoRA snippet trains and saves the complete classification head.

    PEFT saves a layer with the name `classifier` by default, but not the layer `dense` before it.
    """
    source = next(source for source in blocks("python") if "LoraConfig" in source)
    model = run(source, bundled)[1]["model"]
    dense = next(
        weight
        for name, weight in model.named_parameters()
        if name.endswith("dense.modules_to_save.default.weight")
    )
    before = dense.detach().clone()

    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([1])).loss.backward()
    torch.optim.SGD([dense], lr=1.0).step()
    assert not torch.equal(dense, before)

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert (
        torch.equal(saved["base_model.model.dense.weight"], dense)
        and "base_model.model.classifier.weight" in saved
    )


@pytest.mark.parametrize(
    "command",
    [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()],
)
def test_command(command):
    """Every command of the README is a make target, or a part of the installation."""
    words = shlex.split(command)
    if words[0] == "make":
        check = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert check.returncode == 0, f"{command!r} failed: {check.stderr[-500:]}"
        return

    address = re.search(r"^url = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)[1]
    environment = re.search(r"^VENV \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert command in (
        "pip install torch transformers",
        f"git clone {address} && cd NeoBERT",
        f"source {environment}/bin/activate",
    ), f"No test runs the command {command!r}."


def test_metadata():
    """The metadata of the model card are valid and contain the scores of the paper."""
    metadata = yaml.safe_load(README.split("---")[1])
    assert (
        metadata["license"] == "mit"
        and metadata["library_name"] == "transformers"
        and metadata["pipeline_tag"] == "fill-mask"
    )
    assert "custom_code" in metadata["tags"], (
        "Without this tag the Hub does not state that the repository contains code."
    )
    assert "sentence-similarity" not in metadata["tags"], "The model is a masked language model."

    results = {
        (row.dataset_type, row.metric_name): row
        for row in ModelCard(README, ignore_metadata_errors=False).data.eval_results
    }
    columns = [("nyu-mll/glue", name) for name in (*GLUE_TASKS, "GLUE average")]
    columns += [("mteb", name) for name in (*MTEB_TYPES, "MTEB average")]
    paper = dict(zip(columns, (*GLUE["NeoBERT-4096"], *MTEB["NeoBERT-4096"])))
    assert {name: row.metric_value for name, row in results.items()} == paper
    assert {row.source_url for row in results.values()} == {"https://arxiv.org/abs/2502.19587"}


def table(heading):
    """Return the rows of the table below a heading of the README, as lists of cells."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ][2:]


def test_every_task_has_its_page_and_a_command_that_exists():
    """Every task of the README has a page, and a command with options that exist.

    tests/test_tasks.py runs the commands.
    """
    rows = table("Tasks")
    assert len(rows) >= 8

    for task, page, cell in rows:
        assert re.match(r"\[[\w-]+\]\(docs/\w+\.md(#[\w-]+)?\)", page), (
            f"The task {task!r} has no link to a page."
        )
        commands = [shlex.split(text) for text in re.findall(r"`((?:python|neobert) .*?)`", cell)]
        assert commands, f"The task {task!r} has no command."
        for words in commands:
            options = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
            assert words[0] == "python" or words[1] in COMMANDS, (
                f"{task}: the command {words[1]} does not exist."
            )
            assert options <= options_of(words), (
                f"{task}: an option of `{' '.join(words)}` does not exist."
            )


def test_published_scores_match_the_paper():
    """The GLUE and MTEB averages of the comparison are those of the paper."""
    assert "not measured here" in README.split("## Comparison")[1].split("## ")[0]
    rows = table("Comparison")
    assert rows[0][:4] == ["NeoBERT", "245M", "89.0", "51.3"]
    for name, _, glue, mteb, *_ in rows:
        name = "NeoBERT-4096" if name == "NeoBERT" else name
        assert (float(glue), float(mteb)) == (GLUE[name][-1], MTEB[name][-1]), (
            f"The scores of {name} differ from those of the paper."
        )


def test_comparison_speeds_match_the_benchmark():
    """The speeds of the comparison are those of results/throughput_cpu with SDPA attention."""
    page = (ROOT / "results" / "throughput_cpu" / "throughput.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    measured = {(row[0], row[1]): row[6] for row in lines if len(row) > 6 and row[2] == "sdpa"}

    num_checked = 0
    for name, *_, short, full_128, full_512 in table("Comparison"):
        model = name.lower().replace(" ", "-")
        for workload, value in (("short", short), ("128", full_128), ("512", full_512)):
            assert measured.get((workload, model), "") == value, (name, workload)
            num_checked += bool(value)
    assert num_checked >= 10


def test_measurements_match_the_result_files():
    """Every figure of the table occurs in the result file that the row names.

    The file was measured on the machine and, on a CPU, with the number of threads of the row.
    """
    file = None
    num_checked = 0
    for _, figure, machine, source in table("Measurements"):
        file = file if source == "same file" else ROOT / source.strip("`")
        text = file.read_text(encoding="utf-8")
        name, _, threads = machine.partition(", ")
        if name == "H100":
            machines = re.findall(r"NVIDIA (\w+)", text)
        else:
            machines = re.findall(r"AMD EPYC|Intel Xeon", text.replace("(R)", ""))
        assert set(machines) == {name}, f"{file.name} names other machines than the README."
        if threads:
            assert set(re.findall(r"(\d+) threads?\b", text)) == {threads.split()[0]}, (
                f"{file.name} names other numbers of threads than the README."
            )
        assert re.search(rf"\b{re.escape(figure)}\b", text), (
            f"{file.name} does not contain {figure}, which the README attributes to it."
        )
        num_checked += 1
    assert num_checked >= 9


def anchors(path):
    """Return the anchors of the headings of a page, as GitHub and the Hub generate them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_extras_and_links_exist(path):
    page = path.read_text(encoding="utf-8")
    setup = (ROOT / "setup.cfg").read_text()

    for command in re.findall(r"`neobert ([a-z][a-z-]*)[ `]", page):
        assert command in COMMANDS, f"The command `neobert {command}` does not exist."

    for extra in re.findall(r"'\.\[(\w+)\]'", page):
        assert re.search(rf"^{extra} ?=", setup, flags=re.MULTILINE), (
            f"setup.cfg has no extra {extra}."
        )

    for name, anchor in re.findall(r"\]\((?!http)([\w./-]*)#?([\w-]*)\)", page):
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name} links to {name}, which does not exist."
        assert not anchor or anchor in anchors(target), (
            f"{path.name} links to {name}#{anchor}, but {target.name} has no such heading."
        )

    if path.name == "README.md":
        for name in re.findall(r"`([\w/-]+\.(?:py|md))`", page):
            assert (ROOT / name).exists(), f"The README names {name}, which does not exist."


def test_remote_code_table_is_current():
    """The table of SECURITY.md has the current line counts and digests of the model files."""
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert page.count("\n| `") == len(sync.MODEL_FILES) and sync.with_table(page) == page, (
        "Run `make sync`."
    )


@pytest.mark.parametrize("folder", sync.COPIES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", sync.MODEL_FILES)
def test_copies_of_the_model_files_are_identical(name, folder):
    """The model files and their copies are identical.

    The Hub serves a symbolic link as a text file with its target, so the copies must be files.
    """
    copy = folder / name
    assert not copy.is_symlink(), f"{copy} must be a file, but is a symbolic link."
    assert copy.read_bytes() == (ROOT / name).read_bytes(), "Run `make sync`."


def test_citation_matches_the_readme():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (
        citation["cff-version"] == "1.2.0" and citation["message"] and citation["license"] == "MIT"
    )

    bibtex = README.split("```bibtex")[1]
    paper = citation["preferred-citation"]
    assert (
        " and ".join(
            f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]
        )
        in bibtex
    )
    for field in ("title", "journal", "year", "url"):
        assert f"{{{paper[field]}}}" in bibtex, f"The field {field} differs."
