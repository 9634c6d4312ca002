"""`neobert report`: one page, results/report.md: an index of what is in results/, the pages
themselves, and the paper's figures.

Every script writes NAME.md (its page, with the environment), NAME.json (the figures) and often
NAME.png. The report is made of these alone: nothing is measured or typed in by hand.
"""

import json
import os
import re
import sys
from pathlib import Path

from ..common import published
from ..common.errors import UserError
from ..common.files import write_text
from ..common.outputs import check_folder
from ..common.results import environment_line, markdown_table
from .options import OPTIONS


LEAD = (
    "Every figure here was written by a script, with its command, commit, machine and versions "
    "beside it. A command is that of its commit: "
    "later ones may spell it otherwise. Figures of the paper (arXiv 2502.19587v2) were not "
    "measured here: they are at the end of the page, or "
    'in rows whose source is "published".'
)


def collect(folder):
    """Paths of the result pages below `folder`, what is still to be measured last: no READMEs,
    caches, reports, or single runs."""
    pages = [
        path
        for path in sorted(folder.rglob("*.md"))
        if "cache" not in path.relative_to(folder).parts
    ]
    pages = [
        path
        for path in pages
        if path.stem.lower() not in ("readme", "report") and not is_report(path)
    ]
    # A folder with a page is summed up by it: what is in folders below (runs) is not a result of
    # its own.
    summed = {path.parent for path in pages} - {folder}
    pages = [path for path in pages if summed.isdisjoint(path.parent.parents)]
    return sorted(pages, key=lambda path: "pending" in path.name.lower())


def is_report(path):
    """Whether this command wrote a page: below its heading it begins as `LEAD` does."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.partition("\n\n")[2].startswith(LEAD.partition(". ")[0])


def read_environment(path):
    """The environment of a result file, or {}."""
    try:
        block = json.loads(path.read_text(encoding="utf-8"))["environment"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return block if isinstance(block, dict) else {}


def published_tables():
    """The paper's figures as markdown."""
    rows = published.THROUGHPUT.items()
    tables = [
        (
            "thousands of tokens/s",
            published.THROUGHPUT_LENGTHS,
            [[name, *values] for name, values in rows],
            published.THROUGHPUT_NOTE,
        ),
        (
            "GLUE dev",
            (*published.GLUE_TASKS, "avg"),
            [[name, *scores] for name, scores in published.GLUE.items()],
            published.GLUE_NOTE,
        ),
        (
            "MTEB",
            (*published.MTEB_TYPES.values(), "avg (56)"),
            [[name, *row] for name, row in published.MTEB.items()],
            published.MTEB_NOTE,
        ),
        ("ablation", ("change", "GLUE dev", "kept"), published.ABLATIONS, published.ABLATIONS_NOTE),
    ]
    return [
        *(
            f"{markdown_table([name, *columns], rows)}\n{note}"
            for name, columns, rows, note in tables
        ),
        published.PSEUDO_PERPLEXITY_NOTE,
    ]


def build(folder, title, beside):
    """The page as markdown; links are relative to the folder `beside`."""
    pages, index, parts = collect(folder), [], []
    for path in pages:
        name = path.relative_to(folder).with_suffix("").as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        environment = read_environment(path.with_suffix(".json"))
        link = Path(os.path.relpath(path, beside)).as_posix()
        index.append(
            [f"[{name}]({link})", *(environment.get(key) for key in ("date", "commit", "command"))]
        )
        body = re.sub(r"\A\s*#+ [^\n]*\n|^\s*!\[[^\]]*\]\([^)]*\)\s*$", "", text, flags=re.M)
        parts += [f"## {name}", re.sub(r"^(#+) ", r"#\1 ", body, flags=re.M).strip()]
        if environment and f"`{environment.get('command')}`" not in text:
            parts.append(environment_line(environment))
        alone = path.parent != folder and [
            other for other in pages if other.parent == path.parent
        ] == [path]
        images = [
            image for image in sorted(path.parent.glob("*.png")) if alone or image.stem == path.stem
        ]
        parts += [
            f"![{image.stem}]({Path(os.path.relpath(image, beside)).as_posix()})"
            for image in images
        ]
    table = markdown_table(["result", "date", "commit", "command"], index)
    return (
        "\n\n".join(
            [
                f"# {title}",
                LEAD,
                table,
                *parts,
                "## Published figures (the paper, not measured here)",
                *published_tables(),
            ]
        )
        + "\n"
    )


def main(argv=None):
    """`neobert report`; returns the exit code."""
    (given,) = OPTIONS["report"].read(sys.argv[1:] if argv is None else argv)
    folder = Path(given.results)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give --results FOLDER")
    output = Path(given.output) if given.output else folder / "report.md"
    if output.suffix != ".md":
        raise UserError(f"output must end in .md, but {output} was given")
    check_folder(output.parent, "output")
    if output.exists() and not (output.is_file() and is_report(output)):
        raise UserError(
            f"{output} was not made by neobert report, so it is not replaced; move it, or give "
            "another --output"
        )
    found = len(collect(folder))
    if not found:
        raise UserError(f"{folder} holds no results (.md files)")
    write_text(output, build(folder, given.title, output.parent))
    print(f"{output}: {found} results")
    return 0
