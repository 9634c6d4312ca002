"""The card of a student, and the check that it gives the same vectors in every precision."""

import os
import sys

from ..common.cards import base_model, front_matter
from ..common.files import write_text
from ..common.results import markdown_table, shown
from .distill_loss import agreement
from .packed_encoder import NotFinite, PackedEncoder


def precision_check(folder, sets):
    """Loads the saved student in float32, bfloat16 and float16, and says on stderr in which of them
    it cannot be used.

    Args:
        sets: {name: (texts, teacher's vectors)}.
    Returns:
        {dtype: {"to_float32": mean cosine of its vectors with those of float32, "<set>_cosine",
        "<set>_spearman": agreement with the teacher}}, without a dtype whose vectors are not
        finite.
    """
    precisions, exact = {}, None
    for dtype in ("float32", "bfloat16", "float16"):
        encoder = PackedEncoder(str(folder), dtype=dtype, device="cpu")
        try:
            own = {name: encoder.embed(encoder.tokenize(rows)) for name, (rows, _) in sets.items()}
        except NotFinite:
            if dtype == "float32":
                raise
            print(f"the student's vectors are not finite in {dtype}", file=sys.stderr)
            continue
        exact = exact or own
        cosines = [agreement(own[name], exact[name])["cosine"] for name in sets]
        precisions[dtype] = {"to_float32": min(cosines, default=1.0)}
        for name, (_, vectors) in sets.items():
            for key, value in agreement(own[name], vectors).items():
                precisions[dtype][f"{name}_{key}"] = value
    return precisions


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
    precisions = figures["precision"]
    columns = [key for key in precisions["float32"] if key != "to_float32"]
    rows = [
        [dtype, f"{found['to_float32']:.4f}", *(f"{found[key]:.3f}" for key in columns)]
        for dtype, found in precisions.items()
    ]
    header = ["dtype", "cosine to float32", *(key.replace("_", " ") for key in columns)]
    kinds = [[source.name, source.license or "not stated"] for source in sources]
    environment = figures["environment"]
    losses = (
        f"{arguments.cosine_weight:g} x (1 - cosine), KL divergence of similarities / "
        f"{arguments.similarity_temperature:g}, {arguments.similarity_weight:g} x in the batch "
        f"and {arguments.bank_weight:g} x to {arguments.bank:,} stored texts"
    )
    far = ", ".join(source.name for source in others)
    others = (
        f"The other columns are text of kinds that it did not learn from: {far}." if far else ""
    )
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

{markdown_table(header, rows)}

## Training

{figures["texts"]["train"]:,} texts, {figures["steps"]:,} steps, {figures["epochs"]:.2f} epochs; texts of at most {arguments.max_length} tokens. Losses: {losses}.
`figures.json` holds the settings, the losses and the agreement over the steps.
{environment["hardware"]}, {environment["threads"]} threads; commit {environment["commit"]}, {environment["date"]}.

{markdown_table(["texts", "licence"], kinds)}
"""  # noqa: E501
    write_text(folder / "README.md", metadata + text)
