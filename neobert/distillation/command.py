"""Command `neobert distill`: train a NeoBERT sentence encoder on the embeddings of another one.

The teacher is any model of sentence-transformers. Its embeddings are computed once and stored in
`--work`, which several runs may share. The student is a new NeoBERT of any size or an existing one.
It is trained with the trainer of sentence-transformers on packed batches.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file, save
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import RandomSampler
from transformers import set_seed

from ..common.errors import UserError
from ..common.folders import check_disjoint, check_folder, locked, new_file
from ..common.identity import files_digest, model_digest, model_fingerprint
from ..common.loading import check_model, vocabulary_size
from ..common.options import identity, log_options
from ..common.output import Output
from ..common.packing import compile_blocks, uncompile_blocks
from ..common.tables import markdown_table
from ..embeddings.packed_encoder import PackedEncoder, load_sentence_transformer
from ..evaluation.retrieval import Queries, evaluate_retrieval, read_queries
from ..training.checkpoints import RunTrainer, is_main, training_time
from ..training.muon import MuonAdamW, block_matrices, check_muon, warn_if_muon_is_slow
from ..training.options import BLOCKS_ONLY, result_options, training_arguments
from ..training.run import run_environment, run_once
from ..training.run_report import RunReport
from .data import (
    Texts,
    TextSource,
    check_readable,
    check_validation_names,
    count_overlap,
    read_texts,
    teacher_embeddings,
    texts_digest,
)
from .loss import Agreement, DistillLoss, EvaluatedTexts
from .model_card import write_card
from .options import OPTIONS, DistillOptions
from .student import (
    STORAGE_DTYPES,
    TOKEN_TABLE_VERSION,
    balance_student,
    build_student,
    check_hidden_states,
    embed_single_tokens,
    fit_token_embeddings,
    resolve_embeddings_from_teacher,
    save_student,
    set_token_embeddings,
)
from .transfer import (
    TRANSFER_VERSION,
    TeacherLayers,
    equal_lengths,
    initialize_blocks,
    load_teacher_layers,
)


logger = logging.getLogger("neobert.distillation")

# Maximum number of texts that --init-from-teacher uses, and number of tokens after which the texts
# end. The hidden states of all of these tokens are in memory.
TRANSFER_TEXTS = 50_000
TRANSFER_TOKENS = 300_000
# A useless student had a mean cosine of 0.18 with its teacher, useful ones 0.76 to 0.88.
LOW_COSINE = 0.5


class ShuffledBatches(DefaultBatchSampler):
    """Batch sampler whose order depends on the seed and the epoch alone, so runs resume."""

    def __init__(
        self, dataset: Dataset, batch_size: int, drop_last: bool, seed: int = 0, **kwargs: Any
    ) -> None:
        sampler = RandomSampler(dataset, generator=torch.Generator())
        super().__init__(sampler, batch_size=batch_size, drop_last=drop_last, seed=seed)

    def __iter__(self) -> Any:
        # The trainer sets `epoch`. The factor exceeds all numbers of epochs, so two seeds have
        # no order in common.
        sampler: Any = self.sampler
        sampler.generator.manual_seed(self.seed * 1_000_003 + self.epoch)
        return super().__iter__()


class DistillTrainer(RunTrainer, SentenceTransformerTrainer):
    """Trainer of sentence-transformers whose runs resume after an interruption."""


class MuonTrainer(DistillTrainer):
    """Trainer that uses Muon for the matrices of the blocks, and AdamW for other parameters."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer."""
        if self.optimizer is None:
            student: Any = self.model
            args = self.args
            matrices, others = block_matrices(student, student[0].auto_model.transformer_encoder)
            self.optimizer = MuonAdamW(
                matrices,
                others,
                args.learning_rate,
                args.weight_decay,
                (args.adam_beta1, args.adam_beta2),
                args.adam_epsilon,
            )
        return self.optimizer


# ------------------------------------------------------------------------------------------------
# command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert distill TEACHER [RECIPE.yaml] [--option value ...]`, return the exit code."""
    options = OPTIONS["distill"].read(argv or [])
    log_options(options)
    result = train(options)
    if not is_main():
        return 0

    print(f"{options.model.output}: sentence encoder after {result['steps']:,} steps")
    if result["stored"]:
        print(comparison_table(result["comparison"]))
    if result["warning"]:
        logger.warning("%s", result["warning"])
    return 0


def train(options: DistillOptions, run_class: "type[Distillation] | None" = None) -> dict[str, Any]:
    """Train a student and write its directory, unless the run has finished before.

    An interrupted run resumes from its last complete checkpoint.

    Args:
        options: Options of the command.
        run_class: Class of the run, by default `Distillation`.

    Returns:
        The content of result.json: agreement over the steps, losses, time, comparison.

    Raises:
        UserError: If the input is not valid.
        Stopped: If SIGTERM was received; a checkpoint has been written.
    """
    run_class = run_class or Distillation
    sources = [TextSource.from_entry(entry) for entry in options.data.texts]
    validation_sources = [
        TextSource.from_entry(entry, "validation_texts") for entry in options.data.validation_texts
    ]
    check_validation_names(validation_sources)
    check_paths(options, [*sources, *validation_sources])
    if options.student.muon:
        check_muon()
    checkpoint_folder = Path(options.model.output) / "checkpoints"
    # --compile compiles the blocks, so Trainer's own options for compilation are refused.
    training = training_arguments(
        checkpoint_folder,
        options.trainer,
        BLOCKS_ONLY,
        base=SentenceTransformerTrainingArguments,
    )
    if options.student.muon:
        warn_if_muon_is_slow(training.device)

    settings = run_identity(options, sources, validation_sources, training.world_size)
    output = Output(options.model.output, run_class.name, settings)
    run = run_class(options, training, sources, validation_sources)
    return run_once(output, run.build, run.save, checkpoint_folder=checkpoint_folder)


def check_paths(options: DistillOptions, sources: Sequence[TextSource]) -> None:
    """Raise UserError if a directory and an input are inside one another, or a model is damaged."""
    models = [name for name in (options.model.teacher, options.model.init_from) if name]
    names = [*models, *(source.path for source in sources)]
    if options.data.validation_file:
        names.append(options.data.validation_file)
    # A name that does not exist here is one on the Hub.
    inputs = [name for name in names if Path(name).exists()]

    check_folder(options.work_folder, "work")
    check_disjoint(options.model.output, options.work_folder, *inputs)
    check_disjoint(options.work_folder, *inputs)
    for model in models:
        check_model(model)


def run_identity(
    options: DistillOptions,
    sources: Sequence[TextSource],
    validation_sources: Sequence[TextSource],
    processes: int,
) -> dict[str, Any]:
    """Return what identifies a run: options, digests of the texts and of the models."""
    # The number of processes changes the batches.
    settings = identity(options)
    for name, value in result_options(options.trainer).items():
        # The evaluation does not change the weights.
        if not name.startswith("eval_"):
            settings[name] = value
    init_from = options.model.init_from
    validation_file = options.data.validation_file
    return settings | {
        "teacher": model_fingerprint(options.model.teacher),
        "init_from": init_from and model_fingerprint(init_from),
        "texts": [_source_identity(source) for source in sources],
        "validation_texts": [_source_identity(source) for source in validation_sources],
        "validation_file": validation_file and files_digest([validation_file]),
        "processes": processes,
    }


def _source_identity(source: TextSource) -> list[Any]:
    """Return what the texts of a source depend on. Its name and license are in the card only."""
    return [files_digest([source.path]), source.column, source.share]


# ------------------------------------------------------------------------------------------------
# run


class Distillation:
    """Run of `neobert distill`: builds the trainer, and saves the student.

    Args:
        options: Options of the command.
        training: Arguments of the trainer.
        sources: Sources of training texts.
        validation_sources: Sources of validation texts of other types.
    """

    # The output directory of one class of runs is not resumed by another one.
    name = "distill"
    texts: Texts
    agreement: Agreement
    queries: Queries | None
    comparison: dict[str, dict[str, float]]

    def __init__(
        self,
        options: DistillOptions,
        training: SentenceTransformerTrainingArguments,
        sources: Sequence[TextSource],
        validation_sources: Sequence[TextSource],
    ) -> None:
        self.options = options
        self.training = training
        self.sources = sources
        self.validation_sources = validation_sources
        self.teacher_layers: list[int] = []

    def build(self) -> DistillTrainer:
        """Read the texts, compute the embeddings of the teacher, and return the trainer."""
        self._read_data()
        training = self.training
        model = self.options.model
        set_seed(training.seed)

        teacher = PackedEncoder(
            model.teacher,
            dtype=model.teacher_dtype,
            device=training.device,
            max_length=self.options.student.max_length,
            trust_remote_code=model.trust_remote_code,
        )
        encoder = teacher.sentence_transformer

        embeddings_from_teacher = resolve_embeddings_from_teacher(
            model, self.options.student, teacher
        )
        student = self.initial_student(teacher, embeddings_from_teacher)
        if self.options.loss.hidden_state_weight:
            check_hidden_states(student, encoder)

        # The main process computes the files first, and the others read them.
        with (
            training.main_process_first(local=False, desc="teacher embeddings"),
            # Another run may share the work directory.
            locked(self.options.work_folder / "embeddings", wait=True),
        ):
            embeddings = embed_texts(self.options, embeddings_from_teacher, self.texts, teacher)
        if embeddings.token_table is not None:
            storage = STORAGE_DTYPES[self.options.student.embedding_dtype]
            set_token_embeddings(student, embeddings.token_table, storage)

        self.agreement = Agreement(embeddings.evaluated)
        if is_main():
            # The evaluation is deterministic, so a resumed run compares with the same initial
            # student.
            self._evaluate_before_training(encoder, student)
        return self._trainer(student, embeddings.train, encoder)

    def initial_student(
        self, teacher: PackedEncoder, embeddings_from_teacher: bool
    ) -> SentenceTransformer:
        """Return the student before training.

        Args:
            teacher: Teacher.
            embeddings_from_teacher: Whether the token embeddings will be initialized from the
                teacher, see `resolve_embeddings_from_teacher`.
        """
        model = self.options.model
        options = replace(self.options.student, embeddings_from_teacher=embeddings_from_teacher)
        encoder = teacher.sentence_transformer
        student = build_student(model, options, encoder, teacher.embedding_dimension)
        if model.init_from_teacher:
            self._transfer_blocks(student, teacher)
        return student

    def _transfer_blocks(self, student: SentenceTransformer, teacher: PackedEncoder) -> None:
        """Initialize the student from layers of the teacher.

        The result is stored in the work directory, so a resumed run does not repeat it.
        """
        options = self.options
        model = options.model
        # The precision of the blocks does not depend on that of the teacher's embeddings.
        exact_teacher = load_sentence_transformer(
            model.teacher, self.training.device, trust_remote_code=model.trust_remote_code
        )
        layers = load_teacher_layers(student, exact_teacher, model.teacher_layers)
        self.teacher_layers = layers.indices

        # The name of the file is a digest of everything that the blocks depend on.
        student_model: Any = student[0].auto_model
        settings = [
            f"version {TRANSFER_VERSION}",
            model_digest(model.teacher),
            repr(layers.indices),
            student_model.config.to_json_string(),
            options.student.embedding_dtype,
            f"{model.transfer_steps} {options.student.max_length} {self.training.bf16} "
            f"{options.student.muon} {self.training.seed}",
        ]
        texts = self.texts.train
        name = f"blocks-{texts_digest([*settings, *texts])}.safetensors"
        path = options.work_folder / "embeddings" / name

        with (
            self.training.main_process_first(local=False, desc="block-wise transfer"),
            locked(path.parent, wait=True),
        ):
            if not path.is_file():
                self._compute_blocks(student_model, layers, teacher)
                with new_file(path) as file:
                    file.write(save(student_model.to("cpu").state_dict()))
        with check_readable(path):
            weights = load_file(path)
        student_model.to("cpu").load_state_dict(weights)

    def _compute_blocks(
        self, student_model: Any, layers: TeacherLayers, teacher: PackedEncoder
    ) -> None:
        """Train each block of the student to reproduce its layer of the teacher."""
        # Every n-th text, because the texts of several files are in the order of the files.
        texts = self.texts.train
        tokens = teacher.tokenize(texts[:: len(texts) // TRANSFER_TEXTS + 1])
        device = self.training.device
        initialize_blocks(
            student_model.to(device),
            layers,
            [batch.to(device) for batch in equal_lengths(tokens, TRANSFER_TOKENS)],
            self.options.model.transfer_steps,
            STORAGE_DTYPES[self.options.student.embedding_dtype],
            self.training.bf16,
            self.options.student.muon,
        )

    def _read_data(self) -> None:
        """Read the texts and the queries, and warn about queries that are also training texts."""
        data = self.options.data
        self.queries = read_queries(data.validation_file) if data.validation_file else None
        self.texts = read_texts(
            self.sources,
            self.validation_sources,
            data.validation_percent,
            data.max_validation_texts,
        )
        if self.training.eval_strategy != "no":
            self.texts.check_evaluated()

        if self.queries:
            pair_texts = {*self.queries.relevant, *self.queries.texts}
            if copies := count_overlap(self.texts.train, pair_texts):
                logger.warning(
                    "%s: %s of %s queries and texts are also training texts, so the student may "
                    "retrieve new texts less well than these.",
                    data.validation_file,
                    f"{copies:,}",
                    f"{len(pair_texts):,}",
                )

    def _evaluate_before_training(
        self, teacher: SentenceTransformer, student: SentenceTransformer
    ) -> None:
        """Evaluate the teacher and the initial student."""
        teacher_metrics = dict.fromkeys(self.agreement.names, 1.0)
        if self.queries:
            teacher_metrics |= evaluate_retrieval(teacher, self.queries)
        initial_metrics = self._evaluate(student.to(self.training.device))
        self.comparison = {"teacher": teacher_metrics, "initial_student": initial_metrics}

    def _evaluate(self, model: SentenceTransformer) -> dict[str, float]:
        """Return the agreement of an encoder with the teacher and its retrieval metrics."""
        metrics = self.agreement(model)
        if self.queries:
            metrics |= evaluate_retrieval(model, self.queries)
        return metrics

    def _trainer(
        self, student: SentenceTransformer, embeddings: np.ndarray, teacher: SentenceTransformer
    ) -> DistillTrainer:
        """Return the trainer of a student.

        Args:
            student: Student.
            embeddings: Embeddings of the teacher for the training texts, (texts, D).
            teacher: Teacher.
        """
        training = self.training
        if self.options.student.compile:
            compile_blocks(student[0].auto_model)

        # Arguments that depend on the number of texts.
        training.batch_sampler = ShuffledBatches
        # Drop the last, smaller batch: its similarity loss would average over fewer pairs, or over
        # none.
        count = len(self.texts.train)
        training.dataloader_drop_last = count > training.train_batch_size
        if "learning_rate" not in self.options.trainer:
            training.learning_rate = learning_rate_for_steps(count_steps(training, count))

        # The label is the index of a text, by which the loss finds its embedding.
        dataset = Dataset.from_dict({"text": self.texts.train, "label": range(count)})
        options = self.options.loss
        transformer = teacher[0] if options.hidden_state_weight else None
        trainer_class = MuonTrainer if self.options.student.muon else DistillTrainer
        trainer = trainer_class(
            model=student,
            args=training,
            train_dataset=dataset,
            loss=DistillLoss(student, options, embeddings, transformer),
            evaluator=self.agreement,
        )
        trainer.add_callback(RunReport())
        return trainer

    def save(self, trainer: DistillTrainer, folder: Path) -> dict[str, Any]:
        """Write the student, and compare it with the teacher and the initial student.

        Returns:
            The content of result.json.
        """
        if not is_main():
            return {}
        student = trainer.accelerator.unwrap_model(trainer.model)
        uncompile_blocks(student[0].auto_model)
        options = self.options.student

        student.to("cpu")
        balance_student(student, self.texts.train)
        save_student(student, folder, options.dtype, options.embedding_dtype)
        # The student is loaded as users will load it, so the figures include the storage in
        # float16 or float8.
        stored = load_sentence_transformer(str(folder), self.training.device)
        metrics = self._evaluate(stored)
        self._check_finite(metrics)
        comparison = {**self.comparison, "student": metrics}

        history = trainer.state.log_history
        counts = {"train": len(self.texts.train), "validation": len(self.texts.validation)}
        counts |= {name: len(texts) for name, texts in self.texts.other.items()}
        result = {
            "texts": counts,
            "teacher_layers": self.teacher_layers,
            "steps": trainer.state.global_step,
            "epochs": trainer.state.epoch,
            "seconds": training_time(trainer)["seconds"],
            "losses": [entry for entry in history if "loss" in entry],
            "agreement": agreement_history(history),
            "stored": {name: metrics[name] for name in self.agreement.names if name in metrics},
            "comparison": comparison,
            "warning": comparison_warning(comparison),
        }
        environment = run_environment(self.training)
        write_card(folder, self.options, self.sources, self.validation_sources, result, environment)
        return result

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        """Raise UserError if the stored student has metrics that are not finite.

        The checkpoints are removed after the student has been saved, so an error keeps them.
        """
        invalid_names = [name for name, value in metrics.items() if not math.isfinite(value)]
        if invalid_names:
            options = self.options.student
            raise UserError(
                f"the student stored in {options.dtype} and {options.embedding_dtype} must have "
                f"finite metrics, got {metrics[invalid_names[0]]} for {invalid_names[0]}. The "
                f"checkpoints are kept in {self.training.output_dir}. Start a new run with the "
                "last checkpoint as --init-from and another --dtype."
            )


def count_steps(training: SentenceTransformerTrainingArguments, texts: int) -> int:
    """Return the number of optimizer steps of a run with this number of training texts."""
    if training.max_steps > 0:
        return training.max_steps
    batches = max(1, texts // (training.train_batch_size * training.world_size))
    steps_per_epoch = math.ceil(batches / training.gradient_accumulation_steps)
    return math.ceil(training.num_train_epochs * steps_per_epoch)


def learning_rate_for_steps(steps: int) -> float:
    """Return the default peak learning rate of a run with this number of optimizer steps.

    A new student starts from token embeddings that approximate the teacher. A high rate first
    undoes this, and a short run ends before it has made up for it (results/distillation.md,
    "Learning rate and number of steps").

    Args:
        steps: Number of optimizer steps.

    Returns:
        `1e-5 * sqrt(steps)`, at most 1e-3.
    """
    return min(1e-3, 1e-5 * math.sqrt(steps))


@dataclass(frozen=True)
class TeacherEmbeddings:
    """Embeddings of the teacher for a run.

    Attributes:
        train: Embeddings of the training texts, (N, D) float16, memory-mapped.
        evaluated: Evaluated texts with their embeddings, by name.
        token_table: Initial token embeddings of the student, (V, D) float32, or None.
    """

    train: np.ndarray
    evaluated: dict[str, EvaluatedTexts]
    token_table: torch.Tensor | None


def embed_texts(
    options: DistillOptions, embeddings_from_teacher: bool, texts: Texts, teacher: PackedEncoder
) -> TeacherEmbeddings:
    """Compute the embeddings of the teacher, or read them from the work directory.

    Args:
        options: Options of the command.
        embeddings_from_teacher: Whether the token embeddings are initialized from the teacher.
        texts: Texts of the run.
        teacher: Teacher.
    """
    # The embeddings depend on these values and on the texts, which the name of a file identifies.
    settings = [
        model_digest(options.model.teacher),
        str(options.student.max_length),
        options.model.teacher_dtype,
    ]
    if teacher.default_prompt:
        settings.append(teacher.default_prompt)

    def path_of(name: str, content: Sequence[str]) -> Path:
        file = f"{name}-{texts_digest([*settings, *content])}.npy"
        return options.work_folder / "embeddings" / file

    evaluated = {}
    for name, rows in texts.evaluated.items():
        embeddings = np.float32(teacher_embeddings(path_of(name, rows), rows, teacher))
        evaluated[name] = EvaluatedTexts(rows, embeddings)
    # The embeddings of the training texts may be larger than the memory, and stay on disk.
    train_path = path_of("train", texts.train)
    train_embeddings = teacher_embeddings(train_path, texts.train, teacher)
    if not embeddings_from_teacher:
        return TeacherEmbeddings(train_embeddings, evaluated, None)

    # The token table also depends on the algorithm.
    path = path_of("tokens", [f"version {TOKEN_TABLE_VERSION}", *texts.train])
    if not path.is_file():
        count = vocabulary_size(teacher.sentence_transformer.tokenizer)
        single_tokens = embed_single_tokens(teacher, count)
        tokens = teacher.tokenize(texts.train)
        with new_file(path) as file:
            np.save(file, fit_token_embeddings(single_tokens, tokens, train_embeddings))
    with check_readable(path):
        table = np.load(path)
    return TeacherEmbeddings(train_embeddings, evaluated, torch.from_numpy(table))


# ------------------------------------------------------------------------------------------------
# comparison


def comparison_warning(comparison: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return a warning if the student has not improved, or is far from its teacher.

    The student is compared by MRR@10 if there are validation pairs, otherwise by the Spearman
    correlation of its similarities with those of the teacher. The cosine does not show progress:
    the initialization from the teacher's token embeddings maximizes it, and a trained student with
    the cosine of the initial student retrieves much better than the initial student.
    """
    initial = comparison["initial_student"]
    student = comparison["student"]
    # Without evaluated texts there is nothing to compare.
    correlations = [name for name in student if name.endswith("_spearman")]
    if not correlations:
        return None

    name = "mrr@10" if "mrr@10" in student else correlations[0]
    if student[name] <= initial[name]:
        return (
            f"the student is not better than before training ({name.replace('_', ' ')} "
            f"{student[name]:.3f}, before {initial[name]:.3f}). Train for more epochs or with more "
            "texts, or lower --learning-rate."
        )
    # There is no cosine if the embeddings differ in their dimension.
    cosine = student.get(correlations[0].replace("_spearman", "_cosine"))
    if cosine is not None and cosine < LOW_COSINE:
        return (
            f"the student agrees little with its teacher (mean cosine {cosine:.3f}). Train for "
            "more epochs or with more texts."
        )
    return None


def comparison_table(comparison: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of teacher, initial student and student with one column per metric."""
    # The model card contains the standard errors.
    names = [name for name in comparison["student"] if not name.endswith("_se")]
    rows = []
    for encoder, metrics in comparison.items():
        cells = [f"{metrics[name]:.3f}" if name in metrics else "" for name in names]
        rows.append([encoder.replace("_", " "), *cells])
    return markdown_table(["encoder", *(name.replace("_", " ") for name in names)], rows)


def agreement_history(history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the agreement at every evaluation, from the log of the trainer."""
    suffixes = ("step", "_cosine", "_spearman")
    rows = []
    for entry in history:
        row = {name.removeprefix("eval_"): entry[name] for name in entry if name.endswith(suffixes)}
        # Entries with losses have a step, too, but no agreement.
        if len(row) > 1:
            rows.append(row)
    return rows
