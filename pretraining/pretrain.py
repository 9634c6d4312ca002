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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import TrainingArguments

from ..common.errors import UserError
from ..common.files import read_json, write_text
from ..common.folders import apart
from ..common.identity import known_by
from ..common.loading import load_tokenizer
from ..common.output import Output, run_settings
from ..common.packing import compile_blocks
from ..common.results import environment, markdown_table
from ..training.checkpoints import claim, spent, train
from ..training.options import number_options
from .batches import MicroBatches, Windows, text_ends
from .heldout import check_held_out, metric_name, most_frequent, parse_heldout
from .masking import TokenMasking
from .model import START, choose_tokenizer, make_model, weights_folder
from .options import OPTIONS, BatchArguments, DataArguments, ModelArguments, RunArguments
from .prepared import TokenisedTexts, load_prepared, prepare, source_digest
from .schedule import make_training_arguments
from .sources import load_rows, parse_sources, shares_of
from .streaming import StreamedBatches
from .trainer import PretrainingTrainer
from .transplant import find_rows


@dataclass(frozen=True)
class Given:
    """Everything that a run was given."""

    model: ModelArguments
    data: DataArguments
    batch: BatchArguments
    run: RunArguments
    training: TrainingArguments
    sources: tuple  # of the training text
    heldout: dict  # {name of a held-out set: its sources}

    @property
    def prepared(self):
        """Where the tokenised sets are."""
        return Path(self.data.prepared or f"{self.run.output}/prepared")

    @functools.cached_property
    def start(self):
        """Folder or Hub name of the weights that it starts from, or None."""
        if self.model.init_from is None:
            return None
        with self.training.main_process_first(desc="init_from"):
            is_first = self.training.process_index == 0
            return weights_folder(self.model.init_from, self.run.output, is_first)

    @property
    def sets(self):
        """{folder in `prepared`: tuple of `Source`}: "train", of weighted sources "train-1" and so
        on; "heldout", or "heldout-NAME"."""
        sets = {"train": self.sources}
        if self.sources[0].weight is not None:
            sets = {f"train-{i}": (source,) for i, source in enumerate(self.sources, 1)}
        return sets | {_folder_of(name): parts for name, parts in self.heldout.items()}

    @property
    def data_seed(self):
        """Of the order of the texts, the mixture and the masks."""
        training = self.training
        return training.seed if training.data_seed is None else training.data_seed

    @property
    def streams(self):
        """Whether the training data is read while training. Several sources are prepared, so that
        their texts are shuffled together."""
        if self.data.streaming is not None:
            return self.data.streaming
        return (
            len(self.sources) == 1
            and self.sources[0].kind == "hub"
            and not (self.prepared / "train" / "prepared.json").is_file()
        )


def _folder_of(name):
    """Folder in `prepared` of the held-out set `name`, "" for the only one."""
    return f"heldout-{name}" if name else "heldout"


def read_run(argv):
    """The `Given` of a command line; UserError for bad input."""
    model, data, batch, run, options = OPTIONS["pretrain"].read(argv)
    sources = parse_sources(data.dataset, data.split, data.column)
    heldout = parse_heldout(data.heldout, data.split, data.column)
    training = make_training_arguments(run, batch, options)
    return Given(model, data, batch, run, training, sources, heldout)


# ------------------------------------------------------------------------------------------------
# checks


def _check(run):
    """Raises UserError for options that do not go together."""
    plugin = run.training.deepspeed_plugin
    gathered = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    is_sharded = plugin is not None and plugin.zero_stage == 3
    if is_sharded and not plugin.hf_ds_config.get_value(gathered):
        raise UserError(
            "ZeRO-3 would leave no final model: give zero3_save_16bit_model: true under "
            "deepspeed_config, as recipes/accelerate/zero3.yaml does"
        )
    # A later run reads what is in a folder of texts by then.
    inputs = [source.name for sources in run.sets.values() for source in sources]
    apart(run.run.output, *inputs, *filter(None, [run.model.init_from]))
    for name in run.sets:
        apart(run.prepared / name, *inputs)


def _check_text(run):
    """Opens the text that is not prepared yet, so that what is not there, a column or a row as
    well, is named before a model is loaded. UserError for held-out text that is trained on."""
    check_held_out(run.heldout, run.sources)
    for name, sources in run.sets.items():
        is_there = (run.prepared / name / "prepared.json").is_file()
        if not is_there and next(iter(load_rows(sources)), None) is None:
            raise UserError(f"dataset {sources[0].name} has no rows")


def _output(run, tokenizer):
    """The `Output`, known by what decides the numbers of a run."""
    settings = run_settings(run.model, run.data, run.batch, run.run)
    for name, value in number_options(run.training.to_dict()).items():
        if not name.startswith("eval_"):  # an evaluation only measures here
            settings[name] = value
    settings |= {
        "streaming": run.streams,
        "data": source_digest(run.sources, tokenizer),
        "heldout": {
            name: source_digest(sources, tokenizer) for name, sources in run.heldout.items()
        },
        "world_size": run.training.world_size,
        "init_from": run.start and known_by(run.start),
    }
    if run.streams:  # each worker reads a share of its own
        settings["dataloader_num_workers"] = run.training.dataloader_num_workers
    return Output(run.run.output, "pretrain", settings, beside=[run.prepared.name])


# ------------------------------------------------------------------------------------------------
# batches


def _tokens(run, name, tokenizer):
    """`TokenisedTexts` of a set in `Given.sets`, which is prepared first when it is not there."""
    folder = run.prepared / name
    with run.training.main_process_first(desc="tokenising"):
        summary = prepare(run.sets[name], folder, tokenizer)
    if run.training.process_index == 0:
        print(
            f"{summary['dataset']}: {summary['kept']:,} of {summary['rows']:,} rows have text, "
            f"{summary['tokens']:,} tokens",
            file=sys.stderr,
        )
    return load_prepared(folder)


def _micro_batches(tokens, tokenizer, masking, spec, seed, name, count=None):
    """`MicroBatches` of a tokenised set; `count=None`: one pass. UserError if its text has nothing
    to mask."""
    windows = Windows(tokens, text_ends(tokenizer), spec)
    batches = MicroBatches(windows, masking, spec, seed, count)
    looked = len(batches) if count is None else min(count, 100)
    if not any((batches[i]["labels"] != -100).any() for i in range(looked)):
        raise UserError(
            f"the text of {name} has no token to mask, only special ones such as [UNK]; is the "
            "tokenizer made for it?"
        )
    return batches


def heldout_batches(run, tokenizer):
    """{name: `MicroBatches`} of the held-out sets, masked alike over the run."""
    batch, sets = run.batch, {}
    shares = (batch.mlm_probability, batch.mask_replace_prob, batch.random_replace_prob)
    masking, spec = TokenMasking(tokenizer, *shares), replace(batch, mixture=None)
    for name in run.heldout:
        tokens, seed = _tokens(run, _folder_of(name), tokenizer), run.data_seed + 1
        text = name or run.data.heldout
        sets[name] = _micro_batches(tokens, tokenizer, masking, spec, seed, text)
    return sets


def training_batches(run, tokenizer):
    """`MicroBatches` of the training text; of text that is streamed `StreamedBatches` of this
    process."""
    batch, training, seed = run.batch, run.training, run.data_seed
    shares = (batch.mlm_probability, batch.mask_replace_prob, batch.random_replace_prob)
    masking = TokenMasking(tokenizer, *shares, batch.mask_schedule)
    count = training.max_steps * training.gradient_accumulation_steps * training.world_size
    sources, weights = run.sources, shares_of(run.sources)
    if not run.streams:
        tokens = [_tokens(run, name, tokenizer) for name in run.sets if name.startswith("train")]
        tokens = TokenisedTexts.joined(tokens, weights) if weights else tokens[0]
        name = run.data.dataset
        return _micro_batches(tokens, tokenizer, masking, batch, seed, name, count)
    rows = [load_rows([source]) for source in sources] if weights else [load_rows(sources)]
    return StreamedBatches(
        rows,
        weights,
        tokenizer,
        masking,
        batch,
        seed,
        count,
        training.process_index,
        training.world_size,
        training.dataloader_num_workers,
    )


# ------------------------------------------------------------------------------------------------
# the run


def execute(run):
    """Trains, or continues; returns the metrics of the final evaluation (an empty dict without
    held-out text)."""
    training, is_first = run.training, run.training.process_index == 0
    _check(run)
    tokenizer = choose_tokenizer(run.model.tokenizer, run.start, run.model.init_embeddings)
    if run.data.prepare:
        for name in run.sets:
            _tokens(run, name, tokenizer)
        return {}
    _check_text(run)
    output = _output(run, tokenizer)
    if not run.data.measure and output.state() == "finished":
        result = read_json(output.result)
        if is_first:
            print(
                f"{output.folder}: finished already, after {result['steps']:,} steps",
                file=sys.stderr,
            )
        return {name: value for name, value in result.items() if name.startswith("eval_")}

    rows = None
    if run.model.init_embeddings is not None:
        rows = find_rows(load_tokenizer(run.start), tokenizer)
        if is_first:
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
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32
    training.ignore_data_skip = training.ignore_data_skip or run.streams
    heldout = heldout_batches(run, tokenizer)
    trainer = PretrainingTrainer(
        model=model,
        args=training,
        train_dataset=None if run.data.measure else training_batches(run, tokenizer),
        eval_dataset=heldout or None,
        processing_class=tokenizer,
        peak_tflops=run.run.peak_tflops,
    )
    if run.data.measure:
        model.to(training.device)
        metrics = trainer.measure()
    else:
        with claim(output):
            train(trainer, run.run.keep_every, trainer.load_stream if run.streams else None)
            metrics = trainer.evaluate()
            for name, batches in heldout.items():
                metrics[metric_name(name, "unigram_accuracy")] = most_frequent(batches)[1]
            _finish(run, output, trainer, metrics, rows)
    if is_first:
        shutil.rmtree(output.folder / START, ignore_errors=True)
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
                f"the final weights of {output.folder} were not saved by this kind of training; "
                "the last checkpoint has them"
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
            page = _report(trainer.state.log_history, metrics, rows is not None)
            write_text(output.scratch / "adaptation.md", page)
    output.finish(**result)


def _report(history, metrics, replaced):
    """The page of a run with init_from: held-out figures before the first step and after the last.

    Args:
        history: `log_history` of the run.
        metrics: {`metric_name`: value} of the final model.
        replaced: whether the run replaced the vocabulary of its start, so that its first figures
            are those of new rows and no start to compare with.
    """
    first = {key: record[key] for record in history if record["step"] == 0 for key in record}
    measures, rows = ("bits_per_character", "masked_accuracy"), []
    for key in (key for key in metrics if key.endswith(measures)):
        error = f"{key}_error"
        cells = [
            f"{values[key]:.3f}" + (f" ± {values[error]:.3f}" if error in values else "")
            for values in (first, metrics)
        ]
        change = "" if replaced else f"{metrics[key] - first[key]:+.3f}"
        rows.append([key.removeprefix("eval_").replace("_", " "), *cells, change])
    before = "with its new rows, untrained" if replaced else "the model given"
    table = markdown_table(["held-out text", before, "after", "change"], rows)
    return (
        f"# Before and after\n\n{table}\nBits a character: the masked-LM loss in bits, by the "
        "characters of the masked tokens' text; fewer is better. ± is the standard error over the "
        "batches of held-out text.\n"
    )


def main(argv=None):
    """Entry point of `neobert pretrain`; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = read_run(list(sys.argv[1:] if argv is None else argv))
    metrics = execute(run)
    if metrics and run.training.process_index == 0:
        print(json.dumps(metrics))
    return 0
