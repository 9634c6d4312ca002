"""Pins `neobert pretrain`: learning, metrics, a run killed at any moment equals an uninterrupted one, checkpoints kept, stage 2, bad input."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from neobert import __main__ as cli
from neobert import modeling_neobert
from neobert.common import trackers
from neobert.common.errors import UserError
from neobert.common.loading import RECIPES
from neobert.common.recipe import read_recipe
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM, NeoBERTModel
from neobert.pretraining import pretrain
from neobert.pretraining.pretrain_trainer import (
    flops_per_batch,
    last_whole_checkpoint,
    masked_correct,
    remove_broken_checkpoints,
    save_raw_checkpoint,
    whole_checkpoints,
)


SUBJECTS = ["river", "stone", "music", "paper", "table", "winter"]
OTHERS = ["cold water", "hard rock", "sweet sound", "white sheets", "four legs", "deep snow"]
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(400):
        pairs = [int(pick) for pick in rng.integers(len(SUBJECTS), size=rng.integers(1, 4))]
        lines.append(". ".join(f"the {SUBJECTS[i]} has {OTHERS[i]}" for i in pairs))
    (folder / "train.txt").write_text("\n".join(lines[:360]) + "\n")
    (folder / "heldout.txt").write_text("\n".join(lines[360:]) + "\n")
    return folder


def _arguments(corpus, out, **more):
    values = {
        "model_config": json.dumps(TINY), "dataset": corpus / "train.txt", "prepared_dir": corpus / "prepared", "output_dir": out,
        "max_length": 32, "tokens_per_batch": 256, "max_steps": 8, "warmup_steps": 2, "learning_rate": 3e-3, "logging_steps": 1,
        "save_steps": 4, "report_to": "none", "disable_tqdm": "true", "seed": 7, "peak_tflops": 0.01, "dataloader_pin_memory": "false", **more,
    }  # fmt: skip
    return [piece for name, value in values.items() for piece in (f"--{name}", str(value))]


def _run(arguments):
    return pretrain.run(*read_recipe((pretrain.ModelArguments, pretrain.DataArguments, pretrain.PretrainingArguments), arguments))


def _log(out):
    """Logged records of the steps, without what the clock decides."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "share_of_peak", "epoch")
    return [{name: value for name, value in record.items() if name not in timed} for record in records if "loss" in record]


def test_a_run_learns_and_logs_what_the_paper_needs(corpus, tmp_path):
    reports = "tensorboard" if importlib.util.find_spec("tensorboard") else "none"
    metrics = _run(
        _arguments(corpus, tmp_path, max_steps=150, save_steps=150, logging_steps=10, heldout=corpus / "heldout.txt", report_to=reports)
    )
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    names = {"loss", "masked_accuracy", "learning_rate", "grad_norm", "tokens_per_second", "share_of_peak", "tokens_seen", "step"}
    assert names <= set(steps[-1]), f"missing in the log: {names - set(steps[-1])}"
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"], "the loss must fall on text with a rule"
    assert steps[-1]["learning_rate"] == pytest.approx(3e-4), "the learning rate must end at 10 % of its peak"
    assert metrics["eval_masked_accuracy"] > 2 * metrics["eval_unigram_accuracy"], "context must help on held-out text"
    assert 150 * 200 < steps[-1]["tokens_seen"] <= 150 * 256, "tokens seen are the real tokens of all batches"
    assert reports == "none" or list(tmp_path.rglob("events.out.tfevents*")), "TensorBoard's file must be there"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["eval_loss"] == metrics["eval_loss"] and result["command"] and result["steps"] == 150
    model = NeoBERTForMaskedLM.from_pretrained(tmp_path)
    assert model.config.hidden_size == 32, "the final model must load"


@pytest.mark.parametrize("layout, more", [("packed", {}), ("padded", {"gradient_accumulation_steps": 2, "texts_per_batch": 6})])
def test_continuing_equals_not_stopping(corpus, tmp_path, layout, more):
    """Dropout is on, so that the state of the random numbers counts too."""
    model = json.dumps({**TINY, "dropout": 0.1})
    arguments = {"layout": layout, "model_config": model, "mask_share": 0.8, "random_share": 0.1, **more}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _run(_arguments(corpus, whole, **arguments))

    class Killed(BaseException):
        pass

    def killed(self, *args, **kwargs):
        if self.state.global_step == 6:
            raise Killed
        return step(self, *args, **kwargs)

    step = pretrain.pretrain_trainer.PretrainingTrainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.pretrain_trainer.PretrainingTrainer, "training_step", killed)
        with pytest.raises(Killed):
            _run(_arguments(corpus, stopped, **arguments))
    assert list(whole_checkpoints(stopped)) == [4]
    (stopped / "checkpoint-6").mkdir()
    (stopped / "checkpoint-6" / "model.safetensors").write_bytes(b"half")
    _run(_arguments(corpus, stopped, **arguments))
    assert not (stopped / "checkpoint-6").exists(), "what a kill left half-written must go"
    assert _log(stopped) == _log(whole), "the loss curve of the continued run must be exactly that of the uninterrupted one"
    first, second = load_file(whole / "model.safetensors"), load_file(stopped / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first), "and so must the weights"


def test_the_log_and_tokens_seen_cover_the_last_steps(corpus, tmp_path):
    _run(_arguments(corpus, tmp_path / "each", max_steps=10))
    _run(_arguments(corpus, tmp_path / "some", max_steps=10, logging_steps=4))
    each, some = _log(tmp_path / "each"), _log(tmp_path / "some")
    assert [record["step"] for record in some] == [4, 8, 10], "the last steps must be logged"
    assert [record["tokens_seen"] for record in some] == [each[step - 1]["tokens_seen"] for step in (4, 8, 10)]
    assert some[-1]["loss"] == pytest.approx((each[8]["loss"] + each[9]["loss"]) / 2, rel=1e-5)
    for name in ("result.json", "checkpoint-10/whole.json"):
        assert json.loads((tmp_path / "some" / name).read_text())["tokens_seen"] == each[-1]["tokens_seen"], name


def test_a_diverged_run_ends_and_saves_nothing(corpus, tmp_path, capsys):
    def error(out, **more):
        arguments = _arguments(corpus, out, learning_rate=1e30, max_grad_norm=0, **more)
        assert cli.main(["pretrain", *arguments]) == 2
        assert not (out / "model.safetensors").exists() and not (out / "result.json").exists()
        return capsys.readouterr().err.strip().splitlines()[-1].replace(str(out), "OUT")

    assert error(tmp_path / "loss") == (
        "neobert pretrain: the run has diverged: the loss at step 4 is not finite; start again from the beginning (there is no checkpoint) "
        "with a lower learning_rate and another output_dir"
    )
    assert error(tmp_path / "weights", save_steps=1) == (
        "neobert pretrain: the run has diverged: the weights after step 3 are not finite; start again init_from OUT/checkpoint-2 "
        "(the last checkpoint) with a lower learning_rate and another output_dir"
    )
    assert list(whole_checkpoints(tmp_path / "weights")) == [1, 2], "weights that are no numbers must not be saved"


def test_a_prepared_set_is_used_where_streaming_is_left_open(corpus, tmp_path, monkeypatch):
    """The paper's recipes leave it open; the kind of data is fixed when the run begins."""
    for stage in (1, 2):
        recipe = RECIPES / f"neobert_stage{stage}.yaml"
        data = read_recipe(
            (pretrain.ModelArguments, pretrain.DataArguments, pretrain.PretrainingArguments),
            [str(recipe), "--bf16", "false", "--report_to", "none"],
        )[1]
        assert pretrain._streams(data, tmp_path / "train")
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / "prepared.json").write_text("{}")
        assert not pretrain._streams(data, tmp_path / "train"), "a prepared set that is there must be used"
        (tmp_path / "train" / "prepared.json").unlink()
    monkeypatch.setattr(pretrain, "is_local", lambda dataset: False)
    arguments = _arguments(corpus, tmp_path / "out", prepared_dir=tmp_path / "prepared", max_steps=2, warmup_steps=0, save_steps=1)
    _run(arguments)
    assert not (tmp_path / "prepared").exists()
    _run([*arguments, "--prepare", "true"])
    with pytest.raises(UserError, match="was started with streaming=True, now False"):
        _run(arguments)
    _run([*arguments, "--streaming", "true"])


def test_trackers_are_checked_by_name(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["tensorboard"])
    for known in (None, [], "none", "all", "tensorboard,none", ["tensorboard"]):
        trackers.check_trackers(known)
    with pytest.raises(UserError, match="'wandb' is not installed; installed are none, tensorboard"):
        trackers.check_trackers("tensorboard,wandb")
    with pytest.raises(UserError, match="'wandbb' is unknown"):
        trackers.check_trackers(["wandbb"])


@pytest.mark.slow
def test_kill_9_and_the_same_command_again(corpus, tmp_path):
    root = Path(pretrain.__file__).resolve().parent.parent
    package = tmp_path / "path"
    package.mkdir()
    (package / "neobert").symlink_to(root)
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out"
    command = [sys.executable, "-m", "neobert", "pretrain", *_arguments(corpus, out, max_steps=60, save_steps=5)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 240
    while not list(out.glob("checkpoint-??/whole.json")) and time.time() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run must have been killed in the middle"
    assert last_whole_checkpoint(out) is not None
    subprocess.run(command, env=environment, check=True, capture_output=True)
    whole = tmp_path / "whole"
    _run(_arguments(corpus, whole, max_steps=60, save_steps=5))
    assert len(_log(out)) == 60 and _log(out) == _log(whole)


def test_a_streamed_run_continues_exactly(corpus, tmp_path, monkeypatch):
    arguments = {"streaming": "true", "max_steps": 10, "save_steps": 2}
    _run(_arguments(corpus, tmp_path / "whole", **arguments))
    save = pretrain.pretrain_trainer.PretrainingTrainer._save_checkpoint

    def save_once(self, *args, **kwargs):
        if self.state.global_step > 4:
            raise KeyboardInterrupt
        save(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain.pretrain_trainer.PretrainingTrainer, "_save_checkpoint", save_once)
        with pytest.raises(KeyboardInterrupt):
            _run(_arguments(corpus, tmp_path / "stopped", **arguments))
    _run(_arguments(corpus, tmp_path / "stopped", **arguments))
    assert _log(tmp_path / "stopped") == _log(tmp_path / "whole")
    assert _log(tmp_path / "whole")[-1]["rows_skipped_empty"] == 0, "skipped rows must be in the log"


def test_keep_last_and_keep_every(corpus, tmp_path):
    _run(_arguments(corpus, tmp_path, max_steps=9, save_steps=1, keep_last=2, keep_every=4))
    assert list(whole_checkpoints(tmp_path)) == [4, 8, 9], "the newest two and every fourth must be kept"
    (tmp_path / "checkpoint-9" / "whole.json").unlink()
    assert last_whole_checkpoint(tmp_path).name == "checkpoint-8"
    assert remove_broken_checkpoints(tmp_path) == ["checkpoint-9"]


def test_stage_2_starts_from_stage_1(corpus, tmp_path):
    _run(_arguments(corpus, tmp_path / "one"))
    longer = json.dumps({"max_position_embeddings": 128})
    mixture = json.dumps({"0": 0.2, "12": 0.4, "18": 0.4})
    _run(
        _arguments(
            corpus,
            tmp_path / "two",
            init_from=tmp_path / "one",
            model_config=longer,
            mixture=mixture,
            max_length=64,
            learning_rate=0,
            warmup_steps=0,
            max_steps=1,
            save_steps=1,
        )  # fmt: skip
    )
    model = NeoBERTForMaskedLM.from_pretrained(tmp_path / "two")
    assert model.config.max_position_embeddings == 128 and model.config.hidden_size == 32
    before, after = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before), "at learning rate 0 stage 2 must end with stage 1's weights"


def test_accumulated_micro_batches_give_the_loss_of_one_batch(corpus, tmp_path):
    """Both see texts 0 to 11 of the same order; losses are means over all masked tokens, however they are cut."""
    losses = []
    for rows, steps in ((12, 1), (4, 3)):
        out = tmp_path / str(rows)
        masked = _arguments(
            corpus, out, layout="padded", texts_per_batch=rows, gradient_accumulation_steps=steps, max_steps=1, save_steps=1, warmup_steps=0
        )
        parts = read_recipe((pretrain.ModelArguments, pretrain.DataArguments, pretrain.PretrainingArguments), masked)
        with pytest.MonkeyPatch.context() as patch:
            # Every third token is masked, whatever the batch, so that both runs predict the same tokens.
            patch.setattr(pretrain.TokenMasking, "__call__", _every_third)
            pretrain.run(*parts)
        losses.append(_log(out)[0])
    assert losses[0]["tokens_seen"] == losses[1]["tokens_seen"]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-4)


def _every_third(self, input_ids, generator):
    chosen = self.ordinary[input_ids] & (input_ids % 3 == 0)
    return torch.where(chosen, self.mask_token_id, input_ids), torch.where(chosen, input_ids, -100)


def test_masked_accuracy_counts_labelled_tokens_alone():
    labels = torch.tensor([[-100, 1, 2, -100]])
    logits = torch.zeros(1, 4, 3)
    logits[0, 0, 1] = logits[0, 1, 1] = logits[0, 2, 0] = 1
    assert masked_correct(logits, labels) == (1, 2)
    assert masked_correct(logits[0, 1:3], labels) == (1, 2), "logits of the labelled tokens alone must count the same"


def test_flops_of_the_published_model():
    """6 a weight and token: 28 blocks of 7,079,424 less two norms, the decoder on all tokens; 12 D a pair of tokens and layer."""
    config = NeoBERTConfig()
    weights = 28 * (7_079_424 - 2 * 768) * 6 * 1024
    expected = weights + 28 * 12 * 768 * 1024**2 + 6 * 768 * 30522 * 1024
    assert flops_per_batch(config, 1024, 1024**2, 1024) == expected


def test_raw_checkpoint_has_the_authors_layout(tiny_config, tmp_path):
    model = NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config, tie_word_embeddings=True))
    path = save_raw_checkpoint(model, tmp_path, 30, torch.float16)
    assert path == tmp_path / "model_checkpoints" / "30" / "state_dict.pt"
    state = torch.load(path, weights_only=True)
    assert set(state) == {f"module.{name}" for name in model.state_dict()}
    assert state["module.decoder.weight"].data_ptr() == state["module.model.encoder.weight"].data_ptr(), "tied weights must be stored once"
    torch.testing.assert_close(state["module.model.layer_norm.weight"].float(), model.model.layer_norm.weight.detach())


BAD = [
    ({"max_stepps": 3}, "max_stepps"),
    ({"tokens_per_batch": 8}, "less than one text of max_length 32"),
    ({"max_length": 128, "tokens_per_batch": 256}, "more than the model's max_position_embeddings 64"),
    ({"text_column": "body", "dataset": "{corpus}/rows.jsonl"}, "no column 'body', only content"),
    ({"dataset": "{corpus}/none.txt"}, "found nothing"),
    ({"model_config": '{"vocab_size": 100}'}, "vocabulary of 100, but the tokenizer has 30522"),
    ({"model_config": '{"hidden": 32}'}, "unknown field 'hidden'"),
    ({"model_config": '{"hidden_size": 30, "num_attention_heads": 4}'}, "multiple of num_attention_heads"),
    ({"init_from": "{corpus}/bert"}, "is a 'bert' model"),
    ({"init_from": "{corpus}/nothing"}, "neither a model"),
    ({"warmup_steps": 50}, "warmup_steps 50"),
    ({"optimizer": "sgd"}, "adamw, adam"),
    ({"save_steps": 3, "logging_steps": 2}, "multiple of logging_steps"),
    ({"per_device_train_batch_size": 4}, "tokens_per_batch"),
    ({"tokenizer": "{corpus}/nothing"}, "no tokenizer"),
    ({"model_config": '{"hidden_size": "wide"}'}, "hidden_size must be a positive whole number"),
    ({"init_from": "{corpus}/torn"}, "its weights cannot be loaded"),
    ({"init_from": "{corpus}/backbone"}, "a masked-LM checkpoint is needed"),
    ({"max_steps": "many"}, "max_steps"),
    ({"max_steps": 0}, "max_steps must be at least 1"),
    ({"logging_steps": 0}, "logging_steps must be a whole number of steps"),
    ({"save_steps": 0.5}, "save_steps must be a whole number of steps"),
    ({"keep_every": 6}, "keep_every 6 must be a multiple of save_steps 4"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
    ({"workers": 0}, "workers must be at least 1"),
    ({"layout": "stacked"}, "packed, padded"),
    ({"long_texts": "drop"}, "long_texts must be one of"),
    ({"mixture": '{"0": 0.5, "20": 0.4}'}, "sum to 1"),
    ({"mixture": '{"0": 0.5, "5000": 0.5}'}, "texts of at least 5000 tokens, but the data has none"),
    ({"mask_probability": 1.5}, "mask_probability must lie between 0 and 1"),
    ({"eval_strategy": "steps"}, "eval_strategy steps needs held-out text"),
    ({"report_to": "tensorbord"}, "tensorbord"),
    ({"num_train_epochs": 2}, "num_train_epochs does not apply here"),
    ({"lr_scheduler_type": "constant"}, "lr_scheduler_type does not apply here"),
    ({"save_total_limit": 3}, "give keep_last and keep_every"),
    ({"output_dir": "{corpus}/train.txt"}, "is a file"),
    ({"init_from": "{corpus}/raw"}, "convert it first"),
    ({"tokenizer": "{corpus}/backbone"}, "no tokenizer was found in"),
    ({"fp16": "true", "use_cpu": "true"}, "fp16 needs a GPU"),
    ({"long_texts": "spilt", "streaming": "true"}, "long_texts must be one of"),
    ({"max_length": 2, "streaming": "true"}, "max_length must be at least 3"),
    ({"prepare": "true", "streaming": "true"}, "leave streaming out"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"data_seed": 2**32}, "data_seed must be at least 0 and below 2^32"),
    ({"learning_rate": -1}, "learning_rate must be at least 0"),
    ({"learning_rate": "nan"}, "learning_rate must be a finite number"),
    ({"warmup_steps": "inf"}, "warmup_steps must be a finite number"),
    ({"mask_share": "nan"}, "mask_share must be a finite number"),
    ({"adam_beta2": 1}, "adam_beta2 must be at least 0 and below 1"),
    ({"save_strategy": "best"}, "save_strategy must be steps or 'no'"),
    ({"logging_strategy": "no"}, "give logging_steps"),
    ({"heldout": "{corpus}/unknown.txt"}, "has no token to mask"),
    ({"dataset": "{corpus}/unknown.txt"}, "has no token to mask"),
]


@pytest.mark.parametrize("wrong, words", BAD, ids=[next(iter(wrong)) + str(i) for i, (wrong, _) in enumerate(BAD)])
def test_bad_input_is_one_sentence_before_any_work(corpus, tmp_path, capsys, wrong, words):
    (corpus / "bert").mkdir(exist_ok=True)
    (corpus / "nothing").mkdir(exist_ok=True)
    (corpus / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (corpus / "unknown.txt").write_text("\u16a0\u16a2 \u16a6\n" * 60)
    (corpus / "rows.jsonl").write_text('{"content": "a river"}\n')
    (corpus / "raw" / "model_checkpoints").mkdir(parents=True, exist_ok=True)
    for name, model in (("torn", NeoBERTForMaskedLM), ("backbone", NeoBERTModel)):
        if not (corpus / name).exists():
            model(NeoBERTConfig(**TINY)).save_pretrained(corpus / name)
    (corpus / "torn" / "model.safetensors").write_bytes((corpus / "torn" / "model.safetensors").read_bytes()[:5000])
    wrong = {name: str(value).replace("{corpus}", str(corpus)) for name, value in wrong.items()}
    arguments = _arguments(corpus, tmp_path / "out", **{"prepared_dir": tmp_path / "prepared", **wrong})
    assert cli.main(["pretrain", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("neobert pretrain: ") and words in error, error
    assert not list((tmp_path / "out").glob("checkpoint-*")) and not (tmp_path / "out" / "recipe.json").exists(), "no work may have begun"


def test_another_recipe_or_architecture_is_refused(corpus, tmp_path):
    _run(_arguments(corpus, tmp_path / "one", max_steps=2, warmup_steps=0, save_steps=1))
    with pytest.raises(UserError, match="was started with learning_rate=0.003, now 0.001"):
        _run(_arguments(corpus, tmp_path / "one", max_steps=2, warmup_steps=0, save_steps=1, learning_rate=1e-3))
    with pytest.raises(UserError, match="has num_hidden_layers=2, but model_config asks for 3"):
        _run(_arguments(corpus, tmp_path / "two", init_from=tmp_path / "one", model_config='{"num_hidden_layers": 3}'))


@pytest.mark.parametrize(
    "text, words",
    [
        ("datset: a.txt", "unknown key 'datset' in the recipe; did you mean 'dataset'?"),
        ("tokenizer: [a, b]", "tokenizer takes one value, but ['a', 'b'] was given"),
        ("max_length: {a: 1}", "max_length takes one value"),
        ("tokens_per_batch: 1.5", "tokens_per_batch in the recipe must be of type int"),
        ("streaming: perhaps", "streaming in the recipe must be of type"),
        ("mixture: [0.2, 0.8]", "mixture must map least lengths to probabilities"),
        ("model_config: small", "model_config is not valid JSON"),
        ("- dataset", "must hold 'key: value' lines"),
        ("dataset: 'a", "is not valid YAML"),
    ],
)
def test_a_broken_recipe_is_one_sentence(tmp_path, capsys, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(text + "\n")
    assert cli.main(["pretrain", "recipe.yaml", "--report_to", "none"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("neobert pretrain: ") and words in error and error.count("\n") == 1, error
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"], "nothing may be written"


@pytest.mark.parametrize(
    "token, words", [("mask_token", "has no mask token"), ("pad_token", "has no padding token"), ("sep_token", "start and end")]
)
def test_a_tokenizer_must_have_what_the_batches_need(corpus, tmp_path, token, words):
    tokenizer = pretrain.load_tokenizer(pretrain.TOKENIZER)
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=words):
        _run(_arguments(corpus, tmp_path / "out", tokenizer=tmp_path / "tokenizer", layout="padded", prepared_dir=tmp_path / "prepared"))
    assert not (tmp_path / "out" / "recipe.json").exists()


def test_a_recipe_may_write_lists_and_bare_exponents(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "dataset: [a.txt, b.txt]\nlearning_rate: 1e-4\nmodel_config:\n  norm_eps: 1e-6\n  hidden_act: gelu\n"
    )
    classes = (pretrain.ModelArguments, pretrain.DataArguments, pretrain.PretrainingArguments)
    model, data, training = read_recipe(classes, [str(tmp_path / "recipe.yaml"), "--report_to", "none", "--output_dir", str(tmp_path)])
    assert (data.dataset, training.learning_rate) == ("a.txt, b.txt", 1e-4)
    assert model.model_config == {"norm_eps": 1e-6, "hidden_act": "gelu"}, "YAML reads 1e-6 as text, which nobody means"


def test_a_continued_run_has_the_same_text(corpus, tmp_path):
    """A prepared set knows its source; a stream does not, so the run remembers it."""
    other = tmp_path / "other.txt"
    other.write_text((corpus / "train.txt").read_text() + "the river is cold\n")
    arguments = {"streaming": "true", "max_steps": 2, "warmup_steps": 0, "save_steps": 1}
    _run(_arguments(corpus, tmp_path / "out", **arguments))
    with pytest.raises(UserError, match=r"was started with data='train.txt \(\w+\)', now 'other.txt"):
        _run(_arguments(corpus, tmp_path / "out", **arguments, dataset=other))
    moved = tmp_path / "moved" / "train.txt"
    moved.parent.mkdir()
    moved.write_bytes((corpus / "train.txt").read_bytes())
    _run(_arguments(corpus, tmp_path / "out", **arguments, dataset=moved))


def test_checkpoints_of_another_program_are_not_touched(corpus, tmp_path):
    weights = tmp_path / "out" / "checkpoint-500" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"years of work")
    with pytest.raises(UserError, match="holds checkpoint-500, but no run of neobert pretrain"):
        _run(_arguments(corpus, tmp_path / "out"))
    assert weights.read_bytes() == b"years of work", "only this program's half-written checkpoints may be deleted"
    model = tmp_path / "model" / "model.safetensors"
    model.parent.mkdir()
    model.write_bytes(b"years of work")
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(UserError, match=f"holds {name}, but no run of neobert pretrain"):
            _run(_arguments(corpus, tmp_path / "model"))
        (tmp_path / "model" / "config.json").write_text("{}")
    assert model.read_bytes() == b"years of work", "another program's model may not be written over"


def test_stage_2_takes_the_names_that_the_configuration_knows(corpus, tmp_path):
    """`dropout` and `max_length` are other names of fields, and RoPE scaling is relative to the length that the weights know."""
    tokenizer = pretrain.load_tokenizer(pretrain.TOKENIZER)
    NeoBERTForMaskedLM(NeoBERTConfig(**TINY)).save_pretrained(tmp_path)
    given = {"dropout": 0.1, "max_length": 128, "rope_scaling": {"rope_type": "yarn", "factor": 2}}
    config = pretrain.make_model(pretrain.ModelArguments(init_from=str(tmp_path), model_config=given), tokenizer, 0).config
    assert (config.hidden_dropout, config.attention_dropout, config.max_position_embeddings) == (0.1, 0.1, 128)
    assert config.rope_parameters["original_max_position_embeddings"] == 64, "YaRN must extend from the first stage's length"
    with pytest.raises(UserError, match="has norm_type='rms', but model_config asks for 'layer'"):
        pretrain.make_model(pretrain.ModelArguments(init_from=str(tmp_path), model_config={"rms_norm": False}), tokenizer, 0)


def test_prepare_tokenises_and_stops(corpus, tmp_path, capsys):
    arguments = _arguments(corpus, tmp_path / "out", prepared_dir=tmp_path / "prepared", heldout=corpus / "heldout.txt")
    assert cli.main(["pretrain", *arguments, "--prepare"]) == 0
    assert "360 of 360 rows" in capsys.readouterr().err
    summary = json.loads((tmp_path / "prepared" / "heldout" / "prepared.json").read_text())
    assert (summary["kept"], summary["empty"], summary["broken"]) == (40, 0, 0)
    assert not (tmp_path / "out" / "recipe.json").exists(), "--prepare must not train"


def test_the_same_command_after_the_end_changes_nothing(corpus, tmp_path):
    _run(_arguments(corpus, tmp_path))
    log, weights = _log(tmp_path), load_file(tmp_path / "model.safetensors")
    _run(_arguments(corpus, tmp_path, raw_checkpoint="float32"))
    again = load_file(tmp_path / "model.safetensors")
    assert _log(tmp_path) == log and all(torch.equal(weights[name], again[name]) for name in weights)
    assert (tmp_path / "raw" / "model_checkpoints" / "8" / "state_dict.pt").is_file(), "options about the output alone may be added"


def test_the_accelerate_configurations_load():
    """accelerate itself reads them (an unknown key is an error there); FSDP wraps the block by its class name; two machines have 16 processes."""
    from accelerate.commands.config.config_args import load_config_from_file

    folder = RECIPES / "accelerate"
    configs = {path.stem: load_config_from_file(str(path)) for path in folder.glob("*.yaml")}
    assert set(configs) == {"single", "ddp", "fsdp2", "zero2", "zero3", "multinode_zero2"}
    kinds = {name: str(getattr(config.distributed_type, "value", config.distributed_type)) for name, config in configs.items()}
    deepspeed = dict.fromkeys(("zero2", "zero3", "multinode_zero2"), "DEEPSPEED")
    assert kinds == {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", **deepspeed}
    assert [configs[name].deepspeed_config["zero_stage"] for name in deepspeed] == [2, 3, 2]
    assert configs["fsdp2"].fsdp_config["fsdp_version"] == 2
    assert hasattr(modeling_neobert, configs["fsdp2"].fsdp_config["fsdp_transformer_layer_cls_to_wrap"]), "the wrapped class must exist"
    assert (configs["multinode_zero2"].num_machines, configs["multinode_zero2"].num_processes) == (2, 16)
    guide = (folder.parents[1] / "docs" / "pretraining.md").read_text()
    assert all(f"{name}.yaml" in guide for name in configs), "the guide must name every configuration"
