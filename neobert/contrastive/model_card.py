"""The card of an encoder that `neobert contrastive` made: what it is, how to use it, what was
measured; no row of the training data."""

import json
from pathlib import Path

from ..common.errors import printable
from ..common.files import write_text
from ..common.model_card import base_model, front_matter, licence, read_card
from ..common.results import markdown_table, shown
from ..evaluation.retrieval import METRICS


def write_card(folder, arguments, sources, length, training):
    """README.md of the encoder.

    Args:
        folder: where it is written.
        arguments: `ContrastiveArguments`.
        sources: the `PairSource`s.
        length: tokens of a text that are read.
        training: what `train` returns.
    """
    name = Path(arguments.output).resolve().name
    metadata_license = licence(arguments.license, read_card(arguments.model))
    metadata = front_matter(
        **metadata_license,
        **base_model(arguments.base_model, arguments.model),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=[
            "sentence-transformers",
            "sentence-similarity",
            "feature-extraction",
            "contrastive",
            "custom_code",
        ],
        datasets=list(dict.fromkeys(source.path for source in sources if not source.is_local))
        or None,
    )
    data = [
        [printable(key), f"{rows:,}", f"{training['probabilities'][key]:.3f}"]
        for key, rows in training["rows"].items()
    ]
    instructed = any(source.instruction.strip() for source in sources)
    comment = "  # adds the instruction of the training" if instructed else ""
    inherited = ""
    if metadata_license and not arguments.license:
        inherited = "The license is that of the model card of the start.\n\n"
    text = f"""
# {printable(name)}

A sentence encoder: `{printable(shown(arguments.model))}` after {training["steps"]:,} steps of contrastive training with
[sentence-transformers](https://sbert.net). It reads at most {length:,} tokens of a text.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({json.dumps(printable(name))}, trust_remote_code=True)
queries = model.encode_query(["A question."]){comment}
documents = model.encode_document(["A text that may answer it."])
print(model.similarity(queries, documents))
```

{_measured(training.get("heldout"))}## Training

{inherited}InfoNCE on cosine similarity / {arguments.temperature:g}. `result.json` holds all settings and the losses.

{markdown_table(["data set", "rows", "share of the batches"], data)}
"""  # noqa: E501
    write_text(folder / "README.md", metadata + text)


def _measured(found):
    if found is None:
        return ""
    rows = [
        [when, *(f"{found[when][name]:.3f} ± {found[when][f'{name}_se']:.3f}" for name in METRICS)]
        for when in ("tf-idf", "before", "after")
    ]
    return (
        f"## Retrieval\n\n{found['questions']:,} questions that were not trained on, each searched "
        f"among {found['texts']:,} texts:\n\n"
        f"{markdown_table(['encoder', *METRICS], rows)}\n"
    )
