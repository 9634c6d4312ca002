"""What a run with init_from won and lost: `adaptation.md` in its output, with the figures in
`adaptation.json` and a chart."""

import importlib.util

from ..common import figures
from ..common.results import markdown_table, write_result
from .heldout import metric_name


# (metric, its name, decimals, whether more is better)
_METRICS = (
    ("masked_accuracy", "masked accuracy", 3, True),
    ("bits_per_character", "bits a character", 3, False),
)
ALONE = "held-out text"  # the name of a set without one


def curve_of(history, names):
    """{set: {metric: [(step, value), ...]}} of a Trainer's log; of a step the last measurement."""
    curve = {name: {metric: {} for metric, *_ in _METRICS} for name in names}
    for record in history:
        for name, metrics in curve.items():
            for metric, points in metrics.items():
                if metric_name(name, metric) in record:
                    points[record["step"]] = record[metric_name(name, metric)]
    return {
        name: {metric: sorted(points.items()) for metric, points in metrics.items()}
        for name, metrics in curve.items()
    }


def before_and_after(curve, metrics):
    """{set: {metric: {"before": value at step 0 or None, "after": value of the final model}}}."""
    return {
        name: {
            metric: {
                "before": dict(points).get(0),
                "after": metrics[metric_name(name, metric)],
            }
            for metric, points in found.items()
        }
        for name, found in curve.items()
    }


def _cells(values, digits):
    before, after = values["before"], values["after"]
    if before is None:  # a set that was named after the first step
        return ["-", f"{after:.{digits}f}", "-"]
    return [f"{before:.{digits}f}", f"{after:.{digits}f}", f"{after - before:+.{digits}f}"]


def _reading(sets):
    """One sentence a set: gained or lost, by bits a character."""
    lines = []
    for name, metrics in sets.items():
        before, after = metrics["bits_per_character"].values()
        if before:
            word = "Gained" if after < before else "Lost"
            change = 100 * abs(after - before) / before
            less = "fewer" if after < before else "more"
            lines.append(f"{word} on {name or ALONE}: {change:.1f} % {less} bits a character.")
    return " ".join(lines)


def write_report(output, history, metrics, result, sources):
    """Writes OUTPUT.md, .json and, where matplotlib is installed, .png.

    Args:
        output: path without its ending.
        history: `log_history` of the run.
        metrics: of the final model.
        result: content of result.json: environment, steps, tokens_seen, seconds, cpu_seconds,
            average_last.
        sources: {name: share of the texts} of weighted sources, or {}.
    """
    names = [
        name.removeprefix("eval_").removesuffix("bits_per_character").rstrip("_")
        for name in metrics
        if name.endswith("bits_per_character")
    ]
    curve = curve_of(history, names)
    sets = before_and_after(curve, metrics)
    rows = [
        [
            name or ALONE,
            *(cell for metric, _, digits, _ in _METRICS for cell in _cells(found[metric], digits)),
        ]
        for name, found in sets.items()
    ]
    header = ["held-out text"]
    for _, title, *_ in _METRICS:
        header += [f"{title} before", "after", "change"]
    chart = importlib.util.find_spec("matplotlib") is not None
    if chart:
        draw(curve, output.with_name(f"{output.name}.png"), result)
    parts = [
        _reading(sets),
        markdown_table(header, rows),
        f"{result['steps']:,} steps, {result['tokens_seen']:,} tokens, {result['seconds']:,.0f} "
        f"seconds ({result['cpu_seconds']:,.0f} CPU seconds of the first process).",
        _read(sources, history),
        _averaged(result.get("average_last")),
        f"![Before and after]({output.name}.png)" if chart else "",
        "Bits a character: the masked-LM loss in bits, summed over the masked tokens, by the "
        "characters of their text; fewer is better. It compares vocabularies, masked accuracy does "
        "not. Both are measured on the same masked tokens each time.",
    ]
    described = {key: value for key, value in result.items() if key not in ("before", *metrics)}
    write_result(
        output,
        "Adaptation: before and after",
        {key: described.pop(key) for key in _ENVIRONMENT if key in described},
        {**described, "sources": sources, "sets": sets, "curve": curve},
        "\n\n".join(part.strip() for part in parts if part),
    )


_ENVIRONMENT = (
    *("command", "commit", "date", "hardware", "threads", "python", "versions"),
    *("dtype", "processes"),
)


def _read(sources, history):
    """How often each weighted source was read."""
    last = next((record for record in reversed(history) if "loss" in record), {})
    if not sources:
        return ""
    rows = [
        [name, f"{100 * share:.1f} %", f"{last.get(f'passes_{name}', 0):.2g}"]
        for name, share in sources.items()
    ]
    return markdown_table(["source", "share of the texts", "passes"], rows)


def _averaged(found):
    if not found:
        return ""
    bits = found["bits_per_character"]
    return (
        f"Mean of checkpoints {', '.join(map(str, found['steps']))}: {bits['mean']:.4f} bits a "
        f"character (mean of the held-out sets); last weights: {bits['last']:.4f}. Kept: the "
        f"{found['kept']}."
    )


def draw(curve, path, environment):
    """The two measures over the steps, a line for each held-out set; filled markers at the start
    and at the end are those of the table."""
    figure, panels = figures.subplots(
        "Held-out text while training", "step", columns=2, size=(9.6, 3.8)
    )
    for panel, (metric, title, _, more) in zip(panels, _METRICS):
        for number, (name, found) in enumerate(curve.items()):
            if found[metric]:
                steps, values = zip(*found[metric])
                figures.line(panel, steps, values, name or ALONE, number)
        panel.set_ylabel(f"{title} ({'more' if more else 'fewer'} is better)")
        panel.legend()
    figures.save(figure, path, environment)
