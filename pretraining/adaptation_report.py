"""What a run with init_from won and lost: `adaptation.md` in its output, with the figures in
`adaptation.json`.

Three models are told apart: the one that was given, with its own tokenizer; where the vocabulary is
replaced, that with its new rows before the first step; and the one after the run. Gains and losses
are against the first.
"""

from ..common.errors import UserError
from ..common.loading import load_tokenizer
from ..common.results import markdown_table, write_result
from .heldout import measure_sets, metric_name, unigram, unigram_accuracy
from .model import make_model
from .texts import heldout_set


MEASURES = {
    "bits_per_character": "bits a character",
    "masked_accuracy": "masked accuracy",
    "unigram_accuracy": "always the most frequent token",
}
ALONE = "held-out text"  # the name of a set without one
_ENVIRONMENT = ("command", "commit", "date", "hardware", "threads", "python", "versions", "dtype")
_NOTE = (
    "Bits a character: the masked-LM loss in bits, summed over the masked tokens, by the "
    "characters of their text; fewer is better. It compares vocabularies, masked accuracy does "
    "not. Below masked accuracy is what always saying the set's most frequent token would reach on "
    "the same masked tokens. ± is the standard error over the batches of held-out text. What a "
    "vocabulary has no piece for ([UNK]) counts nowhere."
)


def measure_start(run, trainer):
    """Metrics of the model that a run was given, with its own tokenizer: `start_...`; {} where its
    folder has none. A set that it cannot read has none.

    Args:
        run: `Given`, with init_embeddings.
        trainer: `PretrainingTrainer`, for its device and processes.
    """
    try:
        tokenizer = load_tokenizer(run.start, padding=False)
    except UserError:  # init_embeddings random does without
        return {}
    fields = dict(run.model.model_config or {})
    for name in ("vocab_size", "pad_token_id"):  # of the new vocabulary
        fields.pop(name, None)
    model = make_model(fields, run.start, tokenizer, run.training.seed).to(trainer.args.device)
    sets = {}
    for name in run.data.heldout_sources:
        try:
            sets[name] = heldout_set(run, name, tokenizer, "start-")
        except UserError:  # the old vocabulary has no piece for this text
            continue
    metrics = measure_sets(model, sets, tokenizer, trainer.args.device, trainer.accelerator)
    for name, batches in sets.items():
        token = unigram(batches.windows.texts, tokenizer)
        metrics[metric_name(name, "unigram_accuracy")] = unigram_accuracy(batches, token)
    return {name.replace("eval", "start", 1): value for name, value in metrics.items()}


def compare(history, metrics, replaced):
    """{set: {measure: {"given", "untrained", "after": value, None where it was not measured}}}.

    Args:
        history: `log_history` of the run.
        metrics: of the final model.
        replaced: whether the run replaced the vocabulary of its start.
    """
    first = {}
    for record in history:
        if record["step"] == 0:
            first |= record
    ending = "bits_per_character"
    keys = (key.removeprefix("eval_") for key in metrics if key.endswith(ending))
    sets = {key.removesuffix(ending).rstrip("_"): {} for key in keys}
    for name, measures in sets.items():
        for measure in (*MEASURES, *(f"{measure}_error" for measure in MEASURES)):
            after = metrics.get(metric_name(name, measure))
            untrained = first.get(metric_name(name, measure))
            if measure == "unigram_accuracy":  # says nothing of the weights
                untrained = after
            start = first.get(metric_name(name, measure, "start")) if replaced else untrained
            measures[measure] = {"given": start, "untrained": untrained, "after": after}
    return sets


def _cell(value, error):
    if value is None:
        return "-"
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def write_report(output, history, metrics, result, sources):
    """Writes OUTPUT.md and OUTPUT.json.

    Args:
        output: path without its ending.
        history, metrics: as of `compare`.
        result: content of result.json: environment, steps, tokens_seen, seconds, cpu_seconds,
            init_rows where the vocabulary was replaced.
        sources: {name: share of the texts} of weighted sources, or {}.
    """
    replaced = "init_rows" in result
    sets = compare(history, metrics, replaced)
    columns = {"given": "the model given"}
    if replaced:
        columns["untrained"] = "with its new rows, untrained"
    columns["after"] = "after"
    words, rows = [], []
    for name, measures in sets.items():
        for measure, title in MEASURES.items():
            values, errors = measures[measure], measures[f"{measure}_error"]
            cells = [_cell(values[key], errors[key]) for key in columns]
            change = ""
            if values["given"] is not None and (measure == "bits_per_character" or not replaced):
                change = f"{values['after'] - values['given']:+.3f}"
            rows.append([name or ALONE, title, *cells, change])
        bits = measures["bits_per_character"]
        if bits["given"]:
            change = 100 * (bits["after"] / bits["given"] - 1)
            word, more = ("Gained", "fewer") if change < 0 else ("Lost", "more")
            words.append(f"{word} on {name or ALONE}: {abs(change):.1f} % {more} bits a character.")
    header = ["held-out text", "measure", *columns.values(), "change"]
    costs = (
        f"{result['steps']:,} steps, {result['tokens_seen']:,} tokens, {result['seconds']:,.0f} "
        f"seconds ({result['cpu_seconds']:,.0f} CPU seconds of the first process)."
    )
    parts = [" ".join(words), markdown_table(header, rows), costs]
    if sources:
        last = next((record for record in reversed(history) if "loss" in record), {})
        read = [
            [name, f"{100 * share:.1f} %", f"{last.get(f'passes_{name}', 0):.2g}"]
            for name, share in sources.items()
        ]
        parts.append(markdown_table(["source", "share of the texts", "passes"], read))
    described = {key: value for key, value in result.items() if key not in metrics}
    environment = {key: described.pop(key) for key in _ENVIRONMENT if key in described}
    curve = [record for record in history if any(key.startswith("eval_") for key in record)]
    write_result(
        output,
        "Adaptation: before and after",
        environment,
        {**described, "sources": sources, "sets": sets, "curve": curve},
        "\n\n".join(part.strip() for part in (*parts, _NOTE)),
    )
