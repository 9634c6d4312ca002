"""Model card of a student, with its agreement with the teacher."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.environment import shorten_path
from ..common.errors import listed
from ..common.files import write_text
from ..common.model_card import base_model_metadata, front_matter
from ..common.tables import markdown_table
from ..evaluation.retrieval import METRICS
from .data import TextSource
from .options import DistillOptions


def write_card(
    folder: Path,
    options: DistillOptions,
    sources: Sequence[TextSource],
    validation_sources: Sequence[TextSource],
    result: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> None:
    """Write README.md of the student.

    Args:
        folder: Directory of the student.
        options: Options of the command.
        sources: Sources of the training texts.
        validation_sources: Sources of the other validation texts.
        result: Content of the result file, see `command.Distillation.save`.
        environment: Environment of the run.
    """
    card = options.card
    loss = options.loss
    name = card.model_name or Path(options.model.output).resolve().name
    metadata = front_matter(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        language=card.language,
        license=card.license,
        **base_model_metadata(card.base_model, options.model.init_from or options.model.teacher),
        tags=[
            "sentence-transformers",
            "sentence-similarity",
            "feature-extraction",
            "neobert",
            "distillation",
        ],
    )

    counts = result["texts"]
    # `loss.agreement` compares the pairs of at most 1,000 texts.
    pairs = min(1000, counts["validation"])
    evaluated = result["comparison"]["student"]
    other_names = ", ".join(
        source.name for source in validation_sources if f"{source.name}_spearman" in evaluated
    )
    explanation = "`validation`: held-out texts of the training sources."
    if other_names:
        explanation += f" Texts of types that the student was not trained on: {other_names}."
    warning = f"**Warning:** {result['warning']}\n\n" if result["warning"] else ""

    # Only --init-from-teacher takes layers of the teacher.
    initialization = ""
    if result["teacher_layers"]:
        initialization = (
            f" The blocks were initialized from the layers {listed(result['teacher_layers'])} of "
            f"the teacher, with {options.model.transfer_steps} training steps each."
        )

    licenses = [[source.name, source.license or "not stated"] for source in sources]
    losses = (
        f"{loss.cosine_weight:g} x (1 - cosine), {loss.similarity_weight:g} x KL divergence of the "
        f"similarities within a batch, and {loss.memory_bank_weight:g} x KL divergence of the "
        f"similarities to a memory bank of {loss.memory_bank_size:,} texts, at temperature "
        f"{loss.similarity_temperature:g}"
    )
    if loss.hidden_state_weight:
        losses += (
            f"; {loss.hidden_state_weight:g} x the relative squared error of the last hidden states"
        )
    # An installed package has no commit.
    commit = f"commit {environment['commit']}, " if environment["commit"] else ""
    text = f"""
# {name}

A NeoBERT sentence encoder (arXiv 2502.19587) distilled from `{shorten_path(options.model.teacher)}`.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}", trust_remote_code=True)
print(model.similarity(model.encode(["a bird of prey"]), model.encode(["an eagle", "a violin"])))
```

## Agreement with the teacher

Mean cosine between the embeddings of student and teacher, and Spearman correlation between the similarities of all pairs of {pairs} texts.
{explanation} The initial student is the student before training.

{_agreement_table(result["comparison"])}
{_retrieval_section(result["comparison"])}{warning}## Training

{counts["train"]:,} texts of at most {options.student.max_length} tokens, {result["steps"]:,} steps, {result["epochs"]:.2f} epochs.{initialization} Loss: {losses}.
`result.json` contains the settings, the losses and the agreement at every evaluation.
{environment["hardware"]}, {environment["threads"]} threads; {commit}{environment["date"]}.

{markdown_table(["texts", "license"], licenses)}
"""  # noqa: E501
    write_text(folder / "README.md", metadata + text)


def _agreement_table(comparison: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of the agreement of the student and the initial student by type of texts."""
    initial = comparison["initial_student"]
    student = comparison["student"]
    names = [key.removesuffix("_spearman") for key in student if key.endswith("_spearman")]
    rows = []
    for name in names:
        cells = [name.replace("_", " ")]
        for metrics in (student, initial):
            cells += [f"{metrics[f'{name}_{key}']:.3f}" for key in ("cosine", "spearman")]
        rows.append(cells)
    header = ["texts", "mean cosine", "Spearman", "mean cosine, initial", "Spearman, initial"]
    return markdown_table(header, rows)


def _retrieval_section(comparison: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of the retrieval of all encoders, or "" without --validation-file."""
    if "mrr@10" not in comparison["initial_student"]:
        return ""
    rows = []
    for encoder, metrics in comparison.items():
        cells = [f"{metrics[name]:.3f} ± {metrics[f'{name}_se']:.3f}" for name in METRICS]
        rows.append([encoder.replace("_", " "), *cells])
    return f"Retrieval on validation pairs:\n\n{markdown_table(['encoder', *METRICS], rows)}\n"
