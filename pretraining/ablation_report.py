"""The small ladder's table and chart: published numbers beside ours, which are marked as
small-scale."""

import statistics

from ..common import figures
from ..common.results import markdown_table, mean_and_deviation, write_result
from .ablation_recipes import METHODS, PUBLISHED, RUNGS


# column: (what a run measured, factor, format)
_MEASURED = {
    "probe accuracy": ("probe_accuracy", 100, ".1f"),
    "masked accuracy": ("masked_accuracy", 100, ".1f"),
    "bits per masked character": ("masked_bits_per_character", 1, ".3f"),
}
_COSTS = {
    "parameters": ("parameters", 1e-6, ".2f"),
    "steps": ("steps", 1, ",.0f"),
    "tokens": ("tokens_seen", 1e-6, ".2f"),
    "CPU seconds": ("cpu_seconds", 1, ",.0f"),
}


def values_of(rows, rung, column):
    """The values of a column over the seeds of a rung, in the column's unit."""
    key, factor, _ = {**_MEASURED, **_COSTS}[column]
    return [row[key] * factor for row in rows if row["rung"] == rung]


def table(rows):
    """Every measured rung in the ladder's order, mean ± standard deviation over its seeds, as a
    markdown table."""
    lines = []
    for rung in _measured_rungs(rows):
        change, glue, kept = PUBLISHED.get(rung, (METHODS.get(rung), None, None))
        cells = [
            mean_and_deviation(values_of(rows, rung, name), form)
            for name, (_, _, form) in _MEASURED.items()
        ]
        costs = [
            f"{statistics.mean(values_of(rows, rung, name)):{form}}"
            for name, (_, _, form) in _COSTS.items()
        ]
        lines.append(
            [
                rung.upper() if rung in PUBLISHED else "ours",
                change,
                kept or "-",
                glue,
                *cells,
                *costs,
            ]
        )
    units = ["M parameters", "steps", "M tokens", "CPU seconds"]
    return markdown_table(
        ["model", "change", "kept", "GLUE dev (published)", *_MEASURED, *units], lines
    )


def _measured_rungs(rows):
    return [rung for rung in RUNGS if any(row["rung"] == rung for row in rows)]


def write_report(output, rows, ladder, env):
    """Writes OUTPUT.json, .md and .png; returns the page.

    Args:
        rows: of all finished runs.
        ladder: {"scale", "texts", "probe_majority", "probe_test_texts"}.
        env: as `environment()` returns it.
    """
    scale, texts = ladder["scale"], ladder["texts"]
    counts = sorted({len(values_of(rows, rung, "steps")) for rung in _measured_rungs(rows)})
    stand_ins = {
        "Wiki + Books": texts["curated"] or "WordNet",
        "RefinedWeb": texts["diverse"] or "WordNet and GCIDE together",
        "GLUE": "the probe" if texts["probe"] is None else f"the probe on {texts['probe'][0]}",
    }
    text = f"""**Small-scale: {scale["steps"]:,} steps of {scale["texts"]} texts. It shows that every rung runs and is measured alike; it says
nothing for or against the published numbers, which come from 1,000,000 steps of 256 texts of up to 512 tokens.**

Mean ± standard deviation over {" to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds. Probe: logistic regression on mean-pooled features, sentiment of
movie-review sentences, {ladder["probe_test_texts"]:,} test sentences (always the majority class: {100 * ladder["probe_majority"]:.1f} %). Masked accuracy: 20 % always [MASK] on
held-out text. M3's other tokenizer predicts other pieces, so compare it by bits per masked character (lower is better). CPU seconds: of the
training, one process. In place of {", of ".join(f"{name}: {what}" for name, what in stand_ins.items())}. Tokenizers: a WordPiece and a
byte-level BPE of {scale["vocabulary"]:,} pieces and 5 % more, learnt from that text.

{table(rows)}"""  # noqa: E501
    page = write_result(
        output, "The ablation ladder at a small scale", env, {**ladder, "runs": rows}, text
    )
    draw(rows, output.with_name(f"{output.name}.png"), env)
    return page


def draw(rows, path, env):
    """Figure 1's chart: published GLUE by rung on top, our two measurements below; rungs that were
    not kept are pale."""
    rungs = _measured_rungs(rows)
    published = [PUBLISHED.get(rung, (None, None, None)) for rung in rungs]
    colours = [figures.PALE if kept == "no" else figures.OWN for *_, kept in published]
    title = "Ablation ladder: published, and a small-scale run of the same recipes (pale: not kept)"
    figure, panels = figures.subplots(title, rows=3, size=(1.0 + 0.75 * len(rungs), 8), sharex=True)
    figures.bars(panels[0], rungs, [glue for _, glue, _ in published], colours=colours)
    panels[0].set_ylabel("GLUE dev, published")
    for panel, column, digits in zip(
        panels[1:], ("probe accuracy", "bits per masked character"), (1, 2)
    ):
        seeds = [values_of(rows, rung, column) for rung in rungs]
        spreads = [statistics.stdev(values) if len(values) > 1 else 0 for values in seeds]
        figures.bars(panel, rungs, list(map(statistics.mean, seeds)), spreads, digits, colours)
        panel.set_ylabel(f"SMALL SCALE\n{column}")
    panels[2].tick_params(axis="x", labelrotation=30)
    figures.save(figure, path, env)
