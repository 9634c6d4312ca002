"""`neobert pretrain RECIPE.yaml [--option value ...]`: masked-LM pre-training as in the paper
(sections 3 and 4).

`--prepare` only tokenises the data. The same command again continues from the last complete
checkpoint.
"""

import fnmatch
import functools
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from transformers import TrainingArguments

from ..common.blocks import compile_blocks
from ..common.checkpoints import claim, train
from ..common.errors import UserError
from ..common.files import read_json, redacted, remove_left_overs, write_json
from ..common.identity import model_digest
from ..common.loading import set_attention
from ..common.outputs import check_apart, check_folder
from ..common.results import environment
from ..common.runs import Run, run_settings
from ..common.trainer_options import number_options
from . import adaptation_report
from .heldout import metric_name, unigram, unigram_accuracy
from .masking import TokenMasking
from .model import choose_tokenizer, make_model, new_rows, weights_folder
from .options import (
    GROUPS,
    OPTIONS,
    TRAINER,
    BatchArguments,
    DataArguments,
    ModelArguments,
    RunArguments,
)
from .prepared import source_digest
from .raw_checkpoint import raw_from_model
from .schedule import make_training_arguments
from .texts import check_text, folder_of, heldout_batches, prepared_tokens, training_batches
from .trainer import PretrainingTrainer
from .weighted import shares_of


@dataclass(frozen=True)
class Given:
    """Everything that a run was given."""

    model: ModelArguments
    data: DataArguments
    batch: BatchArguments
    run: RunArguments
    training: TrainingArguments

    @property
    def output(self):
        """Where checkpoints, logs and the final model go."""
        return Path(self.run.output)

    @property
    def prepared(self):
        """Where the tokenised sets are."""
        return Path(self.data.prepared) if self.data.prepared else self.output / "prepared"

    @functools.cached_property
    def start(self):
        """Folder or Hub name of the weights that it starts from, or None."""
        return None if self.model.init_from is None else weights_folder(self.model.init_from)

    @property
    def sets(self):
        """{folder in `prepared`: tuple of `Source`}: "train", of weighted sources "train-1" and so
        on; "heldout", or "heldout-NAME"."""
        train, heldout = self.data.sources, self.data.heldout_sources
        if train[0].weight is None:
            sets = {"train": train}
        else:
            sets = {f"train-{i}": (source,) for i, source in enumerate(train, 1)}
        return sets | {folder_of(name): given for name, given in heldout.items()}

    @property
    def spec(self):
        """`BatchSpec` of the training text."""
        return self.batch.spec(
            self.training.seed if self.training.data_seed is None else self.training.data_seed
        )

    @property
    def streams(self):
        """Whether the training data is read while training. Several sources are prepared, so that
        their texts are shuffled together."""
        if self.data.streaming is not None:
            return self.data.streaming
        sources = self.data.sources
        return (
            len(sources) == 1
            and sources[0].local is None
            and not (self.prepared / "train" / "prepared.json").is_file()
        )

    @property
    def micro_batches(self):
        """Of the run, in all processes."""
        return (
            self.training.max_steps
            * self.training.gradient_accumulation_steps
            * self.training.world_size
        )


def read_run(argv):
    """The `Given` of a command line; UserError for bad input."""
    *groups, given = OPTIONS["pretrain"].read(argv)
    return make_run(*groups, given)


def make_run(model, data, batch, run, given):
    """A `Given` from its options and Trainer's `given` ones."""
    return Given(model, data, batch, run, make_training_arguments(run, batch, given))


def run_of(recipe):
    """The `Given` of a recipe as a dict: {option: value}, and under "trainer" Trainer's options."""
    names = [{field.name for field in fields(group)} for group in GROUPS]
    groups = [
        group(**{name: recipe[name] for name in known & recipe.keys()})
        for group, known in zip(GROUPS, names)
    ]
    assert not recipe.keys() - {"trainer"}.union(*names), "a recipe has options that are not known"
    return make_run(*groups, {**TRAINER, **recipe.get("trainer", {})})


# ------------------------------------------------------------------------------------------------
# checks


# Names of what a run writes into its output: a folder without a run has none of them.
_WRITTEN = (
    *("recipe.json", "log.jsonl", "result.json", "checkpoint-*", "raw", "config.json"),
    "adaptation.*",
    *("*.safetensors", "*.bin", "*token*", "vocab*", "*.py"),
)


def _inputs(run):
    """Local paths of the text, of a folder itself, since a later run reads what is in it by then. A
    prepared set may be in the output."""
    found = [
        (source.name, *local)
        for sources in run.sets.values()
        for source in sources
        if (local := source.local)
    ]
    return [
        path
        for name, kind, files in found
        if kind != "prepared"
        for path in ([name] if os.path.isdir(name) else files)
    ]


def _check(run, model):
    """Raises UserError for options that do not go together."""
    training, batch = run.training, run.batch
    strategy = getattr(training.eval_strategy, "value", training.eval_strategy)
    if run.data.heldout is None and strategy != "no":
        raise UserError(f"eval_strategy {strategy} needs held-out text: give heldout")
    limit = model.config.context_length
    if batch.max_length > limit:
        raise UserError(
            f"max_length {batch.max_length} is more than the {limit} tokens of the model's context"
        )
    sharded = (
        training.deepspeed_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    )
    complete = {
        "init_optimizer": run.model.init_optimizer,
        "measure": run.data.measure,
    }
    for name in filter(complete.get, complete) if sharded else ():
        raise UserError(
            f"{name} needs all of a weight in one process; DeepSpeed and FSDP cut them: use "
            "recipes/accelerate/ddp.yaml"
        )
    if training.deepspeed_plugin is not None and training.deepspeed_plugin.zero_stage == 3:
        config = training.deepspeed_plugin.hf_ds_config
        if not config.get_value("zero_optimization.stage3_gather_16bit_weights_on_model_save"):
            raise UserError(
                "ZeRO-3 would leave no final model: give zero3_save_16bit_model: true under "
                "deepspeed_config, as recipes/accelerate/zero3.yaml does"
            )
    output = run.output
    check_folder(output, "output")
    check_apart(
        output,
        *_inputs(run),
        *filter(None, [run.model.init_from if os.path.exists(run.model.init_from or "") else None]),
    )


def _owner(run, tokenizer):
    """The `Run` of the output, known by the numbers of a run."""
    values = run_settings(run.model, run.data, run.batch, run.run)
    # An evaluation only measures here.
    values |= {
        name: value
        for name, value in number_options(run.training.to_dict()).items()
        if not name.startswith("eval_")
    }
    values |= {
        "streaming": run.streams,
        "data": source_digest(run.data.sources, tokenizer),
        "world_size": run.training.world_size,
    }
    values["init_from"] = None if run.start is None else model_digest(run.start)
    if run.streams:  # each worker reads a share of its own
        values["dataloader_num_workers"] = run.training.dataloader_num_workers
    return Run(
        run.output,
        "pretrain",
        values,
        name="recipe.json",
        key=None,
        takes=lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in _WRITTEN),
    )


def _heldout_text(run, tokenizer):
    """What the held-out text is known by: {name: digest}, a digest alone, or None without any."""
    digests = {
        name: redacted(source_digest(sources, tokenizer))
        for name, sources in run.data.heldout_sources.items()
    }
    return digests.get("", digests or None)


def _finished(owner, heldout):
    """result.json, where the output holds the finished model of this very run, measured on this
    held-out text (`_heldout_text`); or None."""
    path = owner.folder / "result.json"
    if owner.inspect(overwrite=None) != "finished" or not path.is_file():
        return None
    result = read_json(path)
    return result if heldout == result.get("heldout") else None


def _new_rows(run, tokenizer):
    """`Rows` that replace the vocabulary of the weights, told once; None where theirs stays."""
    training = run.training
    if (
        run.model.init_embeddings
        and training.deepspeed_plugin is not None
        and training.deepspeed_plugin.zero_stage == 3
    ):
        raise UserError(
            "init_embeddings needs all of the embedding in one process; ZeRO-3 cuts it: use "
            "recipes/accelerate/zero2.yaml"
        )
    rows = new_rows(run.model.init_embeddings, run.start, tokenizer)
    if rows is not None and training.process_index == 0:
        print(f"{len(tokenizer):,} rows of the vocabulary: {rows}", file=sys.stderr, flush=True)
    return rows


def _moments(run):
    """The file of the optimizer's state that the run begins with, or None."""
    if not run.model.init_optimizer:
        return None
    path = Path(run.start) / "optimizer.pt"
    if not path.is_file():
        raise UserError(
            f"init_optimizer: {path} is not there; give one of the run's checkpoints as init_from"
        )
    return path


# ------------------------------------------------------------------------------------------------
# the run


def execute(run):
    """Trains, or continues; returns the metrics of the final evaluation (an empty dict without
    held-out text)."""
    batch, training = run.batch, run.training
    tokenizer = choose_tokenizer(run.model.tokenizer, run.start, run.model.init_embeddings)
    shares = (batch.mlm_probability, batch.mask_replace_prob, batch.random_replace_prob)
    masking = TokenMasking(tokenizer, *shares, batch.mask_schedule)
    inputs = _inputs(run)
    for name in run.sets:
        check_apart(run.prepared / name, *inputs)
    if run.data.prepare:
        for name, sources in run.sets.items():
            prepared_tokens(run, name, sources, tokenizer)
        return {}
    check_text(run)
    rows = _new_rows(run, tokenizer)
    model = make_model(run.model.model_config, run.start, tokenizer, training.seed, rows)
    if run.run.attn_implementation:
        set_attention(model, run.run.attn_implementation)
    if run.run.compile:
        compile_blocks(model)
    moments = _moments(run)
    _check(run, model)
    if run.data.measure:
        trainer = PretrainingTrainer(
            model=model.to(training.device),
            args=training,
            eval_dataset=heldout_batches(run, tokenizer),
            processing_class=tokenizer,
            run=run.run,
        )
        start = {} if rows is None else adaptation_report.measure_start(run, trainer)
        return {**start, **trainer.measure()}
    owner = _owner(run, tokenizer)
    heldout_text = _heldout_text(run, tokenizer)
    if (result := _finished(owner, heldout_text)) is not None:
        if training.process_index == 0:
            print(
                f"{run.output}: finished already, after {training.max_steps:,} steps",
                file=sys.stderr,
            )
            _write_raw(run, result["steps"])
        return {name: value for name, value in result.items() if name.startswith("eval_")}

    tokens, batches = training_batches(run, tokenizer, masking)
    training.ignore_data_skip = training.ignore_data_skip or run.streams
    heldout = heldout_batches(run, tokenizer)
    with claim(owner, overwrite=None):
        if training.process_index == 0:
            remove_left_overs(run.output)
        if torch.cuda.is_available():
            torch.set_float32_matmul_precision("high")  # TF32
        trainer = PretrainingTrainer(
            model=model,
            args=training,
            train_dataset=batches,
            eval_dataset=heldout or None,
            processing_class=tokenizer,
            run=run.run,
            moments=moments,
            measure_start=None
            if rows is None or not heldout
            else functools.partial(adaptation_report.measure_start, run),
        )
        spent = train(
            trainer,
            run.run.keep_every,
            before=trainer.load_stream if run.streams else None,
        ).metrics
        more = {
            "seconds": spent["train_runtime"],
            "cpu_seconds": spent["cpu_seconds"],
            "heldout": heldout_text,
            **({} if rows is None else {"init_rows": rows.counts}),
        }
        return _finish(run, owner, trainer, tokens, more)


def _finish(run, owner, trainer, tokens, more):
    """Saves the final model and what it reached: the files come in one after another, config.json,
    which makes it a model, near the end."""
    training, tokenizer, metrics = trainer.args, trainer.processing_class, trainer.evaluate()
    for name, heldout in (trainer.eval_dataset or {}).items():
        # A streamed run has no training tokens at hand to count: the held-out ones give the
        # baseline its best case.
        frequent = unigram(heldout.windows.texts if tokens is None else tokens, tokenizer)
        metrics[metric_name(name, "unigram_accuracy")] = unigram_accuracy(heldout, frequent)
    if trainer.is_world_process_zero():
        owner.scratch()
    trainer.accelerator.wait_for_everyone()
    folder = owner.scratch_folder
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        if not any(folder.glob("*.safetensors")):
            raise UserError(
                f"the final weights of {run.output} were not saved by this kind of training; the "
                "last checkpoint has them"
            )
        trainer.write_log()
        result = environment(
            processes=training.world_size,
            distributed=trainer.accelerator.distributed_type.value,
            steps=trainer.state.global_step,
            tokens_seen=trainer.state.num_input_tokens_seen,
            parameters=_parameters(folder),
            **more,
            dtype="bfloat16 autocast"
            if training.bf16
            else "float16 autocast"
            if training.fp16
            else "float32",
        )
        write_json(folder / "result.json", {**result, **metrics})
        if run.start is not None and metrics:
            adaptation_report.write_report(
                folder / "adaptation",
                trainer.state.log_history,
                metrics,
                result,
                shares_of(run.data.sources),
            )
        names = owner.move_in(folder, "config.json", "result.json")
        _write_raw(run, trainer.state.global_step)
        owner.finish([*names, "log.jsonl"])
    trainer.accelerator.wait_for_everyone()
    return metrics


def _write_raw(run, step):
    """The final weights in the authors' layout, where they were asked for and are not there."""
    if run.run.raw_checkpoint and not (run.output / "raw" / "config.yaml").is_file():
        raw_from_model(run.output, run.output / "raw", step, getattr(torch, run.run.raw_checkpoint))


def _parameters(folder):
    """Parameters of a saved model; tied ones once."""
    from safetensors import safe_open

    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())
    return count


def main(argv=None):
    """Entry point of `neobert pretrain`; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = read_run(list(sys.argv[1:] if argv is None else argv))
    metrics = execute(run)
    if metrics and run.training.process_index == 0:
        print(json.dumps(metrics))
    return 0
