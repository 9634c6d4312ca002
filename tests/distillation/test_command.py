"""Tests of `neobert distill`: losses, training data, the student, complete runs, and errors."""

import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from helpers.jsonl import write_jsonl


pytest.importorskip("sentence_transformers")

from filelock import FileLock
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers import models as modules
from transformers import AutoTokenizer, BertConfig, BertModel

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.cli import main as command
from neobert.common.errors import UserError
from neobert.distillation import command as distill_command
from neobert.distillation.command import (
    DistillTrainer,
    ShuffledBatches,
    comparison_warning,
    count_steps,
    embed_texts,
    learning_rate_for_steps,
)
from neobert.distillation.data import (
    Texts,
    TextSource,
    check_validation_names,
    count_overlap,
    default_validation_percent,
    is_validation_text,
    read_texts,
    teacher_embeddings,
)
from neobert.distillation.loss import (
    NEAREST,
    RANDOM,
    SPREAD,
    DistillLoss,
    agreement,
    candidates,
    hidden_state_loss,
    memory_bank_loss,
    similarity_loss,
)
from neobert.distillation.model_card import write_card
from neobert.distillation.options import (
    OPTIONS,
    DataOptions,
    DistillOptions,
    LossOptions,
    ModelOptions,
    StudentOptions,
)
from neobert.distillation.student import (
    build_student,
    check_hidden_states,
    embed_single_tokens,
    fit_token_embeddings,
    resolve_embeddings_from_teacher,
    save_student,
    set_token_embeddings,
)
from neobert.embeddings.packed_encoder import PackedEncoder, load_sentence_transformer
from neobert.quantization import smoothing
from neobert.training.checkpoints import remove_checkpoints
from neobert.training.options import BLOCKS_ONLY, training_arguments


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STUDENT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
NARROW = {**STUDENT, "hidden_size": 16}
METRICS = ("cosine", "spearman")
COLORS = "red green blue black white brown grey pink".split()
ANIMALS = "cat dog bird fish horse mouse lion wolf".split()
TEXTS = [
    f"a {color} {animal} number {i % 7}" + " and its friends" * (i % 4)
    for i, (color, animal) in enumerate((c, a) for c in COLORS for a in ANIMALS)
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer_dir):
    """Return the directory of a small BERT sentence encoder with normalized 32-d embeddings."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("teacher")
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )

    model = BertModel(config)
    model.embeddings.word_embeddings.weight.data.mul_(20)
    model.save_pretrained(folder / "bert")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder / "bert")

    transformer = modules.Transformer(str(folder / "bert"))
    SentenceTransformer(
        modules=[transformer, modules.Pooling(32, "mean"), modules.Normalize()]
    ).save_pretrained(str(folder / "encoder"))

    return str(folder / "encoder")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the paths of the training texts and of a second file with validation texts."""
    folder = tmp_path_factory.mktemp("texts")
    training_path = folder / "animals.jsonl"
    validation_path = folder / "birds.txt"
    training_path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    validation_path.write_text(
        "\n".join(f"two {color} birds sing {i}" for i, color in enumerate(COLORS))
    )
    return str(training_path), str(validation_path)


def recipe(tmp_path, encoder, files, **changes):
    """Write a recipe and return its path.

    Args:
        tmp_path: Directory of the recipe and of the output.
        encoder: Path of the teacher.
        files: Paths of the training texts and of the validation texts.
        changes: Options that replace those of the recipe; None removes an option. The values of
            `trainer` are added to those of the recipe.
    """
    trainer = {"max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1}
    trainer |= {"save_steps": 3, "eval_steps": 3, "warmup_steps": 1, **changes.pop("trainer", {})}
    values = {"teacher": encoder, "texts": [files[0]], "validation_texts": [files[1]]}
    values |= {"model_config": STUDENT, "output": str(tmp_path / "student"), "max_length": 32}
    values |= {"validation_percent": 20, **changes, "trainer": trainer}

    path = tmp_path / "recipe.yaml"
    values = {key: value for key, value in values.items() if value is not None}
    path.write_text(yaml.safe_dump(values))
    return str(path)


# ------------------------------------------------------------------------------------------------
# losses and metrics


def unit(*shape):
    """Return random vectors of length 1."""
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_similarity_loss_is_kl_divergence_without_diagonal():
    """The loss does not compare a text with itself, whose similarity is always 1."""
    student, teacher = unit(5, 8), unit(5, 6)

    expected = 0.0
    for i in range(5):
        rows = []
        for x in (teacher, student):
            cosines = [
                torch.dot(x[i], x[j]) / x[i].norm() / x[j].norm() / 0.1 for j in range(5) if j != i
            ]
            rows.append(torch.stack(cosines).softmax(0))
        expected += (rows[0] * (rows[0] / rows[1]).log()).sum() / 5

    torch.testing.assert_close(similarity_loss(student, teacher, 0.1), expected)
    assert similarity_loss(teacher, teacher, 0.1).abs() < 1e-6


def test_candidates_are_nearest_evenly_spaced_and_random():
    """Check the candidates: the nearest texts, texts at evenly spaced scores, and random texts."""
    scores = torch.linspace(-0.2, 0.9, 500)[torch.randperm(500)].repeat(2, 1)
    # The score of a text for itself is -2.
    scores[1, scores[1].argmin()] = -2

    candidate_columns = candidates(scores)
    assert candidate_columns.shape == (2, NEAREST + SPREAD + RANDOM)

    for row, columns in zip(scores, candidate_columns):
        values = row[columns]
        nearest = row.sort().values[-NEAREST:]
        torch.testing.assert_close(values[:NEAREST].sort().values, nearest)

        levels = torch.linspace(row[row > -2].min(), row.max(), SPREAD)
        lowest_above = torch.stack([row[row >= level - 1e-6].min() for level in levels])
        torch.testing.assert_close(values[NEAREST : NEAREST + SPREAD], lowest_above)

    assert len(candidate_columns[:, -RANDOM:].unique()) > RANDOM


def test_memory_bank_loss_is_the_kl_divergence_over_the_candidates():
    """The loss compares a text with the candidates, except for the text itself."""
    student = unit(3, 8)
    teacher = unit(3, 8)
    bank = unit(40, 8)

    bank[5] = teacher[0]
    is_self = torch.zeros(3, 40, dtype=torch.bool)
    is_self[0, 5] = True
    # The candidates are partly random. The same seed selects the same ones.
    torch.manual_seed(1)
    candidate_columns = candidates((teacher @ bank.T).masked_fill(is_self, -2))

    expected = 0.0
    for i, columns in enumerate(candidate_columns):
        visible = bank[columns[~is_self[i, columns]]]
        rows = [(visible @ x[i] / 0.1).softmax(0) for x in (teacher, student)]
        expected += (rows[0] * (rows[0] / rows[1]).log()).sum() / 3

    torch.manual_seed(1)
    torch.testing.assert_close(memory_bank_loss(student, teacher, bank, 0.1, is_self), expected)
    assert memory_bank_loss(teacher, teacher, bank, 0.1, is_self).abs() < 1e-6


def test_losses_are_scaled_by_their_weights():
    """Each loss is its formula times its weight, computed on normalized embeddings."""
    student = unit(4, 8)
    all_embeddings = unit(6, 8)

    options = LossOptions(
        cosine_weight=2.0,
        similarity_weight=3.0,
        similarity_temperature=0.1,
        memory_bank_weight=4.0,
        memory_bank_size=6,
    )
    text_indices = torch.tensor([5, 0, 2, 3])

    # The factors 2 and 3 have no effect, because the loss normalizes the embeddings.
    loss = DistillLoss(torch.nn.Identity(), options, 2 * all_embeddings.numpy())
    # The candidates of the memory bank are partly random. The same seed selects the same ones.
    torch.manual_seed(1)
    losses = loss([{"sentence_embedding": 3 * student}], text_indices)

    teacher = all_embeddings[text_indices]
    bank = all_embeddings[loss.bank_indices]
    cosines = [torch.dot(a, b) for a, b in zip(student, teacher)]

    torch.testing.assert_close(losses["cosine"], 2 * (1 - torch.stack(cosines).mean()))
    torch.testing.assert_close(losses["similarity"], 3 * similarity_loss(student, teacher, 0.1))

    torch.manual_seed(1)
    is_self = text_indices[:, None] == loss.bank_indices
    assert is_self.sum(1).tolist() == [1, 1, 1, 1]
    expected = 4 * memory_bank_loss(student, teacher, bank, 0.1, is_self)
    torch.testing.assert_close(losses["memory_bank"], expected)


def test_losses_of_one_text_and_a_memory_bank_of_one_text():
    """A batch of one text has no similarities within the batch."""

    class Student(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": unit(1, 8)}

    embeddings = np.float16(unit(5, 8))
    loss = DistillLoss(Student(), LossOptions(memory_bank_size=1), embeddings)
    losses = loss([{}], torch.tensor([3]))
    assert losses["similarity"] == 0
    assert all(torch.isfinite(value) for value in losses.values())
    assert loss.bank.shape == (1, 8)


def test_hidden_state_loss_is_relative_error_without_padding():
    student, teacher = torch.randn(2, 2, 4, 8)
    lengths = [4, 1]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]

    errors = 0.0
    squares = 0.0
    for row, length in enumerate(lengths):
        for a, b in zip(student[row, :length], teacher[row, :length]):
            errors += float(torch.dist(a, b)) ** 2
            squares += float(b.norm()) ** 2

    loss = hidden_state_loss(student, teacher, mask.long())
    torch.testing.assert_close(loss, torch.tensor(errors / squares))


def test_spread_candidates_cover_visible_score_range():
    """The levels start at the lowest visible score, not at that of the text itself."""
    scores = torch.linspace(-0.4, 0.9, 2000).repeat(3, 1)
    scores[:, 77] = -2
    spread = candidates(scores)[:, NEAREST : NEAREST + SPREAD]
    levels = torch.linspace(-0.4, 0.9, SPREAD)

    for row, columns in zip(scores, spread):
        assert len(columns.unique()) == SPREAD
        torch.testing.assert_close(row[columns], levels, atol=1.31 / 1999 * 2, rtol=0)


def test_the_memory_bank_is_a_random_sample():
    embeddings = unit(2000, 4).numpy()
    loss = DistillLoss(torch.nn.Identity(), LossOptions(memory_bank_size=200), embeddings)
    assert len(loss.bank_indices.unique()) == 200
    # The mean of 200 of 2,000 indices has a standard error of 39.
    assert abs(loss.bank_indices.float().mean() - 999.5) < 160


@pytest.mark.parametrize(
    "count, percent", [(10, 5), (1000, 5), (2000, 5), (4000, 2.5), (10_000, 1), (10**6, 1)]
)
def test_small_data_has_a_larger_fraction_of_validation_texts(count, percent):
    assert default_validation_percent(count) == percent


def test_validation_texts_are_held_out_by_default(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"text {i}\n" for i in range(3000)), encoding="utf-8")
    texts = read_texts([TextSource.from_entry(str(path))], [], None, 10000)
    # 100 of 3,000 texts, within three standard deviations of a binomial distribution.
    assert abs(len(texts.validation) - 100) < 30
    assert len(texts.train) + len(texts.validation) == 3000


def test_share_is_independent_of_validation_split(tmp_path):
    """`share` and the split use independent hashes.

    With the same hash, all or none of the sampled texts would be validation texts.
    """
    (tmp_path / "a.txt").write_text("\n".join(f"text {i}" for i in range(20000)))
    source = TextSource.from_entry({"path": str(tmp_path / "a.txt"), "share": 0.05})
    texts = read_texts([source], [], 5, 10000)
    total = len(texts.train) + len(texts.validation)
    # About 1,000 texts are sampled, so the standard error of the fraction is 0.007.
    assert 0.02 < len(texts.validation) / total < 0.08


def test_held_out_texts_do_not_depend_on_the_order_of_the_file(tmp_path):
    lines = [f"text {i}" for i in range(300)]
    validation_texts = []
    for order in (lines, lines[::-1]):
        (tmp_path / "a.txt").write_text("\n".join(order))
        texts = read_texts([TextSource.from_entry(str(tmp_path / "a.txt"))], [], 20, 10)
        validation_texts.append(texts.validation)
    assert validation_texts[0] == validation_texts[1] and len(validation_texts[0]) == 10


def test_outlier_row_does_not_shrink_other_embeddings(teacher):
    """One very long row of the table does not shorten all other rows after the normalization.

    Column 7 has the lowest norm, so it stores the value that gives a row length 1. That value
    would be close to 1 in every row that was shortened.
    """
    encoder = SentenceTransformer(teacher, device="cpu")
    table = torch.nn.functional.normalize(torch.randn(30522, 32), dim=1)
    table[:, 7] *= 0.01
    table[9] *= 100

    student = build_student(*options_for(teacher, embeddings_from_teacher=True), encoder, 32)
    set_token_embeddings(student, table, torch.float32)
    weight = student[0].auto_model.get_input_embeddings().weight
    assert weight[:, 7].abs().median() < 0.5


def test_the_default_student_has_half_of_the_layers(teacher):
    """Check the default student, and which students start with embeddings of the teacher."""
    encoder = PackedEncoder(teacher, device="cpu")
    options = options_for(teacher, model_config={})
    assert resolve_embeddings_from_teacher(*options, encoder)

    student = build_student(*options, encoder.sentence_transformer, 32)
    config = student[0].auto_model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 1, 4)

    wide = options_for(teacher, model_config={**STUDENT, "hidden_size": 64})
    assert not resolve_embeddings_from_teacher(*wide, encoder)
    loaded = options_for(teacher, model_config={}, init_from="x")
    assert not resolve_embeddings_from_teacher(*loaded, encoder)

    # Without `model_config`, the hidden size is that of the teacher, whose Dense module may have
    # fewer outputs.
    narrow = SentenceTransformer(
        modules=[
            *encoder.sentence_transformer.children(),
            modules.Dense(32, 16, bias=False, activation_function=torch.nn.Identity()),
        ],
        device="cpu",
    )
    assert not resolve_embeddings_from_teacher(*options, PackedEncoder(narrow, device="cpu"))


@pytest.mark.parametrize(
    ("texts", "settings", "steps", "rate"),
    [
        # 10 batches in each of 3 epochs; the remaining 39 texts are dropped.
        (679, {}, 30, 5.4772e-5),
        # 2 processes with micro-batches of 64 in groups of 2: 3 steps per epoch.
        (679, {"world_size": 2, "gradient_accumulation_steps": 2}, 9, 3e-5),
        (3, {}, 3, 1.7321e-5),
        (679, {"max_steps": 20000}, 20000, 1e-3),
    ],
)
def test_default_learning_rate_depends_on_the_number_of_steps(texts, settings, steps, rate):
    """The default learning rate is 1e-5 times the square root of the steps, and at most 1e-3."""
    defaults = {"max_steps": -1, "train_batch_size": 64, "world_size": 1, "num_train_epochs": 3.0}
    values = {**defaults, "gradient_accumulation_steps": 1, **settings}
    assert count_steps(SimpleNamespace(**values), texts) == steps
    assert learning_rate_for_steps(steps) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize(("trainer", "rate"), [({}, 2.8284e-5), ({"learning_rate": 2e-4}, 2e-4)])
def test_learning_rate_of_a_run(tmp_path, teacher, files, trainer, rate):
    """A run trains with the default learning rate of its number of steps, unless one is given."""
    options = {"trainer": {"max_steps": 8, "eval_strategy": "no", **trainer}}
    assert command(["distill", recipe(tmp_path, teacher, files, **options)]) == 0
    figures = json.loads((tmp_path / "student" / "result.json").read_text())
    rates = [entry["learning_rate"] for entry in figures["losses"]]
    assert len(rates) == 8 and max(rates) == pytest.approx(rate, rel=1e-4)


def test_warning_for_unimproved_student():
    """A warning reports a student that is no better than before training, or unlike its teacher."""

    def warning_for(initial, student, **student_metrics):
        metrics = {
            "initial_student": {"validation_cosine": 0.6, "validation_spearman": initial},
            "student": {
                "validation_cosine": 0.6,
                "validation_spearman": student,
                **student_metrics,
            },
        }
        if "mrr@10" in student_metrics:
            metrics["initial_student"]["mrr@10"] = 0.5
        return comparison_warning(metrics)

    assert warning_for(0.6, 0.8) is None
    assert "not better than before training (validation spearman 0.800" in warning_for(0.8, 0.8)
    assert "agrees little with its teacher" in warning_for(0.1, 0.2, validation_cosine=0.176)

    # Retrieval metrics decide if there are any.
    assert warning_for(0.8, 0.7, **{"mrr@10": 0.6}) is None
    assert "(mrr@10 0.500, before 0.500)" in warning_for(0.6, 0.8, **{"mrr@10": 0.5})

    # Embeddings of different dimensions have no cosine.
    narrow = {
        "initial_student": {"validation_spearman": 0.5},
        "student": {"validation_spearman": 0.6},
    }
    assert comparison_warning(narrow) is None


def test_tensorboard_logs_are_kept_when_checkpoints_are_removed(tmp_path):
    """The TensorBoard logs are moved to the output before the checkpoints are removed."""
    log = tmp_path / "checkpoints" / "runs" / "Nov25" / "events.out"
    log.parent.mkdir(parents=True)
    log.write_text("x")
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir()

    remove_checkpoints(tmp_path / "checkpoints")
    assert (tmp_path / "runs" / "Nov25" / "events.out").read_text() == "x"
    assert not (tmp_path / "checkpoints").exists()


def test_agreement_metrics():
    """Identical embeddings agree with 1, and the Spearman metric depends on similarities only."""
    embeddings = np.random.default_rng(0).normal(size=(40, 8))
    same = agreement(embeddings * 2, embeddings)
    assert same["cosine"] == pytest.approx(1) and same["spearman"] == pytest.approx(1)

    # A rotation preserves the similarities between texts, but not the embeddings.
    rotated = agreement(
        embeddings @ np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0], embeddings
    )
    assert rotated["spearman"] == pytest.approx(1) and rotated["cosine"] < 0.5

    other = agreement(np.random.default_rng(2).normal(size=(40, 8)), embeddings)
    assert abs(other["spearman"]) < 0.2
    # Embeddings of different dimensions have no cosine.
    assert "cosine" not in agreement(embeddings[:, :5], embeddings)


# ------------------------------------------------------------------------------------------------
# data


def test_texts_are_deduplicated_and_split_by_hash(tmp_path):
    """Every distinct text is in one split, and other sources have no training texts."""
    first = tmp_path / "a.txt"
    second = tmp_path / "b.txt"
    other = tmp_path / "other.txt"
    first.write_text("\n".join(f"text {i}" for i in range(200)) + "\n\n text 3 \n")
    second.write_text("\n".join(f"text {i}" for i in range(100, 300)))
    other.write_text("text 5\nquite another\nand one more\nthe last one\n")

    sources = [TextSource.from_entry(str(path)) for path in (first, second, other)]
    texts = read_texts(sources[:2], sources[2:], 20, 1000)

    assert sorted(texts.train + texts.validation) == sorted(f"text {i}" for i in range(300))
    assert all(is_validation_text(text, 20) for text in texts.validation)
    assert not any(is_validation_text(text, 20) for text in texts.train)
    assert 30 < len(texts.validation) < 90
    # A training text is removed from the other sources.
    assert set(texts.other["other"]) == {"quite another", "and one more", "the last one"}
    assert is_validation_text("Some  TEXT", 50) == is_validation_text("some text", 50), (
        "texts that differ in case and white space only must be in the same split"
    )


def test_validation_texts_have_no_copies_of_training_texts(tmp_path, caplog):
    """Copies with other capital letters and spaces are removed, and an empty set is reported."""
    (tmp_path / "train.txt").write_text("\n".join(f"text number {i}" for i in range(20)))
    (tmp_path / "chat.txt").write_text("Text  NUMBER 5\nText number 7\none\ntwo\nthree\n")
    (tmp_path / "copies.txt").write_text("Text number 5\nfour\n")
    sources = [
        TextSource.from_entry(str(tmp_path / f"{name}.txt")) for name in ("train", "chat", "copies")
    ]

    texts = read_texts(sources[:1], sources[1:], 20, 1000)
    assert set(texts.other["chat"]) == {"one", "two", "three"}
    assert "chat" in texts.evaluated and "copies" not in texts.evaluated
    assert "copies.txt is not evaluated: it has 1 texts" in caplog.text
    assert "chat.txt" not in caplog.text


def test_copies_of_training_texts_in_the_validation_file_are_reported(
    tmp_path, teacher, files, caplog
):
    """Check the warning about pairs whose texts are also training texts."""
    assert count_overlap(["a  Cat", "a dog", "x"], ["A cat", "a cat", "a dog", "a bird"]) == 2

    texts = DataOptions([files[0]], validation_file=str(tmp_path / "pairs.jsonl"))
    options = DistillOptions(ModelOptions(teacher, str(tmp_path / "out")), texts)
    arguments = SentenceTransformerTrainingArguments(str(tmp_path / "out"), eval_strategy="no")
    run = distill_command.Distillation(options, arguments, [TextSource.from_entry(files[0])], [])
    for anchor, words in (("an eagle", ""), (TEXTS[0].upper(), "1 of 2 queries and texts")):
        write_jsonl(tmp_path / "pairs.jsonl", [{"anchor": anchor, "positive": "a big bird"}])
        caplog.clear()
        run._read_data()
        assert words in caplog.text and bool(caplog.messages) == bool(words)


def test_the_card_names_evaluated_texts_only(tmp_path, teacher, files):
    """Validation texts that are too few for an evaluation are not in the model card."""
    metrics = {f"{name}_{key}": 0.5 for name in ("validation", "birds") for key in METRICS}
    result = {
        "comparison": {"teacher": metrics, "initial_student": metrics, "student": metrics},
        "texts": {"train": 50, "validation": 10},
        "teacher_layers": [],
        "steps": 1,
        "epochs": 1.0,
        "warning": None,
    }
    environment = {"commit": None, "hardware": "a CPU", "threads": 1, "date": "today"}
    options = DistillOptions(ModelOptions(teacher, str(tmp_path)), DataOptions([files[0]]))
    birds = TextSource.from_entry(files[1])

    sources = [birds, replace(birds, name="copies")]
    write_card(tmp_path, options, [birds], sources, result, environment)
    assert "not trained on: birds. The initial student" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "names", [("a/chat.txt", "b/chat.txt"), ("train.txt",), ("validation.txt",)]
)
def test_repeated_and_reserved_names_of_validation_texts_are_refused(tmp_path, names):
    """Validation texts never replace one another or the held-out texts."""
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("a text")
    entries = [str(path) for path in paths]
    with pytest.raises(UserError, match="must have different names .*Set `name` in the recipe"):
        check_validation_names(map(TextSource.from_entry, entries))
    check_validation_names(
        TextSource.from_entry({"path": entry, "name": f"set-{number}"})
        for number, entry in enumerate(entries)
    )


def test_share_samples_the_same_rows_in_every_run(tmp_path):
    """`share` samples the same rows in every run, and complete rows if several columns are read."""
    rows = [{"a": f"title {i}", "b": f"text {i}"} for i in range(1000)] + [{"a": "x", "b": " "}]
    write_jsonl(tmp_path / "p.jsonl", rows)
    entry = {"path": str(tmp_path / "p.jsonl"), "column": ["a", "b"]}

    texts = list(TextSource.from_entry({**entry, "share": 0.3}).read())
    assert texts == list(TextSource.from_entry({**entry, "share": 0.3}).read())

    titles = [text for text in texts if text.startswith("title")]
    assert 250 < len(titles) < 350
    assert texts[: 2 * len(titles)] == [text for i in titles for text in (i, f"text {i[6:]}")]

    titles_only = list(TextSource.from_entry({**entry, "column": "a", "share": 0.3}).read())
    assert titles_only[: len(titles)] == titles
    # A larger share contains the rows of a smaller one.
    assert set(texts) < set(TextSource.from_entry({**entry, "share": 0.5}).read())

    with pytest.raises(UserError, match="`share` of .* must be a number, greater than 0 and"):
        TextSource.from_entry({**entry, "share": 0})
    with pytest.raises(UserError, match="c"):
        list(TextSource.from_entry({**entry, "column": ["a", "c"]}).read())


class CountingTeacher:
    """Teacher that counts the texts that it has encoded.

    Args:
        max_texts: Number of texts after which `embed` raises KeyboardInterrupt.
    """

    embedding_dimension = 2
    default_prompt = ""

    def __init__(self, max_texts=1000):
        self.texts = 0
        self.max_texts = max_texts

    def tokenize(self, texts, prompt):
        return [prompt + text for text in texts]

    def embed(self, texts, progress, prompt):
        if self.texts + len(texts) > self.max_texts:
            raise KeyboardInterrupt
        self.texts += len(texts)
        return np.array([[len(text), 1.0] for text in texts])


def test_teacher_embeddings_resume_after_interruption(tmp_path, monkeypatch):
    """The teacher's embeddings are stored in chunks, so an interrupted run resumes."""
    monkeypatch.setattr("neobert.distillation.data.CHUNK_SIZE", 10)
    texts = ["x" * i for i in range(1, 26)]
    path = tmp_path / "v.npy"

    with pytest.raises(KeyboardInterrupt):
        teacher_embeddings(path, texts, CountingTeacher(15))

    teacher = CountingTeacher()
    embeddings = teacher_embeddings(path, texts, teacher)
    assert teacher.texts == 15, "the stored embeddings were computed again"
    assert embeddings.dtype == np.float16
    assert embeddings.tolist() == [[i, 1] for i in range(1, 26)]
    # A teacher that must not encode any text shows that all embeddings are read from the file.
    assert np.array_equal(teacher_embeddings(path, texts, CountingTeacher(0)), embeddings)

    # A copy of the file may be truncated, with and without embeddings that are missing.
    for done in (25, 10):
        copy = tmp_path / "copy.npy"
        copy.write_bytes(path.read_bytes()[:-20])
        copy.with_suffix(".json").write_text(json.dumps({"done": done}))
        with pytest.raises(UserError, match="copy.npy cannot be read .*Remove the file"):
            teacher_embeddings(copy, texts, CountingTeacher())

    # The file of embeddings may be deleted without the one of the progress.
    expected = embeddings.tolist()
    del embeddings
    path.unlink()
    assert teacher_embeddings(path, texts, CountingTeacher()).tolist() == expected


def test_space_of_teacher_embeddings_is_reserved(tmp_path, monkeypatch):
    """A full disk is an OSError with the path, before the teacher encodes a text.

    A write to a memory map of a full disk would end the process with SIGBUS.
    """
    path = tmp_path / "v.npy"
    allocated = []

    class Teacher(CountingTeacher):
        def embed(self, tokens, progress, prompt):
            allocated.append(512 * path.stat().st_blocks)
            return super().embed(tokens, progress, prompt)

    texts = ["x"] * 50_000
    teacher_embeddings(path, texts, Teacher(len(texts)))
    assert allocated[0] >= path.stat().st_size >= 200_000

    def fail(number):
        def allocate(*arguments):
            raise OSError(number, os.strerror(number))

        return allocate

    path = tmp_path / "w.npy"
    monkeypatch.setattr(os, "posix_fallocate", fail(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as error:
        teacher_embeddings(path, texts, CountingTeacher(0))
    assert error.value.filename == str(path)

    # A file system that cannot allocate space is no error.
    monkeypatch.setattr(os, "posix_fallocate", fail(errno.EOPNOTSUPP))
    assert len(teacher_embeddings(path, texts, CountingTeacher(len(texts)))) == len(texts)


def test_teacher_embeddings_have_the_default_prompt(tmp_path, teacher):
    """The targets are the embeddings that `teacher.encode` returns, with its default prompt."""
    encoder = SentenceTransformer(teacher, device="cpu")
    encoder.prompts = {"search": "query: "}
    encoder.default_prompt_name = "search"
    packed_encoder = PackedEncoder(encoder, device="cpu")
    embeddings = teacher_embeddings(tmp_path / "v.npy", ["a cat", "an eagle"], packed_encoder)
    np.testing.assert_allclose(embeddings, encoder.encode(["a cat", "an eagle"]), atol=1e-3)
    assert not np.allclose(embeddings, encoder.encode(["a cat", "an eagle"], prompt=""), atol=0.01)


def test_a_run_is_identified_by_the_use_of_its_texts(tmp_path, teacher):
    """A run with another share, column or use of the same files is another run."""
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    first = TextSource.from_entry(str(tmp_path / "a.jsonl"))
    second = TextSource.from_entry(str(tmp_path / "b.jsonl"))
    options = DistillOptions(
        ModelOptions(str(teacher), str(tmp_path / "out")), DataOptions([first.path])
    )
    runs = [
        ([first, second], []),
        ([first], [second]),
        ([replace(first, share=0.1)], []),
        ([replace(first, column="other")], []),
        ([first], []),
    ]
    identities = [
        distill_command.run_identity(options, sources, validation, 1)
        for sources, validation in runs
    ]
    assert all(a != b for i, a in enumerate(identities) for b in identities[:i])
    renamed = distill_command.run_identity(options, [replace(first, name="x")], [], 1)
    assert renamed == identities[-1], "The name is in the model card only."

    # The metrics of the run are those of its validation file.
    data = DataOptions([first.path], validation_file=second.path)
    evaluated = distill_command.run_identity(replace(options, data=data), [first], [], 1)
    assert evaluated != identities[-1]


def test_work_directory_reuses_teacher_embeddings(tmp_path, teacher):
    """Runs share stored embeddings only for the same texts, teacher and maximum length."""

    def count_stored_files(length, texts):
        options = DistillOptions(
            model=ModelOptions(teacher=teacher, output="o"),
            data=DataOptions(texts=["x"], work=str(tmp_path)),
            student=StudentOptions(max_length=length),
        )

        embeddings = embed_texts(options, False, texts, CountingTeacher())
        assert embeddings.token_table is None
        assert embeddings.train.tolist() == [[len(text), 1] for text in texts.train]
        assert embeddings.evaluated["validation"].embeddings.dtype == np.float32

        return len(list(tmp_path.rglob("*.npy")))

    texts = Texts(["a", "bc"], ["d", "e", "f"], {})
    assert count_stored_files(32, texts) == count_stored_files(32, texts) == 2
    assert count_stored_files(16, texts) == 4
    assert count_stored_files(32, replace(texts, train=["bc", "a"])) == 5


def test_token_table_of_another_version_is_computed_again(tmp_path, teacher, monkeypatch):
    """Token embeddings of an older algorithm in `--work` are not used."""
    options = DistillOptions(
        model=ModelOptions(teacher=teacher, output="o"),
        data=DataOptions(texts=["x"], work=str(tmp_path)),
        student=StudentOptions(max_length=32),
    )
    encoder = PackedEncoder(teacher, device="cpu", max_length=32)
    texts = Texts(TEXTS[:8], TEXTS[8:12], {})

    def count_stored_tables():
        assert embed_texts(options, True, texts, encoder).token_table is not None
        return len(list(tmp_path.rglob("tokens-*.npy")))

    assert count_stored_tables() == count_stored_tables() == 1
    embedding_files = sorted(tmp_path.rglob("train-*.npy"))
    monkeypatch.setattr(distill_command, "TOKEN_TABLE_VERSION", 0)
    assert count_stored_tables() == 2
    # The embeddings of the teacher do not depend on the algorithm.
    assert sorted(tmp_path.rglob("train-*.npy")) == embedding_files


# ------------------------------------------------------------------------------------------------
# student


def options_for(teacher, **changes):
    """Return (ModelOptions, StudentOptions) with changed values."""
    values = {"model_config": STUDENT, "max_length": 32, **changes}
    names = ModelOptions.__dataclass_fields__
    model = {name: value for name, value in values.items() if name in names}
    student = {name: value for name, value in values.items() if name not in names}
    return ModelOptions(teacher=teacher, output="o", **model), StudentOptions(**student)


def test_the_student_mirrors_the_teachers_modules(teacher):
    """The student has the teacher's modules, and a Dense module if its hidden size differs."""
    encoder = SentenceTransformer(teacher, device="cpu")
    for config, names in (
        (STUDENT, ["Transformer", "Pooling", "Normalize"]),
        (NARROW, ["Transformer", "Pooling", "Dense", "Normalize"]),
    ):
        student = build_student(*options_for(teacher, model_config=config), encoder, 32)
        assert [type(module).__name__ for module in student.children()] == names
        assert student.encode(["a cat"]).shape == (1, 32)


def test_narrow_student_keeps_its_projection(teacher, tmp_path):
    """A second run starts from the Dense module of the first one.

    A new random map would discard what the first run has learned.
    """
    encoder = SentenceTransformer(teacher, device="cpu")
    first = build_student(*options_for(teacher, model_config=NARROW), encoder, 32)
    save_student(first, tmp_path, "float32", "float32")

    settings = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    # Versions of sentence-transformers before 6 refuse unknown keys.
    assert settings == {"max_seq_length": 32, "do_lower_case": False}

    start = {"model_config": {}, "init_from": str(tmp_path)}
    again = build_student(*options_for(teacher, **start), encoder, 32)
    torch.testing.assert_close(again[2].linear.weight, first[2].linear.weight)
    texts = ["a cat", "two dogs"]
    np.testing.assert_allclose(again.encode(texts), first.encode(texts), atol=1e-5)

    # A map is kept if the hidden size equals the embedding dimension, too.
    square = modules.Dense(16, 16, bias=False, activation_function=torch.nn.Identity())
    SentenceTransformer(modules=[first[0], first[1], square]).save_pretrained(str(tmp_path / "sq"))
    start_square = {"model_config": {}, "init_from": str(tmp_path / "sq")}
    again = build_student(*options_for(teacher, **start_square), encoder, 16)
    torch.testing.assert_close(again[2].linear.weight, square.linear.weight)

    # A teacher with another embedding dimension needs a new map.
    wider = build_student(*options_for(teacher, **start), encoder, 48)
    assert tuple(wider[2].linear.weight.shape) == (48, 16), "the map of another size was reused"


def test_a_student_keeps_its_pooling(teacher, tmp_path):
    """`--init-from` keeps [CLS] pooling without `--pooling`, and refuses another explicit one."""
    encoder = SentenceTransformer(teacher, device="cpu")
    for pooling in ("cls", "mean"):
        first = build_student(*options_for(teacher, pooling=pooling), encoder, 32)
        (tmp_path / pooling).mkdir()
        save_student(first, tmp_path / pooling, "float32", "float32")

    start = {"model_config": {}, "init_from": str(tmp_path / "cls")}
    again = build_student(*options_for(teacher, **start), encoder, 32)
    assert again[1].pooling_mode == "cls"

    for pooling, other in (("cls", "mean"), ("mean", "cls")):
        start["init_from"] = str(tmp_path / pooling)
        with pytest.raises(UserError, match=f"`pooling` must be {pooling}"):
            build_student(*options_for(teacher, **start, pooling=other), encoder, 32)


def test_hidden_states_need_the_positions_of_the_teacher(teacher):
    """A student of longer texts than its teacher has positions cannot learn its hidden states."""
    encoder = load_sentence_transformer(teacher, max_length=100)
    student = build_student(*options_for(teacher, max_length=100), encoder, 32)
    with pytest.raises(UserError, match="`max_length` must be at most 64, .* got 100"):
        check_hidden_states(student, encoder)

    student.max_seq_length = 64
    check_hidden_states(student, encoder)


def test_the_student_pads_on_the_right(teacher):
    """Groups of texts are truncated on the right, so padding on the left would replace tokens."""
    encoder = load_sentence_transformer(teacher, max_length=32)
    encoder.tokenizer.padding_side = "left"
    student = build_student(*options_for(teacher), encoder, 32)
    features = student.preprocess(["a cat", "a cat with two dogs and a bird"])
    assert features["attention_mask"][0].tolist() == [1] * 4 + [0] * 6


def test_single_token_embeddings_include_special_tokens(teacher):
    """The embedding of a single token equals that of its text, with [CLS] and [SEP] around it."""
    encoder = PackedEncoder(teacher, dtype="float32", device="cpu", max_length=32)
    embeddings = embed_single_tokens(encoder, 3000)
    tokenizer = encoder.sentence_transformer.tokenizer
    words = [tokenizer.convert_ids_to_tokens(number) for number in (1999, 2500, 2999)]
    expected = encoder.encode(words)
    np.testing.assert_allclose(embeddings[[1999, 2500, 2999]], expected, atol=1e-5)


def test_token_embeddings_are_the_ridge_regression_solution():
    """Check the token embeddings against the closed form of the ridge regression."""
    generator = np.random.default_rng(0)
    tokens = [generator.integers(12, size=generator.integers(2, 9)) for _ in range(300)]
    single_tokens = generator.normal(size=(12, 4))
    embeddings = generator.normal(size=(300, 4))
    # all-MiniLM-L6-v2 has two coordinates that are always 0.
    single_tokens[:, 3] = embeddings[:, 3] = 0

    bags = np.array([np.bincount(ids, minlength=12) / len(ids) for ids in tokens])
    targets = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    means = bags @ single_tokens
    scaled = single_tokens * (means * targets).sum() / (means**2).sum()
    system = bags.T @ bags + 0.02 * np.eye(12)
    expected = scaled + np.linalg.solve(system, bags.T @ (targets - bags @ scaled))

    table = fit_token_embeddings(single_tokens, tokens, embeddings, num_iterations=12)
    np.testing.assert_allclose(table, expected, atol=1e-5)

    # The default number of iterations removes at least 90 % of the initial error.
    few_iterations = fit_token_embeddings(single_tokens, tokens, embeddings)
    error = np.linalg.norm(scaled - expected)
    assert np.linalg.norm(few_iterations - expected) < 0.1 * error


def student_and_expected_embedding(student, table, text):
    """Return the student's embedding of a text, and the normalized mean of its table rows."""
    ids = student.tokenizer(text)["input_ids"]
    expected = torch.nn.functional.normalize(table[ids].mean(0), dim=0)
    return student.encode(text), expected.numpy()


def test_initial_student_is_the_mean_of_token_embeddings(teacher):
    """The student starts as the mean of the table's rows, although NeoBERT normalizes its output.

    The rows get length 1 by a spare coordinate, which the last norm drops. This preserves the ratio
    of their original lengths.
    """
    encoder = SentenceTransformer(teacher, device="cpu")
    table = torch.randn(30522, 32) * torch.rand(30522, 1)
    table[:, 7] *= 0.1
    options = options_for(teacher, embeddings_from_teacher=True, freeze_embeddings=True)
    student = build_student(*options, encoder, 32)

    set_token_embeddings(student, table.clone(), torch.float32)
    model = student[0].auto_model
    assert model.layer_norm.weight[7] == 0, "the spare coordinate does not have the lowest norm"

    table[:, 7] = 0
    for text in ("a cat", "two dogs and a bird sing", TEXTS[5]):
        embedding, expected = student_and_expected_embedding(student, table, text)
        np.testing.assert_allclose(embedding, expected, atol=1e-4)

    weight = model.get_input_embeddings().weight
    assert not weight.requires_grad
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(30522))

    # The embeddings are rounded before the training, because they are stored with fewer bits.
    set_token_embeddings(student, table.clone(), torch.float8_e5m2)
    assert torch.equal(weight, weight.to(torch.float8_e5m2).float())
    embedding, expected = student_and_expected_embedding(student, table, TEXTS[5])
    assert 0.95 < embedding @ expected < 0.99999


def test_narrow_student_starts_from_principal_components(teacher):
    """A student with a smaller hidden size starts with the principal components of the table."""
    encoder = SentenceTransformer(teacher, device="cpu")
    # The table has rank 15, except for noise, so 16 components describe it.
    table = torch.randn(30522, 15) @ torch.randn(15, 32) + 1e-4 * torch.randn(30522, 32)
    narrow = build_student(
        *options_for(teacher, model_config=NARROW, embeddings_from_teacher=True), encoder, 32
    )

    set_token_embeddings(narrow, table.clone(), torch.float32)

    assert narrow[0].auto_model.get_input_embeddings().weight.requires_grad
    for text in ("a cat", TEXTS[5]):
        embedding, expected = student_and_expected_embedding(narrow, table, text)
        np.testing.assert_allclose(embedding, expected, atol=1e-3)


def test_weights_beyond_float16_are_saved_in_bfloat16(teacher, tmp_path, caplog):
    """A matrix is stored in bfloat16 if float16 would turn its weights into infinity."""
    encoder = SentenceTransformer(teacher, device="cpu")
    student = build_student(*options_for(teacher), encoder, 32)
    block = student[0].auto_model.transformer_encoder[0]
    with torch.no_grad():
        block.wo.weight.fill_(1e5)
    save_student(student, tmp_path, "float16", "float8")

    saved = load_file(tmp_path / "model.safetensors")
    name = "transformer_encoder.0.wo.weight"
    torch.testing.assert_close(saved[name].float(), block.wo.weight.bfloat16().float())
    assert saved["transformer_encoder.1.wo.weight"].dtype == torch.float16
    assert f"{name} is stored in bfloat16" in caplog.text


def test_other_vocabularies_and_wider_students_are_refused(teacher, tmp_path):
    """Embeddings of the teacher need its vocabulary and at most its hidden size."""
    encoder = SentenceTransformer(teacher, device="cpu")
    wide = options_for(
        teacher, embeddings_from_teacher=True, model_config={**STUDENT, "hidden_size": 64}
    )

    save_student(build_student(*options_for(teacher), encoder, 32), tmp_path, *["float32"] * 2)
    start = {"model_config": {}, "init_from": str(tmp_path)}
    other = options_for(teacher, embeddings_from_teacher=True, **start)
    assert build_student(*other, encoder, 32)

    encoder.tokenizer.add_tokens(["newword"])
    for refused in (wide, other):
        with pytest.raises(UserError, match="the teacher's vocabulary and a hidden_size of at mos"):
            build_student(*refused, encoder, 32)


# ------------------------------------------------------------------------------------------------
# complete runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory, teacher, files):
    """Return (directory, metrics) of a finished run of 40 steps that stores float8 weights."""
    folder = tmp_path_factory.mktemp("run")
    options = {"embeddings_from_teacher": True, "dtype": "float8", "embedding_dtype": "float8"}
    options |= {"model_name": "animal-encoder", "license": "mit", "base_model": "you/teacher"}
    options["texts"] = [{"path": files[0], "name": "Animals", "license": "CC0"}]
    trainer = {"max_steps": 40, "learning_rate": 3e-3, "save_steps": 20, "eval_steps": 20}

    path = recipe(folder, teacher, files, **options, trainer=trainer)
    assert command(["distill", path]) == 0
    return folder / "student", json.loads((folder / "student" / "result.json").read_text())


def test_training_increases_agreement_with_the_teacher(finished):
    """The agreement with the teacher increases, and the total loss is the sum of its parts."""
    _, figures = finished
    first, last = figures["agreement"][0], figures["agreement"][-1]
    assert (first["step"], last["step"]) == (20, 40)
    assert last["validation_cosine"] > first["validation_cosine"] > 0.2

    assert {
        "validation_cosine",
        "validation_spearman",
        "birds_cosine",
        "birds_spearman",
    } <= last.keys()

    assert figures["losses"][-1]["loss"] < figures["losses"][0]["loss"]
    assert figures["losses"][0]["loss"] == pytest.approx(
        sum(figures["losses"][0][name] for name in ("cosine", "similarity", "memory_bank")),
        abs=1e-3,
    )


def test_output_files_dtypes_and_model_card(finished):
    """The output contains all files, weights of the requested dtypes, and a model card."""
    folder, figures = finished
    names = "modeling_neobert.py attention_neobert.py configuration_neobert.py tokenizer.json"
    assert {*names.split(), "modules.json", "README.md", "result.json"} <= {*os.listdir(folder)}
    assert [row["type"] for row in json.loads((folder / "modules.json").read_text())] == [
        f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")
    ], "older versions of sentence-transformers only support these class names"
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 32

    weights = load_file(folder / "model.safetensors")
    dtypes_by_dimension = {(tensor.dim(), tensor.dtype) for tensor in weights.values()}
    assert dtypes_by_dimension == {(2, torch.float8_e5m2), (1, torch.float16)}

    card = (folder / "README.md").read_text()
    for text in ("# animal-encoder", "| Animals | CC0 |", "license: mit", "birds"):
        assert text in card
    assert "\nbase_model: you/teacher\n" in card and "\nbase_model_relation: finetune\n" in card

    stored = figures["stored"]
    row = (
        f"| validation | {stored['validation_cosine']:.3f} | {stored['validation_spearman']:.3f} |"
    )
    assert row in card and stored["validation_cosine"] == pytest.approx(
        figures["agreement"][-1]["validation_cosine"], abs=0.02
    )

    assert not (folder / "checkpoints").exists(), "a finished run has left its checkpoints"


def test_the_channels_of_a_saved_student_are_balanced(finished):
    """The balancing factors of a saved student are 1, except for the rounding of its weights."""
    student = SentenceTransformer(str(finished[0]), trust_remote_code=True, device="cpu")
    encoder = student[0].auto_model
    largest = smoothing.observe_inputs(encoder, lambda: student.encode(TEXTS, batch_size=1))

    assert len(largest) == 4 * len(encoder.transformer_encoder)
    for layer, values in largest.items():
        factors = smoothing.balanced_factors(layer, values)
        assert (factors == 1).float().mean() > 0.8 and factors.log2().abs().max() <= 1


def test_training_does_not_process_padding(tmp_path, teacher, files, monkeypatch):
    """The blocks process the non-padding tokens only, although the batches are padded."""
    rows_in_block = []
    token_counts = []
    block = type(NeoBERTModel(NeoBERTConfig(**STUDENT)).transformer_encoder[0])
    block_forward = block.forward
    loss_forward = DistillLoss.forward

    def forward(self, hidden, *args, **kwargs):
        if self.training and self.layer_idx == 0:
            rows_in_block.append(hidden.shape[:2].numel())
        return block_forward(self, hidden, *args, **kwargs)

    def loss(self, features, labels):
        token_counts.append(
            (int(features[0]["attention_mask"].sum()), features[0]["attention_mask"].numel())
        )
        return loss_forward(self, features, labels)

    monkeypatch.setattr(block, "forward", forward)
    monkeypatch.setattr(DistillLoss, "forward", loss)

    assert command(["distill", recipe(tmp_path, teacher, files)]) == 0
    assert rows_in_block == [tokens for tokens, _ in token_counts], (
        "the number of rows differs from the number of non-padding tokens"
    )
    assert sum(padded for _, padded in token_counts) > sum(rows_in_block)


def test_batches_depend_on_seed_and_epoch():
    def batches(seed, epoch):
        sampler = ShuffledBatches(range(20), 8, True, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    first = batches(1, 0)
    assert [len(batch) for batch in first] == [8, 8]
    assert len({*first[0], *first[1]}) == 16
    assert first == batches(1, 0)
    assert first != batches(1, 1) and first != batches(2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("muon", [False, True])
def test_interrupted_run_matches_uninterrupted_run(tmp_path, teacher, files, monkeypatch, muon):
    """A run that is interrupted twice ends with the weights of an uninterrupted run.

    One interruption is before the first checkpoint and one after it. The resumed run samples the
    same memory bank.
    """
    options = {
        "trainer": {"max_steps": 12, "save_steps": 4},
        "memory_bank_size": 20,
        "muon": muon,
    }
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()

    assert command(["distill", recipe(tmp_path / "a", teacher, files, **options)]) == 0
    path = recipe(tmp_path / "b", teacher, files, **options)

    train_step = DistillTrainer.training_step
    for step, signal_number, code in ((2, signal.SIGINT, 130), (6, signal.SIGTERM, 143)):

        def interrupted_step(self, *args, step=step, signal_number=signal_number, **kwargs):
            if self.state.global_step >= step:
                os.kill(os.getpid(), signal_number)
            return train_step(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(DistillTrainer, "training_step", interrupted_step)
            assert command(["distill", path]) == code
        assert not (tmp_path / "b" / "student" / "result.json").exists()
    assert command(["distill", path]) == 0

    uninterrupted, resumed = (
        load_file(tmp_path / name / "student" / "model.safetensors") for name in "ab"
    )
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_student_that_is_not_finite_keeps_its_checkpoints(
    tmp_path, teacher, files, monkeypatch, capsys
):
    """A student whose stored weights are infinite is an error that keeps the checkpoints."""

    def save_infinite(student, *args):
        with torch.no_grad():
            student[0].auto_model.layer_norm.weight.fill_(torch.inf)
        save_student(student, *args)

    monkeypatch.setattr(distill_command, "save_student", save_infinite)
    options = {"trainer": {"max_steps": 4, "save_steps": 4}}
    assert command(["distill", recipe(tmp_path, teacher, files, **options)]) == 2
    assert "must have finite metrics, got nan" in capsys.readouterr().err
    output = tmp_path / "student"
    assert not (output / "model.safetensors").exists()
    assert (output / "checkpoints" / "checkpoint-4" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------
# errors


BAD = {
    "no texts": ({"texts": None}, "missing required options: --texts"),
    "a key": ({"texts": [{"path": "x", "colum": "y"}]}, "in texts. Did you mean column?"),
    "one text": ({"texts": ["one.txt"]}, "`texts` must contain at least 2 different texts"),
    "few texts": (
        {"texts": ["few.txt"], "validation_texts": None},
        "at least 3 held-out texts are needed",
    ),
    "two students": ({"init_from": "x"}, "names an existing one. Remove one"),
    "a config's field": ({"model_config": {"nope": 1}}, "has the unknown field 'nope'"),
    "a reserved name": (
        {"validation_texts": [{"path": "few.txt", "name": "validation"}]},
        "got validation. Set `name` in the recipe.",
    ),
    "a torn teacher": ({"teacher": "torn"}, "cannot be loaded"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_is_reported(case, tmp_path, teacher, files, capsys, monkeypatch):
    """Invalid input ends with one error message, and the output directory remains usable."""
    changes, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("a text")
    (tmp_path / "few.txt").write_text("\n".join("abcde"))
    if changes.get("teacher") == "torn":
        weights = shutil.copytree(teacher, tmp_path / "torn") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])

    assert command(["distill", recipe(tmp_path, teacher, files, **changes)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("neobert distill: ") and expected in error, error
    # The output is claimed before data and models are loaded. `run.json` does not block other runs.
    assert {path.name for path in tmp_path.glob("student*/*")} <= {"run.json", ".lock"}


def test_output_is_locked_before_loading_data_and_models(
    tmp_path, teacher, files, capsys, monkeypatch
):
    """The output directory is locked before the texts and the models are loaded."""
    for name in ("read_texts", "load_sentence_transformer"):
        monkeypatch.setattr(
            distill_command,
            name,
            lambda *_, **__: pytest.fail("data or a model was loaded before the output was locked"),
        )

    path = recipe(tmp_path, teacher, files)
    (tmp_path / "student").mkdir()
    with FileLock(tmp_path / "student" / ".lock"):
        assert command(["distill", path]) == 2
    assert "is in use by another run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["distill", "distill_gpu"])
def test_recipes_are_valid(name):
    """The recipes have valid options, one layer per block, and files that the scripts write."""
    options = OPTIONS["distill"].read(["teacher", str(RECIPES / f"{name}.yaml")])
    training_arguments("runs", options.trainer, BLOCKS_ONLY)
    layers = options.model.teacher_layers
    assert len(layers) in (0, options.model.model_config["num_hidden_layers"])
    for entry in options.data.texts:
        folder, file = entry["path"].removeprefix("data/").split("/", 1)
        assert folder in ("texts", "long", "technical", "distill") and file.endswith(".jsonl")
        assert 0 < entry.get("share", 1) <= 1 and entry["name"] and entry["license"]
