"""`neobert distill TEACHER RECIPE.yaml`: a NeoBERT sentence encoder that learns the vectors of
another one.

The teacher is any model of sentence-transformers; its vectors are computed once and kept. The
student is a new NeoBERT of any size, or one that exists. It trains with sentence-transformers'
trainer, packed as in inference: NeoBERT itself drops the padding of a batch.

Two folders: `--work` holds the teacher's vectors and the checkpoints of a run that is not finished;
`--output` appears when it is, complete.
"""

import functools
import time
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import set_seed

from ..common import checkpoints
from ..common.blocks import compile_blocks, uncompile_blocks
from ..common.checkpoint_files import remove_checkpoints
from ..common.errors import UserError
from ..common.files import read_json, write_json
from ..common.identity import files_digest, model_digest
from ..common.loading import check_model, choose_device, set_attention
from ..common.outputs import check_apart, check_folder, check_replaceable, new_folder
from ..common.results import environment, shown
from ..common.runs import Run, changed_settings, run_settings
from ..common.trainer_options import BLOCKS_ONLY, number_options, training_arguments
from .distill_batches import NearTexts, SimilarLengths, nearest_units
from .distill_card import precision_check, write_card
from .distill_data import (
    TeacherVectors,
    read_texts,
    token_lengths,
    training_dataset,
)
from .distill_loss import Agreement, DistillLoss
from .distill_student import as_shipped, build_student, save_student
from .options import OPTIONS
from .packed_encoder import PackedEncoder


FIGURES = "figures.json"


class DistillTrainer(SentenceTransformerTrainer):
    """The library's trainer; it stops where the loss is not finite, and logs the CPU seconds of its
    process since the training began, those before an interruption among them."""

    counted = time.process_time()

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            history = [row for row in self.state.log_history if "cpu_seconds" in row]
            before, now = history[-1]["cpu_seconds"] if history else 0.0, time.process_time()
            logs["cpu_seconds"] = before + now - self.counted
            self.counted = now
        if not torch.isfinite(torch.tensor(float(logs.get("loss", 0.0)))):
            raise UserError(
                f"training diverged at step {self.state.global_step} with learning_rate "
                f"{self.args.learning_rate:g}, and nothing was written "
                "to the output; give a lower --learning-rate and --overwrite"
            )
        super().log(logs, *args, **kwargs)


def check(arguments):
    """Finds what is wrong with the folders before any work begins."""
    output, work = Path(arguments.output), Path(arguments.work)
    sources, others = arguments.sources()
    for path, name in ((output, "output"), (work, "work")):
        check_folder(path, name)
        check_apart(
            path,
            *(
                p
                for p in (
                    arguments.teacher,
                    arguments.init_from,
                    *(s.path for s in sources + others),
                )
                if p and Path(p).exists()
            ),
        )
    check_apart(work, output)
    for model in filter(None, (arguments.teacher, arguments.init_from)):
        check_model(model)
    if output.is_dir() and any(output.iterdir()):
        check_replaceable(output, "distill")


def is_finished(arguments, settings):
    """Whether the output is a student of these very settings, and is not to be made anew.

    Raises:
        UserError: it is one of other settings.
    """
    path = Path(arguments.output) / FIGURES
    if arguments.overwrite or not path.is_file():
        return False
    changed = changed_settings(read_json(path)["settings"], settings)
    if changed:
        raise UserError(
            f"{arguments.output} holds a finished student of other settings ({', '.join(changed)} "
            "differ); give another --output, "
            "or --overwrite to train it anew"
        )
    return True


def settings_of(arguments, trainer_options, sources, others):
    """What a run is known by: its settings, with digests of its texts and of the weights it starts
    from."""
    settings = run_settings(arguments)
    # An evaluation only measures here.
    settings["trainer"] = {
        name: value
        for name, value in number_options(trainer_options).items()
        if not name.startswith("eval_")
    }
    # the weights are known by their digest, wherever they are
    settings["teacher"] = shown(arguments.teacher)
    settings["teacher_digest"] = model_digest(arguments.teacher)
    settings["init_digest"] = model_digest(arguments.init_from) if arguments.init_from else None
    settings["text_digests"] = {
        source.name: files_digest([source.path]) for source in sources + others
    }
    return settings


def load_teacher(arguments, device):
    dtype = arguments.teacher_dtype
    return PackedEncoder(
        arguments.teacher,
        dtype=dtype,
        device=device,
        max_length=arguments.max_length,
        trust_remote_code=arguments.trust_remote_code,
    )


def teacher_vectors(arguments, texts, device):
    """`TeacherVectors` of all texts of a run: {"train", "held_out", other names}."""
    loaded = []

    def load():
        if not loaded:
            loaded.append(load_teacher(arguments, device))
        return loaded[0]

    identity = {
        "teacher": model_digest(arguments.teacher),
        "max_length": arguments.max_length,
        "dtype": arguments.teacher_dtype,
    }
    folder = Path(arguments.work) / "vectors"
    sets = {
        "train": texts.train,
        "held_out": texts.held_out,
        **{f"other-{name}": rows for name, rows in texts.other.items()},
    }
    return {
        name: TeacherVectors(folder / name, rows, identity, load)
        for name, rows in sets.items()
        if rows
    }


def train(arguments, trainer_options):
    """Trains the student and writes its folder; a run that was interrupted goes on at its last
    checkpoint.

    Returns:
        dict of figures: agreement over the steps, losses, precision, seconds. None if the output
        was finished already.
    Raises:
        UserError: bad input, before any work; Stopped: SIGTERM, after a checkpoint.
    """
    check(arguments)
    sources, others = arguments.sources()
    device = choose_device(arguments.device)
    work = Path(arguments.work)
    fixed = {"eval_strategy": trainer_options.get("eval_strategy", "steps"), **BLOCKS_ONLY}
    if device.type == "cpu":
        fixed["use_cpu"] = True
    training = training_arguments(
        work / "checkpoints", trainer_options, fixed, base=SentenceTransformerTrainingArguments
    )
    settings = {
        **settings_of(arguments, trainer_options, sources, others),
        "processes": training.world_size,
    }
    run = Run(work, "distill", settings, name="run.json", takes=lambda name: name != "vectors")
    if is_finished(arguments, run.settings):
        return None
    run.inspect(arguments.overwrite)
    texts = read_texts(sources, others, arguments.held_out_percent, arguments.held_out_texts)
    set_seed(training.seed)
    teacher = load_teacher(arguments, "cpu")
    student = build_student(arguments, teacher.sentence_transformer, teacher.width)
    del teacher
    packing = student[0].auto_model.config._attn_implementation
    set_attention(student[0].auto_model, arguments.attn_implementation)
    with checkpoints.claim(run, arguments.overwrite, work / "checkpoints"):
        if run.before and training.process_index == 0:
            lengths_file(work, run.before["run"]).unlink(missing_ok=True)
        with training.main_process_first(desc="teacher vectors"):
            vectors = teacher_vectors(arguments, texts, device)
        return _train(arguments, training, run, texts, vectors, student, packing)


def lengths_file(work, run):
    """File of the texts' lengths of the run with this id."""
    return work / f"lengths-{run}.npy"


def _train(arguments, training, run, texts, vectors, student, packing):
    """Trains `student` and writes it with the attention implementation `packing`."""
    model = student[0].auto_model
    if arguments.compile:
        compile_blocks(model)
    training.batch_sampler = _batches(arguments, training, run, texts, vectors, student.tokenizer)
    sets = {name: (rows, vectors[key]) for name, rows, key in _measured(texts) if key in vectors}
    sets = {name: (rows, found.rows(range(len(rows)))) for name, (rows, found) in sets.items()}
    trainer = DistillTrainer(
        model=student,
        args=training,
        train_dataset=training_dataset(texts.train, vectors["train"]),
        loss=DistillLoss(student, arguments),
        evaluator=Agreement(sets) if sets else None,
    )
    trainer.counted = time.process_time()
    outcome = checkpoints.train(trainer)
    history = trainer.state.log_history
    if not all(parameter.isfinite().all() for parameter in student.parameters()):
        raise UserError(
            f"training diverged with learning_rate {training.learning_rate:g}; give a lower "
            "--learning-rate and --overwrite"
        )
    uncompile_blocks(model)
    model.set_attn_implementation(packing)
    figures = {
        "texts": {
            "train": len(texts.train),
            "held_out": len(texts.held_out),
            **{name: len(rows) for name, rows in texts.other.items()},
        },
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "seconds": outcome.metrics.get("train_runtime"),
        "losses": [
            {
                key: entry[key]
                for key in ("step", "loss", "cosine", "mse", "similarity", "cpu_seconds")
                if key in entry
            }
            for entry in history
            if "loss" in entry
        ],
        "agreement": [
            {
                key.removeprefix("eval_"): value
                for key, value in entry.items()
                if key == "step" or key.endswith(("_cosine", "_spearman"))
            }
            for entry in history
            if any(key.endswith("_spearman") for key in entry)
        ],
        "settings": run.settings,
        "earlier": earlier_runs(arguments.init_from),
        "environment": environment(
            dtype="bfloat16" if training.bf16 else "float16" if training.fp16 else "float32",
            processes=training.world_size,
        ),
    }
    if training.process_index == 0:
        write_student(arguments, student, sets, figures)
    return figures


def earlier_runs(init_from):
    """Figures of the runs that made the student that this one starts from, the first one first."""
    path = Path(init_from or "") / FIGURES
    if not init_from or not path.is_file():
        return []
    figures = read_json(path)
    return (
        [*figures.pop("earlier", []), figures]
        if isinstance(figures, dict) and "agreement" in figures
        else []
    )


def _batches(arguments, training, run, texts, vectors, tokenizer):
    """What makes the trainer's batch sampler: by likeness where `neighbours` or pairs are given,
    else by length."""
    if arguments.neighbours or len(texts.units) < len(texts.train):
        # Four times as many candidates: another bundle may have the first ones.
        near = nearest_units(vectors["train"].rows, texts.units, 4 * arguments.neighbours)
        return functools.partial(
            NearTexts,
            units=texts.units,
            near=near,
            neighbours=arguments.neighbours,
            group=training.world_size,
        )
    with training.main_process_first(desc="lengths"):
        path = lengths_file(run.folder, run.id)
        lengths = token_lengths(texts.train, tokenizer, arguments.max_length, path)
    return functools.partial(SimilarLengths, lengths=lengths, group=training.world_size)


def _measured(texts):
    """(name, texts, folder of their vectors) of what agreement is measured on."""
    yield "held_out", texts.held_out, "held_out"
    for name, rows in texts.other.items():
        yield name, rows, f"other-{name}"


def write_student(arguments, student, sets, figures):
    """Writes the output folder: the encoder with its code, its figures and its card, after a check
    in each precision."""
    with new_folder(arguments.output, "distill", replace=arguments.overwrite) as folder:
        save_student(
            as_shipped(student.to("cpu"), arguments.keep_projection),
            folder,
            arguments.dtype,
            arguments.embedding_dtype,
        )
        figures["precision"] = precision_check(folder, sets)
        write_json(folder / FIGURES, figures)
        write_card(folder, arguments, figures)
    remove_checkpoints(Path(arguments.work) / "checkpoints")


def main(argv=None):
    """`neobert distill TEACHER [RECIPE.yaml] [--option value ...]`; returns the exit code."""
    arguments, trainer_options = OPTIONS["distill"].read(argv or [])
    figures = train(arguments, trainer_options)
    if checkpoints.is_main() and figures is None:
        print(
            f"{arguments.output}: finished already with these settings; --overwrite trains it anew"
        )
    elif checkpoints.is_main():
        last = figures["agreement"][-1] if figures["agreement"] else {}
        agreed = "".join(
            f"; {name.replace('_', ' ')} {value:.3f}"
            for name, value in last.items()
            if name != "step"
        )
        print(f"{arguments.output}: sentence encoder after {figures['steps']:,} steps{agreed}")
    return 0
