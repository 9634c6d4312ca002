"""Test the errors of `neobert pretrain` for invalid input.

The command prints one line, exits with code 2 and does not train.
"""

import pytest
import torch
from helpers.pretrain_runs import TINY, arguments_of, make_corpus, run_of  # noqa: F401

from neobert import cli
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError
from neobert.common.loading import load_tokenizer
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM, NeoBERTModel
from neobert.pretraining import command as pretrain


BAD = [
    (
        {"max_length": 128, "micro_batch_tokens": 256},
        "`max_length` must be at most 64, the context length of the model, got 128",
    ),
    (
        {"model_config": '{"vocab_size": 100}'},
        "`model_config.vocab_size` must be one of 30522, 30528, 30592, 30720 for a tokenizer of "
        "30522 tokens, got 100.",
    ),
    (
        {"model_config": '{"vocab_size": 30650}'},
        "`model_config.vocab_size` must be one of 30522, 30528, 30592, 30720 for a tokenizer of "
        "30522 tokens, got 30650.",
    ),
    ({"init_from": "{corpus}/nothing"}, "must contain a checkpoint"),
    ({"init_from": "{corpus}/torn"}, "no tokenizer was found in"),
    (
        {"warmup_steps": 50},
        "`warmup_steps` must be at least 0 and less than `max_steps`, 8, got 50",
    ),
    (
        {"global_batch_tokens": 1000},
        "`global_batch_tokens` must be a multiple of `micro_batch_tokens` times the number of",
    ),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
    ({"tokenizer": "{corpus}/nothing"}, "no tokenizer"),
    ({"init_from": "{corpus}/torn", "tokenizer": TOKENIZER}, "cannot be loaded: "),
    (
        {"init_from": "{corpus}/backbone", "tokenizer": TOKENIZER},
        "Use a masked language model of NeoBERT",
    ),
    (
        {"init_from": "{corpus}/width", "tokenizer": TOKENIZER},
        "cannot be loaded: `hidden_size` must be a positive integer",
    ),
    (
        {"mixture": '{"0": 0.5, "5000": 0.5}'},
        "texts of at least 5000 tokens, but the data has none.",
    ),
    (
        {"mask_replace_prob": 0.9, "random_replace_prob": 0.2},
        "must be at most 1, got",
    ),
    ({"eval_strategy": "steps"}, "there are no validation texts"),
    ({"save_strategy": "epoch"}, "`save_strategy` must not be epoch, because Trainer counts"),
    (
        {"eval_strategy": "epoch", "validation": "{corpus}/validation.txt"},
        "Set it to steps, and the interval with `eval_steps`",
    ),
    ({"output": "{corpus}/train.txt"}, "must not contain each other"),
    ({"init_from": "{corpus}/raw"}, "must contain a checkpoint: model.safetensors"),
    ({"max_length": 2, "streaming": "true"}, "`--max-length` must be an integer, at least 3"),
    ({"validation": "{corpus}/unknown.txt"}, "must contain a token that can be masked"),
]


@pytest.mark.parametrize(
    "overrides, message",
    BAD,
    ids=[next(iter(options)) + str(i) for i, (options, _) in enumerate(BAD)],
)
def test_invalid_input_is_reported_before_training(corpus, tmp_path, capsys, overrides, message):
    """Check the error, and that no checkpoint is written.

    `{corpus}` stands for the directory of the inputs: an empty directory, a configuration with an
    invalid hidden size, texts in a script that the vocabulary does not cover, an empty raw
    checkpoint, a truncated weights file, and an encoder without a decoder.
    """
    (corpus / "nothing").mkdir(exist_ok=True)
    (corpus / "width").mkdir(exist_ok=True)
    config = '{"model_type": "neobert", "hidden_size": "x"}'
    (corpus / "width" / "config.json").write_text(config)
    (corpus / "unknown.txt").write_text("\u16a0\u16a2 \u16a6\n" * 60)
    (corpus / "raw" / "model_checkpoints").mkdir(parents=True, exist_ok=True)
    for name, model in (("torn", NeoBERTForMaskedLM), ("backbone", NeoBERTModel)):
        if not (corpus / name).exists():
            model(NeoBERTConfig(**TINY)).save_pretrained(corpus / name)
    (corpus / "torn" / "model.safetensors").write_bytes(
        (corpus / "torn" / "model.safetensors").read_bytes()[:5000]
    )

    overrides = {
        name: str(value).replace("{corpus}", str(corpus)) for name, value in overrides.items()
    }
    arguments = arguments_of(
        corpus, tmp_path / "out", **{"prepared": tmp_path / "prepared", **overrides}
    )
    assert cli.main(["pretrain", *arguments]) == 2

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("neobert pretrain: ") and message in error, error
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "token, message", [("mask_token", "has no mask token"), ("sep_token", "start and end")]
)
def test_tokenizer_without_required_special_token_is_rejected(corpus, tmp_path, token, message):
    """Check that a tokenizer without a mask token or a separator token is refused."""
    tokenizer = load_tokenizer(TOKENIZER)
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=message):
        paths = {name: tmp_path / name for name in ("tokenizer", "prepared")}
        run_of(arguments_of(corpus, tmp_path / "out", **paths))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_use_cpu_is_set_without_an_accelerator(tmp_path, monkeypatch):
    """Check that `use_cpu` is set on a machine without an accelerator.

    Otherwise the processes of torchrun could not connect to each other.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    arguments = ["--dataset", "a.txt", "--report-to", "none", "--output", str(tmp_path)]
    assert pretrain.read_run(arguments).training.use_cpu
    with pytest.raises(
        UserError, match="`bf16` needs an accelerator, and there is none.* Pass --bf16 false"
    ):
        pretrain.read_run([*arguments, "--bf16"])
    assert pretrain.read_run([*arguments, "--bf16", "--use-cpu"]).training.bf16

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not pretrain.read_run(arguments).training.use_cpu
    assert pretrain.read_run([*arguments, "--use-cpu"]).training.use_cpu
