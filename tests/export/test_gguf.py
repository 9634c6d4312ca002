"""Test `neobert export gguf`: tensors, keys and tokens as llama.cpp expects them.

`make test-engines` runs llama.cpp itself. Here PyPI `gguf` reads the file, and numpy computes the
graph of the engine.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertTokenizerFast

from neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert.common.errors import UserError
from neobert.conversion.heads import HEADS
from neobert.export import command  # noqa: E402
from neobert.export import gguf as target  # noqa: E402
from neobert.export.check import Reference
from neobert.export.options import OPTIONS
from neobert.export.source import Pooling, SourceModel


gguf = pytest.importorskip("gguf")

from helpers.export_models import build  # noqa: E402

from neobert.export import gguf_file  # noqa: E402

from . import gguf_engine  # noqa: E402


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] [unused0] the rain ##ing sao quick ##ly naive".split()
# Letters, digits and marks, so that few texts have an unknown word.
WORDS += [mark + c for c in "abcdefghijklmnopqrstuvwxyz0123456789" for mark in ("", "##")]
WORDS += list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~中")
HIDDEN, COUNT, HEAD_DIM = 64, 4, 16
SMALL = {
    "vocab_size": len(WORDS) + 2,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": COUNT,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
}


def tokenizer_of(folder, **options):
    path = folder / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return BertTokenizerFast(vocab=str(path), vocab_file=str(path), **options)


def pooling_of(mode, *others, include_prompt=True):
    models = pytest.importorskip("sentence_transformers.models")
    first = models.Pooling(HIDDEN, mode)
    return Pooling(mode, include_prompt, (first, *(other(models) for other in others)))


@pytest.fixture
def make(tmp_path):
    """Return make(model_class, pooling=..., **config) -> SourceModel, as the command reads it."""

    def source(model_class=NeoBERTModel, pooling=None, tokenizer=None, head=None, **changes):
        model = build(model_class, **{**SMALL, **changes})
        model.config.unpad_inputs = False
        (tmp_path / "model").mkdir(exist_ok=True)
        return SourceModel(
            name="model",
            folder=tmp_path / "model",
            head=head or next(head for head in HEADS.values() if head.model_class is model_class),
            model=model,
            tokenizer=tokenizer_of(tmp_path / "model", **(tokenizer or {})),
            tokenizer_folder=tmp_path / "model",
            pooling=pooling_of(pooling) if pooling else None,
            max_length=64,
            prompts={},
            metadata={"license": "cc0-1.0", "base_model": "you/yours"},
        )

    return source


def export(source, *options, name="out.gguf"):
    """The target's part of `neobert export gguf`; returns the path of the file."""
    output = source.folder.parent / name
    _, arguments = OPTIONS["export"].read(["gguf", str(source.folder), str(output), *options])
    target.check_output(arguments)
    target.export(source, arguments)
    return output


def read(path):
    """{name: value} of a file's keys, and {name: (type, numbers)} of its tensors."""
    reader, start = gguf.GGUFReader(path), "neo-bert."
    keys = {name.removeprefix(start): field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = tensor.shape.tolist()[::-1]
        tensors[tensor.name] = (tensor.tensor_type.name, numbers.reshape(shape))
    return keys, tensors


# ------------------------------------------------------------------------------------------------
# layout


def test_queries_keys_and_values_are_three_blocks(make):
    """Head h's query, row i, is row (h * 3 + 0) * K + i in NeoBERT and row h * K + i of the first
    block in llama.cpp; keys and values likewise."""
    source = make()
    _, tensors = read(export(source, "--dtype", "f32"))
    published = source.model.transformer_encoder[1].qkv.weight
    _, written = tensors["blk.1.attn_qkv.weight"]
    for part in range(3):
        for head in range(COUNT):
            for row in (0, HEAD_DIM - 1):
                expected = published[(head * 3 + part) * HEAD_DIM + row].detach().numpy()
                assert (written[part * HIDDEN + head * HEAD_DIM + row] == expected).all()


def test_names_and_shapes(make):
    """512 gives a feed-forward of 344, 2/3 rounded up to a multiple of 8."""
    keys, tensors = read(export(make(NeoBERTForMaskedLM), "--dtype", "f32"))
    block = {
        "attn_norm": (64,),
        "attn_qkv": (192, 64),
        "attn_output": (64, 64),
        "ffn_norm": (64,),
        "ffn_up": (2 * 344, 64),
        "ffn_down": (64, 344),
    }
    expected = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in block.items()}
    expected |= {"token_embd.weight": (SMALL["vocab_size"], 64), "enc.output_norm.weight": (64,)}
    # The masked-LM decoder has no place there.
    assert {name: numbers.shape for name, (_, numbers) in tensors.items()} == expected
    assert keys["general.architecture"] == "neo-bert" and keys["feed_forward_length"] == 344


@pytest.mark.parametrize("dtype, file_type", (("f32", 0), ("f16", 1), ("q8_0", 7), ("q5_0", 8)))
def test_types_of_the_tensors(make, dtype, file_type):
    """Vectors stay float32. w3's rows of 344 are no multiple of 32, the block of q8_0
    and q5_0."""
    source = make()
    keys, tensors = read(export(source, "--dtype", dtype))
    assert keys["general.file_type"] == file_type
    for name, (kind, numbers) in tensors.items():
        expected = "F32" if numbers.ndim == 1 else dtype.upper()
        if dtype.startswith("q") and "ffn_down" in name:
            expected = "F16"
        if dtype == "q5_0" and name == "token_embd.weight":
            expected = "Q4_0"
        assert kind == expected, f"{name} is {kind}"
    exact = source.model.transformer_encoder[0].ffn.w12.weight.detach().numpy()
    error = np.abs(tensors["blk.0.ffn_up.weight"][1] - exact)
    # Half a step: of float16's 11 bits, down to 2^-24; of 1/127 of the largest of 32 numbers, which
    # float16 itself stores (127 times 2^-11).
    steps = np.abs(exact).reshape(-1, 32).max(axis=1).repeat(32).reshape(exact.shape) / 127
    half = np.maximum(2.0**-11 * np.abs(exact), 2.0**-25)
    # q5_0 has 16 steps below zero and 15 above: a number may be cut by a whole one.
    bounds = {"f32": 0.0, "f16": half, "q8_0": 0.563 * steps, "q5_0": 127 / 15.9 * steps}
    assert (error <= bounds[dtype]).all()


def test_license_and_base_model_are_those_that_are_known(make):
    keys, _ = read(export(make()))
    assert keys["general.license"] == "cc0-1.0" and keys["general.base_model.count"] == 1
    assert keys["general.base_model.0.repo_url"] == "https://huggingface.co/you/yours"


def test_keys_of_the_architecture(make):
    keys, _ = read(export(make(rope_theta=5000.0, norm_eps=1e-6, pooling="cls")))
    expected = {"context_length": 256, "embedding_length": 64, "block_count": 2}
    expected |= {"attention.head_count": 4, "attention.head_count_kv": 4, "attention.causal": False}
    expected |= {"rope.freq_base": 5000.0, "rope.scaling.type": "none"}
    expected |= {"vocab_size": SMALL["vocab_size"]}
    assert {name: keys[name] for name in expected} == expected
    assert keys["attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


@pytest.mark.parametrize("pooling, number", ((None, 1), ("mean", 1), ("cls", 2), ("lasttoken", 3)))
def test_pooling_of_the_folder(make, pooling, number):
    assert read(export(make(pooling=pooling)))[0]["pooling_type"] == number


# ------------------------------------------------------------------------------------------------
# rotary


def test_linear_scaling(make):
    keys, _ = read(export(make(rope_scaling={"rope_type": "linear", "factor": 3.0})))
    values = [keys[name] for name in ("rope.scaling.type", "rope.scaling.factor", "context_length")]
    assert values == ["linear", 3.0, 768]


@pytest.mark.parametrize(
    "more, attention", (({}, 1.0), ({"attention_factor": 1.3, "beta_fast": 32.0}, 1.1417238))
)
def test_yarn(make, more, attention):
    """The engine multiplies 1 + ln(4) / 10 in by itself: 1.3 / 1.138629 = 1.141724."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **more}
    keys, _ = read(export(make(rope_scaling=scaling), "--dtype", "f32"))
    assert keys["rope.scaling.type"] == "yarn" and keys["rope.scaling.factor"] == 4.0
    assert keys["rope.scaling.original_context_length"] == 64 and keys["context_length"] == 256
    assert keys["rope.scaling.attn_factor"] == pytest.approx(attention, rel=1e-6)


# ------------------------------------------------------------------------------------------------
# classifier


@pytest.mark.parametrize("labels", (1, 2, 3))
def test_a_classifier(make, labels, capsys):
    names = {i: f"kind {i}" for i in range(labels)}
    source = make(NeoBERTForSequenceClassification, num_labels=labels, id2label=names)
    keys, tensors = read(export(source, "--dtype", "f32"))
    assert keys["pooling_type"] == 4
    assert keys["classifier.output_labels"] == list(names.values())
    for name, layer in (("cls", source.model.dense), ("cls.output", source.model.classifier)):
        assert (tensors[f"{name}.weight"][1] == layer.weight.detach().numpy()).all()
        assert (tensors[f"{name}.bias"][1] == layer.bias.detach().numpy()).all()
    assert "largest error 0.0e+00, relative to" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# tokenizer


def test_the_vocabulary(make):
    keys, _ = read(export(make()))
    words, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert keys["tokenizer.ggml.model"] == "bert"
    assert len(words) == len(kinds) == SMALL["vocab_size"]
    assert words[:9] == [*WORDS[:6], "\u2581the", "\u2581rain", "ing"]
    assert words[WORDS.index("[")] == "\u2581[" and words[WORDS.index("#")] == "\u2581#"
    assert kinds[:7] == [3, 3, 3, 3, 3, 1, 1], "special tokens are CONTROL, the others NORMAL"
    # Rows without a token are UNUSED.
    assert words[-2:] == [f"[PAD{len(WORDS) + i}]" for i in range(2)] and kinds[-2:] == [5, 5]
    ids = {"bos": 2, "cls": 2, "eos": 3, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
    assert {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ids} == ids
    added = [keys[f"tokenizer.ggml.add_{name}_token"] for name in ("bos", "eos", "sep")]
    assert added == [True, True, False]


TEXTS = ["The raining!", "naïve São, quickly...", "中the中", "a[b]{c}", "tab\tand  spaces\n"]
TEXTS += ["x" * 30, "€ unknown", "\u200bthe", ""]


@pytest.mark.parametrize("lowercase", (True, False))
def test_texts_are_cut_alike(make, lowercase):
    """The engine's way of cutting, on the words of the file, against the tokenizer of
    transformers."""
    source = make(tokenizer={"do_lower_case": lowercase})
    engine, tokenizer = gguf_engine.Engine(export(source)), source.tokenizer
    for text in TEXTS:
        assert engine.tokenize(text) == tokenizer(text)["input_ids"], text


# ------------------------------------------------------------------------------------------------
# the numbers


@pytest.mark.parametrize(
    "scaling", (None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0})
)
@torch.no_grad()
def test_the_engine_s_arithmetic_gives_torch_s_vectors(make, scaling):
    source = make(rope_scaling=scaling, rope_theta=500.0)
    engine = gguf_engine.Engine(export(source, "--dtype", "f32"))
    ids = torch.randint(5, len(WORDS), (1, 200))
    expected = source.model(ids).last_hidden_state[0].numpy()
    (actual,) = engine.hidden([ids[0].numpy()])
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.fixture
def published_order(monkeypatch):
    """The rows as other converters write them. Such a file loads in llama.cpp."""
    tensors_of = gguf_file.tensors_of

    def as_published(model):
        tensors = tensors_of(model)
        for i, block in enumerate(model.transformer_encoder):
            tensors[f"blk.{i}.attn_qkv.weight"] = block.qkv.weight.detach().numpy()
        return tensors

    monkeypatch.setattr(gguf_file, "tensors_of", as_published)


def test_rows_in_the_published_order_are_other_vectors(make, published_order):
    """The comparison of the tests sees what llama.cpp would not."""
    source = make()
    engine = gguf_engine.Engine(export(source))
    assert Reference(source).agreement(engine.run).token < 0.9


@pytest.mark.parametrize(
    "dtype, least", [("f32", 0.99999), ("f16", 0.999), ("q8_0", 0.98), ("q5_0", 0.9)]
)
@pytest.mark.parametrize("model_class", [NeoBERTModel, NeoBERTForSequenceClassification])
def test_what_llama_cpp_computes_of_a_file(make, model_class, dtype, least):
    """Over texts of many lengths, alone and padded: the vectors or logits of torch."""
    labels = {"num_labels": 3} if model_class is NeoBERTForSequenceClassification else {}
    source = make(model_class, **labels)
    engine = gguf_engine.Engine(export(source, "--dtype", dtype))
    agreement = Reference(source).agreement(engine.run)
    assert agreement.pooled > least and (agreement.token or 1) > least


def test_a_file_made_elsewhere_can_be_compared(make, published_order, monkeypatch, capsys):
    source = make(pooling="mean")
    path = export(source, name="theirs.gguf").rename(source.folder.parent / "theirs.bin")
    before = path.read_bytes()
    monkeypatch.undo()
    with pytest.raises(
        UserError, match=r"theirs.bin does not contain this model: largest error [1-9]"
    ):
        export(source, "--check", name="theirs.bin")
    assert path.read_bytes() == before
    export(source)
    capsys.readouterr()
    export(source, "--check")
    assert "out.gguf contains this model: largest error " in capsys.readouterr().out
    for content, words in (
        (b"my notes", "must be a GGUF file: "),
        (None, "no file "),
    ):
        path.write_bytes(content) if content else path.unlink()
        with pytest.raises(UserError, match=words):
            export(source, "--check", name="theirs.bin")


def test_a_file_that_llama_cpp_does_not_load(make):
    """341 for 344 is what other converters write."""
    path = export(source := make())
    content, name = path.read_bytes(), b"feed_forward_length"
    at = content.index(name) + len(name)  # then the type of its value, uint32, and the value
    right, wrong = (number.to_bytes(4, "little") for number in (344, 341))
    path.write_bytes(content[:at] + content[at:].replace(right, wrong, 1))
    with pytest.raises(UserError, match="this model: neo-bert.feed_forward_length differs"):
        export(source, "--check")


# ------------------------------------------------------------------------------------------------
# refusals


def scaled(kind, **options):
    return {"rope_scaling": {"rope_type": kind, "factor": 2.0, **options}}


@pytest.mark.parametrize(
    "model_class, changes, words",
    (
        (
            NeoBERTModel,
            {"position_embedding_type": "learned"},
            "must be 'rope' for llama.cpp, got 'learned'",
        ),
        (
            NeoBERTModel,
            {"norm_type": "layer"},
            "`norm_type` must be 'rms' for llama.cpp, got 'layer'",
        ),
        (NeoBERTModel, {"hidden_act": "gelu"}, "must be 'swiglu' for llama.cpp, got 'gelu'"),
        (NeoBERTModel, scaled("dynamic"), "does not support the rope_type 'dynamic'"),
        (
            NeoBERTModel,
            scaled("yarn", truncate=False),
            "`truncate` of YaRN must be True for llama.cpp, got False",
        ),
        (
            NeoBERTModel,
            scaled("yarn", beta_fast=16),
            "`beta_fast` of YaRN must be 32 for llama.cpp, got 16",
        ),
        (NeoBERTModel, {"pooling": "max"}, "must be mean, cls, lasttoken for llama.cpp, got max"),
        (
            NeoBERTForTokenClassification,
            {},
            "support NeoBERTForTokenClassification. Use --head base",
        ),
        (NeoBERTForQuestionAnswering, {}, "support NeoBERTForQuestionAnswering. Use --head base"),
        (
            NeoBERTForSequenceClassification,
            {"classifier_pooling": "mean"},
            "must be 'cls' for llama.cpp, got 'mean'",
        ),
    ),
)
def test_what_cannot_be_carried_is_one_sentence(make, model_class, changes, words):
    source = make(model_class, **changes)
    with pytest.raises(
        UserError, match="`neobert export onnx` or `neobert export openvino`"
    ) as caught:
        export(source)
    assert words in str(caught.value) and not (source.folder.parent / "out.gguf").exists()


def test_a_pooling_that_llama_cpp_does_not_have(make):
    source = make()
    dense = pooling_of("mean", lambda models: models.Dense(HIDDEN, 8))
    with pytest.raises(UserError, match="not support Dense layers after pooling"):
        export(replace(source, pooling=dense))
    source = replace(source, pooling=pooling_of("mean", include_prompt=False))
    with pytest.raises(UserError, match="includes prompts in the pooling"):
        export(replace(source, prompts={"query": "the rain ", "document": ""}))
    assert export(replace(source, prompts={"document": ""})).exists(), "no prompt to leave out"


def test_numbers_that_float16_does_not_reach(make):
    source = make()
    with torch.no_grad():
        source.model.transformer_encoder[0].wo.weight[0, 0] = 70000.0
    words = r"blk.0.attn_output.weight must be at most 65504 in float16, got 7e\+04. Use --dty"
    with pytest.raises(UserError, match=words):
        export(source, "--dtype", "f16")
    assert export(source, "--dtype", "f32").exists()


def test_another_kind_of_tokenizer(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    writer = gguf.GGUFWriter(None, "neo-bert")
    with pytest.raises(
        UserError, match="WordPiece tokenizer for GGUF, got .*pre_tokenizer Whitespace"
    ):
        gguf_file.describe_tokenizer(writer, tokenizer, SMALL["vocab_size"])


# ------------------------------------------------------------------------------------------------
# files


def test_outputs_that_cannot_be(make):
    source = make()
    for name, words in (
        ("out.bin", "must be a file that ends in .gguf"),
        ("model/out.gguf", "must not contain each other"),
    ):
        with pytest.raises(UserError, match=words):
            export(source, name=name)


def test_the_same_model_gives_the_same_bytes(make):
    source = make(pooling="mean")
    assert export(source, name="a.gguf").read_bytes() == export(source, name="b.gguf").read_bytes()


def test_the_command(tmp_path, capsys):
    """From a folder of a head that llama.cpp does not have: refused, and its backbone exported on
    demand."""
    folder, output = tmp_path / "model", tmp_path / "out.gguf"
    build(NeoBERTForTokenClassification, num_labels=3, **SMALL).save_pretrained(folder)
    tokenizer_of(folder).save_pretrained(folder)
    with pytest.raises(UserError, match="Use --head base to export its backbone"):
        command.main(["gguf", str(folder), str(output)])
    options = ["--head", "base", "--dtype", "q8_0"]
    assert command.main(["gguf", str(folder), str(output), *options]) == 0
    assert "out.gguf (q8_0, 0.2 MB): largest error " in capsys.readouterr().out
    assert not any("cls" in name for name in read(output)[1])
