"""`neobert pretrain RECIPE.yaml [--option value ...]`: masked-LM pre-training as in the paper
(sections 3 and 4).

`--prepare` only tokenises the data. The same command again continues from the last complete
checkpoint.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainingArguments

from ..common.errors import UserError
from ..common.files import read_json
from ..common.folders import apart
from ..common.identity import known_by
from ..common.output import Output, run_settings
from ..common.packing import compile_blocks
from ..common.results import environment
from ..training.checkpoints import claim, spent, train
from ..training.options import number_options
from .adaptation_report import write_report
from .heldout import metric_name, most_frequent
from .masking import TokenMasking
from .model import START, choose_tokenizer, make_model, new_rows, weights_folder
from .options import (
    OPTIONS,
    BatchArguments,
    DataArguments,
    ModelArguments,
    RunArguments,
)
from .prepared import source_digest
from .schedule import make_training_arguments
from .texts import check_text, folder_of, heldout_batches, prepared_tokens, training_batches
from .trainer import PretrainingTrainer


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
        if self.model.init_from is None:
            return None
        with self.training.main_process_first(desc="init_from"):
            return weights_folder(self.model.init_from, self.output)

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
            and sources[0].kind == "hub"
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
    model, data, batch, run, options = OPTIONS["pretrain"].read(argv)
    return Given(model, data, batch, run, make_training_arguments(run, batch, options))


# ------------------------------------------------------------------------------------------------
# checks


def _check(run):
    """Raises UserError for options that do not go together."""
    training, plugin = run.training, run.training.deepspeed_plugin
    strategy = getattr(training.eval_strategy, "value", training.eval_strategy)
    if run.data.heldout is None and strategy != "no":
        raise UserError(f"eval_strategy {strategy} needs held-out text: give heldout")
    if plugin is not None and plugin.zero_stage == 3:
        gathered = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        if not plugin.hf_ds_config.get_value(gathered):
            raise UserError(
                "ZeRO-3 would leave no final model: give zero3_save_16bit_model: true under "
                "deepspeed_config, as recipes/accelerate/zero3.yaml does"
            )
    # A later run reads what is in a folder of texts by then.
    inputs = [source.name for sources in run.sets.values() for source in sources]
    apart(run.output, *inputs, *filter(None, [run.model.init_from]))
    for name in run.sets:
        apart(run.prepared / name, *inputs)


def _output(run, tokenizer):
    """The `Output`, known by what decides the numbers of a run."""
    settings = run_settings(run.model, run.data, run.batch, run.run)
    for name, value in number_options(run.training.to_dict()).items():
        if not name.startswith("eval_"):  # an evaluation only measures here
            settings[name] = value
    settings |= {
        "streaming": run.streams,
        "data": source_digest(run.data.sources, tokenizer),
        "heldout": {
            name: source_digest(sources, tokenizer)
            for name, sources in run.data.heldout_sources.items()
        },
        "world_size": run.training.world_size,
        "init_from": run.start and known_by(run.start),
    }
    if run.streams:  # each worker reads a share of its own
        settings["dataloader_num_workers"] = run.training.dataloader_num_workers
    return Output(run.output, "pretrain", settings, beside=[run.prepared.name])


# ------------------------------------------------------------------------------------------------
# the run


def execute(run):
    """Trains, or continues; returns the metrics of the final evaluation (an empty dict without
    held-out text)."""
    training, is_first = run.training, run.training.process_index == 0
    _check(run)
    tokenizer = choose_tokenizer(run.model.tokenizer, run.start, run.model.init_embeddings)
    if run.data.prepare:
        for name, sources in run.sets.items():
            prepared_tokens(run, name, sources, tokenizer)
        return {}
    check_text(run)

    output = _output(run, tokenizer)
    if not run.data.measure and output.state() == "finished":
        result = read_json(output.result)
        if is_first:
            print(
                f"{run.output}: finished already, after {result['steps']:,} steps", file=sys.stderr
            )
        return {name: value for name, value in result.items() if name.startswith("eval_")}

    rows = new_rows(run.model.init_embeddings, run.start, tokenizer)
    if rows is not None and is_first:
        print(f"{len(tokenizer):,} rows of the vocabulary: {rows}", file=sys.stderr, flush=True)
    model = make_model(run.model.model_config, run.start, tokenizer, training.seed, rows)
    limit = model.config.context_length
    if run.batch.max_length > limit:
        raise UserError(
            f"max_length {run.batch.max_length} is more than the {limit} tokens of the model's "
            "context"
        )
    if run.run.compile:
        compile_blocks(model)
    heldout = heldout_batches(run, tokenizer)
    if run.data.measure:
        trainer = PretrainingTrainer(
            model=model.to(training.device),
            args=training,
            eval_dataset=heldout,
            processing_class=tokenizer,
        )
        metrics = trainer.measure()
        _remove_start(run)
        return metrics

    shares = (run.batch.mlm_probability, run.batch.mask_replace_prob, run.batch.random_replace_prob)
    masking = TokenMasking(tokenizer, *shares, run.batch.mask_schedule)
    batches = training_batches(run, tokenizer, masking)
    training.ignore_data_skip = training.ignore_data_skip or run.streams
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32
    with claim(output):
        trainer = PretrainingTrainer(
            model=model,
            args=training,
            train_dataset=batches,
            eval_dataset=heldout or None,
            processing_class=tokenizer,
            peak_tflops=run.run.peak_tflops,
        )
        train(trainer, run.run.keep_every, trainer.load_stream if run.streams else None)
        metrics = trainer.evaluate()
        for name, batches in heldout.items():
            metrics[metric_name(name, "unigram_accuracy")] = most_frequent(batches)[1]
        _finish(run, output, trainer, metrics, rows)
    return metrics


def _finish(run, output, trainer, metrics, rows):
    """Saves the final model, and last what it reached."""
    training, is_first = trainer.args, trainer.is_world_process_zero()
    with output.final_files() if is_first else contextlib.nullcontext():
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(output.scratch))
        trainer.accelerator.wait_for_everyone()
        if not is_first:
            return
        if not any(output.scratch.glob("*.safetensors")):
            raise UserError(
                f"the final weights of {run.output} were not saved by this kind of training; the "
                "last checkpoint has them"
            )
        trainer.write_log()
        dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else "float32"
        result = environment(
            dtype=dtype if dtype == "float32" else f"{dtype} autocast",
            processes=training.world_size,
            distributed=trainer.accelerator.distributed_type.value,
            steps=trainer.state.global_step,
            tokens_seen=trainer.state.num_input_tokens_seen,
            **spent(trainer),
            **({} if rows is None else {"init_rows": rows.counts}),
            **metrics,
        )
        if run.start is not None and metrics:
            page = output.scratch / "adaptation.md"
            write_report(page, trainer.state.log_history, metrics, rows is not None)
    output.finish(**result)
    _remove_start(run)


def _remove_start(run):
    """Removes the Hub folder of a raw checkpoint that the run began with."""
    for folder in run.output.glob(START.format("*")):
        shutil.rmtree(folder, ignore_errors=True)


def main(argv=None):
    """Entry point of `neobert pretrain`; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = read_run(list(sys.argv[1:] if argv is None else argv))
    metrics = execute(run)
    if metrics and run.training.process_index == 0:
        print(json.dumps(metrics))
    return 0
