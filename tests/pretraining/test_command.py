"""Test `neobert pretrain`.

Covers learning, metrics, runs that are killed at any moment and equal an uninterrupted one, kept
checkpoints, stage 2 and bad input.
"""

import importlib.util
import json
import signal
import time
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
from neobert.common.loading import load_tokenizer
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining import command as pretrain
from neobert.pretraining import model as model_module
from neobert.pretraining import sources
from neobert.pretraining import trainer as trainer_module
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.options import OPTIONS
from neobert.pretraining.run import run_output
from neobert.pretraining.streaming import StreamedBatches
from neobert.pretraining.trainer import PretrainingTrainer, flops_per_batch
from neobert.pretraining.validation import masked_correct, most_frequent_token
from neobert.training.checkpoints import RunTrainer, checkpoints


RECIPES = ROOT / "recipes"


def test_a_run_learns_and_logs_what_the_paper_needs(corpus, tmp_path):
    reports = "tensorboard" if importlib.util.find_spec("tensorboard") else "none"
    options = {"max_steps": 150, "save_steps": 150, "logging_steps": 10, "report_to": reports}
    metrics = run_of(
        arguments_of(corpus, tmp_path, validation=corpus / "validation.txt", **options)
    )
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    names = {"loss", "masked_accuracy", "learning_rate", "grad_norm", "tokens_per_second", "mfu"}
    assert names | {"tokens_seen", "step"} <= set(steps[-1]), steps[-1]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"], "the loss must fall on text with a rule"
    assert steps[-1]["learning_rate"] == pytest.approx(3e-4), "it ends at 10 % of its peak"
    assert metrics["eval_masked_accuracy"] > 2 * metrics["eval_unigram_accuracy"], "context helps"
    text = json.loads((corpus / "prepared" / "train" / "prepared.json").read_text())
    passes = steps[-1]["tokens_seen"] / text["tokens"]
    assert steps[-1]["epoch"] == pytest.approx(passes, rel=0.02), "epoch: passes over the data"
    assert 150 * 200 < steps[-1]["tokens_seen"] <= 150 * 256, "real tokens of all batches"
    assert reports == "none" or list(tmp_path.rglob("events.out.tfevents*"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert (
        metrics.items() <= result.items()
        and result["environment"]["command"]
        and result["steps"] == 150
    )
    model = NeoBERTForMaskedLM.from_pretrained(tmp_path)
    assert model.config.hidden_size == 32, "the final model must load"


def test_a_second_process_is_refused_before_texts_and_model_are_loaded(
    corpus, tmp_path, monkeypatch
):
    """The first process waits in `load`, which stands for minutes of tokenization and loading."""
    run = pretrain.read_run(arguments_of(corpus, tmp_path / "out"))
    loads = []

    def load(run):
        loads.append(run)
        if len(loads) == 1:
            # The second process has the same command line, and asks the file system for the lock.
            start = time.monotonic()
            with pytest.raises(UserError, match="is in use by another run"):
                pretrain.train(run)
            assert time.monotonic() - start < 1
        raise Killed

    monkeypatch.setattr(pretrain.Setup, "from_run", load)
    with pytest.raises(Killed):
        pretrain.train(run)
    assert len(loads) == 1, "the second process must not load anything"


def test_the_claim_comes_before_a_raw_checkpoint_is_converted(corpus, tmp_path, monkeypatch):
    """The conversion takes minutes, and writes a temporary directory in the output."""
    model = NeoBERTForMaskedLM(NeoBERTConfig(**TINY))
    write_raw_checkpoint(model.state_dict(), model.config, tmp_path / "raw", 2, torch.float32)
    converted = []
    monkeypatch.setattr(model_module, "write_start", lambda *paths: converted.append(paths))
    options = {"init_from": tmp_path / "raw", "model_config": "{}"}
    run = pretrain.read_run(arguments_of(corpus, tmp_path / "out", **options))
    with run_output(run).claim(), pytest.raises(UserError, match="is in use by another run"):
        pretrain.execute(run)
    assert not converted


def test_a_tokenizer_is_identified_by_its_content(corpus, tmp_path):
    NeoBERTForMaskedLM(NeoBERTConfig(**TINY)).save_pretrained(tmp_path / "start")
    lines = (corpus / "train.txt").read_text().splitlines()
    for name, size in (("one", 280), ("copy", 280), ("other", 300)):
        save_bpe(lines, tmp_path / name, size)
    starts = {"init_from": tmp_path / "start", "init_embeddings": "transfer", "model_config": "{}"}

    def settings(name, options):
        run = pretrain.read_run(
            arguments_of(corpus, tmp_path / "out", tokenizer=tmp_path / name, **options)
        )
        return run_output(run).settings

    for options in ({}, starts):
        assert settings("one", options) == settings("copy", options)
        assert settings("one", options) != settings("other", options)


def test_old_names_of_options_lead_to_the_new_ones(corpus, tmp_path):
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


TEXTS = {"global_batch_size": 12, "micro_batch_size": 6, "micro_batch_tokens": None}


STREAM = {"streaming": "true"}


@pytest.mark.parametrize(
    "more",
    [
        {"peak_tflops": None},
        {**TEXTS, "logging_steps": 3},
        STREAM,
        {**STREAM, "dataloader_num_workers": 1},
    ],
    ids=str,
)
def test_continuing_equals_not_stopping(corpus, tmp_path, more):
    """Check that a run with dropout, killed and resumed, equals an uninterrupted run.

    Dropout masks follow the state of the random number generator, so the comparison covers it.
    """
    arguments = {"model_config": json.dumps({**TINY, "dropout": 0.1}), **more}
    arguments |= {"mask_replace_prob": 0.8, "random_replace_prob": 0.1}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_of(arguments_of(corpus, whole, **arguments))

    with pytest.raises(Killed), signaled(6):
        run_of(arguments_of(corpus, stopped, **arguments))
    assert list(checkpoints(stopped)) == [4]
    (stopped / "checkpoint-6").mkdir()
    (stopped / "checkpoint-6" / "model.safetensors").write_bytes(b"half")
    run_of(arguments_of(corpus, stopped, **arguments))
    assert not list(stopped.glob("*checkpoint-6")), "what a kill left half-written must go"
    assert log_of(stopped) == log_of(whole)
    assert same_weights(whole, stopped)
    # Trainer's own summary would hold the mean loss since the last resume.
    assert "train_" not in (stopped / "log.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        {"streaming": "true", "dataloader_num_workers": 2, "gradient_accumulation_steps": 2},
        {"mixture": '{"0": 0.5, "8": 0.5}'},
        TEXTS,
    ],
    ids=str,
)
@pytest.mark.parametrize("interruptions", [2, 3])
def test_any_interruptions_end_as_none(corpus, tmp_path, kind, interruptions):
    """Killed, or stopped by SIGTERM, at random steps, one right after another too; the log of
    SIGTERM's steps has a line more."""
    arguments = {"max_steps": 10, "save_steps": 2, **kind}
    run_of(arguments_of(corpus, tmp_path / "whole", **arguments))
    random = np.random.default_rng(interruptions)
    ends = {signal.SIGTERM: Stopped, signal.SIGINT: KeyboardInterrupt}
    for at in sorted(random.integers(1, 10, size=interruptions).tolist()):
        number = list(ends)[random.integers(2)]
        with pytest.raises(ends[number]), signaled(at, number):
            run_of(arguments_of(corpus, tmp_path / "out", **arguments))
    run_of(arguments_of(corpus, tmp_path / "out", **arguments))
    assert log_of(tmp_path / "out") == log_of(tmp_path / "whole")
    assert same_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.slow
def test_the_log_and_tokens_seen_cover_the_last_steps(corpus, tmp_path):
    run_of(arguments_of(corpus, tmp_path / "each", max_steps=10))
    run_of(arguments_of(corpus, tmp_path / "some", max_steps=10, logging_steps=4))
    each, some = log_of(tmp_path / "each"), log_of(tmp_path / "some")
    assert [record["step"] for record in some] == [4, 8, 10], "the last steps must be logged"
    assert [record["tokens_seen"] for record in some] == [
        each[step - 1]["tokens_seen"] for step in (4, 8, 10)
    ]
    assert some[-1]["loss"] == pytest.approx((each[8]["loss"] + each[9]["loss"]) / 2, rel=1e-5)
    result = json.loads((tmp_path / "some" / "result.json").read_text())
    assert result["tokens_seen"] == each[-1]["tokens_seen"]
    run_of(arguments_of(corpus, tmp_path / "saved", max_steps=10, logging_steps=4, save_steps=3))
    assert [record["step"] for record in log_of(tmp_path / "saved")] == [3, 4, 6, 8, 9, 10]


def test_a_prepared_set_is_used_where_streaming_is_left_open(corpus, tmp_path, monkeypatch):
    """The paper's recipes leave it open; the kind of data is fixed when the run begins."""
    for stage in (1, 2):
        more = ["--bf16", "false", "--report-to", "none", "--prepared", str(tmp_path)]
        run = pretrain.read_run([str(RECIPES / f"neobert_stage{stage}.yaml"), *more])
        assert run.streams
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / "prepared.json").write_text("{}")
        assert not run.streams, "a prepared set that is there must be used"
        (tmp_path / "train" / "prepared.json").unlink()
    monkeypatch.setattr(sources.Source, "kind", "hub")
    monkeypatch.setattr(sources, "load_dataset", _text_files)
    options = {"max_steps": 2, "warmup_steps": 0, "save_steps": 1, "column": "text"}
    arguments = arguments_of(corpus, tmp_path / "out", prepared=tmp_path / "prepared", **options)
    run_of(arguments)
    assert not (tmp_path / "prepared").exists()
    run_of([*arguments, "--prepare"])
    with pytest.raises(UserError, match=r"streaming True, now False"):
        run_of(arguments)
    run_of([*arguments, "--streaming"])


def _text_files(name, *args, streaming=False, **more):
    rows = datasets.load_dataset("text", data_files=name, split="train")
    return rows.to_iterable_dataset() if streaming else rows


@pytest.mark.slow
def test_sigterm_saves_and_leaves_no_finished_run(corpus, tmp_path, capsys):
    """By default a checkpoint is written every 2,000 steps; the signal comes in the third."""
    arguments = {"max_steps": 12, "save_steps": 2000, "logging_steps": 4}
    run_of(arguments_of(corpus, tmp_path / "whole", **arguments))
    out = tmp_path / "out"
    with signaled(2, signal.SIGTERM):
        assert cli.main(["pretrain", *arguments_of(corpus, out, **arguments)]) == 143
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        "neobert pretrain: stopped by SIGTERM after step 3 of 12. Run the same command again to "
        "resume from the last checkpoint."
    )
    assert list(checkpoints(out)) == [3] and not list(out.glob("*.safetensors"))
    assert not (out / "result.json").exists()
    with pytest.raises(Stopped), signaled(2, signal.SIGTERM):
        run_of(arguments_of(corpus, tmp_path / "two", init_from=out, **arguments))
    run_of(arguments_of(corpus, out, **arguments))
    whole, again = log_of(tmp_path / "whole"), log_of(out)
    assert [record["step"] for record in again] == [3, 4, 8, 12] and again[-2:] == whole[-2:]
    assert same_weights(tmp_path / "whole", out)


@pytest.mark.slow
def test_stage_2_starts_from_stage_1(corpus, tmp_path):
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
    # At learning rate 0 stage 2 must end with stage 1's weights.
    assert same_weights(tmp_path / "one", tmp_path / "two")


def test_a_raw_checkpoint_is_a_start(corpus, tmp_path):
    """It gives the numbers of the Hub folder with the same weights; what it is read from is in the
    output, also after a kill, until the run has finished."""
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


def test_the_size_of_a_step_gives_the_accumulation(corpus, tmp_path, monkeypatch):
    def accumulation(processes, **more):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        options = OPTIONS["pretrain"].read(arguments_of(corpus, tmp_path, **more))
        return options.batch.gradient_accumulation_steps(processes)

    paper = {"micro_batch_tokens": None, "max_length": 32}
    assert accumulation(8, **paper, micro_batch_size=32, global_batch_size=2048) == 8
    assert accumulation(16, **paper, micro_batch_size=32, global_batch_size=2048) == 4
    assert accumulation(1, micro_batch_tokens=512, global_batch_tokens=4096) == 8
    assert accumulation(3) is None
    texts = {"micro_batch_size": 32, "global_batch_size": 2048, "micro_batch_tokens": None}
    with pytest.raises(
        UserError, match="`global_batch_size` must be a multiple .* 32 x 3, got 2,048"
    ):
        accumulation(3, **texts)
    with pytest.raises(UserError, match="Use `global_batch_tokens`, which is in the same unit"):
        accumulation(1, micro_batch_tokens=512, global_batch_size=32)
    monkeypatch.delenv("WORLD_SIZE")
    short = {"max_steps": 2, "warmup_steps": 0}
    with pytest.raises(UserError, match="`gradient_accumulation_steps` is set to 2"):
        other = {"global_batch_tokens": 512, "gradient_accumulation_steps": 3}
        run_of(arguments_of(corpus, tmp_path / "out", **other))
    run_of(arguments_of(corpus, tmp_path / "step", global_batch_tokens=512, **short))
    run_of(arguments_of(corpus, tmp_path / "by_hand", gradient_accumulation_steps=2, **short))
    assert log_of(tmp_path / "step") == log_of(tmp_path / "by_hand")


@pytest.mark.slow
def test_accumulated_micro_batches_give_the_loss_of_one_batch(corpus, tmp_path, monkeypatch):
    """Both see texts 0 to 11 of the same order; losses are means over all masked tokens, however
    they are cut."""
    losses = []
    # Every third token is masked, whatever the batch, so that both predict the same tokens.
    monkeypatch.setattr(TokenMasking, "__call__", _every_third)
    for rows in (12, 4):
        options = {"global_batch_size": 12, "micro_batch_size": rows, "micro_batch_tokens": None}
        options |= {"max_steps": 1, "warmup_steps": 0, "save_steps": 1}
        run_of(arguments_of(corpus, tmp_path / str(rows), **options))
        losses += log_of(tmp_path / str(rows))
    one, two = losses
    assert (one["tokens_seen"], one["epoch"]) == (two["tokens_seen"], two["epoch"])
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)


def _every_third(self, input_ids, generator, progress):
    chosen = self.is_ordinary[input_ids] & (input_ids % 3 == 0)
    return torch.where(chosen, self.mask_token_id, input_ids), torch.where(chosen, input_ids, -100)


def test_masked_accuracy_counts_labeled_tokens_alone():
    labels = torch.tensor([[-100, 1, 2, -100]])
    logits = torch.zeros(1, 4, 3)
    logits[0, 0, 1] = logits[0, 1, 1] = logits[0, 2, 0] = 1
    assert masked_correct(logits, labels) == (1, 2)
    assert masked_correct(logits[0, 1:3], labels) == (1, 2)


def test_the_baseline_is_the_most_frequent_masked_token():
    labels = [[[-100, 9, 7]], [[9, -100, 9]]]
    assert most_frequent_token([{"labels": torch.tensor(row)} for row in labels]) == (9, 0.75)


def test_data_seed_is_that_of_the_data_alone(corpus, tmp_path):
    both = {"seed": 3, "data_seed": 5}
    for options, seed in (({}, 7), ({"seed": 3}, 3), (both, 5), ({"data_seed": 0}, 0)):
        run = pretrain.read_run(arguments_of(corpus, tmp_path, **options))
        assert run.data_seed == seed and run.training.seed == options.get("seed", 7)


def test_flops_of_the_published_model():
    """6 a weight and token: 28 blocks of 7,079,424 less two norms, the decoder on all tokens; 12 D
    a pair of tokens and layer."""
    config = NeoBERTConfig()
    weights = 28 * (7_079_424 - 2 * 768) * 6 * 1024
    expected = weights + 28 * 12 * 768 * 1024**2 + 6 * 768 * 30522 * 1024
    assert flops_per_batch(config, 1024, 1024**2, 1024) == expected


@pytest.mark.parametrize("sparse, predicted", [(True, 30), (False, 200)])
def test_mfu_and_epochs_count_all_processes(monkeypatch, sparse, predicted):
    """Check the record of one of two processes, whose sums are twice its own counts."""
    config = NeoBERTConfig(**TINY, vocab_size=100, sparse_prediction=sparse)
    trainer = object.__new__(PretrainingTrainer)
    trainer.args = SimpleNamespace(world_size=2, device="cpu")
    trainer.accelerator = SimpleNamespace(reduce=lambda values, reduction: 2 * values)
    trainer.model = SimpleNamespace(config=config)
    trainer.state = SimpleNamespace(num_input_tokens_seen=0, epoch=0)
    trainer.train_dataset = StreamedBatches.__new__(StreamedBatches)
    trainer.train_dataset.shares = [1.0]
    trainer._stream = {0: {"parts": [{"passes": [3]}]}, 1: {"parts": [{"passes": [5]}]}}
    trainer._counts = Counter(tokens=100, squares=1000, masked=15, correct=6)
    trainer.peak_tflops, trainer.last_time = 1.0, 0.0
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: 4.0)
    monkeypatch.setattr(RunTrainer, "log", lambda *args: None)

    logs = {"loss": 1.0}
    trainer.log(logs)
    assert trainer.state.epoch == 4 and logs["tokens_seen"] == 200
    assert logs["masked_accuracy"] == 12 / 30 and logs["tokens_per_second"] == 50
    flops = flops_per_batch(config, 200, 2000, predicted)
    assert logs["mfu"] == pytest.approx(flops / (4.0 * 2 * 1e12))


def test_the_decoder_computes_masked_tokens_alone_by_default():
    tokenizer = load_tokenizer(TOKENIZER)
    assert model_module.make_model(TINY, None, tokenizer, 0).config.sparse_prediction
    dense = {**TINY, "sparse_prediction": False}
    assert not model_module.make_model(dense, None, tokenizer, 0).config.sparse_prediction


def test_another_start_or_its_tokenizer_is_refused(corpus, tmp_path):
    """The start's own tokenizer is the default: the words of another one would meet other rows of
    its embedding."""
    lines, own_tokenizer = (corpus / "train.txt").read_text().splitlines(), tmp_path / "own"
    for name, size in (("own", 300), ("bpe", 280)):
        save_bpe(lines, tmp_path / name, size)
    short = {"max_steps": 2, "warmup_steps": 0, "save_steps": 1, "prepared": None}
    run_of(arguments_of(corpus, tmp_path / "one", tokenizer=own_tokenizer, **short))
    size = load_tokenizer(own_tokenizer).get_vocab()
    two = {**short, "init_from": tmp_path / "one", "model_config": "{}"}
    words = "bpe differs from the tokenizer of `init_from` .*one, to which the weights belong"
    with pytest.raises(UserError, match=words):
        run_of(arguments_of(corpus, tmp_path / "two", tokenizer=tmp_path / "bpe", **two))
    run_of(arguments_of(corpus, tmp_path / "two", tokenizer=own_tokenizer, **two))
    assert load_tokenizer(tmp_path / "two").get_vocab() == size
    run_of(arguments_of(corpus, tmp_path / "three", **two))
    assert load_tokenizer(tmp_path / "three").get_vocab() == size
    saved = json.loads((tmp_path / "three" / "tokenizer_config.json").read_text())
    # The name that transformers 4 knows.
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    with pytest.raises(UserError, match=r"init_from '[0-9a-f]{12}', now '[0-9a-f]{12}'"):
        run_of(arguments_of(corpus, tmp_path / "three", **{**two, "init_from": tmp_path / "two"}))


def test_the_warm_up_is_a_share_of_the_steps_unless_given(corpus, tmp_path):
    shares = [({"max_steps": steps}, count) for steps, count in ((8, 0), (400, 20), (10**6, 2000))]
    for more, steps in (*shares, ({"warmup_steps": 3}, 3), ({"warmup_steps": 0.5}, 4)):
        run = pretrain.read_run(arguments_of(corpus, tmp_path, **{"warmup_steps": None, **more}))
        assert run.training.get_warmup_steps(run.training.max_steps) == steps, more


def test_a_continued_run_has_the_same_text(corpus, tmp_path):
    """A prepared set knows its source; a stream does not, so the run remembers it."""
    other = tmp_path / "other.txt"
    other.write_text((corpus / "train.txt").read_text() + "the river is cold\n")
    arguments = {"streaming": "true", "max_steps": 2, "warmup_steps": 0, "save_steps": 1}
    run_of(arguments_of(corpus, tmp_path / "out", **arguments))
    with pytest.raises(UserError, match=r"data 'train.txt \(\w+\)', now 'other.txt"):
        run_of(arguments_of(corpus, tmp_path / "out", **arguments, dataset=other))
    moved = tmp_path / "moved" / "train.txt"
    moved.parent.mkdir()
    moved.write_bytes((corpus / "train.txt").read_bytes())
    run_of(arguments_of(corpus, tmp_path / "out", **arguments, dataset=moved))


def test_stage_2_takes_the_names_that_the_configuration_knows(corpus, tmp_path):
    """`dropout` and `max_length` are other names of fields, and RoPE scaling is relative to the
    length that the weights know."""
    tokenizer = load_tokenizer(TOKENIZER)
    NeoBERTForMaskedLM(NeoBERTConfig(**TINY)).save_pretrained(tmp_path)
    fields = {"dropout": 0.1, "max_length": 128, "rope_scaling": {"rope_type": "yarn", "factor": 2}}
    config = model_module.make_model(fields, str(tmp_path), tokenizer, 0).config
    assert config.hidden_dropout == config.attention_dropout == 0.1
    assert config.max_position_embeddings == 128
    # YaRN must extend from the first stage's length.
    assert config.rope_parameters["original_max_position_embeddings"] == 64
    with pytest.raises(UserError, match="is 'rms', but `model_config` sets 'layer'"):
        model_module.make_model({"rms_norm": False}, str(tmp_path), tokenizer, 0)


def test_prepare_tokenizes_and_stops(corpus, tmp_path, caplog):
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
    assert not (tmp_path / "out" / "run.json").exists(), "--prepare must not train"


def test_the_accelerate_configurations_load():
    """accelerate itself reads them (an unknown key is an error there); FSDP wraps the block by its
    class name; two machines have 16 processes."""
    from accelerate.commands.config.config_args import load_config_from_file

    folder = RECIPES / "accelerate"
    configs = {path.stem: load_config_from_file(str(path)) for path in folder.glob("*.yaml")}
    kinds = {name: str(config.distributed_type) for name, config in configs.items()}
    kinds = {name: kind.removeprefix("DistributedType.") for name, kind in kinds.items()}
    deepspeed = dict.fromkeys(("zero2", "zero3", "multinode_zero2"), "DEEPSPEED")
    assert kinds == {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", **deepspeed}
    assert [configs[name].deepspeed_config["zero_stage"] for name in deepspeed] == [2, 3, 2]
    fsdp, two = configs["fsdp2"].fsdp_config, configs["multinode_zero2"]
    assert fsdp["fsdp_version"] == 2
    assert hasattr(modeling_neobert, fsdp["fsdp_transformer_layer_cls_to_wrap"])
    assert (two.num_machines, two.num_processes) == (2, 16)
    guide = (folder.parents[1] / "docs" / "pretraining.md").read_text()
    assert all(f"{name}.yaml" in guide for name in configs), "the guide must name each of them"
