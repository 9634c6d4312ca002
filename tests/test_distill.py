"""Pins distillation: losses against their formulas, teacher vectors that are computed once, token
embeddings by PCA, training without padding, the same weights after kill -9, an output that loads
elsewhere in every precision, and bad input in one sentence that leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml


pytest.importorskip("sentence_transformers")

from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules
from transformers import AutoTokenizer, BertConfig, BertModel

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.__main__ import main as command
from neobert.common.errors import UserError
from neobert.embeddings.distill import DistillTrainer, train
from neobert.embeddings.distill_batches import SimilarLengths
from neobert.embeddings.distill_data import (
    TeacherVectors,
    TextSource,
    is_held_out,
    read_texts,
    token_lengths,
)
from neobert.embeddings.distill_loss import DistillLoss, agreement, similarity_loss
from neobert.embeddings.distill_student import (
    as_shipped,
    build_student,
    save_student,
    take_embeddings,
)
from neobert.embeddings.options import DistillArguments


ROOT = Path(__file__).resolve().parent.parent
STUDENT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
NARROW = {**STUDENT, "hidden_size": 16}
COLOURS = "red green blue black white brown grey pink".split()
ANIMALS = "cat dog bird fish horse mouse lion wolf".split()
TEXTS = [
    f"a {colour} {animal} number {i % 7}" + " and its friends" * (i % 4)
    for i, (colour, animal) in enumerate((c, a) for c in COLOURS for a in ANIMALS)
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
    others.write_text("\n".join(f"two {colour} birds sing {i}" for i, colour in enumerate(COLOURS)))
    return str(texts), str(others)


def recipe(tmp_path, encoder, files, name="recipe.yaml", **changes):
    """Path of a recipe; `trainer` is merged, others replaced, None removed."""
    trainer = {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_steps": 3,
        "warmup_steps": 1,
    }
    values = {
        "teacher": encoder,
        "texts": [files[0]],
        "other_texts": [files[1]],
        "model_config": STUDENT,
        "output": str(tmp_path / "student"),
    }
    values |= {
        "held_out_percent": 20,
        "max_length": 32,
        **changes,
        "trainer": {**trainer, **changes.pop("trainer", {})},
    }
    path = tmp_path / name
    path.write_text(
        yaml.safe_dump({key: value for key, value in values.items() if value is not None})
    )
    return str(path)


# ------------------------------------------------------------------------------------------------
# arithmetic


def test_similarity_loss_is_the_kl_divergence_of_rows_without_their_diagonal():
    student, teacher = torch.randn(5, 8), torch.randn(5, 6)
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
    assert similarity_loss(teacher * 3, teacher, 0.1).abs() < 1e-6, (
        "the same directions must cost nothing"
    )


def test_losses_are_weighted_sums_of_their_formulas(teacher):
    arguments = DistillArguments(
        teacher=teacher,
        texts=["x"],
        output="o",
        model_config=STUDENT,
        cosine_weight=2.0,
        mse_weight=3.0,
        similarity_weight=0.0,
    )
    student, vectors = torch.randn(4, 8), torch.randn(4, 8)
    found = DistillLoss(torch.nn.Identity(), arguments).losses(student, vectors)
    assert found.keys() == {"cosine", "mse"}, "a loss of weight 0 must not be computed"
    cosines = [torch.dot(a, b) / a.norm() / b.norm() for a, b in zip(student, vectors)]
    torch.testing.assert_close(found["cosine"], 2 * (1 - torch.stack(cosines).mean()))
    torch.testing.assert_close(found["mse"], 3 * ((student - vectors) ** 2).sum() / 32)


def test_agreement_is_one_with_itself_and_sees_order_alone():
    vectors = np.random.default_rng(0).normal(size=(40, 8))
    same = agreement(vectors * 2, vectors)
    assert same["cosine"] == pytest.approx(1) and same["spearman"] == pytest.approx(1)
    turned = agreement(
        vectors @ np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0], vectors
    )
    assert turned["spearman"] == pytest.approx(1) and turned["cosine"] < 0.5, (
        "a rotation keeps similarities, not vectors"
    )
    other = agreement(np.random.default_rng(2).normal(size=(40, 8)), vectors)
    assert abs(other["spearman"]) < 0.2
    assert "cosine" not in agreement(vectors[:, :5], vectors), (
        "vectors of different widths have no cosine"
    )


# ------------------------------------------------------------------------------------------------
# data


def test_texts_are_split_by_hash_and_each_comes_once(tmp_path):
    first, second, other = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "other.txt"
    first.write_text("\n".join(f"text {i}" for i in range(200)) + "\n\n text 3 \n")
    second.write_text("\n".join(f"text {i}" for i in range(100, 300)))
    other.write_text("text 5\nquite another\nand one more\nthe last one\n")
    texts = read_texts(
        [TextSource.from_entry(str(first)), TextSource.from_entry(str(second))],
        [TextSource.from_entry(str(other))],
        20,
        1000,
    )
    assert sorted(texts.train + texts.held_out) == sorted(f"text {i}" for i in range(300))
    assert all(is_held_out(text, 20) for text in texts.held_out) and not any(
        is_held_out(text, 20) for text in texts.train
    )
    assert 30 < len(texts.held_out) < 90
    assert set(texts.other["other"]) == {"quite another", "and one more", "the last one"}, (
        "a training text is not a text of another kind"
    )
    assert is_held_out("Some  TEXT", 50) == is_held_out("some text", 50), (
        "copies must stay on one side"
    )


class CountingTeacher:
    def __init__(self):
        self.texts = 0

    def tokenize(self, texts):
        return texts

    def embed(self, texts, progress):
        self.texts += len(texts)
        return np.array([[len(text), 1.0] for text in texts])


def test_teacher_vectors_are_computed_once_and_go_on_at_the_missing_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("neobert.embeddings.distill_data.SHARD", 10)
    texts, teacher = ["x" * i for i in range(1, 26)], CountingTeacher()
    vectors = TeacherVectors(tmp_path / "v", texts, {"teacher": "a"}, lambda: teacher)
    assert teacher.texts == 25 and len(vectors) == 25 and vectors.width == 2
    assert vectors.rows([24, 0, 10]).tolist() == [[25, 1], [1, 1], [11, 1]]
    TeacherVectors(
        tmp_path / "v",
        texts,
        {"teacher": "a"},
        lambda: pytest.fail("the teacher was loaded though nothing is missing"),
    )
    (tmp_path / "v" / "00001.npy").unlink()
    TeacherVectors(tmp_path / "v", texts, {"teacher": "a"}, lambda: teacher)
    assert teacher.texts == 35, "only the missing shard may be computed"
    for changed, identity, other in (
        ("teacher", {"teacher": "b"}, texts),
        ("texts", {"teacher": "a"}, texts[::-1]),
    ):
        with pytest.raises(UserError, match=f"holds vectors of another run \\({changed}"):
            TeacherVectors(tmp_path / "v", other, identity, lambda: teacher)


def test_vectors_that_float16_cannot_hold_are_refused(tmp_path):
    teacher = CountingTeacher()
    teacher.embed = lambda texts, progress: np.full((len(texts), 2), 1e6)
    with pytest.raises(UserError, match="not finite in float16"):
        TeacherVectors(tmp_path / "v", ["a", "b"], {}, lambda: teacher)
    assert not list((tmp_path / "v").glob("*.npy")), "half a shard was left"


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-3], lambda data: data[:20], lambda data: b""],
    ids=["short", "header", "empty"],
)
def test_lengths_of_a_torn_file_are_counted_anew(tmp_path, tokenizer_dir, damage):
    tokenizer, path = AutoTokenizer.from_pretrained(tokenizer_dir), tmp_path / "lengths.npy"
    lengths = token_lengths(TEXTS[:9], tokenizer, 32, path)
    whole = path.read_bytes()
    assert token_lengths(TEXTS[:9], None, 32, path).tolist() == lengths.tolist(), "they are kept"
    path.write_bytes(damage(whole))
    assert token_lengths(TEXTS[:9], tokenizer, 32, path).tolist() == lengths.tolist()
    assert path.read_bytes() == whole and [file.name for file in tmp_path.iterdir()] == [
        "lengths.npy"
    ]


def test_batches_hold_texts_of_nearly_one_length_and_each_text_once():
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    sampler = SimilarLengths(range(1000), batch_size=8, lengths=lengths, group=2, seed=1)
    sampler.pool = 16
    batches = list(sampler)
    assert len(batches) == len(sampler) == 124 and all(len(batch) == 8 for batch in batches)
    assert len({i for batch in batches for i in batch}) == 992, "a text came twice"
    assert np.mean([np.ptp(lengths[batch]) for batch in batches]) < 4
    steps = [batches[i] + batches[i + 1] for i in range(0, 124, 2)]
    assert np.mean([np.ptp(lengths[step]) for step in steps]) < 6, (
        "the processes of a step have texts of different lengths"
    )
    means = [lengths[step].mean() for step in steps]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.5, (
        "the lengths of neighbouring steps follow an order"
    )
    assert list(sampler) == batches, "an epoch must repeat exactly, or a run could not be resumed"
    sampler.set_epoch(1)
    assert list(sampler) != batches
    assert [len(batch) for batch in SimilarLengths(range(5), batch_size=8, lengths=[3] * 5)] == [
        5
    ], "few texts are one batch"


# ------------------------------------------------------------------------------------------------
# student


def arguments_for(teacher, **changes):
    return DistillArguments(
        **{
            "teacher": teacher,
            "texts": ["x"],
            "output": "o",
            "model_config": STUDENT,
            "max_length": 32,
            **changes,
        }
    )


def test_the_student_mirrors_the_teachers_modules(teacher):
    encoder = SentenceTransformer(teacher, device="cpu")
    same = build_student(arguments_for(teacher), encoder, 32)
    assert [type(module).__name__ for module in same.children()] == [
        "Transformer",
        "Pooling",
        "Normalize",
    ]
    narrow = build_student(arguments_for(teacher, model_config=NARROW), encoder, 32)
    assert [type(module).__name__ for module in narrow.children()] == [
        "Transformer",
        "Pooling",
        "Dense",
        "Normalize",
    ]
    assert narrow.encode(["a cat"]).shape == (1, 32)
    assert as_shipped(narrow, keep_projection=True).encode(["a cat"]).shape == (1, 32)
    assert as_shipped(narrow, keep_projection=False).encode(["a cat"]).shape == (1, 16)


def test_a_narrow_student_goes_on_with_its_projection(teacher, tmp_path):
    """A second run that began with a new map would have lost what the first one learned."""
    encoder = SentenceTransformer(teacher, device="cpu")
    first = build_student(arguments_for(teacher, model_config=NARROW), encoder, 32)
    save_student(first, tmp_path, "float32", "float32")
    settings = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    assert settings == {"max_seq_length": 32, "do_lower_case": False}, (
        "versions before 6 refuse keys that they do not know"
    )
    again = build_student(
        arguments_for(teacher, model_config={}, init_from=str(tmp_path)), encoder, 32
    )
    assert [type(module).__name__ for module in again.children()] == [
        "Transformer",
        "Pooling",
        "Dense",
        "Normalize",
    ]
    torch.testing.assert_close(again[2].linear.weight, first[2].linear.weight)
    np.testing.assert_allclose(
        again.encode(["a cat", "two dogs"]), first.encode(["a cat", "two dogs"]), atol=1e-5
    )
    wider = build_student(
        arguments_for(teacher, model_config={}, init_from=str(tmp_path)), encoder, 48
    )
    assert tuple(wider[2].linear.weight.shape) == (48, 16), "a map to another width does not fit"


def test_a_student_with_added_blocks_begins_where_the_shorter_one_ended(teacher, tmp_path):
    encoder = SentenceTransformer(teacher, device="cpu")
    first = build_student(arguments_for(teacher, model_config=STUDENT), encoder, 32)
    save_student(first, tmp_path, "float32", "float32")
    longer = build_student(
        arguments_for(teacher, model_config={}, init_from=str(tmp_path), added_blocks=2),
        encoder,
        32,
    )
    count = STUDENT["num_hidden_layers"] + 2
    assert longer[0].auto_model.config.num_hidden_layers == count
    texts = ["a cat", "two dogs in the sun"]
    np.testing.assert_allclose(longer.encode(texts), first.encode(texts), atol=1e-6)
    longer.train()
    longer(longer.tokenize(texts))["sentence_embedding"].sum().backward()
    for block in longer[0].auto_model.transformer_encoder[-2:]:
        assert block.wo.weight.grad.abs().max() > 0 and block.ffn.w3.weight.grad.abs().max() > 0
    save_student(longer, tmp_path / "longer", "float8", "float8")
    again = SentenceTransformer(str(tmp_path / "longer"), device="cpu", trust_remote_code=True)
    assert again[0].auto_model.config.num_hidden_layers == count


def test_float8_is_for_matrices(teacher, tmp_path):
    encoder = SentenceTransformer(teacher, device="cpu")
    save_student(
        build_student(arguments_for(teacher, model_config=STUDENT), encoder, 32),
        tmp_path,
        "float8",
        "float8",
    )
    weights = load_file(tmp_path / "model.safetensors")
    assert {(t.dim(), t.dtype) for t in weights.values()} == {
        (2, torch.float8_e5m2),
        (1, torch.float16),
    }


def test_token_embeddings_come_from_the_teacher(teacher):
    encoder = SentenceTransformer(teacher, device="cpu")
    source = encoder[0].auto_model.get_input_embeddings().weight.detach()
    arguments = arguments_for(
        teacher, embeddings_from_teacher=True, freeze_embeddings=True, embedding_dtype="float8"
    )
    weight = build_student(arguments, encoder, 32)[0].auto_model.get_input_embeddings().weight
    assert not weight.requires_grad
    assert torch.equal(weight, source.to(torch.float8_e5m2).float()), (
        "they must be trained with as they are stored"
    )
    narrow = build_student(
        arguments_for(teacher, model_config=NARROW, embeddings_from_teacher=True), encoder, 32
    )
    weight = narrow[0].auto_model.get_input_embeddings().weight
    gram = source.double() @ source.double()[:500].T
    kept = (weight.double() @ weight.double()[:500].T - gram).square().sum()
    _, values, right = torch.linalg.svd(source.double(), full_matrices=False)
    best = source.double() @ right[:16].T @ right[:16]
    torch.testing.assert_close(
        kept, (best @ best[:500].T - gram).square().sum(), rtol=1e-4, atol=1e-6
    )
    assert weight.requires_grad


def test_other_vocabularies_and_wider_students_are_refused(teacher, tmp_path):
    encoder = SentenceTransformer(teacher, device="cpu")
    wide = build_student(
        arguments_for(teacher, model_config={**STUDENT, "hidden_size": 64}), encoder, 32
    )
    with pytest.raises(
        UserError, match="hidden_size is 64, but the teacher's token embeddings have 32"
    ):
        take_embeddings(wide, encoder, torch.float32)
    student = build_student(arguments_for(teacher), encoder, 32)
    student.tokenizer.add_tokens(["newword"])
    with pytest.raises(UserError, match="needs a student with the teacher's vocabulary"):
        take_embeddings(student, encoder, torch.float32)


# ------------------------------------------------------------------------------------------------
# complete


@pytest.fixture(scope="module")
def finished(tmp_path_factory, teacher, files):
    """A finished run of 40 steps that stores small: its folder, its work folder and its figures."""
    folder = tmp_path_factory.mktemp("run")
    options = {
        "embeddings_from_teacher": True,
        "dtype": "float16",
        "embedding_dtype": "float8",
        "title": "animal-encoder",
        "license": "mit",
        "base_model": "you/teacher",
    }
    options["texts"] = [{"path": files[0], "name": "Animals", "license": "CC0"}]
    path = recipe(
        folder,
        teacher,
        files,
        **options,
        trainer={"max_steps": 40, "learning_rate": 3e-3, "save_steps": 20, "eval_steps": 20},
    )
    assert command(["distill", path]) == 0
    return folder / "student", json.loads((folder / "student" / "figures.json").read_text())


def test_the_student_comes_nearer_to_its_teacher(finished):
    _, figures = finished
    first, last = figures["agreement"][0], figures["agreement"][-1]
    assert (first["step"], last["step"]) == (20, 40)
    assert last["held_out_cosine"] > first["held_out_cosine"] > 0.2
    assert {"held_out_cosine", "held_out_spearman", "birds_cosine", "birds_spearman"} <= last.keys()
    assert figures["losses"][-1]["loss"] < figures["losses"][0]["loss"]
    assert figures["losses"][0]["loss"] == pytest.approx(
        figures["losses"][0]["cosine"] + figures["losses"][0]["similarity"], abs=1e-3
    )


def test_the_folder_is_complete_and_small(finished):
    folder, figures = finished
    assert {
        "modeling_neobert.py",
        "attention_neobert.py",
        "configuration_neobert.py",
        "tokenizer.json",
        "modules.json",
        "README.md",
        "distill.json",
    } <= set(os.listdir(folder))
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert (
        pooling["pooling_mode"] == "mean"
        and pooling["pooling_mode_mean_tokens"] is True
        and pooling["pooling_mode_cls_token"] is False
    )
    assert [row["type"] for row in json.loads((folder / "modules.json").read_text())] == [
        f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")
    ], "older versions of the library know these names alone"
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 32
    weights = load_file(folder / "model.safetensors")
    assert {
        name: tensor.dtype
        for name, tensor in weights.items()
        if "encoder.weight" in name or "qkv" in name
    } == {
        "encoder.weight": torch.float8_e5m2,
        **{f"transformer_encoder.{i}.qkv.weight": torch.float16 for i in range(2)},
    }
    card = (folder / "README.md").read_text()
    assert (
        "# animal-encoder" in card
        and "| Animals | CC0 |" in card
        and "license: mit" in card
        and "birds" in card
    )
    assert "\nbase_model: you/teacher\n" in card and "\nbase_model_relation: finetune\n" in card
    assert f"{figures['precision']['bfloat16']['held_out_spearman']:.3f}" in card
    assert not (folder.parent / "student.work" / "checkpoints").exists(), (
        "a finished run needs no checkpoints"
    )


def test_every_precision_gives_the_same_vectors(finished):
    _, figures = finished
    assert set(figures["precision"]) == {"float32", "bfloat16", "float16"}
    for dtype, found in figures["precision"].items():
        assert found["to_float32"] > 0.999, dtype
        assert found["held_out_cosine"] == pytest.approx(
            figures["precision"]["float32"]["held_out_cosine"], abs=0.01
        )


@pytest.mark.slow
def test_it_loads_with_sentence_transformers_alone(finished, tmp_path):
    """In a process that does not know this package."""
    folder, _ = finished
    code = (
        "import sys, json; from sentence_transformers import SentenceTransformer; "
        f"model = SentenceTransformer({str(folder)!r}, trust_remote_code=True, device='cpu'); "
        "assert 'neobert' not in sys.modules; print(json.dumps([str(model[0].auto_model.dtype), "
        "model.encode(['a red cat']).tolist()]))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert found.returncode == 0, found.stderr
    dtype, vectors = json.loads(found.stdout.splitlines()[-1])
    assert dtype == "torch.float32", (
        "what is stored small must be computed with in float32 where nothing else is asked for"
    )
    np.testing.assert_allclose(
        vectors, SentenceTransformer(str(folder), device="cpu").encode(["a red cat"]), atol=1e-5
    )
    assert np.linalg.norm(vectors) == pytest.approx(1, abs=1e-5)


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
    assert sum(padded for _, padded in real) > sum(seen), (
        "no batch had padding, so this test would be vacuous"
    )


def test_pairs_and_what_is_alike_share_the_batches_of_a_run(tmp_path, teacher, monkeypatch):
    pairs, seen, losses = tmp_path / "pairs.jsonl", [], DistillLoss.forward
    rows = [{"short": text, "long": f"{text}, which is a long text"} for text in TEXTS]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"path": str(pairs), "column": "short", "pair": "long"}

    def loss(self, features, labels):
        seen.append(labels)
        return losses(self, features, labels)

    monkeypatch.setattr(DistillLoss, "forward", loss)
    likeness = {}
    for neighbours in (0, 3):
        seen.clear()
        (tmp_path / str(neighbours)).mkdir()
        changes = {"texts": [entry], "other_texts": None, "neighbours": neighbours}
        path = recipe(tmp_path / str(neighbours), teacher, (str(pairs), ""), **changes)
        assert command(["distill", path]) == 0 and len(seen) == 6
        similarities = [torch.nn.functional.normalize(labels.float(), dim=-1) for labels in seen]
        likeness[neighbours] = float(torch.stack([(v @ v.T).mean() for v in similarities]).mean())
    assert likeness[3] > likeness[0] + 0.01
    figures = json.loads((tmp_path / "3" / "student" / "figures.json").read_text())
    seconds = [row["cpu_seconds"] for row in figures["losses"]]
    assert len(seconds) == 6 and seconds == sorted(seconds) and 0 < seconds[0] < seconds[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_interruptions_end_as_none(tmp_path, teacher, files, monkeypatch, seed):
    """Two and three random ones, by Ctrl-C or SIGTERM; some before the first checkpoint; batches of
    texts of one length and of texts that are alike."""
    steps, near = {"max_steps": 14, "save_steps": 2}, {"neighbours": 2 * seed}
    for name in "ab":
        (tmp_path / name).mkdir()
    path = recipe(tmp_path / "a", teacher, files, trainer=steps, **near)
    assert command(["distill", path]) == 0
    random, train_step = np.random.default_rng(seed), DistillTrainer.training_step
    for step in sorted(random.integers(1, 8, size=2 + seed).tolist()):
        number = signal.SIGTERM if random.integers(2) else signal.SIGINT

        def interrupted(self, *given, step=step, number=number, **more):
            if self.state.global_step >= step:
                os.kill(os.getpid(), number)
            return train_step(self, *given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(DistillTrainer, "training_step", interrupted)
            path = recipe(tmp_path / "b", teacher, files, trainer=steps, **near)
            assert command(["distill", path]) == (143 if number == signal.SIGTERM else 130)
    path = recipe(tmp_path / "b", teacher, files, trainer=steps, **near)
    assert command(["distill", path]) == 0
    first, second = (load_file(tmp_path / name / "student" / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(tmp_path, teacher, files):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    steps = {"max_steps": 12, "save_steps": 2}
    assert command(["distill", recipe(tmp_path / "a", teacher, files, trainer=steps)]) == 0
    argv = [
        sys.executable,
        "-m",
        "neobert",
        "distill",
        recipe(tmp_path / "b", teacher, files, trainer=steps),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    checkpoints = tmp_path / "b" / "student.work" / "checkpoints"
    for _ in range(1200):
        if list(checkpoints.glob("checkpoint-*/complete.json")):
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "b" / "student").exists(), (
        "the run was over before it was killed, so this test would be vacuous"
    )
    assert command(["distill", argv[-1]]) == 0
    first, second = (load_file(tmp_path / name / "student" / "model.safetensors") for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first), (
        "a killed run ended with other weights"
    )


def test_a_student_starts_from_an_existing_model(tmp_path, teacher, files, tokenizer_dir):
    torch.manual_seed(5)
    NeoBERTModel(NeoBERTConfig(**STUDENT, max_position_embeddings=64)).save_pretrained(
        tmp_path / "model"
    )
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    path = recipe(
        tmp_path,
        teacher,
        files,
        model_config=None,
        init_from=str(tmp_path / "model"),
        trainer={"max_steps": 1, "learning_rate": 1e-5},
    )
    assert command(["distill", path]) == 0
    after = load_file(tmp_path / "student" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] - after[name]).abs().max() < 1e-4 for name in before), (
        "one small step cannot lead far from the start"
    )
    assert json.loads((tmp_path / "student" / "figures.json").read_text())["earlier"] == []

    (tmp_path / "again").mkdir()
    again = recipe(
        tmp_path / "again",
        teacher,
        files,
        model_config=None,
        init_from=str(tmp_path / "student"),
        trainer={"max_steps": 2},
    )
    assert command(["distill", again]) == 0
    figures = json.loads((tmp_path / "again" / "student" / "figures.json").read_text())
    assert [run["steps"] for run in figures["earlier"]] == [1] and figures["steps"] == 2
    assert (
        "begun from a student of 1 steps"
        in (tmp_path / "again" / "student" / "README.md").read_text()
    )


# ------------------------------------------------------------------------------------------------
# what may go wrong


BAD = {
    "no texts": ({"texts": []}, "there are no texts to learn from"),
    "a missing file": ({"texts": ["nowhere.jsonl"]}, "there is no file nowhere.jsonl"),
    "an unknown key": (
        {"texts": [{"path": "x", "colum": "y"}]},
        "each of texts must be a file or a mapping",
    ),
    "no student": (
        {"model_config": {}},
        "give either model_config, for a new student, or --init-from",
    ),
    "two students": (
        {"init_from": "x"},
        "give either model_config, for a new student, or --init-from",
    ),
    "blocks added to nothing": ({"added_blocks": 1}, "added_blocks is for --init-from"),
    "no loss": ({"cosine_weight": 0, "similarity_weight": 0}, "at least one of cosine_weight"),
    "a wrong config": (
        {"model_config": {"hidden_size": 30, "num_attention_heads": 4}},
        "hidden_size must be a multiple",
    ),
    "an unknown config field": (
        {"model_config": {"nope": 1}},
        "model_config has an unknown field 'nope'",
    ),
    "a size of zero": (
        {"model_config": {"hidden_size": 0}},
        "hidden_size must be a positive whole number",
    ),
    "a negative weight": ({"mse_weight": -1}, "mse_weight must be at least 0, but -1.0 was given"),
    "a wrong temperature": (
        {"similarity_temperature": 0},
        "similarity_temperature must be above 0",
    ),
    "no teacher there": ({"teacher": "./nowhere"}, "there is no ./nowhere; give a folder"),
    "a wrong dtype": ({"dtype": "int3"}, "dtype must be one of float32, bfloat16, float16, float8"),
    "no number": (
        {"cosine_weight": float("nan")},
        "cosine_weight must be a finite number, but nan was given",
    ),
    "no number in the config": (
        {"model_config": {"norm_eps": float("inf")}},
        "model_config must be made of finite numbers",
    ),
    "a huge length": ({"max_length": 10**20}, "max_length must be at most 2147483647, but 1"),
    "a path of a wrong type": ({"texts": [{"path": 5}]}, "there is no file 5, named in texts"),
    "a name of a wrong type": (
        {"texts": [{"path": "x", "name": [1]}]},
        "must be text, but [1] was given",
    ),
    "no step": (
        {"trainer": {"max_steps": 0}},
        "max_steps must be at least 1, or -1 where num_train_epochs counts, but 0 was given",
    ),
    "no epoch": ({"trainer": {"num_train_epochs": 0}}, "num_train_epochs must be above 0"),
    "no learning rate": (
        {"trainer": {"learning_rate": float("nan")}},
        "learning_rate must be a finite number, but nan was given",
    ),
    "a wrong beta": ({"trainer": {"adam_beta1": 2}}, "Trainer's options: Invalid beta parameter"),
    "an empty batch": (
        {"trainer": {"per_device_train_batch_size": 0}},
        "per_device_train_batch_size must be at least 1",
    ),
    "half of a GPU's precision": ({"trainer": {"fp16": True, "use_cpu": True}}, "fp16 needs a GPU"),
    "a tracker that is not there": (
        {"trainer": {"report_to": "nonsense"}},
        "report_to 'nonsense' is unknown",
    ),
    "an unknown attention": (
        {"attn_implementation": "foo"},
        "attn_implementation foo cannot be used here",
    ),
    "a text of no use": (
        {"held_out_percent": 50, "texts": ["one.txt"]},
        "texts must hold at least 2 different texts",
    ),
    "a torn teacher": ({"teacher": "torn"}, "cannot be loaded"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    case, tmp_path, teacher, files, capsys, monkeypatch
):
    changes, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("a text")
    if changes.get("teacher") == "torn":
        weights = shutil.copytree(teacher, tmp_path / "torn") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    assert command(["distill", recipe(tmp_path, teacher, files, **changes)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("neobert distill: ") and expected in error, error
    assert not (tmp_path / "student").exists() and not (tmp_path / "student.work").exists(), (
        "something was written"
    )


@pytest.mark.slow
def test_what_a_user_had_is_never_replaced(tmp_path, teacher, files, capsys):
    path = recipe(tmp_path, teacher, files, trainer={"max_steps": 1})
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "thesis.txt").write_text("years of work")
    for more in ([], ["--overwrite"]):
        assert command(["distill", path, *more]) == 2
        assert "was not written by neobert distill" in capsys.readouterr().err
    assert (tmp_path / "student" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "student" / "thesis.txt").unlink()
    assert command(["distill", path]) == 0
    before = {
        file: file.read_bytes() for file in (tmp_path / "student").rglob("*") if file.is_file()
    }
    assert command(["distill", path]) == 0, "a finished run is no error"
    assert "finished already with these settings" in capsys.readouterr().out
    assert command(["distill", path, "--learning-rate", "1e-5"]) == 2
    assert "holds a finished student of other settings (trainer differ)" in capsys.readouterr().err
    assert before == {
        file: file.read_bytes() for file in (tmp_path / "student").rglob("*") if file.is_file()
    }
    assert command(["distill", path, "--overwrite"]) == 0
    (tmp_path / "student" / "notes.txt").write_text("mine")
    assert command(["distill", path, "--overwrite"]) == 2
    assert (
        "notes.txt" in capsys.readouterr().err
        and (tmp_path / "student" / "notes.txt").read_text() == "mine"
    )


def test_other_settings_do_not_go_on_with_a_run(tmp_path, teacher, files, capsys):
    work = tmp_path / "student.work"
    work.mkdir()
    (work / "mine.txt").write_text("x")
    assert command(["distill", recipe(tmp_path, teacher, files)]) == 2
    assert (
        "student.work holds other files (mine.txt); choose another output"
        in capsys.readouterr().err
    )
    (work / "mine.txt").unlink()
    (work / "checkpoints").mkdir()
    (work / "checkpoints" / "best.pt").write_text("precious")
    for text in ('{"experiment": "mine"}', '["mine"]'):
        (work / "run.json").write_text(text)
        assert command(["distill", recipe(tmp_path, teacher, files), "--overwrite"]) == 2
        assert (
            "run.json is damaged, or not of this version of neobert distill"
            in capsys.readouterr().err
        )
        assert (work / "run.json").read_text() == text and (
            work / "checkpoints" / "best.pt"
        ).read_text() == "precious"
    shutil.rmtree(work)
    work.mkdir()
    arguments = arguments_for(teacher, texts=[files[0]], output=str(tmp_path / "student"))
    train(arguments, {"max_steps": 1, "per_device_train_batch_size": 4})
    assert (
        command(
            [
                "distill",
                recipe(
                    tmp_path,
                    teacher,
                    files,
                    name="other.yaml",
                    output=str(tmp_path / "second"),
                    work=str(work),
                ),
            ]
        )
        == 2
    )
    assert "holds a run with other settings (" in capsys.readouterr().err
    assert (work / "vectors" / "train" / "00000.npy").is_file(), "the vectors were lost"


@pytest.mark.parametrize(
    "work, output", [("student/work", "student"), ("work", "work/student"), ("same", "same")]
)
def test_one_of_the_two_folders_in_the_other_is_refused_before_the_training(
    tmp_path, teacher, files, capsys, work, output
):
    assert (
        command(
            [
                "distill",
                recipe(
                    tmp_path,
                    teacher,
                    files,
                    work=str(tmp_path / work),
                    output=str(tmp_path / output),
                ),
            ]
        )
        == 2
    )
    assert (
        "the output " in capsys.readouterr().err
        and not (tmp_path / work).exists()
        and not (tmp_path / output).exists()
    )


def test_a_continued_run_leaves_what_the_user_has_in_its_folder(
    tmp_path, teacher, files, monkeypatch
):
    def interrupted(self, *given, **more):
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return train_step(self, *given, **more)

    train_step, path = DistillTrainer.training_step, recipe(tmp_path, teacher, files)
    with monkeypatch.context() as patch:
        patch.setattr(DistillTrainer, "training_step", interrupted)
        assert command(["distill", path]) == 130
    mine = [
        tmp_path / "student.work" / name
        for name in ("notes.txt", "checkpoints/notes.txt", "checkpoints/checkpoint-3/notes.txt")
    ]
    for file in mine:
        file.write_text("mine")
    assert command(["distill", path]) == 0
    assert all(file.read_text() == "mine" for file in mine)
    assert [
        file.name for file in (tmp_path / "student.work" / "checkpoints").rglob("*.safetensors")
    ] == []


def test_a_diverged_run_writes_no_student(tmp_path, teacher, files, capsys):
    path = recipe(tmp_path, teacher, files, trainer={"learning_rate": 1e30, "max_grad_norm": 0})
    assert command(["distill", path]) == 2
    assert "training diverged" in capsys.readouterr().err
    assert not (tmp_path / "student").exists()
