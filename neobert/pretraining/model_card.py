"""Model card of a pre-training run, and the comparison of the model before and after it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.environment import shorten_path
from ..common.errors import printable
from ..common.files import write_text
from ..common.model_card import base_model_metadata, front_matter, license_metadata, read_card
from ..common.tables import markdown_table
from ..training.run import mixed_precision
from .run import PretrainingRun


# Metrics of a validation set in the table.
_METRICS = ("bits_per_character", "masked_accuracy")

_EXPLANATION = (
    "Bits per character: masked-LM loss in bits, divided by the characters of the masked tokens' "
    "text; lower is better, and comparable across tokenizers. ± is the standard error over the "
    "validation batches."
)


def write_card(
    run: PretrainingRun, folder: Path, result: Mapping[str, Any], comparison: str
) -> None:
    """Write README.md, the model card of a run.

    Args:
        run: The run.
        folder: Directory of the final files.
        result: Content of result.json.
        comparison: Result of `comparison_table`, or "" without validation texts.
    """
    name = printable(run.options.output_folder.resolve().name)
    text = f"""
# {name}

A NeoBERT masked language model ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)), trained {_origin(run)}.

```python
from transformers import pipeline

fill_mask = pipeline("fill-mask", {json.dumps(name)}, trust_remote_code=True)
```

## Training

`neobert pretrain`; `result.json` contains all settings.

{markdown_table(["", "value"], _settings_rows(run, result))}"""  # noqa: E501
    if comparison:
        text += f"\n## Validation\n\n{comparison}"
    write_text(folder / "README.md", _metadata(run) + text)


def _metadata(run: PretrainingRun) -> str:
    """Return the metadata block of the card."""
    start = run.options.model.init_from
    start_card = {} if start is None else read_card(start)
    hub_names = [source.name for source in run.sources if source.source_type == "hub"]
    return front_matter(
        **license_metadata(None, start_card),
        **base_model_metadata(None, start),
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["neobert", "fill-mask", "custom_code", "safetensors"],
        datasets=list(dict.fromkeys(hub_names)) or None,
    )


def _origin(run: PretrainingRun) -> str:
    """Return the start and the texts of a run: "from `model` on `texts.txt`"."""
    start = run.options.model.init_from
    origin = "random weights" if start is None else f"`{printable(shorten_path(start))}`"
    texts = [f"`{printable(shorten_path(source.name))}`" for source in run.sources]
    return f"from {origin} on {', '.join(texts)}"


def _settings_rows(run: PretrainingRun, result: Mapping[str, Any]) -> list[list[object]]:
    """Return the rows of the card's table of settings."""
    masking = run.options.masking
    fractions = masking.mask_schedule or [masking.mlm_probability]
    steps = f"{result['steps']:,}"
    if result.get("best_step"):
        steps += f"; the weights are those of step {result['best_step']:,}"
    return [
        ["steps", steps],
        ["tokens", f"{result['tokens_seen']:,}"],
        ["maximum length", f"{run.options.batch.max_length:,}"],
        ["peak learning rate", f"{run.training.learning_rate:g}"],
        ["masked tokens", " to ".join(f"{fraction:.0%}" for fraction in fractions)],
        ["dtype", mixed_precision(run.training)],
        ["seed", run.training.seed],
    ]


def comparison_table(
    history: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float],
    has_start: bool,
    has_new_vocabulary: bool,
) -> str:
    """Return a table of the validation metrics before the first step and after the last.

    Changes are relative to the initial model. If the run replaced the vocabulary, this is the model
    with its original tokenizer, so the table shows what the model has forgotten. The masked
    accuracy of two vocabularies is not comparable, so its change is omitted.

    Args:
        history: Log records of the run.
        metrics: Metrics of the final model, {`metric_name`: value}.
        has_start: Whether the run started from another model.
        has_new_vocabulary: Whether the run replaced the vocabulary of that model.
    """
    # Before the first step, several records are logged. Their metrics are combined.
    first: dict[str, Any] = {}
    for record in history:
        if record["step"] == 0:
            first.update(record)

    before: Mapping[str, Any] = first
    columns: dict[str, Mapping[str, Any]]
    if has_new_vocabulary:
        # `eval_...` are the metrics after the vocabulary was replaced, and `start_...` those of the
        # model with its original vocabulary.
        before = _with_eval_prefix(first)
        columns = {
            "initial model, own tokenizer": before,
            "untrained new rows": first,
            "after": metrics,
        }
    else:
        columns = {"initial model" if has_start else "untrained model": first, "after": metrics}

    # Standard errors and losses have no row of their own. The errors appear in the cells.
    rows = []
    for key in metrics:
        if not key.endswith(_METRICS):
            continue
        is_comparable = key.endswith("bits_per_character") or not has_new_vocabulary
        change = ""
        if key in before and is_comparable:
            change = f"{metrics[key] - before[key]:+.3f}"
        cells = [_cell(values, key) for values in columns.values()]
        rows.append([key.removeprefix("eval_").replace("_", " "), *cells, change])
    return f"{markdown_table(['metric', *columns, 'change'], rows)}\n{_EXPLANATION}\n"


def _with_eval_prefix(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics `start_...` of a record under the names `eval_...`."""
    return {
        key.replace("start", "eval", 1): value
        for key, value in record.items()
        if key.startswith("start_")
    }


def _cell(values: Mapping[str, Any], key: str) -> str:
    """Return a value with its standard error, or "-" if there is none."""
    if key not in values:
        return "-"
    error = values.get(f"{key}_error")
    return f"{values[key]:.3f}" + ("" if error is None else f" ± {error:.3f}")
