"""Tests of `neobert distill`.

Losses equal their formulas, embeddings of the teacher are computed once, a student starts as the
bag of words nearest to the teacher, training computes no padding and resumes with the same weights,
the output loads elsewhere in every precision, and bad input ends in one message.
"""

import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from helpers.jsonl import write_jsonl


pytest.importorskip("sentence_transformers")

from filelock import FileLock
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
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
    embed_texts,
)
from neobert.distillation.data import (
    Texts,
    TextSource,
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
    memory_bank_loss,
    similarity_loss,
)
from neobert.distillation.options import (
    DataOptions,
    DistillOptions,
    LossOptions,
    ModelOptions,
    StudentOptions,
)
from neobert.distillation.student import (
    build_student,
    embed_single_tokens,
    fit_token_embeddings,
    save_student,
    starts_from_teacher,
    take_embeddings,
)
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.quantization import smoothing
from neobert.training.checkpoints import remove_checkpoints


STUDENT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
NARROW = {**STUDENT, "hidden_size": 16}
COLORS = "red green blue black white brown grey pink".split()
ANIMALS = "cat dog bird fish horse mouse lion wolf".split()
TEXTS = [
    f"a {color} {animal} number {i % 7}" + " and its friends" * (i % 4)
    for i, (color, animal) in enumerate((c, a) for c in COLORS for a in ANIMALS)
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer_dir):
    """Folder of a small BERT sentence encoder with vectors of 32 numbers and unit length."""
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
    folder = tmp_path_factory.mktemp("texts")
    texts, others = folder / "animals.jsonl", folder / "birds.txt"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    others.write_text("\n".join(f"two {color} birds sing {i}" for i, color in enumerate(COLORS)))
    return str(texts), str(others)


def recipe(tmp_path, encoder, files, **changes):
    """Path of a recipe; `trainer` is merged, others replaced, None removed."""
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
# arithmetic


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_similarity_loss_is_the_kl_divergence_of_rows_without_their_diagonal():
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


def test_candidates_are_the_nearest_and_of_every_degree():
    scores = torch.linspace(-0.2, 0.9, 500)[torch.randperm(500)].repeat(2, 1)
    scores[1, scores[1].argmin()] = -2
    chosen = candidates(scores)
    assert chosen.shape == (2, NEAREST + SPREAD + RANDOM)
    for row, columns in zip(scores, chosen):
        values = row[columns]
        nearest = row.sort().values[-NEAREST:]
        torch.testing.assert_close(values[:NEAREST].sort().values, nearest)
        levels = torch.linspace(row[row > -2].min(), row.max(), SPREAD)
        least = torch.stack([row[row >= level - 1e-6].min() for level in levels])
        torch.testing.assert_close(values[NEAREST : NEAREST + SPREAD], least)
    assert len(chosen[:, -RANDOM:].unique()) > RANDOM


def test_memory_bank_loss_is_the_kl_divergence_over_the_candidates():
    student, teacher, bank = unit(3, 8), unit(3, 8), unit(40, 8)
    bank[5] = teacher[0]
    hidden = torch.zeros(3, 40, dtype=torch.bool)
    hidden[0, 5] = True
    torch.manual_seed(1)
    chosen = candidates((teacher @ bank.T).masked_fill(hidden, -2))
    expected = 0.0
    for i, columns in enumerate(chosen):
        others = bank[columns[~hidden[i, columns]]]
        rows = [(others @ x[i] / 0.1).softmax(0) for x in (teacher, student)]
        expected += (rows[0] * (rows[0] / rows[1]).log()).sum() / 3
    torch.manual_seed(1)
    torch.testing.assert_close(memory_bank_loss(student, teacher, bank, 0.1, hidden), expected)
    assert memory_bank_loss(teacher, teacher, bank, 0.1, hidden).abs() < 1e-6


def test_losses_are_weighted_sums_of_their_formulas():
    student, vectors = unit(4, 8), unit(6, 8)
    options = LossOptions(
        cosine_weight=2.0,
        similarity_weight=3.0,
        similarity_temperature=0.1,
        memory_bank_weight=4.0,
        memory_bank_size=6,
    )
    numbers = torch.tensor([5, 0, 2, 3])
    loss = DistillLoss(torch.nn.Identity(), options, 2 * vectors.numpy())
    torch.manual_seed(1)
    losses = loss([{"sentence_embedding": 3 * student}], numbers)
    teachers, bank = vectors[numbers], vectors[loss.stored]
    cosines = [torch.dot(a, b) for a, b in zip(student, teachers)]
    torch.testing.assert_close(losses["cosine"], 2 * (1 - torch.stack(cosines).mean()))
    torch.testing.assert_close(losses["similarity"], 3 * similarity_loss(student, teachers, 0.1))
    torch.manual_seed(1)
    is_own_text = numbers[:, None] == loss.stored
    assert is_own_text.sum(1).tolist() == [1, 1, 1, 1]
    expected = 4 * memory_bank_loss(student, teachers, bank, 0.1, is_own_text)
    torch.testing.assert_close(losses["memory_bank"], expected)


def test_levels_cover_the_range_of_the_visible_scores():
    """A stored vector of the text itself is hidden; the levels start at the lowest other score."""
    scores = torch.linspace(-0.4, 0.9, 2000).repeat(3, 1)
    scores[:, 77] = -2
    spread = candidates(scores)[:, NEAREST : NEAREST + SPREAD]
    levels = torch.linspace(-0.4, 0.9, SPREAD)
    for row, columns in zip(scores, spread):
        assert len(columns.unique()) == SPREAD
        torch.testing.assert_close(row[columns], levels, atol=1.31 / 1999 * 2, rtol=0)


def test_the_memory_bank_is_a_random_sample():
    vectors = unit(2000, 4).numpy()
    stored = DistillLoss(torch.nn.Identity(), LossOptions(memory_bank_size=200), vectors).stored
    assert len(stored.unique()) == 200
    # The mean of 200 of 2,000 numbers has a standard error of 39.
    assert abs(stored.float().mean() - 999.5) < 160


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


def test_shares_and_held_out_texts_are_independent(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"text {i}" for i in range(20000)))
    source = TextSource.from_entry({"path": str(tmp_path / "a.txt"), "share": 0.05})
    texts = read_texts([source], [], 5, 10000)
    total = len(texts.train) + len(texts.validation)
    # Binomial with about 1,000 texts: standard error 0.007.
    assert 0.02 < len(texts.validation) / total < 0.08


def test_held_out_texts_do_not_depend_on_the_order_of_the_file(tmp_path):
    lines = [f"text {i}" for i in range(300)]
    kept = []
    for order in (lines, lines[::-1]):
        (tmp_path / "a.txt").write_text("\n".join(order))
        texts = read_texts([TextSource.from_entry(str(tmp_path / "a.txt"))], [], 20, 10)
        kept.append(texts.validation)
    assert kept[0] == kept[1] and len(kept[0]) == 10


def test_one_long_row_does_not_shrink_the_others(teacher):
    encoder = SentenceTransformer(teacher, device="cpu")
    table = torch.nn.functional.normalize(torch.randn(30522, 32), dim=1)
    table[:, 7] *= 0.01
    table[9] *= 100
    student = build_student(*options_for(teacher, embeddings_from_teacher=True), encoder, 32)
    take_embeddings(student, table, torch.float32)
    weight = student[0].auto_model.get_input_embeddings().weight
    assert weight[:, 7].abs().median() < 0.5


def test_the_default_student_has_half_of_the_layers(teacher):
    encoder = SentenceTransformer(teacher, device="cpu")
    options = options_for(teacher, model_config={})
    assert starts_from_teacher(*options, encoder)
    config = build_student(*options, encoder, 32)[0].auto_model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 1, 4)
    wide = options_for(teacher, model_config={**STUDENT, "hidden_size": 64})
    assert not starts_from_teacher(*wide, encoder)
    loaded = options_for(teacher, model_config={}, init_from="x")
    assert not starts_from_teacher(*loaded, encoder)


def test_a_student_that_learned_nothing_is_reported():
    def warning(start, student, **more):
        metrics = {
            "start": {"validation_cosine": 0.6, "validation_spearman": start},
            "student": {"validation_cosine": 0.6, "validation_spearman": student, **more},
        }
        if "mrr@10" in more:
            metrics["start"]["mrr@10"] = 0.5
        return comparison_warning(metrics)

    assert warning(0.6, 0.8) is None
    assert "not better than its start (validation spearman 0.800" in warning(0.8, 0.8)
    assert "agrees little with its teacher" in warning(0.1, 0.2, validation_cosine=0.176)
    # Pairs decide if there are some.
    assert warning(0.8, 0.7, **{"mrr@10": 0.6}) is None
    assert "(mrr@10 0.500, start 0.500)" in warning(0.6, 0.8, **{"mrr@10": 0.5})
    # Embeddings of another dimension have no cosine with the teacher's.
    narrow = {"start": {"validation_spearman": 0.5}, "student": {"validation_spearman": 0.6}}
    assert comparison_warning(narrow) is None


def test_tensorboard_logs_outlive_the_checkpoints(tmp_path):
    log = tmp_path / "checkpoints" / "runs" / "Nov25" / "events.out"
    log.parent.mkdir(parents=True)
    log.write_text("x")
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir()
    remove_checkpoints(tmp_path / "checkpoints")
    assert (tmp_path / "runs" / "Nov25" / "events.out").read_text() == "x"
    assert not (tmp_path / "checkpoints").exists()


def test_agreement_is_one_with_itself_and_sees_order_alone():
    vectors = np.random.default_rng(0).normal(size=(40, 8))
    same = agreement(vectors * 2, vectors)
    assert same["cosine"] == pytest.approx(1) and same["spearman"] == pytest.approx(1)
    turned = agreement(
        vectors @ np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0], vectors
    )
    # A rotation keeps similarities, not vectors.
    assert turned["spearman"] == pytest.approx(1) and turned["cosine"] < 0.5
    other = agreement(np.random.default_rng(2).normal(size=(40, 8)), vectors)
    assert abs(other["spearman"]) < 0.2
    # Vectors of different widths have no cosine.
    assert "cosine" not in agreement(vectors[:, :5], vectors)


# ------------------------------------------------------------------------------------------------
# data


def test_texts_are_split_by_hash_and_each_comes_once(tmp_path):
    first, second, other = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "other.txt"
    first.write_text("\n".join(f"text {i}" for i in range(200)) + "\n\n text 3 \n")
    second.write_text("\n".join(f"text {i}" for i in range(100, 300)))
    other.write_text("text 5\nquite another\nand one more\nthe last one\n")
    sources = [TextSource.from_entry(str(path)) for path in (first, second, other)]
    texts = read_texts(sources[:2], sources[2:], 20, 1000)
    assert sorted(texts.train + texts.validation) == sorted(f"text {i}" for i in range(300))
    assert all(is_validation_text(text, 20) for text in texts.validation)
    assert not any(is_validation_text(text, 20) for text in texts.train)
    assert 30 < len(texts.validation) < 90
    # A training text is not a text of another kind.
    assert set(texts.other["other"]) == {"quite another", "and one more", "the last one"}
    assert is_validation_text("Some  TEXT", 50) == is_validation_text("some text", 50), (
        "a copy on another side"
    )


def test_a_share_takes_the_same_rows_again(tmp_path):
    rows = [{"a": f"title {i}", "b": f"text {i}"} for i in range(1000)] + [{"a": "x", "b": " "}]
    write_jsonl(tmp_path / "p.jsonl", rows)
    entry = {"path": str(tmp_path / "p.jsonl"), "column": ["a", "b"]}
    texts = list(TextSource.from_entry({**entry, "share": 0.3}).read())
    assert texts == list(TextSource.from_entry({**entry, "share": 0.3}).read())
    titles = [text for text in texts if text.startswith("title")]
    assert 250 < len(titles) < 350
    assert texts[: 2 * len(titles)] == [text for i in titles for text in (i, f"text {i[6:]}")]
    alone = list(TextSource.from_entry({**entry, "column": "a", "share": 0.3}).read())
    assert alone[: len(titles)] == titles
    assert set(texts) < set(TextSource.from_entry({**entry, "share": 0.5}).read())
    with pytest.raises(UserError, match="`share` of .* must be a number, greater than 0 and"):
        TextSource.from_entry({**entry, "share": 0})
    with pytest.raises(UserError, match="c"):
        list(TextSource.from_entry({**entry, "column": ["a", "c"]}).read())


class CountingTeacher:
    embedding_dimension = 2

    def __init__(self, most=1000):
        self.texts, self.most = 0, most

    def tokenize(self, texts):
        return texts

    def embed(self, texts, progress):
        if self.texts + len(texts) > self.most:
            raise KeyboardInterrupt
        self.texts += len(texts)
        return np.array([[len(text), 1.0] for text in texts])


def test_teacher_vectors_are_computed_once_and_go_on_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setattr("neobert.distillation.data.CHUNK_SIZE", 10)
    texts, path = ["x" * i for i in range(1, 26)], tmp_path / "v.npy"
    with pytest.raises(KeyboardInterrupt):
        teacher_embeddings(path, texts, CountingTeacher(15))
    teacher = CountingTeacher()
    vectors = teacher_embeddings(path, texts, teacher)
    assert teacher.texts == 15, "only the missing ones are computed"
    assert vectors.dtype == np.float16
    assert vectors.tolist() == [[i, 1] for i in range(1, 26)]
    assert np.array_equal(teacher_embeddings(path, texts, CountingTeacher(0)), vectors)


def test_runs_share_the_vectors_of_a_work_folder(tmp_path, teacher):
    """Those of the same texts by the same teacher alone."""

    def files(length, texts):
        options = DistillOptions(
            model=ModelOptions(teacher=teacher, output="o"),
            data=DataOptions(texts=["x"], work=str(tmp_path)),
            student=StudentOptions(max_length=length),
        )
        vectors, sets, table = embed_texts(options, False, texts, CountingTeacher())
        assert table is None
        assert vectors.tolist() == [[len(text), 1] for text in texts.train]
        assert sets["validation"][1].dtype == np.float32
        return len(list(tmp_path.rglob("*.npy")))

    texts = Texts(["a", "bc"], ["d", "e", "f"], {})
    assert files(32, texts) == files(32, texts) == 2
    assert files(16, texts) == 4
    assert files(32, replace(texts, train=["bc", "a"])) == 5


# ------------------------------------------------------------------------------------------------
# student


def options_for(teacher, **changes):
    """Return the options of the models and of the student."""
    values = {"model_config": STUDENT, "max_length": 32, **changes}
    names = ModelOptions.__dataclass_fields__
    model = {name: value for name, value in values.items() if name in names}
    student = {name: value for name, value in values.items() if name not in names}
    return ModelOptions(teacher=teacher, output="o", **model), StudentOptions(**student)


def test_the_student_mirrors_the_teachers_modules(teacher):
    encoder = SentenceTransformer(teacher, device="cpu")
    for config, names in (
        (STUDENT, ["Transformer", "Pooling", "Normalize"]),
        (NARROW, ["Transformer", "Pooling", "Dense", "Normalize"]),
    ):
        student = build_student(*options_for(teacher, model_config=config), encoder, 32)
        assert [type(module).__name__ for module in student.children()] == names
        assert student.encode(["a cat"]).shape == (1, 32)


def test_a_narrow_student_goes_on_with_its_projection(teacher, tmp_path):
    """A second run that began with a new map would have lost what the first one learned."""
    encoder = SentenceTransformer(teacher, device="cpu")
    first = build_student(*options_for(teacher, model_config=NARROW), encoder, 32)
    save_student(first, tmp_path, "float32", "float32")
    settings = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    # Versions before 6 refuse keys that they do not know.
    assert settings == {"max_seq_length": 32, "do_lower_case": False}
    start = {"model_config": {}, "init_from": str(tmp_path)}
    again = build_student(*options_for(teacher, **start), encoder, 32)
    torch.testing.assert_close(again[2].linear.weight, first[2].linear.weight)
    texts = ["a cat", "two dogs"]
    np.testing.assert_allclose(again.encode(texts), first.encode(texts), atol=1e-5)
    wider = build_student(*options_for(teacher, **start), encoder, 48)
    assert tuple(wider[2].linear.weight.shape) == (48, 16), "a map to another width does not fit"


def test_a_token_alone_stands_between_the_special_tokens(teacher):
    encoder = PackedEncoder(teacher, dtype="float32", device="cpu", max_length=32)
    embeddings = embed_single_tokens(encoder, 3000)
    tokenizer = encoder.sentence_transformer.tokenizer
    words = [tokenizer.convert_ids_to_tokens(number) for number in (1999, 2500, 2999)]
    expected = encoder.encode(words)
    np.testing.assert_allclose(embeddings[[1999, 2500, 2999]], expected, atol=1e-5)


def test_the_table_is_the_ridge_regression_of_bags_of_words():
    generator = np.random.default_rng(0)
    tokens = [generator.integers(12, size=generator.integers(2, 9)) for _ in range(300)]
    alone, vectors = generator.normal(size=(12, 4)), generator.normal(size=(300, 4))
    alone[:, 3] = vectors[:, 3] = 0  # all-MiniLM-L6-v2 has two such coordinates
    bags = np.array([np.bincount(ids, minlength=12) / len(ids) for ids in tokens])
    targets = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    start = bags @ alone
    scaled = alone * (start * targets).sum() / (start**2).sum()
    system = bags.T @ bags + 0.02 * np.eye(12)
    expected = scaled + np.linalg.solve(system, bags.T @ (targets - bags @ scaled))
    table = fit_token_embeddings(alone, tokens, vectors, rounds=12)
    np.testing.assert_allclose(table, expected, atol=1e-5)
    few, error = fit_token_embeddings(alone, tokens, vectors), np.linalg.norm(scaled - expected)
    assert np.linalg.norm(few - expected) < 0.1 * error


def first_vectors(student, table, text):
    """The student's vector of a text, and the mean of the table's rows scaled to length 1."""
    ids = student.tokenizer(text)["input_ids"]
    expected = torch.nn.functional.normalize(table[ids].mean(0), dim=0)
    return student.encode(text), expected.numpy()


def test_a_student_begins_as_the_mean_of_rows_that_keep_their_lengths(teacher):
    encoder = SentenceTransformer(teacher, device="cpu")
    table = torch.randn(30522, 32) * torch.rand(30522, 1)
    table[:, 7] *= 0.1
    options = options_for(teacher, embeddings_from_teacher=True, freeze_embeddings=True)
    student = build_student(*options, encoder, 32)
    take_embeddings(student, table.clone(), torch.float32)
    model = student[0].auto_model
    assert model.layer_norm.weight[7] == 0, "the coordinate that says least"
    table[:, 7] = 0
    for text in ("a cat", "two dogs and a bird sing", TEXTS[5]):
        embedding, expected = first_vectors(student, table, text)
        np.testing.assert_allclose(embedding, expected, atol=1e-4)
    weight = model.get_input_embeddings().weight
    assert not weight.requires_grad
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(30522))
    # They must be trained with as they are stored.
    take_embeddings(student, table.clone(), torch.float8_e5m2)
    assert torch.equal(weight, weight.to(torch.float8_e5m2).float())
    embedding, expected = first_vectors(student, table, TEXTS[5])
    assert 0.95 < embedding @ expected < 0.99999


def test_a_narrow_student_begins_with_the_principal_components(teacher):
    encoder = SentenceTransformer(teacher, device="cpu")
    table = torch.randn(30522, 15) @ torch.randn(15, 32) + 1e-4 * torch.randn(30522, 32)
    narrow = build_student(
        *options_for(teacher, model_config=NARROW, embeddings_from_teacher=True), encoder, 32
    )
    take_embeddings(narrow, table.clone(), torch.float32)
    assert narrow[0].auto_model.get_input_embeddings().weight.requires_grad
    for text in ("a cat", TEXTS[5]):
        embedding, expected = first_vectors(narrow, table, text)
        np.testing.assert_allclose(embedding, expected, atol=1e-3)


def test_other_vocabularies_and_wider_students_are_refused(teacher, tmp_path):
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
# complete


@pytest.fixture(scope="module")
def finished(tmp_path_factory, teacher, files):
    """A finished run of 40 steps that stores small: its folder and its figures."""
    folder = tmp_path_factory.mktemp("run")
    options = {"embeddings_from_teacher": True, "dtype": "float8", "embedding_dtype": "float8"}
    options |= {"model_name": "animal-encoder", "license": "mit", "base_model": "you/teacher"}
    options["texts"] = [{"path": files[0], "name": "Animals", "license": "CC0"}]
    trainer = {"max_steps": 40, "learning_rate": 3e-3, "save_steps": 20, "eval_steps": 20}
    path = recipe(folder, teacher, files, **options, trainer=trainer)
    assert command(["distill", path]) == 0
    return folder / "student", json.loads((folder / "student" / "figures.json").read_text())


def test_the_student_comes_nearer_to_its_teacher(finished):
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


def test_the_folder_is_complete_and_small(finished):
    folder, figures = finished
    names = "modeling_neobert.py attention_neobert.py configuration_neobert.py tokenizer.json"
    assert {*names.split(), "modules.json", "README.md", "figures.json"} <= {*os.listdir(folder)}
    assert [row["type"] for row in json.loads((folder / "modules.json").read_text())] == [
        f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")
    ], "older versions of the library know these names alone"
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 32
    weights = load_file(folder / "model.safetensors")
    kinds = {(tensor.dim(), tensor.dtype) for tensor in weights.values()}
    assert kinds == {(2, torch.float8_e5m2), (1, torch.float16)}
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
    assert not (folder / "checkpoints").exists(), "a finished run needs no checkpoints"


def test_the_channels_of_a_saved_student_are_balanced(finished):
    """Their factors are 1, except for the rounding of the weights in float8."""
    student = SentenceTransformer(str(finished[0]), trust_remote_code=True, device="cpu")
    encoder = student[0].auto_model
    largest = smoothing.observe_inputs(encoder, lambda: student.encode(TEXTS, batch_size=1))
    assert len(largest) == 4 * len(encoder.transformer_encoder)
    for layer, values in largest.items():
        factors = smoothing.balanced_factors(layer, values)
        assert (factors == 1).float().mean() > 0.8 and factors.log2().abs().max() <= 1


def test_no_padding_is_computed_in_training(tmp_path, teacher, files, monkeypatch):
    seen, real = [], []
    block = type(NeoBERTModel(NeoBERTConfig(**STUDENT)).transformer_encoder[0])
    original, losses = block.forward, DistillLoss.forward

    def forward(self, hidden, *args, **kwargs):
        if self.training and self.layer_idx == 0:
            seen.append(hidden.shape[:2].numel())
        return original(self, hidden, *args, **kwargs)

    def loss(self, features, labels):
        real.append(
            (int(features[0]["attention_mask"].sum()), features[0]["attention_mask"].numel())
        )
        return losses(self, features, labels)

    monkeypatch.setattr(block, "forward", forward)
    monkeypatch.setattr(DistillLoss, "forward", loss)
    assert command(["distill", recipe(tmp_path, teacher, files)]) == 0
    assert seen == [tokens for tokens, _ in real], "blocks saw other rows than the real tokens"
    assert sum(padded for _, padded in real) > sum(seen)


def test_batches_are_a_function_of_the_seed_and_the_epoch():
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
def test_interruptions_lose_nothing(tmp_path, teacher, files, monkeypatch):
    """One before the first checkpoint, one after it: the stored texts are drawn again alike."""
    options = {"trainer": {"max_steps": 12, "save_steps": 4}, "memory_bank_size": 20}
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert command(["distill", recipe(tmp_path / "a", teacher, files, **options)]) == 0
    path = recipe(tmp_path / "b", teacher, files, **options)
    train_step = DistillTrainer.training_step
    for step, number, code in ((2, signal.SIGINT, 130), (6, signal.SIGTERM, 143)):

        def interrupted(self, *args, step=step, number=number, **kwargs):
            if self.state.global_step >= step:
                os.kill(os.getpid(), number)
            return train_step(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(DistillTrainer, "training_step", interrupted)
            assert command(["distill", path]) == code
        assert not (tmp_path / "b" / "student" / "figures.json").exists()
    assert command(["distill", path]) == 0
    first, second = (load_file(tmp_path / name / "student" / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------------
# what may go wrong


BAD = {
    "no texts": ({"texts": None}, "--texts must be given"),
    "a key": ({"texts": [{"path": "x", "colum": "y"}]}, "in texts. Did you mean column?"),
    "one text": ({"texts": ["one.txt"]}, "`texts` must contain at least 2 different texts"),
    "few texts": (
        {"texts": ["few.txt"], "validation_texts": None},
        "at least 3 held-out texts are needed",
    ),
    "two students": ({"init_from": "x"}, "names an existing one. Remove one"),
    "a config's field": ({"model_config": {"nope": 1}}, "has the unknown field 'nope'"),
    "a torn teacher": ({"teacher": "torn"}, "cannot be loaded"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    case, tmp_path, teacher, files, capsys, monkeypatch
):
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
    # The output is claimed before data and models are loaded; `run.json` alone blocks no other run.
    assert {path.name for path in tmp_path.glob("student*/*")} <= {"run.json", ".lock"}


def test_a_second_process_is_refused_before_texts_and_models_are_loaded(
    tmp_path, teacher, files, capsys, monkeypatch
):
    for name in ("read_texts", "load_sentence_transformer"):
        monkeypatch.setattr(
            distill_command, name, lambda *_, **__: pytest.fail("loaded before the claim")
        )
    path = recipe(tmp_path, teacher, files)
    (tmp_path / "student").mkdir()
    with FileLock(tmp_path / "student" / ".lock"):
        assert command(["distill", path]) == 2
    assert "is in use by another run" in capsys.readouterr().err
