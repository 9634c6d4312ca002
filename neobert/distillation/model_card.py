"""The card of a student, and how near the saved one is to its teacher."""

import os

from ..common.files import write_text
from ..common.model_card import base_model, front_matter
from ..common.results import markdown_table, shown
from ..evaluation.retrieval import METRICS


def write_card(folder, arguments, figures):
    """README.md of the student."""
    title = arguments.title or os.path.basename(os.path.abspath(arguments.output))
    sources, others = arguments.sources()
    metadata = front_matter(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        language=arguments.language,
        license=arguments.license,
        **base_model(arguments.base_model, arguments.init_from or arguments.teacher),
        tags=[
            "sentence-transformers",
            "sentence-similarity",
            "feature-extraction",
            "neobert",
            "distillation",
        ],
    )
    comparison = figures["comparison"]
    found, start = figures["stored"], comparison["start"]
    names = dict.fromkeys(key.rpartition("_")[0] for key in found)
    rows = [
        [name.replace("_", " ")]
        + [f"{found[f'{name}_{key}']:.3f}" for key in ("cosine", "spearman")]
        + [f"{start[f'{name}_{key}']:.3f}" for key in ("cosine", "spearman")]
        for name in names
    ]
    headers = [
        "texts",
        "mean cosine",
        "Spearman",
        "mean cosine of the start",
        "Spearman of the start",
    ]
    retrieval = ""
    if "mrr@10" in start:
        retrieved = [
            [encoder, *(f"{values[name]:.3f} ± {values[f'{name}_se']:.3f}" for name in METRICS)]
            for encoder, values in comparison.items()
        ]
        retrieval = (
            f"Retrieval of held-out pairs:\n\n{markdown_table(['encoder', *METRICS], retrieved)}\n"
        )
    warning = f"**Warning:** {figures['warning']}\n\n" if figures["warning"] else ""
    kinds = [[source.name, source.license or "not stated"] for source in sources]
    environment = figures["environment"]
    losses = (
        f"{arguments.cosine_weight:g} x (1 - cosine), KL divergence of similarities / "
        f"{arguments.similarity_temperature:g}, {arguments.similarity_weight:g} x in the batch "
        f"and {arguments.bank_weight:g} x to {arguments.bank:,} stored texts"
    )
    far = ", ".join(source.name for source in others)
    others = f"The others are text of kinds that it did not learn from: {far}." if far else ""
    # An installed package has no commit.
    commit = f"commit {environment['commit']}, " if environment["commit"] else ""
    text = f"""
# {title}

A NeoBERT sentence encoder (arXiv 2502.19587) that learned the vectors of `{shown(arguments.teacher)}`.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{title}", trust_remote_code=True)
print(model.similarity(model.encode(["a bird of prey"]), model.encode(["an eagle", "a violin"])))
```

## How near it is to its teacher

Mean cosine between the two vectors of a text, and Spearman correlation between the similarities of all pairs of {min(1000, figures["texts"]["held_out"])}
texts. `held out`: texts of the training sources, kept back by hash. {others}

{markdown_table(headers, rows)}

{retrieval}{warning}## Training

{figures["texts"]["train"]:,} texts, {figures["steps"]:,} steps, {figures["epochs"]:.2f} epochs; texts of at most {arguments.max_length} tokens. Losses: {losses}.
`figures.json` holds the settings, the losses and the agreement over the steps.
{environment["hardware"]}, {environment["threads"]} threads; {commit}{environment["date"]}.

{markdown_table(["texts", "licence"], kinds)}
"""  # noqa: E501
    write_text(folder / "README.md", metadata + text)
