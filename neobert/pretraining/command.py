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
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..common.errors import UserError, printable
from ..common.files import read_json, write_text
from ..common.folders import apart
from ..common.identity import known_by
from ..common.loading import load_tokenizer
from ..common.model_card import base_model, front_matter, licence, read_card
from ..common.output import Output, run_settings
from ..common.packing import compile_blocks
from ..common.results import environment, markdown_table, shown
from ..training.checkpoints import claim, spent, train
from ..training.options import number_options
from ..training.run_report import RunReport
from .batches import MicroBatches, TokenWindows, boundary_tokens
from .masking import TokenMasking
from .model import START, choose_tokenizer, make_model, read_config, weights_folder
from .options import OPTIONS, BatchArguments, DataArguments, ModelArguments, RunArguments
from .prepared import TokenizedTexts, load_prepared, prepare_dataset, source_digest
from .schedule import adaptation_learning_rate, make_training_arguments, steps_of_epochs
from .sources import load_rows, parse_sources, shares_of
from .streaming import StreamedBatches
from .trainer import PretrainingTrainer
from .validation import (
    check_held_out,
    evaluate_batches,
    metric_name,
    most_frequent,
    parse_heldout,
    piece_characters,
)
from .vocabulary_transfer import find_rows


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
    options: dict  # Trainer's options, as they were given

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
    return Given(model, data, batch, run, training, sources, heldout, options)


def fit_to_model(run: Given, tokenizer: PreTrainedTokenizerBase) -> Given:
    """Return the run with the values that depend on the model and on the amount of text.

    `auto` becomes the learning rate and maximum length for the model, and `num_train_epochs` limits
    the number of steps.
    """
    batch = run.batch
    options = dict(run.options)
    arguments = replace(run.run)
    config = None
    if "auto" in (batch.max_length, arguments.learning_rate):
        config = read_config(run.model.model_config, run.start)
    if batch.max_length == "auto":
        longest = (run.model.model_config or {}).get(
            "max_position_embeddings", config.context_length
        )
        batch = replace(batch, max_length=min(1024, longest))
    if arguments.learning_rate == "auto":
        arguments.learning_rate = adaptation_learning_rate(config.hidden_size)

    if "num_train_epochs" in options and not run.data.measure:
        if run.streams:
            raise UserError(
                "`num_train_epochs` needs prepared text, but the text is streamed. Set "
                "`max_steps`, or prepare the text with `--prepare`."
            )
        texts = [_tokens(run, name, tokenizer) for name in run.sets if name.startswith("train")]
        size = batch.texts_per_batch or batch.tokens_per_batch
        sizes = [len(part.lengths) for part in texts]
        if batch.texts_per_batch is None:
            longest = batch.max_length if batch.long_texts == "truncate" else None
            sizes = [int(part.lengths.clip(max=longest).sum()) for part in texts]
        world_size = run.training.world_size
        size *= world_size * run.training.gradient_accumulation_steps
        steps = steps_of_epochs(options["num_train_epochs"], sizes, shares_of(run.sources), size)
        options["max_steps"] = min(options["max_steps"], steps)

    if (batch, arguments, options) == (run.batch, run.run, run.options):
        return run
    training = make_training_arguments(arguments, batch, options)
    return replace(run, batch=batch, run=arguments, options=options, training=training)


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


def _tokens(run, name, tokenizer, prefix=""):
    """`TokenizedTexts` of a set in `Given.sets`, which is prepared first when it is not there."""
    folder = run.prepared / f"{prefix}{name}"
    with run.training.main_process_first(desc="tokenising"):
        summary = prepare_dataset(run.sets[name], folder, tokenizer)
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
    windows = TokenWindows(tokens, boundary_tokens(tokenizer), spec)
    batches = MicroBatches(windows, masking, spec, seed, count)
    looked = len(batches) if count is None else min(count, 100)
    if not any((batches[i]["labels"] != -100).any() for i in range(looked)):
        raise UserError(
            f"the text of {name} has no token to mask, only special ones such as [UNK]; is the "
            "tokenizer made for it?"
        )
    return batches


def heldout_batches(run, tokenizer, prefix=""):
    """{name: `MicroBatches`} of the held-out sets, masked alike over the run. `prefix` is that of
    their folders in `prepared`, which belong to one tokenizer."""
    batch, sets = run.batch, {}
    shares = (batch.mlm_probability, batch.mask_replace_prob, batch.random_replace_prob)
    masking, spec = TokenMasking(tokenizer, *shares), replace(batch, mixture=None)
    for name in run.heldout:
        tokens = _tokens(run, _folder_of(name), tokenizer, prefix)
        seed = run.data_seed + 1
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
        tokens = TokenizedTexts.concatenate(tokens, weights) if weights else tokens[0]
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


def measure_start(run: Given, trainer: PretrainingTrainer) -> dict[str, float]:
    """Return the validation metrics of the given model with its own tokenizer, as `start_...`.

    The random state is left unchanged. A set that the old vocabulary cannot represent has no
    metrics.

    Args:
        run: Run that replaces the vocabulary of its start.
        trainer: Trainer whose device and processes are used.
    """
    tokenizer = load_tokenizer(run.start)
    fields = dict(run.model.model_config or {})
    for name in ("vocab_size", "pad_token_id"):  # of the new vocabulary
        fields.pop(name, None)
    cuda_devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(cuda_devices):
        model = make_model(fields, run.start, tokenizer, run.training.seed)
    model.to(trainer.args.device)

    metrics = {}
    for name in run.heldout:
        try:
            (batches,) = heldout_batches(
                replace(run, heldout={name: run.heldout[name]}), tokenizer, "start-"
            ).values()
        except UserError:  # no token of this text is in the old vocabulary
            continue
        measured = evaluate_batches(
            model, batches, piece_characters(tokenizer), trainer.accelerator
        )
        metrics |= {metric_name(name, key, "start"): value for key, value in measured.items()}
    return metrics


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
    run = fit_to_model(run, tokenizer)
    training = run.training
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
    if rows is not None and heldout:
        trainer.measure_start = functools.partial(measure_start, run, trainer)
    if run.data.measure:
        model.to(training.device)
        metrics = trainer.measure() | trainer.measure_start()
    else:
        trainer.add_callback(_run_report(run, trainer.train_dataset))
        with claim(output):
            train(trainer, run.run.keep_every, trainer.load_stream if run.streams else None)
            metrics = trainer.evaluate()
            for name, batches in heldout.items():
                metrics[metric_name(name, "unigram_accuracy")] = most_frequent(batches)[1]
            _finish(run, output, trainer, metrics, rows)
    if is_first:
        shutil.rmtree(output.folder / START, ignore_errors=True)
    return metrics


def _run_report(run: Given, batches: MicroBatches | StreamedBatches) -> RunReport:
    """Return the callback that reports the size of a run, in sequences and epochs of its text."""
    if run.streams:
        return RunReport()
    windows = batches.windows
    epochs = None
    if len(batches.plans) == 1:
        number, i = batches.plans[0].locate(len(batches) - 1)
        epochs = number + (i + 1) / batches.plans[0].batches_of(number)
    return RunReport(sequences=len(windows), epochs=epochs)


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
        table = ""
        if metrics:
            before = "untrained model" if run.start is None else "given model"
            table = _report(trainer.state.log_history, metrics, rows is not None, before)
        if run.start is not None and metrics:
            write_text(output.scratch / "adaptation.md", f"# Before and after\n\n{table}")
        write_card(run, output, result, table)
    output.finish(**result)


def write_card(run: Given, output: Output, result: dict, table: str) -> None:
    """Write README.md, the model card of a run.

    Args:
        run: The run.
        output: Its output, in whose final files the card is written.
        result: Contents of result.json.
        table: Validation metrics as Markdown, or "".
    """
    name = output.folder.resolve().name
    start = run.model.init_from
    card = read_card(start) if start is not None else {}
    hub_names = [source.name for source in run.sources if source.kind == "hub"]
    metadata = front_matter(
        **licence(None, card),
        **base_model(None, start),
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["neobert", "fill-mask", "custom_code", "safetensors"],
        datasets=list(dict.fromkeys(hub_names)) or None,
    )
    origin = "from random weights" if start is None else f"from `{printable(shown(start))}`"
    texts = ", ".join(f"`{printable(shown(source.name))}`" for source in run.sources)
    training = run.training
    rows = [
        ["steps", f"{result['steps']:,}"],
        ["tokens", f"{result['tokens_seen']:,}"],
        ["maximum length", f"{run.batch.max_length:,}"],
        ["peak learning rate", f"{training.learning_rate:g}"],
        ["masked tokens", f"{run.batch.mlm_probability:.0%}"],
        ["dtype", result["dtype"]],
        ["seed", training.seed],
    ]
    text = f"""
# {printable(name)}

A NeoBERT masked language model ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)), trained {origin} on {texts}.

```python
from transformers import pipeline

fill_mask = pipeline("fill-mask", {json.dumps(printable(name))}, trust_remote_code=True)
```

## Training

`neobert pretrain`; `result.json` contains all settings.

{markdown_table(["", "value"], rows)}"""  # noqa: E501
    if table:
        text += f"\n## Validation\n\n{table}"
    write_text(output.scratch / "README.md", metadata + text)


def _report(history: list[dict], metrics: dict[str, float], replaced: bool, before: str) -> str:
    """Return a table of the validation metrics before the first step and after the last.

    Changes are relative to the given model. If the run replaced the vocabulary, that is the model
    with its own tokenizer, so that the table shows what was forgotten; masked accuracy of two
    vocabularies is not comparable and has no change.

    Args:
        history: `log_history` of the run.
        metrics: {`metric_name`: value} of the final model.
        replaced: Whether the run replaced the vocabulary of its start.
        before: Header of the column before the first step, if it did not.
    """
    first = {key: record[key] for record in history if record["step"] == 0 for key in record}
    given = first
    if replaced:
        starts = (key for key in first if key.startswith("start_"))
        given = {key.replace("start", "eval", 1): first[key] for key in starts}
    columns = {before: given, "after": metrics}
    if replaced:
        untrained = {"untrained new rows": first}
        columns = {"given model, own tokenizer": given, **untrained, "after": metrics}

    rows = []
    measures = ("bits_per_character", "masked_accuracy")
    for key in (key for key in metrics if key.endswith(measures)):
        cells = [_cell(values, key) for values in columns.values()]
        change = ""
        if key in given and (key.endswith("bits_per_character") or not replaced):
            change = f"{metrics[key] - given[key]:+.3f}"
        rows.append([key.removeprefix("eval_").replace("_", " "), *cells, change])
    table = markdown_table(["validation text", *columns, "change"], rows)
    return (
        f"{table}\nBits per character: masked-LM loss in bits, divided by the characters of the "
        "masked tokens' text; lower is better, and comparable across tokenizers. ± is the standard "
        "error over the validation batches.\n"
    )


def _cell(values: dict[str, float], key: str) -> str:
    """Return a value with its standard error, or "-" if there is none."""
    if key not in values:
        return "-"
    error = values.get(f"{key}_error")
    return f"{values[key]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def main(argv=None):
    """Entry point of `neobert pretrain`; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run = read_run(list(sys.argv[1:] if argv is None else argv))
    metrics = execute(run)
    if metrics and run.training.process_index == 0:
        print(json.dumps(metrics))
    return 0
