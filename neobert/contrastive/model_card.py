"""Model card of an encoder trained by `neobert contrastive`.

The card describes the encoder, its use and its evaluation. Unlike the card of the library, it
contains no rows of the training data.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.environment import shorten_path
from ..common.errors import printable
from ..common.files import write_text
from ..common.model_card import base_model_metadata, front_matter, license_metadata, read_card
from ..common.tables import markdown_table
from ..evaluation.retrieval import METRICS
from .data import PairSource
from .options import ContrastiveOptions


def write_card(
    folder: Path,
    options: ContrastiveOptions,
    sources: Sequence[PairSource],
    max_length: int | None,
    summary: Mapping[str, Any],
) -> None:
    """Write README.md.

    Args:
        folder: Directory of the encoder.
        options: Options of the command.
        sources: Training datasets.
        max_length: Maximum sequence length of the encoder in tokens.
        summary: Statistics of the training run, see `command.summarize`.
    """
    # `folder` is a temporary directory, so the name is that of the output directory.
    name = printable(Path(options.model.output).resolve().name)
    initial_model = options.model.model
    # Local files are not listed in the metadata, because nobody else can load them.
    hub_datasets = list(dict.fromkeys(source.path for source in sources if not source.is_local))
    # Without an option, the license is that of the initial model, and the card states this below.
    license_of_weights = license_metadata(options.card.license, read_card(initial_model))
    metadata = front_matter(
        **license_of_weights,
        **base_model_metadata(options.card.base_model, initial_model),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=[
            "sentence-transformers",
            "sentence-similarity",
            "feature-extraction",
            "contrastive",
            "custom_code",
        ],
        datasets=hub_datasets or None,
    )

    # The parts of the text that depend on the run, in the order of the page.
    has_instruction = any(source.instruction.strip() for source in sources)
    comment = "  # adds the instruction of the training" if has_instruction else ""
    inherited = ""
    if license_of_weights and not options.card.license:
        inherited = "The license is that of the initial model's card.\n\n"
    data = [
        [printable(key), f"{rows:,}", f"{summary['probabilities'][key]:.3f}"]
        for key, rows in summary["rows"].items()
    ]
    warning = summary.get("warning")
    warning_text = f"**Warning:** {warning}\n\n" if warning else ""
    length = f"{max_length:,} tokens" if max_length else "the length of its positions"

    text = f"""
# {name}

A sentence encoder: `{printable(shorten_path(initial_model))}` after {summary["steps"]:,} steps of contrastive training with [sentence-transformers](https://sbert.net).
Texts are truncated to {length}.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({json.dumps(name)}, trust_remote_code=True)
queries = model.encode_query(["A query."]){comment}
documents = model.encode_document(["A text that may answer it."])
print(model.similarity(queries, documents))
```

{_evaluation(summary.get("validation"))}{warning_text}## Training

{inherited}InfoNCE on cosine similarity / {options.loss.temperature:g}. `result.json` contains all settings and the losses.

{markdown_table(["dataset", "rows", "sampling probability"], data)}
"""  # noqa: E501
    write_text(folder / "README.md", metadata + text)


def _evaluation(validation: Mapping[str, Any] | None) -> str:
    """Return the section about the evaluation, or "" for a run without validation queries."""
    if validation is None:
        return ""
    rows = []
    for encoder in ("tf-idf", "before", "after"):
        metrics = validation[encoder]
        cells = [f"{metrics[name]:.3f} ± {metrics[f'{name}_se']:.3f}" for name in METRICS]
        rows.append([encoder, *cells])
    table = markdown_table(["encoder", *METRICS], rows)
    return (
        f"## Evaluation\n\nRetrieval for {validation['queries']:,} queries that were not "
        "trained on, neither as anchor nor as positive. Each query is searched among "
        f"{validation['texts']:,} texts. Mean ± standard error.\n\n{table}\n"
    )
