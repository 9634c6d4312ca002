"""Test that `neobert export gguf` writes the tensors, keys and tokens that llama.cpp expects.

These tests read the file with the package `gguf` from PyPI and compute its outputs in numpy
(gguf_engine.py). `make test-engines` runs llama.cpp itself.
"""

from contextlib import nullcontext
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
# Single letters, digits and punctuation marks, so that few words are unknown.
WORDS += [mark + c for c in "abcdefghijklmnopqrstuvwxyz0123456789" for mark in ("", "##")]
WORDS += list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~中")
HIDDEN, NUM_HEADS, HEAD_DIM = 64, 4, 16
SMALL = {
    "vocab_size": len(WORDS) + 2,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
}


def tokenizer_of(folder, **options):
    """Write the vocabulary to a directory, and return a BERT tokenizer with it."""
    path = folder / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return BertTokenizerFast(vocab=str(path), vocab_file=str(path), **options)


def pooling_of(mode, *factories, include_prompt=True):
    """Return a pooling. Each factory creates a further module from sentence_transformers.models."""
    models = pytest.importorskip("sentence_transformers.models")
    pooling = models.Pooling(HIDDEN, mode)
    return Pooling(mode, include_prompt, (pooling, *(factory(models) for factory in factories)))


@pytest.fixture
def make(tmp_path):
    """Return a function that builds the `SourceModel` of a tiny random model.

    The function takes a model class, the pooling mode, options of the tokenizer, the head, and
    fields of the configuration.
    """

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
    """Export a source model with options of `neobert export gguf`, and return the file's path."""
    output = source.folder.parent / name
    _, arguments = OPTIONS["export"].read(["gguf", str(source.folder), str(output), *options])
    target.check_output(arguments)
    target.export(source, arguments)
    return output


def read(path):
    """Read a GGUF file.

    Returns:
        The values of its keys by name, without the prefix "neo-bert.", and its tensors by name, as
        (type, float32 values).
    """
    reader = gguf.GGUFReader(path)
    prefix = "neo-bert."
    keys = {name.removeprefix(prefix): field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = tensor.shape.tolist()[::-1]
        tensors[tensor.name] = (tensor.tensor_type.name, values.reshape(shape))
    return keys, tensors


# ------------------------------------------------------------------------------------------------
# Tensors and keys


def test_order_of_qkv_rows(make):
    """Check the order of the rows of `attn_qkv`.

    In NeoBERT, row i of the query of head h is row (h * 3 + 0) * K + i. In llama.cpp, it is row
    h * K + i of the first of three blocks. Keys and values are numbered in the same way.
    """
    source = make()
    _, tensors = read(export(source, "--dtype", "f32"))
    published = source.model.transformer_encoder[1].qkv.weight
    _, written = tensors["blk.1.attn_qkv.weight"]

    for part in range(3):
        for head in range(NUM_HEADS):
            for row in (0, HEAD_DIM - 1):
                expected = published[(head * 3 + part) * HEAD_DIM + row].detach().numpy()
                assert (written[part * HIDDEN + head * HEAD_DIM + row] == expected).all()


def test_names_and_shapes(make):
    """Check the names and shapes of all tensors.

    The feed-forward has 344 inner units: 2/3 of the `intermediate_size` 512, rounded up to a
    multiple of 8.
    """
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

    # The masked-LM decoder is left out, because llama.cpp does not use it.
    assert {name: values.shape for name, (_, values) in tensors.items()} == expected
    assert keys["general.architecture"] == "neo-bert" and keys["feed_forward_length"] == 344


@pytest.mark.parametrize("dtype, file_type", (("f32", 0), ("f16", 1), ("q8_0", 7), ("q5_0", 8)))
def test_types_of_the_tensors(make, dtype, file_type):
    """Check the storage type of each tensor, and the rounding errors of a matrix.

    Vectors stay in float32. The rows of `ffn_down` have 344 values, which is not a multiple of the
    block size 32 of q8_0 and q5_0, so this matrix stays in float16. A q5_0 file has q4_0 token
    embeddings.
    """
    source = make()
    keys, tensors = read(export(source, "--dtype", dtype))
    assert keys["general.file_type"] == file_type

    for name, (storage_type, values) in tensors.items():
        expected = "F32" if values.ndim == 1 else dtype.upper()
        if dtype.startswith("q") and "ffn_down" in name:
            expected = "F16"
        if dtype == "q5_0" and name == "token_embd.weight":
            expected = "Q4_0"
        assert storage_type == expected, f"{name} has the type {storage_type}"

    exact = source.model.transformer_encoder[0].ffn.w12.weight.detach().numpy()
    error = np.abs(tensors["blk.0.ffn_up.weight"][1] - exact)
    # q8_0 has 127 steps up to the largest of 32 values, and stores the step size in float16. Its
    # error is half a step, plus 127 * 2^-11 steps for the rounded step size. The error of float16
    # is 2^-11 of the value, or 2^-25 for subnormal values.
    steps = np.abs(exact).reshape(-1, 32).max(axis=1).repeat(32).reshape(exact.shape) / 127
    half = np.maximum(2.0**-11 * np.abs(exact), 2.0**-25)
    # q5_0 has 16 steps below zero and 15 above, so that a value may be clipped by a whole step.
    bounds = {"f32": 0.0, "f16": half, "q8_0": 0.563 * steps, "q5_0": 127 / 15.9 * steps}
    assert (error <= bounds[dtype]).all()


def test_license_and_base_model_are_exported(make):
    """The license and the base model of the source are written to the general keys."""
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


@pytest.mark.parametrize(
    "pooling, pooling_type", ((None, 1), ("mean", 1), ("cls", 2), ("lasttoken", 3))
)
def test_pooling_type(make, pooling, pooling_type):
    """The pooling of the source is written. A model without pooling gets mean pooling."""
    assert read(export(make(pooling=pooling)))[0]["pooling_type"] == pooling_type


# ------------------------------------------------------------------------------------------------
# Rotary positions


def test_linear_scaling(make):
    """Check the keys of linear RoPE scaling. The factor multiplies the context length."""
    keys, _ = read(export(make(rope_scaling={"rope_type": "linear", "factor": 3.0})))
    values = [keys[name] for name in ("rope.scaling.type", "rope.scaling.factor", "context_length")]
    assert values == ["linear", 3.0, 768]


@pytest.mark.parametrize(
    "more, attention", (({}, 1.0), ({"attention_factor": 1.3, "beta_fast": 32.0}, 1.1417238))
)
def test_yarn(make, more, attention):
    """Check the keys of YaRN.

    llama.cpp multiplies the attention factor by 1 + ln(4) / 10, so that the file contains the
    quotient: 1.3 / 1.138629 = 1.141724. The default factor is 1 + ln(4) / 10 itself.
    """
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **more}
    keys, _ = read(export(make(rope_scaling=scaling), "--dtype", "f32"))
    assert keys["rope.scaling.type"] == "yarn" and keys["rope.scaling.factor"] == 4.0
    assert keys["rope.scaling.original_context_length"] == 64 and keys["context_length"] == 256
    assert keys["rope.scaling.attn_factor"] == pytest.approx(attention, rel=1e-6)


# ------------------------------------------------------------------------------------------------
# Classifier


@pytest.mark.parametrize("labels", (1, 2, 3))
def test_a_classifier(make, labels, capsys):
    """A sequence classifier is exported with its layers and the names of its labels."""
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
# Tokenizer


def test_the_vocabulary(make):
    """Check the tokens, their types and the special tokens.

    In llama.cpp, a token that begins a word has the prefix U+2581, and other tokens have none.
    """
    keys, _ = read(export(make()))
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert keys["tokenizer.ggml.model"] == "bert"
    assert len(tokens) == len(types) == SMALL["vocab_size"]
    assert tokens[:9] == [*WORDS[:6], "\u2581the", "\u2581rain", "ing"]
    assert tokens[WORDS.index("[")] == "\u2581[" and tokens[WORDS.index("#")] == "\u2581#"
    assert types[:7] == [3, 3, 3, 3, 3, 1, 1], (
        "special tokens must be CONTROL (3), and the others NORMAL (1)"
    )
    # Rows of the embedding without a token are UNUSED (5).
    assert tokens[-2:] == [f"[PAD{len(WORDS) + i}]" for i in range(2)] and types[-2:] == [5, 5]

    ids = {"bos": 2, "cls": 2, "eos": 3, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
    assert {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ids} == ids
    added = [keys[f"tokenizer.ggml.add_{name}_token"] for name in ("bos", "eos", "sep")]
    assert added == [True, True, False]


TEXTS = ["The raining!", "naïve São, quickly...", "中the中", "a[b]{c}", "tab\tand  spaces\n"]
TEXTS += ["x" * 30, "€ unknown", "\u200bthe", ""]


@pytest.mark.parametrize("lowercase", (True, False))
def test_tokenization_matches_transformers(make, lowercase):
    """llama.cpp's algorithm returns the token ids of transformers for the exported vocabulary."""
    source = make(tokenizer={"do_lower_case": lowercase})
    engine = gguf_engine.Engine(export(source))
    tokenizer = source.tokenizer
    for text in TEXTS:
        assert engine.tokenize(text) == tokenizer(text)["input_ids"], text


# ------------------------------------------------------------------------------------------------
# Outputs


@pytest.mark.parametrize(
    "scaling", (None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0})
)
@torch.no_grad()
def test_hidden_states_match_torch_with_rope_scaling(make, scaling):
    """The hidden states of llama.cpp's graph are those of torch, with each type of RoPE scaling."""
    source = make(rope_scaling=scaling, rope_theta=500.0)
    engine = gguf_engine.Engine(export(source, "--dtype", "f32"))
    ids = torch.randint(5, len(WORDS), (1, 200))
    expected = source.model(ids).last_hidden_state[0].numpy()
    (actual,) = engine.hidden([ids[0].numpy()])
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.fixture
def published_order(monkeypatch):
    """Export `attn_qkv` with its rows in the order of NeoBERT.

    Other converters write such files. llama.cpp loads them and computes wrong embeddings.
    """
    tensors_of = gguf_file.tensors_of

    def as_published(model):
        tensors = tensors_of(model)
        for i, block in enumerate(model.transformer_encoder):
            tensors[f"blk.{i}.attn_qkv.weight"] = block.qkv.weight.detach().numpy()
        return tensors

    monkeypatch.setattr(gguf_file, "tensors_of", as_published)


def test_comparison_detects_wrong_qkv_order(make, published_order):
    """Check that the comparison of these tests detects the wrong order of rows in `attn_qkv`."""
    source = make()
    engine = gguf_engine.Engine(export(source))
    assert Reference(source).agreement(engine.run).token_cosine < 0.9


@pytest.mark.parametrize(
    "dtype, min_cosine", [("f32", 0.99999), ("f16", 0.999), ("q8_0", 0.98), ("q5_0", 0.9)]
)
@pytest.mark.parametrize("model_class", [NeoBERTModel, NeoBERTForSequenceClassification])
def test_outputs_match_torch(make, model_class, dtype, min_cosine):
    """llama.cpp's graph has the outputs of torch on texts of many lengths, alone and padded."""
    labels = {"num_labels": 3} if model_class is NeoBERTForSequenceClassification else {}
    source = make(model_class, **labels)
    engine = gguf_engine.Engine(export(source, "--dtype", dtype))
    agreement = Reference(source).agreement(engine.run)
    assert agreement.pooled_cosine > min_cosine and (agreement.token_cosine or 1) > min_cosine


def test_check_compares_existing_file(make, published_order, monkeypatch, capsys):
    """`--check` compares an existing file with the model, and does not change the file."""
    source = make(pooling="mean")
    path = export(source, name="theirs.gguf").rename(source.folder.parent / "theirs.bin")
    content_before = path.read_bytes()
    monkeypatch.undo()

    with pytest.raises(
        UserError, match=r"theirs.bin does not contain this model: largest error [1-9]"
    ):
        export(source, "--check", name="theirs.bin")
    assert path.read_bytes() == content_before

    export(source)
    capsys.readouterr()
    export(source, "--check")
    assert "out.gguf contains this model: largest error " in capsys.readouterr().out

    for content, message in (
        (b"my notes", "must be a GGUF file: "),
        (None, "no file "),
    ):
        path.write_bytes(content) if content else path.unlink()
        with pytest.raises(UserError, match=message):
            export(source, "--check", name="theirs.bin")


@pytest.mark.parametrize(
    "dtype, noise, is_accepted",
    [("f16", 0.0, True), ("f16", 0.002, False), ("q8_0", 0.0, True), ("q8_0", 0.02, False)]
    + [("q5_0", 0.0, True), ("q5_0", 0.2, False)],
)
def test_check_rejects_weights_of_another_run(make, dtype, noise, is_accepted):
    """`--check` accepts the rounding of the types in a file, and no larger differences."""
    source = make()
    export(source, "--dtype", dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in source.model.parameters():
            weight += noise * weight.abs().max() * (2 * torch.rand_like(weight) - 1)
    expected = nullcontext() if is_accepted else pytest.raises(UserError, match="does not contain")
    with expected:
        export(source, "--check")


def test_check_rejects_wrong_feed_forward_length(make):
    """`--check` rejects a file with the wrong feed-forward length, which llama.cpp does not load.

    Other converters write 341, 2/3 of the `intermediate_size`, instead of 344.
    """
    path = export(source := make())
    content = path.read_bytes()
    name = b"feed_forward_length"
    # The name is followed by the type of the value, uint32, and by the value.
    value_start = content.index(name) + len(name)
    correct, wrong = (number.to_bytes(4, "little") for number in (344, 341))
    path.write_bytes(content[:value_start] + content[value_start:].replace(correct, wrong, 1))
    with pytest.raises(UserError, match="this model: neo-bert.feed_forward_length differs"):
        export(source, "--check")


# ------------------------------------------------------------------------------------------------
# Unsupported models


def scaled(rope_type, **options):
    """Return fields of the configuration with RoPE scaling."""
    return {"rope_scaling": {"rope_type": rope_type, "factor": 2.0, **options}}


@pytest.mark.parametrize(
    "model_class, changes, message",
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
def test_unsupported_models_are_refused(make, model_class, changes, message):
    """The error for an unsupported model names the other export targets, and no file is written."""
    source = make(model_class, **changes)
    with pytest.raises(
        UserError, match="`neobert export onnx` or `neobert export openvino`"
    ) as error:
        export(source)
    assert message in str(error.value) and not (source.folder.parent / "out.gguf").exists()


def test_unsupported_pooling_is_refused(make):
    """Dense modules, and prompts that are excluded from the pooling, are not supported."""
    source = make()
    dense = pooling_of("mean", lambda models: models.Dense(HIDDEN, 8))
    with pytest.raises(UserError, match="not support Dense layers after pooling"):
        export(replace(source, pooling=dense))

    source = replace(source, pooling=pooling_of("mean", include_prompt=False))
    with pytest.raises(UserError, match="includes prompts in the pooling"):
        export(replace(source, prompts={"query": "the rain ", "document": ""}))
    assert export(replace(source, prompts={"document": ""})).exists(), (
        "a model with empty prompts only must be supported"
    )


def test_float16_overflow_is_an_error(make):
    """Values beyond the range of float16 are an error, because they would become infinite."""
    source = make()
    with torch.no_grad():
        source.model.transformer_encoder[0].wo.weight[0, 0] = 70000.0
    message = r"blk.0.attn_output.weight must be at most 65504 in float16, got 7e\+04. Use --dty"
    with pytest.raises(UserError, match=message):
        export(source, "--dtype", "f16")
    assert export(source, "--dtype", "f32").exists()


def test_unsupported_tokenizer_is_refused(tmp_path):
    """A tokenizer that splits words differently from BERT is not supported."""
    tokenizer = tokenizer_of(tmp_path)
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    writer = gguf.GGUFWriter(None, "neo-bert")
    with pytest.raises(
        UserError, match="WordPiece tokenizer for GGUF, got .*pre_tokenizer Whitespace"
    ):
        gguf_file.add_tokenizer_keys(writer, tokenizer, SMALL["vocab_size"])


# ------------------------------------------------------------------------------------------------
# Output files


def test_invalid_output_paths_are_refused(make):
    """The output must end in .gguf, and must not be inside the model directory."""
    source = make()
    for name, message in (
        ("out.bin", "must be a file that ends in .gguf"),
        ("model/out.gguf", "must not contain each other"),
    ):
        with pytest.raises(UserError, match=message):
            export(source, name=name)


def test_the_same_model_gives_the_same_bytes(make):
    source = make(pooling="mean")
    assert export(source, name="a.gguf").read_bytes() == export(source, name="b.gguf").read_bytes()


def test_command_with_unsupported_head(tmp_path, capsys):
    """Check the command with a model whose head llama.cpp does not support.

    The error recommends `--head base`, which exports the backbone.
    """
    folder = tmp_path / "model"
    output = tmp_path / "out.gguf"
    build(NeoBERTForTokenClassification, num_labels=3, **SMALL).save_pretrained(folder)
    tokenizer_of(folder).save_pretrained(folder)
    with pytest.raises(UserError, match="Use --head base to export its backbone"):
        command.main(["gguf", str(folder), str(output)])

    options = ["--head", "base", "--dtype", "q8_0"]
    assert command.main(["gguf", str(folder), str(output), *options]) == 0
    assert "out.gguf (q8_0, 0.2 MB): largest error " in capsys.readouterr().out
    assert not any("cls" in name for name in read(output)[1])
