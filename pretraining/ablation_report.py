"""The small ladder's table and chart: published numbers beside ours, which are marked as small-scale."""

import statistics
import textwrap

from ..common import figures
from ..common.results import markdown_table, write_result
from .ablation_recipes import EQUAL_SECONDS, METHODS, PUBLISHED, RUNGS


def summarise(rows):
    """{rung: {measurement: (mean, standard deviation over seeds or None)}}, in the ladder's order."""
    table = {}
    for name in RUNGS:
        mine = [row for row in rows if row["rung"] == name]
        if mine:
            values = {key: [row[key] for row in mine] for key in mine[0] if key not in ("rung", "seed")}
            table[name] = {key: (statistics.mean(v), statistics.stdev(v) if len(v) > 1 else None) for key, v in values.items()}
    return table


def describe_rung(name):
    """(model, change, published GLUE dev, kept) as the table and the chart word them."""
    if name in PUBLISHED:
        change, glue, kept = PUBLISHED[name]
        return name.upper(), change, glue, kept or "-"
    method = name.removesuffix(EQUAL_SECONDS)
    return f"M9 {METHODS[method]}", "ours, equal CPU seconds" if name != method else "ours, equal tokens", None, "-"


def _with_spread(pair, digits=1, factor=100):
    mean, spread = pair
    return f"{mean * factor:.{digits}f}" + (f" ± {spread * factor:.{digits}f}" if spread is not None else "")


def _line(rung, values):
    model, change, glue, kept = describe_rung(rung)
    return [
        model, change, kept, glue, _with_spread(values["probe_accuracy"]), _with_spread(values["masked_accuracy"]),
        _with_spread(values["masked_bits_per_character"], 3, 1), f"{values['parameters'][0] / 1e6:.2f}M", f"{values['steps'][0]:,.0f}",
        f"{values['tokens_seen'][0] / 1e6:.2f}M", f"{values['cpu_seconds'][0]:.0f}",
    ]  # fmt: skip


def write_report(output, rows, ladder, env):
    """Writes OUTPUT.json, .md and .png; returns the page.

    Args:
        rows: of all finished runs.
        ladder: {"scale", "texts", "probe_majority", "probe_test_texts"}.
        env: as `environment()` returns it.
    """
    table, scale, texts = summarise(rows), ladder["scale"], ladder["texts"]
    counts = sorted({sum(row["rung"] == name for row in rows) for name in table})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    stand_ins = {
        "Wiki + Books": texts["curated"] or "WordNet",
        "RefinedWeb": texts["diverse"] or "WordNet and GCIDE together",
        "GLUE": "the probe" if texts["probe"] is None else f"the probe on {texts['probe'][0]}",
    }
    text = (
        f"**Small-scale: models of {table[next(iter(table))]['parameters'][0] / 1e6:.2f}M parameters and up, {scale['steps']:,} steps of "
        f"{scale['texts']} texts. It shows that every rung runs and is measured alike; it says nothing for or against the published numbers, "
        "which come from 1,000,000 steps of 256 texts of up to 512 tokens.**\n\n"
        f"Mean ± standard deviation over {seeds} seeds. Probe: logistic regression on mean-pooled features, sentiment of movie-review "
        f"sentences, {ladder['probe_test_texts']:,} test sentences (always the majority class: {100 * ladder['probe_majority']:.1f} %). Masked "
        "accuracy: 20 % always [MASK] on held-out text. M3's other tokenizer predicts other pieces, so compare it by bits per masked character "
        "(lower is better). CPU seconds: of the training, one process. In place of "
        + ", of ".join(f"{name}: {what}" for name, what in stand_ins.items())
        + f". Tokenizers: a WordPiece and a byte-level BPE of {scale['vocabulary']:,} pieces and 5 % more, learnt from that text.\n\n"
    )
    header = [
        *(
            "model",
            "change",
            "kept",
            "GLUE dev (published)",
            "probe accuracy",
            "masked accuracy",
            "bits per masked character",
            "parameters",
        ),
        *("steps", "tokens", "CPU seconds"),
    ]
    text += markdown_table(header, [_line(rung, values) for rung, values in table.items()])
    page = write_result(output, "The ablation ladder at a small scale", env, {**ladder, "runs": rows}, text)
    draw(table, seeds, ladder["probe_majority"], output.with_name(f"{output.name}.png"), env)
    return page


def draw(table, seeds, baseline, path, env):
    """Figure 1's chart: published GLUE by rung on top, our two measurements below; rungs that were not kept are pale."""
    names = list(table)
    labels = [textwrap.fill(": ".join(describe_rung(name)[:2]), 24) for name in names]
    colours = [figures.OWN if describe_rung(name)[3] != "no" else figures.PALE for name in names]
    title = "Ablation ladder: published, and a small-scale run of the same recipes (pale: not kept)"
    figure, panels = figures.subplots(title, rows=3, size=(1.0 + 0.75 * len(names), 9.5), sharex=True)
    measured = (
        ("GLUE dev, published", [describe_rung(name)[2] for name in names], None, 1),
        (f"SMALL SCALE, {seeds} seeds\nprobe accuracy, %", *_series(table, names, "probe_accuracy", 100), 1),
        (
            f"SMALL SCALE, {seeds} seeds\nbits per masked character\n(lower is better)",
            *_series(table, names, "masked_bits_per_character", 1),
            2,
        ),
    )
    for panel, (label, means, spreads, digits) in zip(panels, measured):
        figures.bars(panel, labels, means, spreads, digits, colours)
        panel.set_ylabel(label)
    panels[1].axhline(100 * baseline, color=figures.GREY, linewidth=0.8, linestyle="--", label="always the majority class")
    panels[1].legend(loc="lower right", frameon=True)
    panels[2].tick_params(axis="x", labelrotation=60)
    for label in panels[2].get_xticklabels():
        label.set_ha("right")
        label.set_rotation_mode("anchor")
    figures.save(figure, path, env)


def _series(table, names, key, factor):
    """Means and standard deviations (0 for one seed) of a measurement over the rungs."""
    return [factor * table[name][key][0] for name in names], [factor * (table[name][key][1] or 0) for name in names]
