"""Test the evaluation on validation texts.

Covers bits per character and their standard errors, the number of characters of the tokens of three
types of tokenizers, named validation sets before, during and after training, evaluation without
training, and invalid validation sets.
"""

import json
import math

import fsspec
import pytest
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast


pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from helpers.data_runs import tokenize_texts
from helpers.pretrain_runs import TINY, arguments_of, make_corpus, run_of  # noqa: F401

from neobert.cli import main
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining import command as pretrain
from neobert.pretraining import trainer
from neobert.pretraining.batches import MicroBatches, TokenWindows, boundary_tokens
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.options import BatchOptions
from neobert.pretraining.run import check_run
from neobert.pretraining.sources import parse_sources
from neobert.pretraining.validation import (
    check_validation_sets,
    evaluate_batches,
    parse_validation,
    token_characters,
)


TEXT = "naïve café, “quoted” 雪国 ### C# # résumé — straße 🐢 unaffable\tend"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _train_tokenizer(tokenizer_type):
    """Return a small, cased tokenizer of one of three types, which is trained on `TEXT`."""
    if tokenizer_type == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL)
    elif tokenizer_type == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=290,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    elif tokenizer_type == "byte fallback":
        # A vocabulary of SentencePiece without any character of the text but "a".
        tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]", byte_fallback=True))
        tokenizer.decoder = decoders.ByteFallback()
        trainer = None
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="[UNK]")
    if trainer is not None:
        tokenizer.train_from_iterator([TEXT] * 20 + TEXT.split() * 5, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL)),
    )


@pytest.mark.parametrize("tokenizer_type", ["wordpiece", "bytes", "metaspace", "byte fallback"])
def test_token_characters_add_up_to_the_text(tokenizer_type):
    """Check that the characters of all tokens add up to those of the text without white space."""
    tokenizer = _train_tokenizer(tokenizer_type)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids, "the vocabulary must cover the text"
    characters = token_characters(tokenizer)
    assert int(characters[ids].sum()) == len("".join(TEXT.split()))
    assert characters[tokenizer.all_special_ids].tolist() == [0] * len(SPECIAL)


@pytest.fixture(name="bundled")
def make_bundled(tokenizer_dir):
    """Return the bundled tokenizer."""
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def test_bits_per_character_match_a_loop_over_texts(bundled):
    """Check the metrics against a loop over single texts.

    The loop adds up the negative log-probabilities of the masked tokens in bits, and divides by the
    number of their characters.
    """
    torch.manual_seed(0)
    model = NeoBERTForMaskedLM(NeoBERTConfig(**TINY, vocab_size=len(bundled), pad_token_id=0))
    texts = ["the unaffable river has cold water"] * 30 + ["hard rock, sweet sound"] * 30
    batch_options = BatchOptions(micro_batch_tokens=64, max_length=32)
    windows = TokenWindows(tokenize_texts(texts, bundled), boundary_tokens(bundled), batch_options)
    batches = MicroBatches(windows, TokenMasking(bundled), batch_options, 3)

    bits = characters = 0
    model.eval()
    for i in range(len(batches)):
        batch = batches[i]
        bounds = batch["cu_seq_lens_q"].tolist()
        for start, stop in zip(bounds, bounds[1:]):
            with torch.no_grad():
                logits = model(batch["input_ids"][:, start:stop]).logits[0]
            for position, label in enumerate(batch["labels"][0, start:stop].tolist()):
                if label != -100:
                    bits -= float(logits[position].log_softmax(-1)[label]) / math.log(2)
                    characters += len(bundled.convert_ids_to_tokens(label).removeprefix("##"))

    metrics = evaluate_batches(model, batches, token_characters(bundled), Accelerator(cpu=True))
    assert metrics["bits_per_character"] == pytest.approx(bits / characters, rel=1e-5)
    assert metrics["loss"] * metrics["masked_tokens"] / math.log(2) == pytest.approx(bits, rel=1e-5)


def test_standard_errors_match_the_ratio_formula():
    """Check the standard errors against the textbook formula for a ratio of two sums.

    The residuals of the batches are a - ratio * b, and the sum of their squares is multiplied by
    n / (n - 1).
    """
    rng = torch.Generator().manual_seed(0)
    batches = []
    rows = []
    for count in (4, 7, 2, 5, 9):
        labels = torch.randint(0, 6, (1, count), generator=rng)
        batches.append({"labels": labels, "logits": torch.randn(1, count, 6, generator=rng)})

    class LogitsFromBatch(torch.nn.Module):
        def forward(self, labels, logits):
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0])
            return type("Output", (), {"loss": loss, "logits": logits})

    characters = torch.tensor([1, 2, 3, 1, 4, 2])
    metrics = evaluate_batches(LogitsFromBatch(), batches, characters, Accelerator(cpu=True))

    # Bits, correct tokens, masked tokens and their characters of each batch.
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(
            batch["logits"][0].double(), batch["labels"][0], reduction="sum"
        )
        correct = (batch["logits"].argmax(-1) == batch["labels"]).sum()
        lengths = characters[batch["labels"]].sum()
        rows.append([float(loss) / 0.6931471805599453, correct, batch["labels"].numel(), lengths])

    values = torch.tensor(rows, dtype=torch.float64)
    for name, a, b in (("bits_per_character", 0, 3), ("masked_accuracy", 1, 2)):
        ratio = values[:, a].sum() / values[:, b].sum()
        residuals = values[:, a] - ratio * values[:, b]
        error = (residuals.square().sum() * 5 / 4).sqrt() / values[:, b].sum()
        assert metrics[name] == pytest.approx(float(ratio), rel=1e-5)
        assert metrics[f"{name}_error"] == pytest.approx(float(error), rel=1e-4)


@pytest.fixture(name="sets")
def make_sets(corpus):
    """Return two validation sets, one similar to the training texts and one of other sentences."""
    (corpus / "other.txt").write_text("green apples fall down\nold men sing loud songs\n" * 30)
    return {"domain": str(corpus / "validation.txt"), "general": str(corpus / "other.txt")}


def _records(folder):
    """Return all log records of a run."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_named_validation_sets_before_during_and_after_training(corpus, tmp_path, sets):
    """Check the metrics of two validation sets, of a single one, and of `--evaluate-only`."""
    options = {"max_steps": 24, "save_steps": 24, "eval_strategy": "steps", "eval_steps": 12}
    metrics = run_of(arguments_of(corpus, tmp_path / "a", validation=json.dumps(sets), **options))
    records = [record for record in _records(tmp_path / "a") if "eval_domain_loss" in record]
    assert [record["step"] for record in records] == [0, 12, 24, 24]
    assert (
        records[0]["eval_domain_bits_per_character"]
        > 1.2 * metrics["eval_domain_bits_per_character"]
    )
    assert metrics["eval_domain_masked_accuracy"] > metrics["eval_general_masked_accuracy"] + 0.1
    assert metrics["eval_domain_unigram_accuracy"] > 0
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert set(result["settings"]["validation"]) == {"domain", "general"}
    assert metrics.items() <= result.items()

    # A single set has the same metrics, without a name in their keys.
    single_metrics = run_of(
        arguments_of(corpus, tmp_path / "b", validation=sets["domain"], **options)
    )
    assert single_metrics["eval_loss"] == metrics["eval_domain_loss"]
    with pytest.raises(UserError, match="other settings .validation"):
        other = sets["general"]
        run_of(
            arguments_of(
                corpus, tmp_path / "b", validation=other, prepared=tmp_path / "p", **options
            )
        )

    # Without training, the metrics are identical, and nothing is written to the output directory.
    evaluated = run_of(
        [
            *arguments_of(
                corpus, tmp_path / "c", validation=json.dumps(sets), model_config=None, dataset=None
            ),
            *("--init-from", str(tmp_path / "a"), "--evaluate-only"),
        ]
    )
    assert evaluated == {name: metrics[name] for name in evaluated} and (
        "eval_general_loss" in evaluated
    )
    assert not list((tmp_path / "c").iterdir())


def test_best_checkpoint_is_named_in_the_result_and_the_card(corpus, tmp_path):
    """`load_best_model_at_end` ends with the weights of `best_step`."""
    options = {"max_steps": 6, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": "true", "metric_for_best_model": "masked_accuracy"}
    validation = corpus / "validation.txt"
    run_of(arguments_of(corpus, tmp_path / "a", validation=validation, **options))
    result = json.loads((tmp_path / "a" / "result.json").read_text())

    records = [row for row in _records(tmp_path / "a") if "eval_masked_accuracy" in row]
    accuracies = {row["step"]: row["eval_masked_accuracy"] for row in records[1:-1]}
    assert list(accuracies) == [2, 4, 6]
    assert (result["steps"], result["best_step"]) == (6, max(accuracies, key=accuracies.get))
    assert result["eval_masked_accuracy"] == accuracies[result["best_step"]]
    sentence = f"| 6; the weights are those of step {result['best_step']} |"
    assert sentence in (tmp_path / "a" / "README.md").read_text()


def test_evaluate_only_prints_the_metrics_alone(corpus, tmp_path, monkeypatch, capsys):
    """Check that messages of other libraries, such as DeepSpeed, are not in the output."""
    NeoBERTForMaskedLM(NeoBERTConfig(**TINY)).save_pretrained(tmp_path / "model")

    def evaluate(*arguments):
        print("Setting accelerator to CPU")
        return {"loss": 1.0}

    monkeypatch.setattr(trainer, "evaluate_batches", evaluate)
    texts = corpus / "validation.txt"
    arguments = arguments_of(corpus, tmp_path / "out", validation=texts, model_config=None)
    tokenizer = ("--tokenizer", str(TOKENIZER))
    start = ("--init-from", str(tmp_path / "model"), *tokenizer, "--evaluate-only")
    capsys.readouterr()
    assert pretrain.main([*arguments, *start]) == 0
    assert json.loads(capsys.readouterr().out) == {"eval_loss": 1.0}


def test_initial_evaluation_does_not_change_the_losses(corpus, tmp_path, sets):
    """Check that the evaluation before the first step does not change the losses of the run.

    Dropout masks depend on the random state, which the evaluation must leave unchanged.
    """
    model = json.dumps({**TINY, "dropout": 0.1})
    losses = []
    for name, options in (("with", {"validation": json.dumps(sets)}), ("without", {})):
        run_of(arguments_of(corpus, tmp_path / name, model_config=model, max_steps=3, **options))
        losses.append([row["loss"] for row in _records(tmp_path / name) if "loss" in row])
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_validation_masks_depend_on_data_seed(corpus, tmp_path, bundled):
    """Check that the validation masks depend on `data_seed` and not on `seed`."""
    labels = []
    for seed, data_seed in ((3, 5), (4, 5), (3, 6)):
        seeds = {"seed": seed, "data_seed": data_seed, "validation": corpus / "validation.txt"}
        run = pretrain.read_run(arguments_of(corpus, tmp_path, **seeds))
        (batches,) = pretrain.validation_batches(run, bundled).values()
        labels.append([batches[i]["labels"].tolist() for i in range(len(batches))])
    assert labels[0] == labels[1] != labels[2]


BAD = [
    ("{domain: DIR/empty.txt}", "DIR/empty.txt"),
    ("{domain: DIR/train.txt}", "must not contain training texts"),
    ("{domain: [DIR/other.txt, DIR/train.txt]}", "DIR/train.txt is also in `dataset`"),
    ("{domain: }", "`name` in `validation` must be text, got None"),
]


@pytest.mark.parametrize("validation, message", BAD, ids=[message for _, message in BAD])
def test_invalid_validation_sets_are_reported(corpus, tmp_path, capsys, sets, validation, message):
    """Check that an invalid validation set is reported in one line before training."""
    (corpus / "empty.txt").write_text("")
    validation, message = (text.replace("DIR", str(corpus)) for text in (validation, message))
    out = tmp_path / "out"
    exit_code = main(["pretrain", *arguments_of(corpus, out, validation=validation, prepared=None)])
    error = capsys.readouterr().err
    assert exit_code == 2 and message in error and len(error.strip().split("\n")) == 1, error
    assert not list(out.glob("checkpoint-*")) and not (out / "result.json").exists()


def test_weights_of_validation_sources_are_refused():
    """Check that sampling weights, which an evaluation does not use, are refused."""
    sources = [{"name": "a.jsonl", "weight": 1}, {"name": "b.jsonl", "weight": 2}]
    for validation in (sources, {"mine": sources}):
        with pytest.raises(UserError, match="sources of `validation` must not have weights"):
            parse_validation(validation)
    with pytest.raises(UserError, match="`validation` must contain at least one source"):
        parse_validation({"mine": []})


@pytest.mark.parametrize(
    ("metric", "greater_is_better"),
    [("loss", False), ("eval_bits_per_character", False), ("masked_accuracy", True)],
)
def test_direction_of_the_metric_for_the_best_model(corpus, tmp_path, metric, greater_is_better):
    """Check that the best checkpoint is the one with the fewest bits per character."""
    arguments = arguments_of(
        corpus,
        tmp_path,
        validation=corpus / "validation.txt",
        eval_strategy="steps",
        metric_for_best_model=metric,
    )
    run = pretrain.read_run(arguments)
    check_run(run)
    assert run.training.greater_is_better is greater_is_better

    # The value of the user takes precedence.
    opposite = str(not greater_is_better).lower()
    run = pretrain.read_run([*arguments, "--greater-is-better", opposite])
    assert run.training.greater_is_better is not greater_is_better


def test_unknown_metric_for_the_best_model_is_refused(corpus, tmp_path):
    """Check that a metric which the evaluation does not compute is refused before training.

    The metrics of a named validation set contain its name.
    """

    def check(metric):
        overrides = {"validation": f"{{mine: {corpus / 'validation.txt'}}}"}
        overrides |= {"eval_strategy": "steps", "metric_for_best_model": metric}
        check_run(pretrain.read_run(arguments_of(corpus, tmp_path, **overrides)))

    check("mine_loss")
    check("eval_mine_bits_per_character")
    with pytest.raises(UserError, match="must be one of eval_mine_loss, eval_mine_.*, got loss"):
        check("loss")


def test_validation_link_to_a_training_file_is_rejected(tmp_path):
    """Check that a validation file which is a link to a training file is refused."""
    (tmp_path / "train.txt").write_text("a text\n")
    (tmp_path / "other.txt").symlink_to("train.txt")
    sets = parse_validation({"a": str(tmp_path / "other.txt")})
    with pytest.raises(UserError, match="must not contain training texts"):
        check_validation_sets(sets, parse_sources(str(tmp_path / "train.txt")))


def test_validation_url_of_training_texts_is_rejected(tmp_path):
    """Check that a validation URL is refused if it is also a URL or a path of training texts."""
    memory = fsspec.filesystem("memory")
    memory.pipe({"/urls/train.txt": b"a text\n", "/urls/other.txt": b"another text\n"})
    (tmp_path / "train.txt").write_text("a text\n")
    pairs = [
        ("memory://urls/train.txt", "memory://urls"),
        (f"file://{tmp_path}/train.txt", str(tmp_path)),
    ]
    for validation, train in pairs:
        sets = parse_validation({"a": validation})
        with pytest.raises(UserError, match="must not contain training texts"):
            check_validation_sets(sets, parse_sources(train))
        check_validation_sets(sets, parse_sources("memory://urls/other.txt"))


def test_evaluate_only_requires_validation_texts_and_a_model(corpus, tmp_path):
    """Check that `--evaluate-only` is refused without validation texts and without a model."""
    arguments = [*arguments_of(corpus, tmp_path), "--evaluate-only"]
    with pytest.raises(UserError, match="`evaluate_only` needs validation texts"):
        pretrain.read_run(arguments)
    with pytest.raises(UserError, match="`evaluate_only` needs a model to evaluate"):
        pretrain.read_run([*arguments, "--validation", str(corpus / "train.txt")])
    with pytest.raises(UserError, match="missing required options: --dataset"):
        pretrain.read_run(arguments_of(corpus, tmp_path, dataset=None))


def test_kept_checkpoints_must_be_saved(corpus, tmp_path):
    """`keep_every` is a multiple of `save_steps`."""
    arguments = [*arguments_of(corpus, tmp_path), "--save-steps", "4", "--max-steps", "12"]
    arguments.append("--keep-every")
    with pytest.raises(UserError, match=r"must be a multiple of `save_steps` \(4\), .* got 6"):
        pretrain.read_run([*arguments, "6"])
    # The run ends before step 90.
    for value in ("8", "90"):
        assert pretrain.read_run([*arguments, value]).options.output.keep_every == int(value)


def test_validation_set_as_mapping_or_list():
    """Check the types of values of a named validation set: a mapping with keys, and a list."""
    sets = parse_validation(
        {"a": {"name": "x.jsonl", "column": "body"}, "b": ["y.jsonl", "z.jsonl"]}
    )
    assert [source.column for source in sets["a"]] == ["body"]
    assert [source.name for source in sets["b"]] == ["y.jsonl", "z.jsonl"]
