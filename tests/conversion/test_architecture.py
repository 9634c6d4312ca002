"""Test the architecture of a converted checkpoint.

Covers sizes that are derived from shapes or read from a configuration, tied decoders, dtypes, and
the rejection of invalid sizes, names and values.
"""

import json

import pytest
import torch
from helpers.conversion_helpers import convert, save
from safetensors.torch import load_file

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
)
from neobert.common.errors import UserError
from neobert.conversion.architecture import derived_fields, plan


def converted(source, tmp_path, *options):
    """Convert a checkpoint without a tokenizer, and return the tensors that were written."""
    convert(source, tmp_path / "out", "--tokenizer", "none", *options)
    return load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("how", ["absent", "shared", "said"])
def test_tied_decoder(tmp_path, model, tiny_config, without_proof, how):
    """Check that a tied decoder is detected and not written.

    The decoder is tied if it is absent, if it shares the memory of the embedding, or if its values
    are equal and the configuration sets `tie_word_embeddings`.
    """
    state = dict(model.state_dict())
    tying_fields = {}
    embedding = state["model.encoder.weight"]
    if how == "absent":
        del state["decoder.weight"]
    else:
        state["decoder.weight"] = embedding if how == "shared" else embedding.clone()
    if how == "said":
        tying_fields = {"tie_word_embeddings": True}

    written = converted(save(tmp_path / "run", state, **tiny_config, **tying_fields), tmp_path)

    assert "decoder.weight" not in written
    tied = NeoBERTForMaskedLM.from_pretrained(tmp_path / "out")
    assert tied.config.tie_word_embeddings and torch.equal(tied.decoder.weight, embedding)


@pytest.mark.parametrize("intermediate_size", [96, 160, 168])
def test_architecture_from_the_shapes(tmp_path, without_proof, caplog, intermediate_size):
    """Check the configuration that is derived from the tensors alone.

    Several values of `intermediate_size` lead to the same shapes, because the model rounds the size
    up. The value that needs no rounding is chosen.
    """
    caplog.set_level("INFO", "neobert")
    sizes = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 2}
    config = NeoBERTConfig(num_attention_heads=2, intermediate_size=intermediate_size, **sizes)

    converted(save(tmp_path / "run", NeoBERTForMaskedLM(config).state_dict()), tmp_path)
    printed = caplog.text
    written_config = NeoBERTConfig.from_pretrained(tmp_path / "out")

    names = (*sizes, "num_attention_heads", "hidden_act", "norm_type", "ffn_inner_size")
    for field in names:
        assert getattr(written_config, field) == getattr(config, field), f"{field} is wrong"
    assert int(2 * written_config.intermediate_size / 3) == written_config.ffn_inner_size
    assert f"intermediate_size {written_config.intermediate_size}" in printed
    assert "published head_dim of 64" in printed
    assert "so the default: norm_eps 1e-05, max_position_embeddings 4096" in printed


def test_published_size_is_derived():
    """Check the sizes that are derived from the shapes of the published 250M model."""
    shapes = {"encoder": (30522, 768), "transformer_encoder.27.ffn.w12": (4096, 768)}
    tensors = {f"model.{name}.weight": torch.empty(shapes[name], device="meta") for name in shapes}
    fields = derived_fields(tensors)
    sizes = ("intermediate_size", "num_attention_heads", "num_hidden_layers")
    assert [fields[name] for name in sizes] == [3072, 12, 28]


def test_row_0_of_learned_positions_is_padding():
    """The maximum length is one less than the number of rows, because row 0 is for padding."""
    shapes = {"encoder": (200, 64), "positional_embedding": (129, 64)}
    shapes |= {"transformer_encoder.0.ffn.0": (96, 64)}
    tensors = {f"model.{name}.weight": torch.empty(shape) for name, shape in shapes.items()}
    assert derived_fields(tensors)["max_position_embeddings"] == 128


def test_num_attention_heads_is_required_if_not_derivable(tmp_path, without_proof):
    """Check that `num_attention_heads` is required if the hidden size is no multiple of 64.

    Otherwise the number of heads is derived with the published head size of 64.
    """
    sizes = {"vocab_size": 50, "hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 96}
    model = NeoBERTModel(NeoBERTConfig(num_attention_heads=4, **sizes))
    source = save(tmp_path / "run", model.state_dict())
    with pytest.raises(UserError, match="size 48 is not a multiple of 64.*num_attention_heads: N"):
        converted(source, tmp_path)

    (tmp_path / "heads.json").write_text('{"num_attention_heads": 4}')
    converted(source, tmp_path, "--config", tmp_path / "heads.json")
    assert NeoBERTConfig.from_pretrained(tmp_path / "out").num_attention_heads == 4


def test_config_option_replaces_the_config_of_the_checkpoint(
    tmp_path, model, tiny_config, without_proof
):
    """Check that the file of `--config` is not merged with the one next to the checkpoint.

    Fields that are missing in the file of `--config` are derived from the shapes, or else have the
    values of the published model, as docs/conversion.md states.
    """
    source = save(tmp_path / "run", model.state_dict(), **tiny_config, norm_eps=1e-3)
    config_path = tmp_path / "given.json"
    config_path.write_text('{"num_attention_heads": 4, "max_position_embeddings": 77}')

    converted(source, tmp_path, "--config", config_path)

    config = NeoBERTConfig.from_pretrained(tmp_path / "out")
    assert (config.max_position_embeddings, config.norm_eps, config.hidden_size) == (77, 1e-5, 64)


# Maximum rounding error of each dtype, relative to the largest value of a tensor.
STEPS = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}


@pytest.mark.parametrize("dtype", STEPS)
def test_dtypes(tmp_path, checkpoint, model, without_proof, dtype):
    """Check that `--dtype` sets the dtype of the weights and of the configuration."""
    written = converted(checkpoint, tmp_path, "--dtype", dtype)
    assert {str(value.dtype) for value in written.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    for name, value in model.state_dict().items():
        error = (written[name].float() - value).abs().max() / value.abs().max().clamp(min=1e-9)
        assert error <= STEPS[dtype], f"{name} differs by more than the rounding of {dtype}"


@pytest.mark.parametrize(
    "bias, others, expected",
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float64, torch.float64, torch.float32),
    ],
)
def test_dtype_is_kept_and_mixed_dtypes_become_float32(
    tmp_path, model, tiny_config, without_proof, capsys, bias, others, expected
):
    """Without `--dtype`, a checkpoint keeps its dtype, and one with several dtypes gets float32.

    float64 is converted to float32, too.
    """
    state = {name: value.to(others) for name, value in model.state_dict().items()}
    state["decoder.bias"] = state["decoder.bias"].to(bias)
    written = converted(save(tmp_path / "run", state, **tiny_config), tmp_path)
    for name, value in written.items():
        assert value.dtype == expected and torch.equal(value, state[name].to(expected))
    assert "with rounding" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# Rejected checkpoints


WO = "model.transformer_encoder.1.wo.weight"


def put(name, *shape, dtype=torch.float32, place=None, value=0.0):
    """Return a function that changes a tensor of a state dict.

    Args:
        name: Name of the tensor.
        shape: Shape of the tensor of zeros that is stored if `place` is None.
        dtype: Dtype of the tensor of zeros.
        place: Index in the existing tensor at which `value` is stored.
        value: New value at `place`.
    """

    def change(state):
        state[name] = torch.zeros(shape, dtype=dtype) if place is None else state[name].clone()
        if place is not None:
            state[name][place] = value

    return change


def drop(*words):
    """Return a function that removes all tensors whose name contains one of the words."""

    def change(state):
        for name in [name for name in state if any(word in name for word in words)]:
            del state[name]

    return change


def unchanged(state):
    """Leave the state dict as it is."""


@pytest.mark.parametrize(
    "change, fields, options, message",
    [
        (drop("1.wo.", "decoder.bias"), {}, [], r"missing .*: .*1\.wo\.weight, .*decoder.bias"),
        (drop("model.encoder.weight"), {}, [], "must contain a token embedding"),
        (drop("transformer_encoder"), {}, [], "must contain transformer layers"),
        (drop("ffn"), {}, [], "must contain the feed-forward networks"),
        (drop("decoder.w"), {"tie_word_embeddings": False}, [], "missing tensors: decoder.w"),
        (put("model.x.\x1b[2J", 2), {}, [], r"unexpected tensors: model.x.\\x1b\[2J\."),
        (put(f"module.{WO}", 64, 64), {}, [], r"1\.wo\.weight twice under different"),
        (put(WO, 32, 64), {}, [], r"wrong shape .*wo\.weight is \(32, 64\) instead of \(64, 64\)"),
        (
            put(WO, 64, 64, dtype=torch.int8),
            {},
            [],
            r"dtype of weights must be one of .*torch.int8",
        ),
        (put(WO, place=(3, 5), value=float("nan")), {}, [], rf"{WO} contains values that are NaN"),
        (put(WO, place=0, value=-1e5), {}, ["--dtype", "float16"], "beyond the range of float16"),
        (put("model.transformer_encoder.0.ffn.w12.weight", 12, 64), {}, [], "wrong shape"),
        (
            unchanged,
            {"hidden_size": 128},
            [],
            r"`hidden_size` in the configuration must be 64, got 128: model.encoder.weight has the "
            r"shape \(200, 64\) instead of \(200, 128\). Correct or remove the field.",
        ),
        # Without the field, the number of heads is derived from the shapes, and does not fit.
        (
            unchanged,
            {"hidden_size": 100, "num_attention_heads": None},
            [],
            r"`hidden_size` in the configuration must be 64, got 100: model.encoder.weight has",
        ),
        (unchanged, {"vocab_size": 99}, [], r"`vocab_size` .* must be 200, got 99: .* \(99, 64\)"),
        (unchanged, {"num_hidden_layers": 2}, [], "unexpected .*: model.transformer_encoder.2"),
        (unchanged, {"vocab_size": 10**15}, [], "must be 200, got 1000000000000000"),
        (unchanged, {"tie_word_embeddings": True}, [], "decoder.weight and .* differ"),
        (unchanged, {}, ["--head", "sequence-classification"], "missing tensors: dense.weight"),
    ],
    ids=range(19),
)
def test_inconsistent_checkpoints_are_rejected(
    tmp_path, model, tiny_config, change, fields, options, message
):
    """Check that a checkpoint that does not fit its configuration is rejected.

    The message is short and printable, although it quotes names of an untrusted file, and nothing
    is written.
    """
    state = dict(model.state_dict())
    change(state)
    source = save(tmp_path / "run", state, **{**tiny_config, **fields})

    with pytest.raises(UserError, match=message) as error:
        converted(source, tmp_path, *options)

    assert str(error.value).isprintable() and len(str(error.value)) < 2000
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "the output was not removed"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_labels": "many"}, "got 'many' labels"),
        (
            {"id2label": {"0": "a", "1": "b"}},
            "each of the 3 rows of classifier.weight, got 2 labels",
        ),
        ({"id2label": {"0": "x", "1": "y", "3": "z"}}, "must map the numbers from 0 on to names"),
        ({"id2label": ["x", "y", "z"]}, "must map the numbers from 0 on to names"),
    ],
)
def test_invalid_labels_are_rejected(tiny_config, fields, message):
    """Check that invalid labels, or a wrong number of labels, raise an error."""
    config = NeoBERTConfig(**tiny_config, num_labels=3)
    with pytest.raises(UserError, match=message):
        plan(NeoBERTForSequenceClassification(config).state_dict(), {**tiny_config, **fields})


def test_names_of_bert_are_not_replaced_by_defaults(tiny_config):
    """A field under its name in BERT is used, and is not reported as a default."""
    state = NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config)).state_dict()
    fields = {name: value for name, value in tiny_config.items() if name != "norm_eps"}
    fields |= {"layer_norm_eps": 1e-3, "hidden_dropout_prob": 0.1}
    result = plan(state, fields)
    assert (result.config.norm_eps, result.config.hidden_dropout) == (1e-3, 0.1)
    assert not any("norm_eps" in note for note in result.notes)


def test_labels_keep_their_ids_if_keys_are_sorted_as_text(tiny_config):
    """Labels keep their ids if the keys of `id2label` are sorted as text: 0, 1, 10, 11, 2, ...

    `label2id` is derived from `id2label`, and a contradicting one in the file is ignored.
    """
    model = NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config, num_labels=12))
    names = {number: f"label {number}" for number in sorted(map(str, range(12)))}
    label_fields = {"id2label": names, "label2id": {"x": 5}, "problem_type": "regression"}

    config = plan(model.state_dict(), {**tiny_config, **label_fields}).config

    assert config.id2label == {number: f"label {number}" for number in range(12)}
    assert config.label2id == {f"label {number}": number for number in range(12)}
    assert config.num_labels == 12 and config.problem_type == "regression"
