"""Pins what a checkpoint becomes: the architecture from shapes and configuration, tied decoders,
dtypes; and that sizes, names and values that cannot be are refused.
"""

import json
import time

import pytest
import torch
from conversion_helpers import convert, save
from safetensors.torch import load_file

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
)
from neobert.common.errors import UserError
from neobert.conversion.architecture import derived_fields, expected_shapes, plan
from neobert.conversion.heads import HEADS


@pytest.mark.parametrize("how", ["absent", "shared", "said"])
def test_tied_decoder(tmp_path, model, tiny_config, without_proof, how):
    state = dict(model.state_dict())
    said = {"tie_word_embeddings": True} if how == "said" else {}
    if how == "absent":
        del state["decoder.weight"]
    else:
        state["decoder.weight"] = (
            state["model.encoder.weight"]
            if how == "shared"
            else state["model.encoder.weight"].clone()
        )
    convert(
        save(tmp_path / "run", state, **tiny_config, **said),
        tmp_path / "out",
        "--tokenizer",
        "none",
    )
    assert "decoder.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    tied = NeoBERTForMaskedLM.from_pretrained(tmp_path / "out")
    assert tied.config.tie_word_embeddings and torch.equal(
        tied.decoder.weight, state["model.encoder.weight"]
    )


@pytest.mark.parametrize("intermediate_size", [96, 160, 168])
def test_architecture_from_the_shapes(tmp_path, without_proof, capsys, intermediate_size):
    config = NeoBERTConfig(
        vocab_size=100,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=intermediate_size,
    )
    model = NeoBERTForMaskedLM(config)
    convert(save(tmp_path / "run", model.state_dict()), tmp_path / "out", "--tokenizer", "none")
    printed = capsys.readouterr().out
    read = NeoBERTConfig.from_pretrained(tmp_path / "out")
    for field in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "norm_type",
        "ffn_inner_size",
    ):
        assert getattr(read, field) == getattr(config, field), f"{field} was not derived rightly"
    assert int(2 * read.intermediate_size / 3) == read.ffn_inner_size, (
        "a size that needs no rounding is the one to choose"
    )
    assert (
        f"intermediate_size {read.intermediate_size}" in printed
        and "published head_dim of 64" in printed
    )
    assert "so the default: norm_eps 1e-05, max_position_embeddings 4096" in printed


def test_published_size_is_derived():
    """The 250M model's tensors, section 2 of the published layout."""
    shapes = {
        "model.encoder.weight": (30522, 768),
        "model.transformer_encoder.27.ffn.w12.weight": (4096, 768),
    }
    fields = derived_fields(
        {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    )
    assert (
        fields["intermediate_size"] == 3072
        and fields["num_attention_heads"] == 12
        and fields["num_hidden_layers"] == 28
    )


def test_heads_must_be_given_when_64_does_not_divide(tmp_path, without_proof):
    model = NeoBERTModel(
        NeoBERTConfig(
            vocab_size=50,
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=96,
        )
    )
    source = save(tmp_path / "run", model.state_dict())
    with pytest.raises(
        UserError, match="hidden size 48 is not a multiple of 64.*num_attention_heads: N"
    ):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    (tmp_path / "heads.json").write_text('{"num_attention_heads": 4}')
    convert(source, tmp_path / "out", "--tokenizer", "none", "--config", tmp_path / "heads.json")
    assert NeoBERTConfig.from_pretrained(tmp_path / "out").num_attention_heads == 4


def test_a_given_configuration_replaces_the_one_beside_the_checkpoint(
    tmp_path, model, tiny_config, without_proof
):
    """docs/conversion.md: the two are not merged; what `--config` leaves out comes from the shapes,
    then from the published model."""
    source = save(tmp_path / "run", model.state_dict(), **tiny_config, norm_eps=1e-3)
    (tmp_path / "given.json").write_text(
        '{"num_attention_heads": 4, "max_position_embeddings": 77}'
    )
    convert(source, tmp_path / "out", "--tokenizer", "none", "--config", tmp_path / "given.json")
    read = NeoBERTConfig.from_pretrained(tmp_path / "out")
    assert (read.max_position_embeddings, read.norm_eps, read.hidden_size) == (
        77,
        1e-5,
        tiny_config["hidden_size"],
    )


@pytest.mark.parametrize(
    "dtype, step", [("float32", 0.0), ("bfloat16", 2**-8), ("float16", 2**-11)]
)
def test_dtypes(tmp_path, checkpoint, model, without_proof, dtype, step):
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--dtype", dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(value.dtype) for value in written.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    for name, value in model.state_dict().items():
        error = (written[name].float() - value).abs().max() / value.abs().max().clamp(min=1e-9)
        assert error <= step, f"{name} is off by more than the rounding of {dtype}"


def test_own_dtype_is_kept_and_mixed_ones_become_float32(
    tmp_path, model, tiny_config, without_proof, capsys
):
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    convert(save(tmp_path / "a", state, **tiny_config), tmp_path / "out", "--tokenizer", "none")
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["decoder.weight"].dtype == torch.bfloat16
    )
    for dtype in (torch.float32, torch.float16):
        state["decoder.bias"] = state["decoder.bias"].to(dtype)
        convert(
            save(tmp_path / f"{dtype}", state, **tiny_config),
            tmp_path / f"out {dtype}",
            "--tokenizer",
            "none",
        )
        assert {
            value.dtype
            for value in load_file(tmp_path / f"out {dtype}" / "model.safetensors").values()
        } == {torch.float32}
    assert "with rounding" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# refusals


WO = "model.transformer_encoder.1.wo.weight"


def put(name, *shape, dtype=torch.float32, place=None, value=0.0):
    """A change of a state dict: a tensor of zeros, or one number in the tensor that is there."""

    def change(state):
        state[name] = torch.zeros(shape, dtype=dtype) if place is None else state[name].clone()
        if place is not None:
            state[name][place] = value

    return change


def drop(*words):
    def change(state):
        for name in [name for name in state if any(word in name for word in words)]:
            del state[name]

    return change


def unchanged(state):
    pass


@pytest.mark.parametrize(
    "change, fields, options, message",
    [
        (
            drop("1.wo.", "decoder.bias"),
            {},
            [],
            r"missing tensors: .*1\.wo\.weight, .*decoder.bias",
        ),
        (
            drop("encoder.1."),
            {},
            [],
            r"missing tensors: model.transformer_encoder.1.attention_norm",
        ),
        (put("model.x.\x1b[2J", 2), {}, [], r"unexpected tensors: model.x.\\x1b\[2J\."),
        (put("x" * 100_000, 2), {}, [], r"unexpected tensors: x{197}\.\.\."),
        (put(f"module.{WO}", 64, 64), {}, [], r"1\.wo\.weight twice under different"),
        (put(WO, 32, 64), {}, [], r"wrong shape .*wo\.weight is \(32, 64\) instead of \(64, 64\)"),
        (put(WO, 64, 64, dtype=torch.int8), {}, [], r"dtype that is not converted: .*torch.int8"),
        (put(WO, 64, 64, dtype=torch.float8_e4m3fn), {}, [], "dtype that is not converted"),
        (put(WO, place=(3, 5), value=float("nan")), {}, [], rf"{WO} holds numbers that are NaN"),
        (
            put("decoder.bias", place=7, value=-float("inf")),
            {},
            [],
            "decoder.bias holds numbers that are NaN or infinite",
        ),
        (
            put(WO, place=0, value=-1e5),
            {},
            ["--dtype", "float16"],
            "wo.weight holds numbers beyond the range of float16",
        ),
        (drop("model.encoder.weight"), {}, [], "no token embedding"),
        (drop("transformer_encoder"), {}, [], "no transformer layers"),
        (drop("ffn"), {}, [], "no feed-forward of a NeoBERT"),
        (put("model.encoder.weight", 200), {}, [], "model.encoder.weight should be a matrix"),
        (put("model.transformer_encoder.0.ffn.w12.weight", 12, 64), {}, [], "wrong shape"),
        (put("model.transformer_encoder.999999999.wo.weight", 2), {}, [], "unexpected tensors"),
        (
            unchanged,
            {"hidden_size": 128},
            [],
            r"encoder.weight is \(200, 64\) instead of \(200, 128",
        ),
        (
            unchanged,
            {"num_hidden_layers": 2},
            [],
            "unexpected tensors: model.transformer_encoder.2",
        ),
        (unchanged, {"num_hidden_layers": 10**9}, [], "num_hidden_layers"),
        (unchanged, {"num_attention_heads": 5}, [], "must be a multiple of num_attention_heads"),
        (unchanged, {"vocab_size": 10**18}, [], "no model can be made|wrong shape"),
        (unchanged, {"vocab_size": 10**40}, [], "no model can be made of this configuration"),
        (unchanged, {"vocab_size": "many"}, [], "vocab_size must be a positive whole number"),
        (unchanged, {"rope_scaling": "yarn"}, [], "must be a dictionary"),
        (unchanged, {"hidden_act": ["gelu"]}, [], "must be one of|does not describe a NeoBERT"),
        (unchanged, {"tie_word_embeddings": True}, [], "decoder.weight and .* differ"),
        (drop("decoder.weight"), {"tie_word_embeddings": False}, [], "missing tensors: decoder.w"),
        (unchanged, {}, ["--head", "sequence-classification"], "missing tensors: dense.weight"),
    ],
    ids=range(29),
)
def test_refused(tmp_path, model, tiny_config, change, fields, options, message):
    state = dict(model.state_dict())
    change(state)
    source, start = save(tmp_path / "run", state, **{**tiny_config, **fields}), time.monotonic()
    with pytest.raises(UserError, match=message) as refusal:
        convert(source, tmp_path / "out", "--tokenizer", "none", *options)
    assert time.monotonic() - start < 20
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 2000
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "something was left behind"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_labels": 10**9}, "has 1000000000 labels, but classifier.weight has 3 rows"),
        ({"num_labels": "many"}, "has 'many' labels"),
        ({"id2label": {"0": "a", "1": "b"}}, "has 2 labels, but classifier.weight has 3 rows"),
        ({"id2label": {"a": "x", "b": "y", "c": "z"}}, "should map the numbers from 0 on to names"),
        ({"id2label": {"0": "x", "1": "y", "3": "z"}}, "should map the numbers from 0 on to names"),
        ({"id2label": ["x", "y", "z"]}, "should map the numbers from 0 on to names"),
        ({"id2label": 3}, "should map the numbers from 0 on to names"),
    ],
    ids=range(7),
)
def test_labels_that_cannot_be(tiny_config, fields, message):
    config = NeoBERTConfig(**tiny_config, num_labels=3)
    with pytest.raises(UserError, match=message):
        plan(NeoBERTForSequenceClassification(config).state_dict(), {**tiny_config, **fields})


def test_labels_that_can_be(tiny_config):
    state = NeoBERTForSequenceClassification(
        NeoBERTConfig(**tiny_config, num_labels=3)
    ).state_dict()
    names = {"0": "x", "1": "y", "2": "z"}
    given = {
        **tiny_config,
        "id2label": names,
        "label2id": {"x": 0, "y": 1, "z": 2},
        "num_labels": 3,
        "problem_type": "regression",
    }
    config = plan(state, given).config
    assert (
        config.id2label == {0: "x", 1: "y", 2: "z"}
        and config.num_labels == 3
        and config.problem_type == "regression"
    )


def test_labels_in_another_order_keep_their_numbers(tiny_config):
    """As in a JSON file whose keys are sorted as text: 0, 1, 10, 11, 2, ..."""
    state = NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config, num_labels=12))
    names = {number: f"label {number}" for number in sorted(map(str, range(12)))}
    config = plan(
        state.state_dict(), {**tiny_config, "id2label": names, "label2id": {"x": 5}}
    ).config
    assert config.id2label == {number: f"label {number}" for number in range(12)}
    assert config.label2id == {f"label {number}": number for number in range(12)}


def test_expected_shapes_are_those_of_the_model(tiny_config):
    config = NeoBERTConfig(
        **tiny_config, hidden_act="gelu", norm_type="layer", position_embedding_type="learned"
    )
    for head in HEADS.values():
        assert expected_shapes(head, config) == {
            name: tuple(v.shape) for name, v in head.model_class(config).state_dict().items()
        }
    assert config.num_hidden_layers == 3


def test_float64_becomes_float32(tmp_path, model, tiny_config, without_proof):
    convert(
        save(
            tmp_path / "run", {n: v.double() for n, v in model.state_dict().items()}, **tiny_config
        ),
        tmp_path / "out",
        "--tokenizer",
        "none",
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.float32}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in written.items())


def test_row_0_of_learned_positions_is_padding():
    shapes = {"encoder": (200, 64), "positional_embedding": (129, 64)}
    shapes |= {"transformer_encoder.0.ffn.0": (96, 64)}
    tensors = {f"model.{name}.weight": torch.empty(shape) for name, shape in shapes.items()}
    assert derived_fields(tensors)["max_position_embeddings"] == 128
