"""Test README.md, docs/troubleshooting.md, SECURITY.md, CITATION.cff and CHANGELOG.md.

Python snippets run and print what is shown; commands, links and extras exist; figures equal those
of their files; and published scores are those of the paper.

The snippets load the bundled masked language model instead of the published one, which tests cannot
download.
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
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def run(source, bundled):
    """What a snippet prints, and its names."""
    names, printed = {}, io.StringIO()
    encoder = ROOT / "examples" / "sentence-encoder"
    for name, folder in (("chandar-lab/NeoBERT", bundled), ("examples/sentence-encoder", encoder)):
        source = source.replace(f'"{name}"', repr(str(folder)))
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), names)
    return printed.getvalue(), names


def test_it_opens_with_the_published_weights():
    install, first = README.index("pip install"), README.index("```python")
    assert install < first < README.index("make demo") < README.index("examples/sentence-encoder")
    for snippet in blocks("python")[:2]:
        assert 'chandar-lab/NeoBERT", trust_remote_code=True, revision=' in snippet, (
            "the card is read on the Hub, where no clone is"
        )


@pytest.mark.parametrize(
    "source",
    blocks("python") + blocks("python", TROUBLESHOOTING),
    ids=lambda source: source.splitlines()[-1][:40],
)
def test_python_snippet(source, bundled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    width = str(json.loads((bundled / "config.json").read_text())["hidden_size"])
    expected = [
        line[2:].replace("768", width) for line in source.splitlines() if line.startswith("# ")
    ]
    printed, _ = run(source, bundled)
    assert printed or "print" not in source, "it prints nothing"
    for line in expected:
        assert line in printed, f"the README promises {line!r}, but the snippet printed {printed!r}"


def test_loras_head_learns_and_is_saved(bundled, tmp_path):
    """PEFT keeps a `classifier` by itself, and not the layer `dense` before it."""
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
    words = shlex.split(command)
    if words[0] == "make":
        check = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert check.returncode == 0, f"{command!r} failed: {check.stderr[-500:]}"
    else:
        assert words == ["pip", "install", "torch", "transformers"], f"no test runs {command!r}"


def test_metadata():
    metadata = yaml.safe_load(README.split("---")[1])
    assert (
        metadata["license"] == "mit"
        and metadata["library_name"] == "transformers"
        and metadata["pipeline_tag"] == "fill-mask"
    )
    assert "custom_code" in metadata["tags"], "the Hub would not say that the repository holds code"
    assert "sentence-similarity" not in metadata["tags"], "a masked LM"
    found = {
        (row.dataset_type, row.metric_name): row
        for row in ModelCard(README, ignore_metadata_errors=False).data.eval_results
    }
    columns = [("nyu-mll/glue", name) for name in (*GLUE_TASKS, "GLUE average")]
    columns += [("mteb", name) for name in (*MTEB_TYPES, "MTEB average")]
    paper = dict(zip(columns, (*GLUE["NeoBERT-4096"], *MTEB["NeoBERT-4096"])))
    assert {name: row.metric_value for name, row in found.items()} == paper
    assert {row.source_url for row in found.values()} == {"https://arxiv.org/abs/2502.19587"}


def table(heading):
    """Cells of the rows below a heading, without the header."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ][2:]


def test_every_task_has_its_page_and_a_command_that_exists():
    """tests/test_tasks.py runs the commands."""
    rows = table("Tasks")
    assert len(rows) >= 8
    for task, page, cell in rows:
        assert re.match(r"\[[\w-]+\]\(docs/\w+\.md(#[\w-]+)?\)", page), task
        commands = [shlex.split(text) for text in re.findall(r"`((?:python|neobert) .*?)`", cell)]
        assert commands, f"{task}: no command"
        for words in commands:
            options = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
            assert words[0] == "python" or words[1] in COMMANDS, (
                f"{task}: there is no command {words[1]}"
            )
            assert options <= options_of(words), f"{task}: {' '.join(words)}"


def test_published_scores_are_the_papers():
    assert "not measured here" in README.split("## Comparison")[1].split("## ")[0]
    rows = table("Comparison")
    assert rows[0][:4] == ["NeoBERT", "245M", "89.0", "51.3"]
    for name, _, glue, mteb, *_ in rows:
        name = "NeoBERT-4096" if name == "NeoBERT" else name
        assert (float(glue), float(mteb)) == (GLUE[name][-1], MTEB[name][-1]), (
            f"{name} has other scores in the paper"
        )


def test_the_speeds_of_the_comparison_are_those_of_the_benchmark():
    page = (ROOT / "results" / "throughput_cpu" / "throughput.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    measured = {(row[0], row[1]): row[6] for row in lines if len(row) > 6 and row[2] == "sdpa"}
    checked = 0
    for name, *_, short, full in table("Comparison"):
        model = name.lower().replace(" ", "-")
        for workload, value in (("short", short), ("512", full)):
            assert measured.get((workload, model), "") == value, (name, workload)
            checked += bool(value)
    assert checked >= 6


def test_figures_are_those_of_the_results():
    """With the machine and the threads that the row names."""
    file, checked = None, 0
    for _, figure, _, machine, named in table("Measurements"):
        file = file if named == "same file" else ROOT / named.strip("`")
        text = file.read_text(encoding="utf-8")
        if machine != "any":
            name, threads = machine.split(", ")
            assert set(re.findall(r"AMD EPYC|Intel\(R\) Xeon", text)) == {
                name.replace("Intel", "Intel(R)")
            }, file
            assert set(re.findall(r"(\d+) threads?\b", text)) == {threads}, file
        for number in re.findall(r"\b\d+\.\d+", figure):
            assert re.search(rf"\b{re.escape(number)}\b", text), (
                f"{file.name} has no {number}, which the README takes from it"
            )
            checked += 1
    assert checked >= 9


def anchors(path):
    """The anchors of a page's headings, as GitHub and the Hub make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_extras_and_links_exist(path):
    page, setup = path.read_text(encoding="utf-8"), (ROOT / "setup.cfg").read_text()
    for command in re.findall(r"`neobert ([a-z][a-z-]*)[ `]", page):
        assert command in COMMANDS, f"there is no command neobert {command}"
    for extra in re.findall(r"'\.\[(\w+)\]'", page):
        assert re.search(rf"^{extra} ?=", setup, flags=re.MULTILINE), (
            f"setup.cfg has no extra {extra}"
        )
    for name, anchor in re.findall(r"\]\((?!http)([\w./-]*)#?([\w-]*)\)", page):
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name} links to {name}, which does not exist"
        assert not anchor or anchor in anchors(target), (
            f"{path.name} links to {name}#{anchor}: there is no such heading"
        )
    if path.name == "README.md":
        for name in re.findall(r"`([\w/-]+\.(?:py|md))`", page):
            assert (ROOT / name).exists(), f"the README names {name}, which does not exist"


def test_the_table_of_remote_code_is_todays():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert page.count("\n| `") == len(sync.MODEL_FILES) and sync.with_table(page) == page, (
        "Run `make sync`."
    )


@pytest.mark.parametrize("folder", sync.COPIES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", sync.MODEL_FILES)
def test_copies_of_the_model_files_are_identical(name, folder):
    """The Hub serves a symbolic link as its text, so the copies must be files."""
    copy = folder / name
    assert not copy.is_symlink(), f"{copy} must be a file, but is a symbolic link."
    assert copy.read_bytes() == (ROOT / name).read_bytes(), "Run `make sync`."


def test_citation_names_the_paper_of_the_readme():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["cff-version"] == "1.2.0" and found["message"] and found["license"] == "MIT"
    bibtex = README.split("```bibtex")[1]
    cited = found["preferred-citation"]
    assert (
        " and ".join(
            f"{author['family-names']}, {author['given-names']}" for author in cited["authors"]
        )
        in bibtex
    )
    for field in ("title", "journal", "year", "url"):
        assert f"{{{cited[field]}}}" in bibtex, field
