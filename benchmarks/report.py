"""`neobert report`: one page, results/report.md, from what is in results/.

Every script here writes NAME.md (its page, with the environment), NAME.json (the figures) and often NAME.png. The report is made of these
alone: nothing is measured or typed in by hand. Parts that are missing are named with the command that makes them.
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..common import published
from ..common.errors import UserError
from ..common.files import write_text
from ..common.outputs import check_folder
from ..common.results import environment_line, markdown_table
from .options import OPTIONS


LEAD = (
    "Every figure here was written by a script, with its command, commit, machine and versions beside it. Figures of the paper (arXiv "
    '2502.19587v2) were not measured here: they are under "Published figures", or in rows whose source is "published". A command is that of '
    "its commit: later ones may spell it otherwise."
)


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        words: a result belongs to the first section one of whose words is in its path.
        command: what makes the results where there are none.
        published: markdown of the paper's figures, or "".
    """

    title: str
    words: tuple
    about: str
    command: str
    published: str = ""


def _throughput_table():
    rows = [[name, *("" if v is None else v for v in values)] for name, values in published.THROUGHPUT.items()]
    header = ["model (published, thousands of tokens/s)", *(f"{length:,}" for length in published.THROUGHPUT_LENGTHS)]
    return markdown_table(header, rows) + "\n" + published.THROUGHPUT_NOTE


def _glue_table():
    header = ["model (published)", "MNLI", "QNLI", "QQP", "RTE", "SST", "MRPC", "CoLA", "STS", "avg"]
    return markdown_table(header, [[name, *scores] for name, scores in published.GLUE.items()]) + "\n" + published.GLUE_NOTE


def _mteb_table():
    header = ["model (published)", *published.MTEB_TYPES.values(), "avg (56)"]
    return markdown_table(header, [[name, *values] for name, values in published.MTEB.items()]) + "\n" + published.MTEB_NOTE


def _ablations_table():
    header = ["rung (published)", "change", "GLUE dev", "kept"]
    return markdown_table(header, [list(row) for row in published.ABLATIONS]) + "\n" + published.ABLATIONS_NOTE


def sections():
    """The page's sections in order; the last one takes what no other does."""
    return [
        Section(
            "Throughput",
            ("throughput",),
            "Real tokens a second against other encoders; padding does not count. NeoBERT packs under every attention implementation. `padded` is "
            "the same model without packing, `published` the construction of the published code around the same weights, measured here.",
            "neobert throughput --output results/throughput",
            _throughput_table(),
        ),
        Section(
            "Precisions and engines",
            ("precisions", "engines"),
            "The same weights in float32, 16 bits and int8, in torch and in the engines that people deploy encoders with.",
            "python -m neobert.benchmarks.precisions",
        ),
        Section(
            "Memory and profiles",
            ("memory_", "profile"),
            "Peak memory of inference, and where the time of a forward goes.",
            "python -m neobert.benchmarks.memory",
        ),
        Section(
            "GPU",
            ("gpu",),
            "Correctness, throughput, compiled blocks, memory, a profile and a training step on a CUDA device.",
            "make gpu",
        ),
        Section(
            "Pseudo-perplexity",
            ("perplexity",),
            "exp(mean cross-entropy) with each position masked on its own, against length; lower is better.",
            "neobert pseudo-perplexity --model MODEL --output results/pseudo_perplexity",
            published.PSEUDO_PERPLEXITY_NOTE,
        ),
        Section(
            "Ablation ladder",
            ("ablation", "ladder"),
            "The paper's rungs, each changing the last kept model; here at a reduced size, which shows that each runs, not how good it is.",
            "neobert ablations --scale small",
            _ablations_table(),
        ),
        Section(
            "GLUE",
            ("glue",),
            "Dev scores x 100, mean ± standard deviation over seeds. A row with `data: NAME` is other data in GLUE's schema, not a GLUE score.",
            "neobert glue --task all --model MODEL --output results/glue",
            _glue_table(),
        ),
        Section(
            "Sentence embeddings",
            ("contrastive", "mteb", "distill", "open_text"),
            "Main score of each task in percent. The 56 tasks: `neobert mteb --model MODEL --output results/mteb`; local tasks are others.",
            "neobert mteb --model MODEL --output results/mteb",
            _mteb_table(),
        ),
        Section(
            "Corpus encoding",
            ("encode/", "encode."),
            "`neobert encode` against what it replaces: speed, vectors, memory.",
            "python -m neobert.benchmarks.encode --model MODEL",
        ),
        Section(
            "Sentiment: full fine-tuning and LoRA",
            ("sentiment", "lora"),
            "Sentences of movie reviews with human ratings: the small bundled NeoBERT against a bag of words and the MiniLM sentence encoder.",
            "",
        ),
        Section(
            "Named entities",
            ("named_entities",),
            "What an uncased vocabulary costs, on gold tags.",
            "",
        ),
        Section(
            "Training",
            ("train", "streaming", "example"),
            "The training engine: steps, streams, and the bundled small model.",
            "python -m neobert.benchmarks.training",
        ),
        Section("Other measurements", ("",), "What the tests catch, what converting costs, and whatever else is in the folder.", ""),
    ]


@dataclass(frozen=True)
class Result:
    """One result: its page, its plots, and the environment where the page does not tell it; `path` is relative to the folder."""

    name: str
    path: str
    text: str
    environment: dict
    images: tuple

    @property
    def pending(self):
        """Whether the page says what is to be measured."""
        return "pending" in self.path.lower()


def collect(folder):
    """`Result`s below `folder`, by name, pending ones last: every .md, but for READMEs, caches, reports, and pages below a folder that has one."""
    folder = Path(folder)
    pages = [path for path in sorted(folder.rglob("*.md")) if not re.fullmatch(r"readme|report.*", path.stem.lower())]
    pages = [path for path in pages if "cache" not in path.relative_to(folder).parts and not is_report(path)]
    # A folder with a page is summed up by it: what is in folders below (runs) is not a result of its own.
    summed = {path.parent for path in pages} - {folder}
    pages = [path for path in pages if summed.isdisjoint(path.parent.parents)]
    results = []
    for path in pages:
        beside = [other for other in pages if other.parent == path.parent]
        images = tuple(image for image in sorted(path.parent.glob("*.png")) if _owner(image, beside, folder) == path)
        text = path.read_text(encoding="utf-8", errors="replace")
        found = read_environment(path.with_suffix(".json"))
        environment = {} if not found or f"`{found.get('command')}`" in text else found
        results.append(Result(_name(path, folder), str(path.relative_to(folder)), text, environment, images))
    return sorted(results, key=lambda result: result.pending)


def is_report(path):
    """Whether this command wrote a page: below its heading it begins as `LEAD` does."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.partition("\n\n")[2].startswith(LEAD.partition(". ")[0])


def _owner(image, pages, folder):
    """The page that a plot belongs to: the longest name that its own starts with; a page alone in a folder owns all plots there."""
    if len(pages) == 1 and image.parent != folder:
        return pages[0]
    named = [page for page in pages if image.stem == page.stem or image.stem.startswith((f"{page.stem}_", f"{page.stem}-"))]
    return max(named, key=lambda page: len(page.stem), default=None)


def _name(path, folder):
    """The file's place in words; a file named as its folder starts, and "table", add nothing."""
    parts = list(path.relative_to(folder).with_suffix("").parts)
    if len(parts) > 1 and (parts[-1] == "table" or parts[-2].startswith(parts[-1])):
        parts.pop()
    return " / ".join(part.replace("_", " ") for part in parts)


def read_environment(path):
    """The environment of a result file, or {}."""
    try:
        block = json.loads(Path(path).read_text(encoding="utf-8"))["environment"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return block if isinstance(block, dict) else {}


def assign(results):
    """[(section, its results)], every result once."""
    parts = [(section, []) for section in sections()]
    for result in results:
        path = result.path.lower()
        next(found for section, found in parts if any(word in path for word in section.words)).append(result)
    return parts


def _overview(parts):
    """Table: every section, and what is here or which command fills it."""
    rows = []
    for section, found in parts:
        measured = ", ".join(result.name for result in found if not result.pending)
        anchor = re.sub(r"[^a-z0-9 -]", "", section.title.lower()).replace(" ", "-")
        rows.append([f"[{section.title}](#{anchor})", measured or f"not measured yet: `{section.command}`"])
    return markdown_table(["part", "here"], rows)


def _body(result, folder):
    """A result's page below its own heading, two levels down, with links to its plots from `folder`."""
    text = re.sub(r"\A\s*#+ [^\n]*\n", "", result.text)
    text = re.sub(r"^\s*!\[[^\]]*\]\([^)]*\)\s*$", "", text, flags=re.M)
    text = re.sub(r"^(#+) ", r"##\1 ", text, flags=re.M).strip()
    plots = [f"![{image.stem.replace('_', ' ')}]({Path(os.path.relpath(image, folder)).as_posix()})" for image in result.images]
    return [text, *plots, *([environment_line(result.environment)] if result.environment else [])]


def build(folder, title, beside):
    """The page as markdown; links to plots are relative to the folder `beside`."""
    parts = [(section, found) for section, found in assign(collect(folder)) if found or section.command]
    output = [f"# {title}", LEAD, _overview(parts)]
    for section, found in parts:
        output += [f"## {section.title}", section.about]
        if not found:
            output.append(f"Not measured here. `{section.command}` does it.")
        for result in found:
            heading = re.match(r"\s*#+ ([^\n]*)", result.text)
            output += [f"### {heading[1] if heading and result.pending else result.name}", *_body(result, beside)]
        if section.published and not any("| source |" in result.text and "| published" in result.text for result in found):
            output += ["### Published figures (the paper, not measured here)", section.published]
    return "\n\n".join(part.strip() for part in output if part.strip()) + "\n"


def main(argv=None):
    """`neobert report`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = OPTIONS["report"].read(argv)
    folder = Path(given.results)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give --results FOLDER")
    output = Path(given.output) if given.output else folder / "report.md"
    if output.suffix != ".md":
        raise UserError(f"output must end in .md, but {output} was given")
    check_folder(output.parent, "output")
    if output.exists() and not (output.is_file() and is_report(output)):
        raise UserError(f"{output} was not made by neobert report, so it is not replaced; move it, or give another --output")
    found = collect(folder)
    if not found:
        raise UserError(f"{folder} holds no results (.md files)")
    write_text(output, build(folder, given.title, output.parent))
    print(f"{output}: {len(found)} results")
    return 0
