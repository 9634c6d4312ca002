"""Fine-tune a BERT sentence encoder from which layers were removed, on its own embeddings.

    OMP_NUM_THREADS=1 python -m benchmarks.pruned_teacher TEACHER recipes/distill.yaml --output runs/pruned

The result shows how near a model with as many layers as a NeoBERT student can come to the teacher
if its architecture does not change. `python -m benchmarks.open_text --pruned runs/pruned` measures
it. The options, losses and texts are those of `neobert distill`. The blocks are the layers
`--teacher-layers` of the teacher, by default 0, 1, 4 and 5.
"""  # noqa: E501

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from neobert.common.commands import guarded
from neobert.common.options import log_options
from neobert.distillation.command import (
    Distillation,
    DistillTrainer,
    comparison_table,
    train,
)
from neobert.distillation.loss import forward_in_groups
from neobert.distillation.options import OPTIONS
from neobert.embeddings.packed_encoder import PackedEncoder, load_sentence_transformer
from neobert.training.checkpoints import is_main, training_time

from .open_text import TEACHER_LAYERS, keep_layers


class PrunedTeacher(Distillation):
    """Run that trains some layers of the teacher instead of a NeoBERT."""

    name = "pruned_teacher"

    def initial_student(
        self, teacher: PackedEncoder, embeddings_from_teacher: bool
    ) -> SentenceTransformer:
        """Return the teacher with the layers of `--teacher-layers`."""
        model = self.options.model
        student = load_sentence_transformer(
            model.teacher,
            max_length=self.options.student.max_length,
            trust_remote_code=model.trust_remote_code,
        )
        keep_layers(student, model.teacher_layers)

        transformer: Any = student[0]
        if self.options.student.freeze_embeddings:
            transformer.auto_model.embeddings.requires_grad_(False)
        transformer.forward = partial(forward_in_groups, transformer.forward)
        return student

    def save(self, trainer: DistillTrainer, folder: Path) -> dict[str, Any]:
        """Write the model and return its agreement with the teacher."""
        if not is_main():
            return {}
        student = trainer.accelerator.unwrap_model(trainer.model)
        comparison = {**self.comparison, "student": self._evaluate(student)}
        student.save_pretrained(str(folder))
        return {
            "steps": trainer.state.global_step,
            **training_time(trainer),
            "comparison": comparison,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune the pruned teacher and print its agreement with the teacher."""
    options = OPTIONS["distill"].read(sys.argv[1:] if argv is None else argv)
    # A recipe for a NeoBERT student may initialize it in another way, and compile its blocks.
    model = replace(
        options.model,
        init_from_teacher=True,
        teacher_layers=options.model.teacher_layers or list(TEACHER_LAYERS),
    )
    options = replace(options, model=model, student=replace(options.student, compile=False))
    log_options(options)
    result = train(options, PrunedTeacher)
    if is_main():
        print(f"{options.model.output}: {result['steps']:,} steps")
        print(comparison_table(result["comparison"]))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.pruned_teacher", main))
