"""Test `neobert pretrain`.

Covers the metrics of a run, interrupted runs that must end like uninterrupted ones, checkpoints,
the second stage of the paper, the start from other weights, and options that cannot be combined.
"""

import importlib.util
import json
import signal
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.pretrain_runs import (  # noqa: F401
    TINY,
    Killed,
    arguments_of,
    log_of,
    make_corpus,
    run_of,
    same_weights,
    save_bpe,
    signaled,
)
from helpers.raw_checkpoint import write_raw_checkpoint

from neobert import cli, modeling_neobert
from neobert.common.constants import TOKENIZER
from neobert.common.errors import Stopped, UserError
from neobert.common.folders import LOCK, locked
from neobert.common.loading import load_tokenizer
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining import command as pretrain
from neobert.pretraining import model as model_module
from neobert.pretraining import sources
from neobert.pretraining import trainer as trainer_module
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.model import START, read_config
from neobert.pretraining.options import OPTIONS
from neobert.pretraining.run import run_output
from neobert.pretraining.streaming import StreamedBatches
from neobert.pretraining.trainer import PretrainingTrainer, flops_per_batch
from neobert.pretraining.validation import masked_correct, most_frequent_token
from neobert.training.checkpoints import RunTrainer, checkpoints


RECIPES = ROOT / "recipes"


def test_loss_falls_and_all_metrics_are_logged(corpus, tmp_path):
    """Check that the loss falls, and that the log and result.json contain all metrics."""
    reports = "tensorboard" if importlib.util.find_spec("tensorboard") else "none"
    options = {"max_steps": 150, "save_steps": 150, "logging_steps": 10, "report_to": reports}
    metrics = run_of(
        arguments_of(corpus, tmp_path, validation=corpus / "validation.txt", **options)
    )

    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    names = {"loss", "masked_accuracy", "learning_rate", "grad_norm", "tokens_per_second", "mfu"}
    assert names | {"tokens_seen", "step"} <= set(steps[-1]), steps[-1]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"], "the loss must halve"
    assert steps[-1]["learning_rate"] == pytest.approx(3e-4), (
        "the rate must end at 10 % of its peak"
    )
    assert metrics["eval_masked_accuracy"] > 2 * metrics["eval_unigram_accuracy"], (
        "the model must use the context of a masked token"
    )

    prepared = json.loads((corpus / "prepared" / "train" / "prepared.json").read_text())
    epochs = steps[-1]["tokens_seen"] / prepared["tokens"]
    assert steps[-1]["epoch"] == pytest.approx(epochs, rel=0.02)
    assert 150 * 200 < steps[-1]["tokens_seen"] <= 150 * 256, (
        "the non-padding tokens of all batches must be counted"
    )
    assert reports == "none" or list(tmp_path.rglob("events.out.tfevents*"))

    result = json.loads((tmp_path / "result.json").read_text())
    assert (
        metrics.items() <= result.items()
        and result["environment"]["command"]
        and result["steps"] == 150
    )
    model = NeoBERTForMaskedLM.from_pretrained(tmp_path)
    assert model.config.hidden_size == 32, "the final model must load"


def test_every_evaluated_step_is_logged(corpus, tmp_path):
    """Check that a log record ends at every evaluation, and counts the tokens of its steps only.

    The speed is then that of the steps between two evaluations.
    """
    options = {"logging_steps": 100, "eval_strategy": "steps", "eval_steps": 2}
    validation = {"validation": corpus / "validation.txt"}
    pretrain.train(
        pretrain.read_run(arguments_of(corpus, tmp_path / "out", **options, **validation))
    )
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").open()]
    records = [record for record in log if "loss" in record]
    assert [record["step"] for record in records] == [2, 4, 6, 8]
    tokens = [record["tokens_seen"] for record in records]
    assert tokens[0] > 0 and tokens == sorted(set(tokens))


def test_a_glob_that_matches_the_output_is_refused(corpus, tmp_path):
    """Check that files of the output cannot become texts of the next run."""
    (tmp_path / "a.jsonl").write_text('{"text": "a text"}\n')
    values = {"dataset": f"{tmp_path}/**/*.jsonl", "prepared": corpus / "prepared"}
    run = pretrain.read_run(arguments_of(corpus, tmp_path / "out", **values))
    with pytest.raises(UserError, match="must not contain files that the glob"):
        pretrain.execute(run)


@pytest.mark.parametrize("command", ["prepare", "evaluate_only"])
def test_the_copy_of_a_raw_checkpoint_is_locked(corpus, tmp_path, command):
    """Check that a command does not replace the converted copy of a run that trains there."""
    values = {
        "init_from": ROOT / "examples" / "checkpoint",
        "validation": corpus / "validation.txt",
        command: "true",
    }
    run = pretrain.read_run(arguments_of(corpus, tmp_path / "out", model_config=None, **values))
    copy = tmp_path / "out" / START
    copy.mkdir(parents=True)
    with locked(tmp_path / "out"), pytest.raises(UserError, match="in use by another run"):
        pretrain.execute(run)
    assert copy.is_dir()


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({}, 64),
        ({"max_length": 32}, 32),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
    ],
)
def test_model_config_changes_the_context_of_the_initial_model(tmp_path, fields, context):
    """Check that the fields of `model_config` apply under any of their names."""
    NeoBERTConfig(**TINY).save_pretrained(tmp_path)
    assert read_config(fields, str(tmp_path)).context_length == context


@pytest.mark.parametrize(
    ("prepared", "allowed"), [("data/tokens", {"data"}), ("tokens", {"tokens"}), ("../x", set())]
)
def test_prepared_texts_may_be_anywhere_in_the_output(corpus, tmp_path, prepared, allowed):
    """Check which directories the output may contain before the run."""
    out = tmp_path / "out"
    run = pretrain.read_run(arguments_of(corpus, out, prepared=out / prepared))
    assert run_output(run).preexisting - {LOCK} == allowed


def test_output_is_locked_before_loading_texts_and_model(corpus, tmp_path, monkeypatch):
    """Check that the output directory is locked before the texts and the model are loaded.

    The second process starts while the first one is in `load`, which replaces tokenization and
    loading. With a large corpus, these take minutes.
    """
    run = pretrain.read_run(arguments_of(corpus, tmp_path / "out"))
    loads = []

    def load(run):
        loads.append(run)
        if len(loads) == 1:
            # The second process runs the same command, and must fail at the lock.
            with pytest.raises(UserError, match="is in use by another run"):
                pretrain.train(run)
        raise Killed

    monkeypatch.setattr(pretrain.Setup, "from_run", load)
    with pytest.raises(Killed):
        pretrain.train(run)
    assert len(loads) == 1, "the second process must not load anything"


def test_output_is_locked_before_converting_a_raw_checkpoint(corpus, tmp_path, monkeypatch):
    """Check that no raw checkpoint is converted if another run uses the output directory.

    The conversion takes minutes and writes to the output directory.
    """
    model = NeoBERTForMaskedLM(NeoBERTConfig(**TINY))
    write_raw_checkpoint(model.state_dict(), model.config, tmp_path / "raw", 2, torch.float32)
    conversions = []
    monkeypatch.setattr(
        model_module, "write_initial_model", lambda *paths: conversions.append(paths)
    )

    options = {"init_from": tmp_path / "raw", "model_config": "{}"}
    run = pretrain.read_run(arguments_of(corpus, tmp_path / "out", **options))
    with run_output(run).claim(), pytest.raises(UserError, match="is in use by another run"):
        pretrain.execute(run)
    assert not conversions


def test_a_tokenizer_is_identified_by_its_content(corpus, tmp_path):
    """Check that the settings of a run identify its tokenizer by content and not by path."""
    NeoBERTForMaskedLM(NeoBERTConfig(**TINY)).save_pretrained(tmp_path / "start")
    lines = (corpus / "train.txt").read_text().splitlines()
    for name, size in (("one", 280), ("copy", 280), ("other", 300)):
        save_bpe(lines, tmp_path / name, size)
    transfer_options = {
        "init_from": tmp_path / "start",
        "init_embeddings": "transfer",
        "model_config": "{}",
    }

    def settings(name, options):
        run = pretrain.read_run(
            arguments_of(corpus, tmp_path / "out", tokenizer=tmp_path / name, **options)
        )
        return run_output(run).settings

    for options in ({}, transfer_options):
        assert settings("one", options) == settings("copy", options)
        assert settings("one", options) != settings("other", options)


def test_old_option_names_suggest_the_new_names(corpus, tmp_path):
    """Check that the error about an option of an earlier release suggests its new name."""
    recipe = tmp_path / "old.yaml"
    names = {
        "texts_per_step: 8": "global_batch_size",
        "tokens_per_step: 8": "global_batch_tokens",
        "texts_per_batch: 8": "micro_batch_size",
        "tokens_per_batch: 8": "micro_batch_tokens",
        "heldout: a.txt": "validation",
        "measure: true": "evaluate_only",
    }
    for line, name in names.items():
        recipe.write_text(f"{line}\n")
        with pytest.raises(UserError, match=f"unknown key .* Did you mean {name}[?]"):
            pretrain.read_run([str(recipe), *arguments_of(corpus, tmp_path)])


# Options for batches of sequences instead of tokens.
TEXTS = {"global_batch_size": 12, "micro_batch_size": 6, "micro_batch_tokens": None}


STREAM = {"streaming": "true"}


@pytest.mark.parametrize(
    "overrides",
    [
        {"peak_tflops": None},
        {**TEXTS, "logging_steps": 3},
        STREAM,
        {**STREAM, "dataloader_num_workers": 1},
    ],
    ids=str,
)
def test_resumed_run_equals_uninterrupted_run(corpus, tmp_path, overrides):
    """Check that a run with dropout, killed and resumed, equals an uninterrupted run.

    Dropout masks depend on the state of the random number generator, so the comparison covers it.
    """
    options = {"model_config": json.dumps({**TINY, "dropout": 0.1}), **overrides}
    options |= {"mask_replace_prob": 0.8, "random_replace_prob": 0.1}
    uninterrupted = tmp_path / "whole"
    interrupted = tmp_path / "stopped"
    run_of(arguments_of(corpus, uninterrupted, **options))

    with pytest.raises(Killed), signaled(6):
        run_of(arguments_of(corpus, interrupted, **options))
    assert list(checkpoints(interrupted)) == [4]

    # A kill may also leave an incomplete checkpoint.
    (interrupted / "checkpoint-6").mkdir()
    (interrupted / "checkpoint-6" / "model.safetensors").write_bytes(b"half")
    run_of(arguments_of(corpus, interrupted, **options))
    assert not list(interrupted.glob("*checkpoint-6")), "the incomplete checkpoint must be removed"
    assert log_of(interrupted) == log_of(uninterrupted)
    assert same_weights(uninterrupted, interrupted)

    # The summary that Trainer logs at the end would contain the mean loss since the last resume.
    assert "train_" not in (interrupted / "log.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"streaming": "true", "dataloader_num_workers": 2, "gradient_accumulation_steps": 2},
        {"mixture": '{"0": 0.5, "8": 0.5}'},
        TEXTS,
    ],
    ids=str,
)
@pytest.mark.parametrize("interruptions", [2, 3])
def test_repeatedly_interrupted_run_equals_uninterrupted_run(
    corpus, tmp_path, overrides, interruptions
):
    """Check that a run with several interruptions equals an uninterrupted run.

    SIGTERM, after which the run saves a checkpoint, or SIGINT interrupts the run at random steps.
    """
    options = {"max_steps": 10, "save_steps": 2, **overrides}
    run_of(arguments_of(corpus, tmp_path / "whole", **options))

    rng = np.random.default_rng(interruptions)
    exceptions = {signal.SIGTERM: Stopped, signal.SIGINT: KeyboardInterrupt}
    for step in sorted(rng.integers(1, 10, size=interruptions).tolist()):
        number = list(exceptions)[rng.integers(2)]
        with pytest.raises(exceptions[number]), signaled(step, number):
            run_of(arguments_of(corpus, tmp_path / "out", **options))
    run_of(arguments_of(corpus, tmp_path / "out", **options))

    assert log_of(tmp_path / "out") == log_of(tmp_path / "whole")
    assert same_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.slow
def test_last_step_and_saved_steps_are_logged(corpus, tmp_path):
    """Check that the last step and the saved steps are logged between multiples of `logging_steps`.

    Every record covers all steps since the previous one.
    """
    run_of(arguments_of(corpus, tmp_path / "each", max_steps=10))
    run_of(arguments_of(corpus, tmp_path / "some", max_steps=10, logging_steps=4))
    every_step = log_of(tmp_path / "each")
    every_fourth = log_of(tmp_path / "some")
    assert [record["step"] for record in every_fourth] == [4, 8, 10], "step 10 must be logged"
    assert [record["tokens_seen"] for record in every_fourth] == [
        every_step[step - 1]["tokens_seen"] for step in (4, 8, 10)
    ]
    assert every_fourth[-1]["loss"] == pytest.approx(
        (every_step[8]["loss"] + every_step[9]["loss"]) / 2, rel=1e-5
    )
    result = json.loads((tmp_path / "some" / "result.json").read_text())
    assert result["tokens_seen"] == every_step[-1]["tokens_seen"]

    run_of(arguments_of(corpus, tmp_path / "saved", max_steps=10, logging_steps=4, save_steps=3))
    assert [record["step"] for record in log_of(tmp_path / "saved")] == [3, 4, 6, 8, 9, 10]


def test_prepared_texts_are_used_if_streaming_is_not_set(corpus, tmp_path, monkeypatch):
    """Check that prepared texts are used instead of a stream if `streaming` is not set.

    The recipes of the paper do not set `streaming`. A run that has begun cannot change between a
    stream and prepared texts.
    """
    for stage in (1, 2):
        argv = ["--bf16", "false", "--report-to", "none", "--prepared", str(tmp_path)]
        run = pretrain.read_run([str(RECIPES / f"neobert_stage{stage}.yaml"), *argv])
        assert run.streams
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / "prepared.json").write_text("{}")
        assert not run.streams, "existing prepared texts must be used"
        (tmp_path / "train" / "prepared.json").unlink()

    # A Hub dataset is streamed until it is prepared.
    monkeypatch.setattr(sources.Source, "source_type", "hub")
    monkeypatch.setattr(sources, "load_dataset", _text_files)
    options = {"max_steps": 2, "warmup_steps": 0, "save_steps": 1, "column": "text"}
    arguments = arguments_of(corpus, tmp_path / "out", prepared=tmp_path / "prepared", **options)
    run_of(arguments)
    assert not (tmp_path / "prepared").exists()
    run_of([*arguments, "--prepare"])
    with pytest.raises(UserError, match=r"streaming True, now False"):
        run_of(arguments)
    run_of([*arguments, "--streaming"])


def _text_files(name, *args, streaming=False, **kwargs):
    """Load a local text file; replaces `load_dataset` of a Hub dataset."""
    rows = datasets.load_dataset("text", data_files=name, split="train")
    return rows.to_iterable_dataset() if streaming else rows


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_but_no_final_files(corpus, tmp_path, capsys):
    """Check that a run stopped by SIGTERM saves a checkpoint and no final files, and resumes.

    SIGTERM arrives during the third step. No other checkpoint is written, because by default a
    checkpoint is written every 2,000 steps.
    """
    options = {"max_steps": 12, "save_steps": 2000, "logging_steps": 4}
    run_of(arguments_of(corpus, tmp_path / "whole", **options))

    out = tmp_path / "out"
    with signaled(2, signal.SIGTERM):
        assert cli.main(["pretrain", *arguments_of(corpus, out, **options)]) == 143
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        "neobert pretrain: stopped by SIGTERM after step 3 of 12. Run the same command again to "
        "resume from the last checkpoint."
    )
    assert list(checkpoints(out)) == [3] and not list(out.glob("*.safetensors"))
    assert not (out / "result.json").exists()

    # The output of a stopped run can be the start of another run.
    with pytest.raises(Stopped), signaled(2, signal.SIGTERM):
        run_of(arguments_of(corpus, tmp_path / "two", init_from=out, **options))

    run_of(arguments_of(corpus, out, **options))
    uninterrupted_log = log_of(tmp_path / "whole")
    resumed_log = log_of(out)
    assert [record["step"] for record in resumed_log] == [3, 4, 8, 12] and (
        resumed_log[-2:] == uninterrupted_log[-2:]
    )
    assert same_weights(tmp_path / "whole", out)


@pytest.mark.slow
def test_stage_2_starts_from_stage_1(corpus, tmp_path):
    """Check that the second stage starts from the weights of the first with a longer context."""
    run_of(arguments_of(corpus, tmp_path / "one"))
    options = {"model_config": json.dumps({"max_position_embeddings": 128}), "max_length": 64}
    options |= {
        "mixture": json.dumps({"0": 0.2, "12": 0.4, "18": 0.4}),
        "init_from": tmp_path / "one",
    }
    options |= {"learning_rate": 0, "warmup_steps": 0, "max_steps": 1, "save_steps": 1}
    run_of(arguments_of(corpus, tmp_path / "two", **options))
    model = NeoBERTForMaskedLM.from_pretrained(tmp_path / "two")
    assert model.config.max_position_embeddings == 128 and model.config.hidden_size == 32
    # With a learning rate of 0, the second stage must end with the weights of the first.
    assert same_weights(tmp_path / "one", tmp_path / "two")


def test_raw_checkpoint_initializes_a_run(corpus, tmp_path):
    """Check that a raw checkpoint initializes a run like the Hub folder with the same weights.

    `init_from` may be the directory of the checkpoint or its file. The converted copy of the
    checkpoint, `.start.tmp`, must be removed from the output when the run has finished.
    """
    short = {"max_steps": 2, "warmup_steps": 0, "save_steps": 2}
    run_of(arguments_of(corpus, tmp_path / "one", **short))
    model = NeoBERTForMaskedLM.from_pretrained(tmp_path / "one")
    path = write_raw_checkpoint(
        model.state_dict(), model.config, tmp_path / "raw", 2, torch.float32
    )

    starts = {"folder": tmp_path / "one", "raw": tmp_path / "raw", "file": path}
    for name, start in starts.items():
        options = {**short, "init_from": start, "model_config": "{}"}
        run_of(arguments_of(corpus, tmp_path / f"of-{name}", **options))
        assert not list((tmp_path / f"of-{name}").glob(".start*"))
        assert same_weights(tmp_path / f"of-{name}", tmp_path / "of-folder")
    assert not same_weights(tmp_path / "one", tmp_path / "of-raw")


def test_global_batch_size_sets_gradient_accumulation(corpus, tmp_path, monkeypatch):
    """Check that the global batch size determines the number of gradient accumulation steps.

    The launcher sets the number of processes in the environment variable WORLD_SIZE.
    """

    def accumulation(processes, **overrides):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        options = OPTIONS["pretrain"].read(arguments_of(corpus, tmp_path, **overrides))
        return options.batch.gradient_accumulation_steps(processes)

    sequences = {"micro_batch_tokens": None, "max_length": 32}
    assert accumulation(8, **sequences, micro_batch_size=32, global_batch_size=2048) == 8
    assert accumulation(16, **sequences, micro_batch_size=32, global_batch_size=2048) == 4
    assert accumulation(1, micro_batch_tokens=512, global_batch_tokens=4096) == 8
    assert accumulation(3) is None

    # The two sizes must be multiples of each other, and in the same unit.
    indivisible = {"micro_batch_size": 32, "global_batch_size": 2048, "micro_batch_tokens": None}
    with pytest.raises(
        UserError, match="`global_batch_size` must be a multiple .* 32 x 3, got 2,048"
    ):
        accumulation(3, **indivisible)
    with pytest.raises(UserError, match="Use `global_batch_tokens`, which is in the same unit"):
        accumulation(1, micro_batch_tokens=512, global_batch_size=32)

    # A run with a global batch size equals a run with the same number of accumulation steps.
    monkeypatch.delenv("WORLD_SIZE")
    short = {"max_steps": 2, "warmup_steps": 0}
    with pytest.raises(UserError, match="`gradient_accumulation_steps` is set to 2"):
        contradictory = {"global_batch_tokens": 512, "gradient_accumulation_steps": 3}
        run_of(arguments_of(corpus, tmp_path / "out", **contradictory))
    run_of(arguments_of(corpus, tmp_path / "step", global_batch_tokens=512, **short))
    run_of(arguments_of(corpus, tmp_path / "by_hand", gradient_accumulation_steps=2, **short))
    assert log_of(tmp_path / "step") == log_of(tmp_path / "by_hand")


@pytest.mark.slow
def test_accumulated_micro_batches_give_the_loss_of_one_batch(corpus, tmp_path, monkeypatch):
    """Check that one micro-batch of 12 texts has the loss and gradient norm of three of 4 texts.

    The loss of a step is the mean over all of its masked tokens, and not over micro-batches.
    """
    records = []
    # Masks depend on the tokens alone, so that both runs predict the same tokens.
    monkeypatch.setattr(TokenMasking, "__call__", _every_third)
    for rows in (12, 4):
        options = {"global_batch_size": 12, "micro_batch_size": rows, "micro_batch_tokens": None}
        options |= {"max_steps": 1, "warmup_steps": 0, "save_steps": 1}
        run_of(arguments_of(corpus, tmp_path / str(rows), **options))
        records += log_of(tmp_path / str(rows))

    single, accumulated = records
    assert (single["tokens_seen"], single["epoch"]) == (
        accumulated["tokens_seen"],
        accumulated["epoch"],
    )
    assert single["loss"] == pytest.approx(accumulated["loss"], rel=1e-5)
    assert single["grad_norm"] == pytest.approx(accumulated["grad_norm"], rel=1e-4)


def _every_third(self, input_ids, generator, progress):
    """Mask the ordinary tokens whose id is a multiple of 3; replaces `TokenMasking.__call__`."""
    is_masked = self.is_ordinary[input_ids] & (input_ids % 3 == 0)
    return (
        torch.where(is_masked, self.mask_token_id, input_ids),
        torch.where(is_masked, input_ids, -100),
    )


def test_masked_accuracy_counts_only_labeled_tokens():
    """Check the counts for logits of all tokens, and for logits of the masked tokens only."""
    labels = torch.tensor([[-100, 1, 2, -100]])
    logits = torch.zeros(1, 4, 3)
    logits[0, 0, 1] = logits[0, 1, 1] = logits[0, 2, 0] = 1
    assert masked_correct(logits, labels) == (1, 2)
    assert masked_correct(logits[0, 1:3], labels) == (1, 2)


def test_the_baseline_is_the_most_frequent_masked_token():
    labels = [[[-100, 9, 7]], [[9, -100, 9]]]
    assert most_frequent_token([{"labels": torch.tensor(row)} for row in labels]) == (9, 0.75)


def test_data_seed_defaults_to_seed(corpus, tmp_path):
    """Check that `data_seed` defaults to `seed`, and leaves the seed of the model unchanged."""
    both = {"seed": 3, "data_seed": 5}
    for options, data_seed in (({}, 7), ({"seed": 3}, 3), (both, 5), ({"data_seed": 0}, 0)):
        run = pretrain.read_run(arguments_of(corpus, tmp_path, **options))
        assert run.data_seed == data_seed and run.training.seed == options.get("seed", 7)


def test_flops_of_the_published_model():
    """Check the floating-point operations of a text of 1,024 tokens against a formula by hand.

    A token needs 6 operations per weight of the decoder and of the 28 blocks, which have 7,079,424
    weights including two norms that are not counted. A pair of tokens needs 12 * 768 operations per
    layer.
    """
    config = NeoBERTConfig()
    weights = 28 * (7_079_424 - 2 * 768) * 6 * 1024
    expected = weights + 28 * 12 * 768 * 1024**2 + 6 * 768 * 30522 * 1024
    assert flops_per_batch(config, 1024, 1024**2, 1024) == expected


@pytest.mark.parametrize("sparse, predicted", [(True, 30), (False, 200)])
def test_mfu_and_epochs_count_all_processes(monkeypatch, sparse, predicted):
    """Check the log record of one of two processes.

    The counts summed over both processes are twice those of this process.
    """
    config = NeoBERTConfig(**TINY, vocab_size=100, sparse_prediction=sparse)
    trainer = object.__new__(PretrainingTrainer)
    trainer.args = SimpleNamespace(world_size=2, device="cpu")
    trainer.accelerator = SimpleNamespace(reduce=lambda values, reduction: 2 * values)
    trainer.model = SimpleNamespace(config=config)
    trainer.state = SimpleNamespace(num_input_tokens_seen=0, epoch=0)
    trainer.train_dataset = StreamedBatches.__new__(StreamedBatches)
    trainer.train_dataset.sampling_weights = [1.0]
    trainer._stream = {0: {"parts": [{"epochs": [3]}]}, 1: {"parts": [{"epochs": [5]}]}}
    trainer._counts = Counter(tokens=100, squares=1000, masked=15, correct=6)
    trainer.peak_tflops = 1.0
    trainer.last_time = 0.0
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: 4.0)
    monkeypatch.setattr(RunTrainer, "log", lambda *args: None)

    logs = {"loss": 1.0}
    trainer.log(logs)
    assert trainer.state.epoch == 4 and logs["tokens_seen"] == 200
    assert logs["masked_accuracy"] == 12 / 30 and logs["tokens_per_second"] == 50
    flops = flops_per_batch(config, 200, 2000, predicted)
    assert logs["mfu"] == pytest.approx(flops / (4.0 * 2 * 1e12))


def test_sparse_prediction_is_enabled_by_default():
    """Check that training uses `sparse_prediction`, unless `model_config` disables it."""
    tokenizer = load_tokenizer(TOKENIZER)
    assert model_module.make_model(TINY, None, tokenizer, 0).config.sparse_prediction
    dense = {**TINY, "sparse_prediction": False}
    assert not model_module.make_model(dense, None, tokenizer, 0).config.sparse_prediction


def test_changed_init_from_or_other_tokenizer_is_rejected(corpus, tmp_path):
    """Check that `tokenizer` must match `init_from`, and that a run cannot change `init_from`.

    The tokenizer of `init_from` is the default. The ids of another tokenizer would select the
    embeddings of other tokens.
    """
    lines = (corpus / "train.txt").read_text().splitlines()
    start_tokenizer = tmp_path / "own"
    for name, size in (("own", 300), ("bpe", 280)):
        save_bpe(lines, tmp_path / name, size)
    short = {"max_steps": 2, "warmup_steps": 0, "save_steps": 1, "prepared": None}
    run_of(arguments_of(corpus, tmp_path / "one", tokenizer=start_tokenizer, **short))
    vocabulary = load_tokenizer(start_tokenizer).get_vocab()

    options = {**short, "init_from": tmp_path / "one", "model_config": "{}"}
    message = "bpe differs from the tokenizer of `init_from` .*one, to which the weights belong"
    with pytest.raises(UserError, match=message):
        run_of(arguments_of(corpus, tmp_path / "two", tokenizer=tmp_path / "bpe", **options))
    run_of(arguments_of(corpus, tmp_path / "two", tokenizer=start_tokenizer, **options))
    assert load_tokenizer(tmp_path / "two").get_vocab() == vocabulary

    run_of(arguments_of(corpus, tmp_path / "three", **options))
    assert load_tokenizer(tmp_path / "three").get_vocab() == vocabulary
    saved = json.loads((tmp_path / "three" / "tokenizer_config.json").read_text())
    # transformers 4 can load this class.
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"

    with pytest.raises(UserError, match=r"init_from '[0-9a-f]{12}', now '[0-9a-f]{12}'"):
        run_of(
            arguments_of(corpus, tmp_path / "three", **{**options, "init_from": tmp_path / "two"})
        )


def test_default_and_explicit_warmup_steps(corpus, tmp_path):
    """Check the default warmup, 5 % of the steps and at most 2,000, and values that are set.

    A value below 1 is a fraction of the steps, here of 8.
    """
    defaults = [
        ({"max_steps": steps}, count) for steps, count in ((8, 0), (400, 20), (10**6, 2000))
    ]
    for options, steps in (*defaults, ({"warmup_steps": 3}, 3), ({"warmup_steps": 0.5}, 4)):
        run = pretrain.read_run(arguments_of(corpus, tmp_path, **{"warmup_steps": None, **options}))
        assert run.training.get_warmup_steps(run.training.max_steps) == steps, options


def test_resumed_stream_requires_the_same_texts(corpus, tmp_path):
    """Check that a streamed run is resumed only with the same texts, which may have been moved.

    Prepared texts are stored with their source. A stream is not, so the run stores its source.
    """
    other = tmp_path / "other.txt"
    other.write_text((corpus / "train.txt").read_text() + "the river is cold\n")
    options = {"streaming": "true", "max_steps": 2, "warmup_steps": 0, "save_steps": 1}
    run_of(arguments_of(corpus, tmp_path / "out", **options))
    with pytest.raises(UserError, match=r"data 'train.txt \(\w+\)', now 'other.txt"):
        run_of(arguments_of(corpus, tmp_path / "out", **options, dataset=other))

    moved = tmp_path / "moved" / "train.txt"
    moved.parent.mkdir()
    moved.write_bytes((corpus / "train.txt").read_bytes())
    run_of(arguments_of(corpus, tmp_path / "out", **options, dataset=moved))


def test_model_config_accepts_field_aliases(corpus, tmp_path):
    """Check that `model_config` accepts aliases of fields when a model is loaded.

    `dropout` and `max_length` are aliases. RoPE scaling is relative to the context length of the
    weights, and not to the new one.
    """
    tokenizer = load_tokenizer(TOKENIZER)
    NeoBERTForMaskedLM(NeoBERTConfig(**TINY)).save_pretrained(tmp_path)
    fields = {"dropout": 0.1, "max_length": 128, "rope_scaling": {"rope_type": "yarn", "factor": 2}}
    config = model_module.make_model(fields, str(tmp_path), tokenizer, 0).config
    assert config.hidden_dropout == config.attention_dropout == 0.1
    assert config.max_position_embeddings == 128
    # YaRN must extend the context length of the first stage.
    assert config.rope_parameters["original_max_position_embeddings"] == 64

    with pytest.raises(UserError, match="is 'rms', but `model_config` sets 'layer'"):
        model_module.make_model({"rms_norm": False}, str(tmp_path), tokenizer, 0)


def test_prepare_tokenizes_and_stops(corpus, tmp_path, caplog):
    """Check that `--prepare` tokenizes the training and validation texts, and does not train."""
    arguments = arguments_of(
        corpus,
        tmp_path / "out",
        prepared=tmp_path / "prepared",
        validation=corpus / "validation.txt",
    )
    assert cli.main(["pretrain", *arguments, "--prepare"]) == 0
    assert "360 of 360 rows have text" in caplog.text
    summary = json.loads((tmp_path / "prepared" / "validation" / "prepared.json").read_text())
    assert (summary["rows"], summary["kept"]) == (40, 40)
    assert not (tmp_path / "out" / "run.json").exists(), "`--prepare` must not train"


def test_the_accelerate_configurations_load():
    """Check the configurations of recipes/accelerate, and that the guide names each of them.

    accelerate itself loads the files, and rejects unknown keys. FSDP finds the blocks by the name
    of their class. The configuration of two machines has 16 processes.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    folder = RECIPES / "accelerate"
    configs = {path.stem: load_config_from_file(str(path)) for path in folder.glob("*.yaml")}

    types = {name: str(config.distributed_type) for name, config in configs.items()}
    types = {name: value.removeprefix("DistributedType.") for name, value in types.items()}
    deepspeed = dict.fromkeys(("zero2", "zero3", "multinode_zero2"), "DEEPSPEED")
    assert types == {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", **deepspeed}
    assert [configs[name].deepspeed_config["zero_stage"] for name in deepspeed] == [2, 3, 2]

    fsdp = configs["fsdp2"].fsdp_config
    multinode = configs["multinode_zero2"]
    assert fsdp["fsdp_version"] == 2
    assert hasattr(modeling_neobert, fsdp["fsdp_transformer_layer_cls_to_wrap"])
    assert (multinode.num_machines, multinode.num_processes) == (2, 16)

    guide = (folder.parents[1] / "docs" / "pretraining.md").read_text()
    assert all(f"{name}.yaml" in guide for name in configs), (
        "docs/pretraining.md must name each of them"
    )
