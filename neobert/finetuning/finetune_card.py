"""Model card of a model that `neobert finetune` has trained."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.environment import environment_line, shorten_path
from ..common.errors import printable
from ..common.files import write_text
from ..common.model_card import base_model_metadata, front_matter, license_metadata, read_card
from ..common.tables import markdown_table
from ..common.task_file import CLASSIFICATION, REGRESSION, TOKENS
from .baselines import metric_title
from .comparison import metrics_table
from .finetune_options import FinetuneOptions
from .plots import MAX_LABELS
from .text_tasks import TextTask


# Maximum number of labels of a confusion matrix as a table. metrics.json contains all matrices.
_MAX_MATRIX = 12


def write_card(
    folder: Path,
    options: FinetuneOptions,
    task: TextTask,
    result: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> None:
    """Write README.md: task, data, metrics with standard errors, baselines and calibration.

    Args:
        folder: Directory of the model.
        options: Options of the command.
        task: Task of the model.
        result: Content of metrics.json.
        environment: Environment of the run.
    """
    start = options.model.model
    name = printable(Path(options.model.output).resolve().name)
    tag = "token-classification" if task.name == TOKENS else "text-classification"
    metadata = front_matter(
        **license_metadata(options.card.license, read_card(start)),
        **base_model_metadata(options.card.base_model, start),
        library_name="transformers",
        pipeline_tag=tag,
        tags=["neobert", tag, "custom_code"],
    )
    rows = result["rows"]
    warning = f"**Warning:** {result['warning']}\n\n" if result["warning"] else ""
    text = f"""
# {name}

`{printable(shorten_path(start))}`, fine-tuned with `neobert finetune`: {printable(result["description"])}.

```python
{_usage(name, task)}
```

For files of any size, with calibrated probabilities: `neobert predict INPUT OUTPUT --model {name}`.

## Evaluation

Data: `{printable(result["data"])}`, {rows["train"]:,} training, {rows["validation"]:,} validation and {rows["test"]:,} test rows.
The values are those of the test rows, ± standard error over rows. The baselines were fitted on the same training rows, or on a sample of them.

{metrics_table(result)}
{result["comparison"]["statement"]}

{warning}{_labels_section(task, result)}{_calibration_section(result)}## Training

Learning rate {result["learning_rate"]:.2g}, {len(result["history"])} evaluations; the weights are those with the best {metric_title(result["metric"])} on the validation rows, after epoch {result["selected"]["epoch"]:.2f}. Texts of more than {result["max_length"]:,} tokens are truncated: {_truncated(result)}. `result.json` contains all settings, `metrics.json` all values.

![learning curve](learning_curve.png)

{environment_line(environment)}.
"""  # noqa: E501
    write_text(folder / "README.md", metadata + text)


def _usage(name: str, task: TextTask) -> str:
    # The pipeline joins the tokens of an entity only with an aggregation strategy.
    pipeline = "token-classification" if task.name == TOKENS else "text-classification"
    arguments = ', aggregation_strategy="first"' if task.name == TOKENS and task.bio else ""
    text = '"A text."'
    # The pipeline takes a pair as a dictionary.
    if len(task.text_columns) == 2:
        text = '{"text": "A text.", "text_pair": "Another one."}'
    # By default the pipeline applies a sigmoid to a single output.
    if task.name == REGRESSION:
        arguments = ', function_to_apply="none"'
    return (
        "from transformers import pipeline\n\n"
        f'model = pipeline("{pipeline}", {json.dumps(name)}, trust_remote_code=True{arguments})\n'
        f"print(model({text}))"
    )


def _labels_section(task: TextTask, result: Mapping[str, Any]) -> str:
    """Return the table of the labels or entity types, and the confusion matrix."""
    if task.name == REGRESSION:
        return "![predicted values](predictions.png)\n\n"
    count = "entities" if task.name == TOKENS and task.bio else "test rows"
    rows = [
        [
            printable(row["label"]),
            *(f"{row[name]:.3f}" for name in ("precision", "recall", "f1")),
            f"{row['rows']:,}",
        ]
        for row in result["label_table"]
    ]
    text = markdown_table(["label", "precision", "recall", "F1", count], rows) + "\n"
    # Labels that are numbers, such as stars, have a distance.
    if result["mean_distance"] is not None:
        text += f"Mean distance of label and prediction: {result['mean_distance']:.3f}.\n\n"
    # Plots of many labels are not readable, and are not written.
    if task.name != CLASSIFICATION:
        has_plot = 1 <= len(rows) <= MAX_LABELS
        return f"{text}![F1 of the labels](label_f1.png)\n\n" if has_plot else text

    # A large matrix is readable as a picture only.
    labels = [printable(label) for label in task.labels]
    if len(labels) <= _MAX_MATRIX:
        matrix = [[label, *row] for label, row in zip(labels, result["confusion_matrix"])]
        table = markdown_table(["label / prediction", *labels], matrix)
        text += f"Number of test rows per label and prediction:\n\n{table}\n"
    if len(labels) <= MAX_LABELS:
        text += "![confusion matrix](confusion_matrix.png)\n\n"
    return text


def _calibration_section(result: Mapping[str, Any]) -> str:
    # A regression has no probabilities.
    calibration = result["calibration"]
    if calibration is None:
        return ""
    return (
        f"## Calibration\n\nExpected calibration error on the test rows: "
        f"{calibration['error_before']:.3f} without and {calibration['error_after']:.3f} with the "
        f"temperature {calibration['temperature']:.3f}, which was fitted on the validation rows. "
        "`neobert predict` divides the logits by the temperature; `pipeline` does not.\n\n"
    )


def _truncated(result: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in result["truncated"].items())
