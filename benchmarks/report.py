"""`neobert report`: one self-contained HTML page, and one markdown file, from results/.

Every script here writes NAME.md (its table), NAME.json (the figures and the environment they were measured in) and often NAME.png. The page
is made of these alone: nothing is measured or typed in by hand. Parts that are missing are named with the command that makes them.
"""

import base64
import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..common import published
from ..common.errors import UserError
from ..common.files import check_folder, write_text
from ..common.recipe import read_recipe
from ..common.results import markdown_table
from ..finetuning.glue_tasks import PUBLISHED as GLUE
from ..finetuning.glue_tasks import PUBLISHED_NOTE as GLUE_NOTE


IMAGES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
_ENVIRONMENT = ("command", "commit", "date", "hardware", "threads", "python", "versions")


@dataclass
class ReportArguments:
    """Options of `neobert report`."""

    results: str = field(default="results", metadata={"help": "folder with the result files"})
    output: str | None = field(default=None, metadata={"help": "the HTML file; RESULTS/report.html by default, tables beside it as .md"})
    title: str = "NeoBERT: measured results"


@dataclass
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
    return markdown_table(header, [list(row) for row in GLUE]) + "\n" + GLUE_NOTE


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
            "Real tokens a second against other encoders; padding does not count. NeoBERT runs packed under every attention implementation "
            "(`sdpa`, ...); `padded` and `published construction` are the same model without packing and built as in the published code, all "
            "measured here.",
            "neobert throughput --output results/throughput",
            _throughput_table(),
        ),
        Section(
            "Memory, compilation, int8",
            ("memory_", "no_padding", "compile_packed", "int8", "profile"),
            "What the packed model costs and gains beyond plain speed.",
            "python benchmarks/memory.py --output results/memory_cpu",
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
            "Dev scores x 100, mean ± standard deviation over seeds. GLUE itself: `neobert glue --task all --model MODEL --output "
            "results/glue`; a row with `data: NAME` is other data in GLUE's schema, and no GLUE score.",
            "neobert glue --task all --model MODEL --output results/glue",
            _glue_table(),
        ),
        Section(
            "Sentence embeddings: contrastive training and MTEB",
            ("contrastive", "mteb"),
            "Main score of each task in percent. The 56 tasks: `neobert mteb --model MODEL --output results/mteb`; local tasks are others.",
            "neobert mteb --model MODEL --output results/mteb",
            _mteb_table(),
        ),
        Section(
            "Corpus encoding",
            ("encode",),
            "`neobert encode` against SentenceTransformer.encode with the same model: speed, vectors, memory.",
            "python benchmarks/encode.py --model MODEL",
        ),
        Section(
            "Sentiment: full fine-tuning and LoRA",
            ("sentiment", "lora"),
            "Sentences of movie reviews with human ratings: the small bundled NeoBERT against a bag of words and the MiniLM sentence encoder.",
            "python benchmarks/sentiment.py --model MODEL",
        ),
        Section(
            "Pre-training",
            ("pretrain", "example"),
            "The training engine, and the bundled small model.",
            "python benchmarks/pretrain_speed.py",
        ),
        Section("Other measurements", ("",), "What the tests catch, what converting costs, and whatever else lies in the folder.", ""),
    ]


@dataclass
class Result:
    """One result: its markdown, images, and the environments of its files; `path` is relative to the folder."""

    name: str
    path: str
    text: str
    environments: list
    images: list
    data: list


def collect(folder):
    """`Result`s below `folder`, by name: every .md, and every .json with an environment that has no .md beside it or above it."""
    folder = Path(folder)
    results, used = [], set()
    texts = [path for path in sorted(folder.rglob("*.md")) if path.name.lower() not in ("readme.md", "report.md")]
    # A folder with a text is summed up by it: what lies in folders below (runs, caches) is no result of its own.
    summed = {path.parent for path in texts} - {folder}

    def below_a_text(path):
        return "cache" in path.relative_to(folder).parts or any(parent in summed for parent in path.parent.parents)

    for path in texts:
        if below_a_text(path):
            continue
        stems = [p.with_suffix("") for p in texts if p.parent == path.parent]
        alone = len(stems) == 1 and path.parent != folder
        companions = [p for p in sorted(path.parent.iterdir()) if p.is_file() and _belongs(p, path.with_suffix(""), stems, alone)]
        images = [p for p in companions if p.suffix in IMAGES]
        data = [p for p in companions if p.suffix in (".json", ".csv")]
        # The file of the text's own name speaks for it; else every file does (a table of several runs).
        own = [p for p in data if p.stem == path.stem and read_environment(p)]
        environments = [env for p in own or data if (env := read_environment(p))]
        where = str(path.relative_to(folder))
        results.append(Result(_name(path, folder), where, path.read_text(encoding="utf-8", errors="replace"), environments, images, data))
        used.update(companions)
    for path in sorted(folder.rglob("*.json")):
        if path not in used and not below_a_text(path) and (environment := read_environment(path)):
            images = [p for suffix in IMAGES if (p := path.with_suffix(suffix)).is_file() and p not in used]
            results.append(Result(_name(path, folder), str(path.relative_to(folder)), "", [environment], images, [path]))
            used.update([path, *images])
    for path in sorted(p for p in folder.rglob("*") if p.suffix in IMAGES and p not in used):
        if not below_a_text(path):
            results.append(Result(_name(path, folder), str(path.relative_to(folder)), "", [], [path], []))
    return sorted(results, key=lambda result: "pending" in result.path.lower())


def _belongs(path, stem, stems, alone):
    """Whether a file belongs to the text `stem`.md: the longest stem that its name starts with; the text `alone` in a folder owns it."""
    if path.suffix not in (*IMAGES, ".json", ".csv"):
        return False
    if alone:
        return True
    own = [s for s in stems if path.stem == s.name or re.match(re.escape(s.name) + r"[-_.]", path.name)]
    return bool(own) and max(own, key=lambda s: len(s.name)) == stem


def _name(path, folder):
    """The file's place in words; a file named as its folder starts, and "table", add nothing."""
    parts = list(path.relative_to(folder).with_suffix("").parts)
    if len(parts) > 1 and (parts[-1] == "table" or parts[-2].startswith(parts[-1])):
        parts.pop()
    return " / ".join(part.replace("_", " ") for part in parts)


def read_environment(path):
    """The environment block of a result file: its "environment", or the same fields at the top; {} where there is none."""
    if path.suffix != ".json":
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return {}
    if not isinstance(data, dict):
        return {}
    block = data.get("environment", data)
    if not isinstance(block, dict) or "command" not in block:
        return {}
    known = block if "environment" in data else {name: block[name] for name in (*_ENVIRONMENT, "dtype", "device") if name in block}
    return {name: value for name, value in known.items() if value not in (None, "", [], {})}


def assign(results):
    """[(section, its results)], every result once."""
    parts = [(section, []) for section in sections()]
    for result in results:
        path = result.path.lower()
        next(found for section, found in parts if any(word in path for word in section.words)).append(result)
    return parts


def environment_line(environment):
    """One line of markdown: what was run, where, with what."""
    parts = []
    if "command" in environment:
        parts.append(f"`{environment['command']}`")
    if "commit" in environment:
        parts.append(f"commit {environment['commit']}")
    parts += [str(environment[name]) for name in ("date", "hardware") if name in environment]
    if "threads" in environment:
        parts.append(f"{environment['threads']} thread{'s' if environment['threads'] != 1 else ''}")
    rest = [name for name in environment if name not in _ENVIRONMENT]
    for name in rest:
        value = environment[name]
        parts.append(f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    parts += [f"{name} {version}" for name, version in environment.get("versions", {}).items()]
    return ", ".join(parts)


def environment_lines(result):
    """One line a run, where its text does not say it already."""
    missing = [environment for environment in result.environments if f"`{environment.get('command')}`" not in result.text]
    return list(dict.fromkeys(line for environment in missing if (line := environment_line(environment))))


# ----------------------------------------------------------------------------------------------------------- markdown to HTML


def _inline(text):
    """Code, bold, emphasis and links of one line; everything else is escaped."""
    pieces = re.split(r"(`[^`]+`)", text)
    output = []
    for piece in pieces:
        if piece.startswith("`") and piece.endswith("`") and len(piece) > 2:
            output.append(f"<code>{html.escape(piece[1:-1])}</code>")
            continue
        piece = html.escape(piece, quote=False)
        piece = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", piece)
        piece = re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*(?!\w)", r"<em>\1</em>", piece)
        piece = re.sub(r"\[([^\]]+)\]\((https?://[^)\s]+)\)", r'<a href="\2">\1</a>', piece)
        piece = re.sub(r"\[([^\]]+)\]\([^)\s]+\)", r"\1", piece)
        output.append(piece)
    return "".join(output)


_NUMBER = re.compile(r"^(\*\*)?[-+]?[\d,]+(\.\d+)?( ?(±|to|\.\.) ?[-+]?[\d,]+(\.\d+)?)?( ?%)?(e[-+]?\d+)?(\*\*)?$")


def _cells(line):
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _is_rule(line):
    """The line under a table's header."""
    return re.fullmatch(r"[\s|:-]+", line) is not None


def _table(lines):
    header, *body = [_cells(line) for line in lines if not _is_rule(line)]
    columns = range(len(header))
    values = [[row[i] for row in body if i < len(row) and row[i]] for i in columns]
    numeric = [bool(values[i]) and sum(bool(_NUMBER.match(v)) for v in values[i]) > len(values[i]) / 2 for i in columns]

    # A column of the paper's figures beside ours.
    published = {i for i, name in enumerate(header) if i and name.endswith("(published)")}

    def row(cells, tag, kind=""):
        kinds = [["n"] * (i < len(numeric) and numeric[i]) + ["pub"] * (i in published) for i in range(len(cells))]
        marks = [f' class="{" ".join(names)}"' if names else "" for names in kinds]
        return f"<tr{kind}>" + "".join(f"<{tag}{mark}>{_inline(cell)}</{tag}>" for mark, cell in zip(marks, cells)) + "</tr>"

    source = header.index("source") if "source" in header else None

    def kind(cells):
        published = source is not None and source < len(cells) and cells[source].startswith("published")
        return ' class="published"' if published else ""

    # An implementation of that name is one of ours; it must not read like a figure of the paper.
    for i in (i for i, name in enumerate(header) if "implementation" in name):
        for cells in (cells for cells in body if i < len(cells)):
            cells[i] = re.sub(r"\bpublished$", "published construction", cells[i])
    rows = "\n".join(row(cells, "td", kind(cells)) for cells in body)
    return f'<div class="scroll"><table><thead>{row(header, "th")}</thead>\n<tbody>{rows}</tbody></table></div>'


def to_html(text, level=3):
    """The markdown that our scripts write (headings, tables, lists, fences, paragraphs) as HTML; headings start at `level`.

    Images are left out: the page shows those that lie beside the text.
    """
    output, lines = [], text.splitlines()
    i = 0
    while i < len(lines):
        line = lines[i]
        if not line.strip() or re.fullmatch(r"\s*!\[[^\]]*\]\([^)]*\)\s*", line):
            i += 1
        elif match := re.match(r"(#+)\s+(.*)", line):
            depth = min(6, level + len(match[1]) - 1)
            output.append(f"<h{depth}>{_inline(match[2])}</h{depth}>")
            i += 1
        elif line.startswith("```"):
            stop = next((j for j in range(i + 1, len(lines)) if lines[j].startswith("```")), len(lines))
            output.append(f"<pre>{html.escape(chr(10).join(lines[i + 1 : stop]))}</pre>")
            i = stop + 1
        else:
            start, kind = i, _kind(line)
            while i < len(lines) and lines[i].strip() and _kind(lines[i]) == kind and not lines[i].startswith(("#", "```")):
                i += 1
            block = lines[start:i]
            if kind == "table" and all(_is_rule(row) for row in block[1:]):
                # A table without rows says nothing, and neither does its heading.
                if output and output[-1].startswith("<h"):
                    output.pop()
            elif kind == "table":
                output.append(_table(block))
            elif kind == "list":
                output.append("<ul>" + "".join(f"<li>{_inline(re.sub(r'^[-*] ', '', item.strip()))}</li>" for item in block) + "</ul>")
            else:
                text = " ".join(map(str.strip, block))
                mark = ' class="env"' if text.startswith("`") and ", commit " in text else ""
                output.append(f"<p{mark}>{_inline(text)}</p>")
    return "\n".join(output)


def _kind(line):
    if line.lstrip().startswith("|"):
        return "table"
    return "list" if re.match(r"\s*[-*] ", line) else "text"


# -------------------------------------------------------------------------------------------------------------------- the page

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1f2933; background: #fff;
  max-width: 1080px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 27px; margin: 0 0 4px; } h2 { font-size: 21px; margin: 44px 0 4px; padding-top: 12px; border-top: 2px solid #2b6cb0; }
h3 { font-size: 17px; margin: 26px 0 6px; } h4, h5, h6 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 8px 0; max-width: 82ch; } .lead { color: #52606d; }
.overview { margin: 14px 0; } .overview td:last-child { min-width: 190px; } .path { font-size: 12px; font-weight: 400; color: #7b8794; }
a { color: #2b6cb0; text-decoration: none; } a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 13.5px; } th, td { padding: 4px 10px; border-bottom: 1px solid #e4e7eb; text-align: left; }
th { border-bottom: 2px solid #9aa5b1; vertical-align: bottom; } .n { text-align: right; font-variant-numeric: tabular-nums; }
tr.published td, .pub { color: #8a5a12; background: #fffaf0; } tbody tr:hover { background: #f5f7fa; }
code { font: 12.5px ui-monospace, "DejaVu Sans Mono", monospace; background: #f0f4f8; padding: 1px 4px; border-radius: 3px; overflow-wrap: anywhere; }
pre { background: #f0f4f8; padding: 10px; overflow-x: auto; font-size: 12.5px; }
.env { font-size: 12.5px; color: #52606d; background: #f5f7fa; border-left: 3px solid #9aa5b1; padding: 6px 10px; max-width: none; }
.paper { background: #fffaf0; border-left: 3px solid #dd9a3c; padding: 4px 12px; margin: 14px 0; } .paper summary { cursor: pointer; font-weight: 600; }
.none { color: #7b8794; } figure { margin: 14px 0; } img { max-width: min(100%, 760px); height: auto; border: 1px solid #e4e7eb; } img.wide { max-width: 100%; }
@media print { details > * { display: block; } }
"""


def image_tag(path, caption):
    """The image as a data URI; several plots side by side (a PNG over twice as wide as high) get the whole width."""
    data = path.read_bytes()
    wide = path.suffix == ".png" and int.from_bytes(data[16:20], "big") > 2 * int.from_bytes(data[20:24], "big")
    kind = ' class="wide"' if wide else ""
    uri = f"data:{IMAGES[path.suffix]};base64,{base64.b64encode(data).decode()}"
    return f'<figure><img{kind} alt="{html.escape(caption)}" src="{uri}"></figure>'


def _anchor(title):
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _title(result):
    """The name; of a part that waits for its measurement, the text's own heading, which says so."""
    heading = re.match(r"\s*#+ ([^\n]*)", result.text)
    return heading[1] if heading and "pending" in result.path.lower() else result.name


def _without_title(text):
    """The text without a heading at its top: the page has its own."""
    return re.sub(r"\A\s*#+ [^\n]*\n", "", text)


def _has_published_rows(text):
    return "| source |" in text and "| published" in text


def _images_once(result):
    """Images of a result; the same drawing as .png and .svg only once."""
    best = {}
    for path in result.images:
        if path.stem not in best or path.suffix == ".svg":
            best.setdefault(path.stem, path)
    return list(best.values())


def figures_of(path):
    """Markdown table of the plain values in a JSON result, one level deep; "" where there are none."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    flat = {}
    for name, value in data.items():
        if name != "environment" and name not in _ENVIRONMENT:
            inner = value.items() if isinstance(value, dict) else [("", value)]
            flat.update({f"{name} {key}".strip().replace("_", " "): item for key, item in inner})
    rows = [[name, f"{value:,.4g}" if isinstance(value, float) else value] for name, value in flat.items()]
    rows = [row for row in rows if isinstance(row[1], (str, int)) and str(row[1])]
    return markdown_table(["", "value"], rows) if rows else ""


def _overview(parts):
    """HTML table: every section, what it shows, what is here or which command fills it; and the machines of all results."""
    rows = []
    for section, found in parts:
        measured = [result for result in found if "pending" not in result.path.lower()]
        if measured:
            state = html.escape(", ".join(result.name for result in measured))
        else:
            state = f"not measured yet: <code>{html.escape(section.command)}</code>"
        link = f'<a href="#{_anchor(section.title)}">{html.escape(section.title)}</a>'
        rows.append(f"<tr><td>{link}</td><td>{_inline(re.split(r'(?<=[a-z])[.] ', section.about)[0])}</td><td>{state}</td></tr>")
    environments = [environment for _, found in parts for result in found for environment in result.environments]
    machines = sorted({environment["hardware"] for environment in environments if "hardware" in environment})
    dates = sorted(environment["date"][:10] for environment in environments if "date" in environment)
    where = f"Measured on: {html.escape('; '.join(machines))}" if machines else ""
    when = f", {dates[0]} to {dates[-1]}" if dates and dates[0] != dates[-1] else f", {dates[0]}" if dates else ""
    head = "<tr><th>part</th><th>what it shows</th><th>here</th></tr>"
    return f'<table class="overview"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>\n<p class="lead">{where}{when}.</p>'


def build_html(folder, title):
    """The whole page as text."""
    parts = [(section, found) for section, found in assign(collect(folder)) if found or section.command]
    output = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
    ]
    output.append(f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>")
    output.append(
        '<p class="lead">Every figure here was written by a script, with its command, commit, machine and versions beside it (grey boxes). '
        "Figures of the paper (arXiv 2502.19587v2) were not measured here: they stand in boxes with an orange edge, or in orange rows whose "
        'source is "published".</p>'
    )
    output.append(_overview(parts))
    for section, found in parts:
        output.append(f'<h2 id="{_anchor(section.title)}">{html.escape(section.title)}</h2>')
        if section.about:
            output.append(f'<p class="lead">{_inline(section.about)}</p>')
        if section.published:
            # The measured tables of GLUE and MTEB hold the published rows themselves.
            state = "" if any(_has_published_rows(result.text) for result in found) else " open"
            text = to_html(section.published, level=4)
            output.append(
                f'<details class="paper"{state}><summary>Published figures (the paper, not measured here)</summary>{text}</details>'
            )
        if not found:
            output.append(f'<p class="none">Not measured here. <code>{html.escape(section.command)}</code> does it.</p>')
        for result in found:
            output.append(f'<h3>{html.escape(_title(result))} <span class="path">{html.escape(result.path)}</span></h3>')
            text = _without_title(result.text) or next((figures_of(path) for path in result.data if path.suffix == ".json"), "")
            if text:
                output.append(to_html(text, level=4))
            output += [image_tag(path, path.stem.replace("_", " ")) for path in _images_once(result)]
            output += [f'<p class="env">{_inline(line)}</p>' for line in environment_lines(result)]
    output.append("</body></html>")
    return "\n".join(output) + "\n"


def build_markdown(folder, title):
    """The same as one markdown text, without the images."""
    output = [f"# {title}"]
    for section, found in assign(collect(folder)):
        if not found and not section.command:
            continue
        output.append(f"## {section.title}")
        output.append(section.about)
        if not found:
            output.append(f"Not measured here. `{section.command}` does it.")
        for result in found:
            output.append(f"### {result.name}")
            text = _without_title(result.text) or next((figures_of(path) for path in result.data if path.suffix == ".json"), "")
            text = re.sub(r"^\s*!\[[^\]]*\]\([^)]*\)\s*$", "", text, flags=re.M)
            output.append(re.sub(r"^(#+) ", r"###\1 ", text, flags=re.M).strip())
            output += environment_lines(result)
        if section.published and not any(_has_published_rows(result.text) for result in found):
            output.append("Published figures (the paper, not measured here):")
            output.append(section.published)
    return "\n\n".join(part.strip() for part in output if part.strip()) + "\n"


def main(argv=None):
    """`neobert report`; returns the exit code."""
    (arguments,) = read_recipe((ReportArguments,), argv or [], prog="neobert report")
    folder = Path(arguments.results)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give --results FOLDER")
    output = Path(arguments.output) if arguments.output else folder / "report.html"
    if output.suffix != ".html":
        raise UserError(f"output must end in .html, but {output} was given")
    check_folder(output.parent, "output")
    found = collect(folder)
    if not found:
        raise UserError(f"{folder} holds no results (.md, or .json with an environment)")
    write_text(output, build_html(folder, arguments.title))
    write_text(output.with_suffix(".md"), build_markdown(folder, arguments.title))
    print(f"{output}: {len(found)} results, {output.stat().st_size / 1e6:.1f} MB; tables in {output.with_suffix('.md')}")
    return 0
