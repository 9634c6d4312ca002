"""Pins what `neobert pretrain` says to bad input: one sentence, exit code 2, before any work."""

import pytest
import torch
from pretrain_runs import TINY, arguments_of, make_corpus, run_of  # noqa: F401

from neobert import __main__ as cli
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError
from neobert.common.loading import load_tokenizer
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM, NeoBERTModel
from neobert.pretraining import pretrain


BAD = [
    ({"max_stepps": 3}, "unknown argument '--max-stepps'; did you mean --max-steps?"),
    ({"tokens_per_batch": 8}, "less than one text of max_length 32"),
    (
        {"max_length": 128, "tokens_per_batch": 256},
        "more than the 64 tokens of the model's context",
    ),
    (
        {"column": "body", "dataset": "{corpus}/rows.jsonl"},
        "there is no column 'body'; there is: content",
    ),
    ({"dataset": "{corpus}/none.txt"}, "there is no file of rows"),
    ({"model_config": '{"vocab_size": 100}'}, "vocabulary of 100, but the tokenizer has 30522"),
    (
        {"model_config": '{"hiden_size": 32}'},
        "unknown field 'hiden_size'; did you mean hidden_size?",
    ),
    (
        {"model_config": '{"hidden_size": 30, "num_attention_heads": 4}'},
        "multiple of num_attention_heads",
    ),
    ({"init_from": "{corpus}/bert"}, "is a 'bert' model"),
    ({"init_from": "{corpus}/nothing"}, "neither a model"),
    ({"init_from": "{corpus}/torn"}, "no tokenizer was found in"),
    ({"warmup_steps": 50}, "warmup_steps 50 must be at least 0 and below max_steps 8"),
    ({"optim": "sgdd"}, "sgdd"),
    (
        {"per_device_train_batch_size": 4},
        "per_device_train_batch_size is set to 1 by this command, but 4 was given; leave it out",
    ),
    ({"texts_per_batch": 4}, "give either tokens_per_batch or texts_per_batch"),
    (
        {"tokens_per_step": 1000},
        "tokens_per_step 1,000 is not a multiple of 256 tokens x 1 processes",
    ),
    ({"mask_schedule": 0.3}, "mask_schedule"),
    ({"lr_scheduler_type": "cosin"}, "cosin"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
    (
        {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": '{"a": 1}'},
        "unexpected keyword argument",
    ),
    ({"tokenizer": "{corpus}/nothing"}, "no tokenizer"),
    ({"model_config": '{"hidden_size": "wide"}'}, "hidden_size must be a positive whole number"),
    ({"init_from": "{corpus}/torn", "tokenizer": TOKENIZER}, "its weights cannot be loaded"),
    (
        {"init_from": "{corpus}/backbone", "tokenizer": TOKENIZER},
        "a masked-LM checkpoint is needed",
    ),
    ({"init_from": "{corpus}/list"}, "its config.json cannot be loaded ("),
    (
        {"init_from": "{corpus}/width"},
        "its config.json cannot be loaded (hidden_size must be a positive whole number",
    ),
    ({"init_from": "{corpus}/labels"}, "its config.json cannot be loaded ("),
    ({"max_steps": 0}, "max_steps must be at least 1"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
    ({"layout": "padded"}, "packed, packed_without_boundaries"),
    ({"long_texts": "drop"}, "long_texts must be one of"),
    ({"mixture": '{"0": 0.5, "20": 0.4}'}, "sum to 1"),
    (
        {"mixture": '{"0": 0.5, "5000": 0.5}'},
        "texts of at least 5000 tokens, but the data has none",
    ),
    ({"mlm_probability": 1.5}, "mlm_probability must be below 1"),
    (
        {"mask_replace_prob": 0.9, "random_replace_prob": 0.2},
        "must be shares that sum to at most 1",
    ),
    ({"eval_strategy": "steps"}, "eval_strategy steps needs held-out text"),
    ({"output": "{corpus}/train.txt"}, "are in one another"),
    ({"init_from": "{corpus}/raw"}, "holds no checkpoint: expected model.safetensors"),
    ({"tokenizer": "{corpus}/backbone"}, "no tokenizer was found in"),
    ({"max_length": 2, "streaming": "true"}, "max_length must be at least 3"),
    ({"prepare": "true", "streaming": "true"}, "leave streaming out"),
    ({"learning_rate": -1}, "Invalid learning rate: -1"),
    ({"learning_rate": ".nan"}, "learning_rate on the command line must be float"),
    ({"heldout": "{corpus}/unknown.txt"}, "has no token to mask"),
    ({"dataset": "{corpus}/unknown.txt"}, "has no token to mask"),
]


@pytest.mark.parametrize(
    "wrong, words", BAD, ids=[next(iter(wrong)) + str(i) for i, (wrong, _) in enumerate(BAD)]
)
def test_bad_input_is_one_sentence_before_any_work(corpus, tmp_path, capsys, wrong, words):
    (corpus / "bert").mkdir(exist_ok=True)
    (corpus / "nothing").mkdir(exist_ok=True)
    (corpus / "bert" / "config.json").write_text('{"model_type": "bert"}')
    for name, text in (
        ("list", "[]"),
        ("width", '{"model_type": "neobert", "hidden_size": "x"}'),
        ("labels", '{"model_type": "neobert", "id2label": {"a": "b"}}'),
    ):
        (corpus / name).mkdir(exist_ok=True)
        (corpus / name / "config.json").write_text(text)
    (corpus / "unknown.txt").write_text("\u16a0\u16a2 \u16a6\n" * 60)
    (corpus / "rows.jsonl").write_text('{"content": "a river"}\n')
    (corpus / "raw" / "model_checkpoints").mkdir(parents=True, exist_ok=True)
    for name, model in (("torn", NeoBERTForMaskedLM), ("backbone", NeoBERTModel)):
        if not (corpus / name).exists():
            model(NeoBERTConfig(**TINY)).save_pretrained(corpus / name)
    (corpus / "torn" / "model.safetensors").write_bytes(
        (corpus / "torn" / "model.safetensors").read_bytes()[:5000]
    )
    wrong = {name: str(value).replace("{corpus}", str(corpus)) for name, value in wrong.items()}
    arguments = arguments_of(
        corpus, tmp_path / "out", **{"prepared": tmp_path / "prepared", **wrong}
    )
    assert cli.main(["pretrain", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("neobert pretrain: ") and words in error, error
    assert (
        not list((tmp_path / "out").glob("checkpoint-*"))
        and not (tmp_path / "out" / "run.json").exists()
    ), "no work may have begun"


@pytest.mark.parametrize(
    "text, words",
    [
        ("datset: a.txt", "unknown key 'datset' in the recipe recipe.yaml; did you mean dataset?"),
        ("trainer: {learning_rat: 1}", "'learning_rat' in the recipe recipe.yaml; did you mean"),
        ("mixture: [0.2, 0.8]", "mixture in the recipe recipe.yaml must be object"),
        (
            "dataset: a.txt\nmixture: {a: 0.2, b: 0.8}",
            "mixture must map least lengths to probabilities",
        ),
        ("max_length: 64", "give --dataset; --help lists the options"),
    ],
)
def test_a_broken_recipe_is_one_sentence(tmp_path, capsys, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(text + "\n")
    assert cli.main(["pretrain", "recipe.yaml", "--report-to", "none"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("neobert pretrain: ") and words in error and error.count("\n") == 1, (
        error
    )
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"], "nothing may be written"


@pytest.mark.parametrize(
    "token, words", [("mask_token", "has no mask token"), ("sep_token", "start and end")]
)
def test_a_tokenizer_must_have_what_the_batches_need(corpus, tmp_path, token, words):
    tokenizer = load_tokenizer(TOKENIZER)
    setattr(tokenizer, token, None)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=words):
        run_of(
            arguments_of(
                corpus,
                tmp_path / "out",
                tokenizer=tmp_path / "tokenizer",
                prepared=tmp_path / "prepared",
            )
        )
    assert not (tmp_path / "out" / "run.json").exists()


def test_pretrain_without_arguments_does_not_go_for_the_papers_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pretrain"]) == 2
    assert capsys.readouterr().err == "neobert pretrain: give --dataset; --help lists the options\n"
    assert not list(tmp_path.iterdir())


def test_a_recipe_may_write_lists_and_bare_exponents(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "dataset: [a.txt, b.txt]\ntrainer:\n  learning_rate: 1e-4\nmodel_config:\n  norm_eps: "
        "1e-6\n  hidden_act: gelu\n"
    )
    run = pretrain.read_run(
        [str(tmp_path / "recipe.yaml"), "--report-to", "none", "--output", str(tmp_path)]
    )
    assert [source.name for source in run.data.sources] == [
        "a.txt",
        "b.txt",
    ] and run.training.learning_rate == 1e-4
    assert run.model.model_config == {"norm_eps": 1e-6, "hidden_act": "gelu"}, (
        "YAML 1.1 reads 1e-6 as text, which nobody means"
    )


def test_a_run_without_an_accelerator_says_so_to_the_trainer(tmp_path, monkeypatch):
    """Else the processes of torchrun would not know of each other."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    given = ["--dataset", "a.txt", "--report-to", "none", "--output", str(tmp_path)]
    assert pretrain.read_run(given).training.use_cpu
    with pytest.raises(UserError, match="bf16 is on, but there is no GPU .* give --bf16 false"):
        pretrain.read_run([*given, "--bf16"])
    assert pretrain.read_run([*given, "--bf16", "--use-cpu"]).training.bf16
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert (
        not pretrain.read_run(given).training.use_cpu
        and pretrain.read_run([*given, "--use-cpu"]).training.use_cpu
    )
