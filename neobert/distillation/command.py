"""`neobert distill TEACHER RECIPE.yaml`: a NeoBERT sentence encoder that learns the vectors of
another one.

The teacher is any model of sentence-transformers; its vectors are computed once and kept. The
student is a new NeoBERT of any size, or one that exists. It trains with sentence-transformers'
trainer, packed as in inference: NeoBERT itself drops the padding of a batch.

`--work` keeps the teacher's vectors, which several runs may share; checkpoints are in the output
until it is finished.
"""

import logging
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import RandomSampler
from transformers import set_seed

from ..common.folders import apart, check_folder, new_file
from ..common.identity import files_digest, known_by, model_digest
from ..common.loading import check_model
from ..common.output import Output, run_settings
from ..common.packing import compile_blocks, uncompile_blocks
from ..common.results import environment, markdown_table
from ..embeddings.packed_encoder import PackedEncoder, load_sentence_transformer
from ..evaluation.retrieval import measure, read_questions
from ..training import checkpoints
from ..training.checkpoints import RunTrainer
from ..training.options import BLOCKS_ONLY, number_options, training_arguments
from ..training.run_report import RunReport
from .data import read_texts, teacher_vectors, texts_digest
from .loss import Agreement, DistillLoss
from .model_card import write_card
from .options import OPTIONS
from .student import (
    STORED_AS,
    build_student,
    fitted_table,
    save_student,
    starts_from_teacher,
    take_embeddings,
    token_vectors,
)


logger = logging.getLogger("neobert")

FIGURES = "figures.json"
# A useless student had a mean cosine of 0.18 with its teacher, sensible ones 0.76 to 0.88.
LOW_COSINE = 0.5


class ShuffledBatches(DefaultBatchSampler):
    """Batches whose order is a function of the seed and the epoch: a run that goes on has the
    same."""

    def __init__(self, dataset, batch_size, drop_last, seed=0, **unused):
        sampler = RandomSampler(dataset, generator=torch.Generator())
        super().__init__(sampler, batch_size=batch_size, drop_last=drop_last, seed=seed)

    def __iter__(self):
        self.sampler.generator.manual_seed(self.seed * 1_000_003 + self.epoch)
        return super().__iter__()


class DistillTrainer(RunTrainer, SentenceTransformerTrainer):
    """The library's trainer, whose runs go on after an interruption."""


def settings_of(arguments, trainer_options, sources, others):
    """What a run is known by: its settings, with digests of its texts and of the weights it starts
    from."""
    settings = run_settings(arguments)
    for name, value in number_options(trainer_options).items():
        if not name.startswith("eval_"):  # an evaluation only measures here
            settings[name] = value
    settings["teacher"] = known_by(arguments.teacher)
    settings["init_from"] = arguments.init_from and known_by(arguments.init_from)
    settings["text_digests"] = [files_digest([source.path]) for source in sources + others]
    return settings


def all_vectors(arguments, texts, teacher):
    """The teacher's vectors of the training texts, (N, D) float16 on disk; {name: (texts, their
    vectors)} of what agreement is measured on; and the student's token embeddings, or None. Each is
    computed once, and kept under `--work`."""
    known = [model_digest(arguments.teacher), str(arguments.max_length), arguments.teacher_dtype]

    def place(name, rows):
        file = f"{name}-{texts_digest([*known, *rows])}.npy"
        return Path(arguments.work) / "vectors" / file

    def vectors(name, rows):
        return teacher_vectors(place(name, rows), rows, teacher)

    sets = {name: (rows, np.float32(vectors(name, rows))) for name, rows in texts.measured.items()}
    train = vectors("train", texts.train)
    if not arguments.embeddings_from_teacher:
        return train, sets, None
    path = place("tokens", texts.train)
    if not path.is_file():
        alone = token_vectors(teacher, len(teacher.sentence_transformer.tokenizer))
        with new_file(path) as file:
            np.save(file, fitted_table(alone, teacher.tokenize(texts.train), train))
    return train, sets, torch.from_numpy(np.load(path))


def train(arguments, trainer_options):
    """Trains the student and writes its folder; a run that was interrupted goes on at its last
    checkpoint.

    Returns:
        dict of figures: agreement over the steps, losses, seconds. None if the output
        was finished already.
    Raises:
        UserError: bad input, before any work; Stopped: SIGTERM, after a checkpoint.
    """
    sources, others = arguments.sources()
    paths = (arguments.teacher, arguments.init_from, *(s.path for s in sources + others))
    inputs = [path for path in paths if path and Path(path).exists()]
    check_folder(arguments.work, "work")
    apart(arguments.output, arguments.work, *inputs)
    apart(arguments.work, *inputs)
    for model in filter(None, (arguments.teacher, arguments.init_from)):
        check_model(model)
    checkpoint_folder = Path(arguments.output) / "checkpoints"
    training = training_arguments(
        checkpoint_folder,
        trainer_options,
        BLOCKS_ONLY,
        base=SentenceTransformerTrainingArguments,
    )
    settings = settings_of(arguments, trainer_options, sources, others)
    settings["processes"] = training.world_size
    output = Output(arguments.output, "distill", settings, result=FIGURES)
    if output.state() == "finished":
        checkpoints.remove_checkpoints(checkpoint_folder)
        return None
    heldout = read_questions(arguments.heldout) if arguments.heldout else None
    texts = read_texts(sources, others, arguments.held_out_percent, arguments.held_out_texts)
    if training.eval_strategy != "no":
        texts.check_measured()
    # Before the models are loaded, so that a second process is refused immediately.
    with checkpoints.claim(output):
        return _distill(arguments, training, output, texts, heldout)


def _distill(arguments, training, output, texts, heldout):
    """Train the student in its claimed output; return its figures."""
    set_seed(training.seed)
    teacher = PackedEncoder(
        arguments.teacher,
        dtype=arguments.teacher_dtype,
        device=training.device,
        max_length=arguments.max_length,
        trust_remote_code=arguments.trust_remote_code,
    )
    arguments.embeddings_from_teacher = starts_from_teacher(arguments, teacher.sentence_transformer)
    student = build_student(arguments, teacher.sentence_transformer, teacher.width)
    with training.main_process_first(desc="teacher vectors"):
        vectors, sets, table = all_vectors(arguments, texts, teacher)
    measured = Agreement(sets)
    comparison = {}
    is_main = training.process_index == 0
    if is_main:
        comparison["teacher"] = dict.fromkeys(measured_names(sets), 1.0)
        if heldout:
            comparison["teacher"] |= measure(teacher.sentence_transformer, *heldout)
    del teacher
    if table is not None:
        take_embeddings(student, table, STORED_AS[arguments.embedding_dtype])
    if is_main:
        # Deterministic, so that a resumed run measures the same start.
        comparison["start"] = compare(student.to(training.device), measured, heldout)
    model = student[0].auto_model
    if arguments.compile:
        compile_blocks(model)
    training.batch_sampler = ShuffledBatches
    # A smaller batch has fewer similarities, and one text none.
    training.dataloader_drop_last = len(texts.train) > training.train_batch_size
    numbered = Dataset.from_dict({"text": texts.train, "label": range(len(texts.train))})
    trainer = DistillTrainer(
        model=student,
        args=training,
        train_dataset=numbered,
        loss=DistillLoss(student, arguments, vectors),
        evaluator=measured,
    )
    trainer.add_callback(RunReport())
    checkpoints.train(trainer)
    uncompile_blocks(model)
    figures = {
        "texts": {
            "train": len(texts.train),
            "held_out": len(texts.held_out),
            **{name: len(rows) for name, rows in texts.other.items()},
        },
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "seconds": checkpoints.spent(trainer)["seconds"],
        "losses": [entry for entry in trainer.state.log_history if "loss" in entry],
        "agreement": agreements(trainer.state.log_history),
        "environment": environment(
            dtype="bfloat16" if training.bf16 else "float16" if training.fp16 else "float32",
            processes=training.world_size,
        ),
    }
    if is_main:
        with output.final_files() as folder:
            save_student(student.to("cpu"), folder, arguments.dtype, arguments.embedding_dtype)
            stored = load_sentence_transformer(str(folder), training.device)
            comparison["student"] = compare(stored, measured, heldout)
            figures["stored"] = {name: comparison["student"][name] for name in measured_names(sets)}
            figures["comparison"] = comparison
            figures["warning"] = comparison_warning(comparison)
            write_card(folder, arguments, figures)
        output.finish(**figures)
        checkpoints.remove_checkpoints(training.output_dir)
    return figures


def measured_names(sets: dict) -> list[str]:
    """Return the names of the agreement metrics of these sets of texts."""
    return [f"{name}_{metric}" for name in sets for metric in ("cosine", "spearman")]


def compare(model: SentenceTransformer, measured: Agreement, heldout: tuple | None) -> dict:
    """Return the agreement of an encoder with the teacher and, with `heldout`, its retrieval."""
    metrics = measured(model)
    return metrics | measure(model, *heldout) if heldout else metrics


def comparison_warning(comparison: dict) -> str | None:
    """Return a warning if the student is not better than its start or far from its teacher."""
    start, student = comparison["start"], comparison["student"]
    cosines = [name for name in student if name.endswith("_cosine")]
    if not cosines:
        return None

    name = "mrr@10" if "mrr@10" in student else cosines[0]
    if student[name] <= start[name]:
        return (
            f"the student is not better than its start ({name} {student[name]:.3f}, start "
            f"{start[name]:.3f}). Train for more epochs or with more texts, or lower "
            "--learning-rate."
        )
    if student[cosines[0]] < LOW_COSINE:
        return (
            f"the student agrees little with its teacher (mean cosine {student[cosines[0]]:.3f}). "
            "Start from the teacher with --embeddings-from-teacher, or train for more epochs."
        )
    return None


def comparison_table(comparison: dict) -> str:
    """Return a table of teacher, start and student with one column per metric."""
    names = [name for name in comparison["student"] if not name.endswith("_se")]
    rows = [
        [encoder, *(f"{metrics[name]:.3f}" if name in metrics else "" for name in names)]
        for encoder, metrics in comparison.items()
    ]
    return markdown_table(["encoder", *(name.replace("_", " ") for name in names)], rows)


def agreements(history):
    """The agreement over the steps, of the trainer's log."""
    kept = ("step", "_cosine", "_spearman")
    rows = [
        {name.removeprefix("eval_"): entry[name] for name in entry if name.endswith(kept)}
        for entry in history
    ]
    return [row for row in rows if len(row) > 1]


def main(argv=None):
    """`neobert distill TEACHER [RECIPE.yaml] [--option value ...]`; returns the exit code."""
    arguments, trainer_options = OPTIONS["distill"].read(argv or [])
    figures = train(arguments, trainer_options)
    if not checkpoints.is_main():
        return 0
    if figures is None:
        print(f"{arguments.output}: finished already with these settings")
        return 0
    print(f"{arguments.output}: sentence encoder after {figures['steps']:,} steps")
    if figures["stored"]:
        print(comparison_table(figures["comparison"]))
    if figures["warning"]:
        logger.warning("%s", figures["warning"])
    return 0
