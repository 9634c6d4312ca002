"""Pins what a checkpoint becomes: the architecture from shapes and configuration, tied decoders,
dtypes; and that sizes, names and values that cannot be are refused before anything of their size is
made.
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
from neobert.conversion.stored import StoredTensor


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


def test_tying_that_is_not_so_is_refused(tmp_path, model, tiny_config, without_proof):
    source = save(tmp_path / "a", model.state_dict(), **tiny_config, tie_word_embeddings=True)
    with pytest.raises(
        UserError,
        match="says tie_word_embeddings, but decoder.weight and model.encoder.weight differ",
    ):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    state = {name: value for name, value in model.state_dict().items() if name != "decoder.weight"}
    source = save(tmp_path / "b", state, **tiny_config, tie_word_embeddings=False)
    with pytest.raises(UserError, match="missing tensors: decoder.weight"):
        convert(source, tmp_path / "out", "--tokenizer", "none")


@pytest.mark.parametrize("intermediate_size", [96, 160, 168, 3072])
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


def _broken(state, kind):
    state = {name: value.clone() for name, value in state.items()}
    wo = "model.transformer_encoder.1.wo.weight"
    if kind == "missing":
        del state[wo], state["decoder.bias"]
    elif kind == "missing layer":
        state = {name: value for name, value in state.items() if "encoder.1." not in name}
    elif kind == "unexpected":
        state["model.transformer_encoder.1.wo.bias"] = torch.zeros(64)
    elif kind == "doubled":
        state[f"module.{wo}"] = state[wo]
    elif kind == "shape":
        state[wo] = state[wo][:32]
    elif kind == "nan":
        state[wo][3, 5] = float("nan")
    elif kind == "inf":
        state["decoder.bias"][7] = -float("inf")
    elif kind == "integers":
        state[wo] = state[wo].to(torch.int8)
    elif kind in ("large", "large negative"):
        state[wo][0, 0] = 1e5 if kind == "large" else -1e5
    elif kind == "no embedding":
        del state["model.encoder.weight"]
    elif kind == "no layers":
        state = {name: value for name, value in state.items() if "transformer_encoder" not in name}
    return state


@pytest.mark.parametrize(
    "kind, message",
    [
        (
            "missing",
            r"missing tensors: .*(decoder.bias, .*1\.wo\.weight|1\.wo\.weight, decoder.bias)",
        ),
        (
            "missing layer",
            r"missing tensors: model.transformer_encoder.1.attention_norm.weight, .*1\.ffn\.w3",
        ),
        ("unexpected", r"unexpected tensors: model.transformer_encoder.1.wo.bias\."),
        ("doubled", r"twice under different names: .*1\.wo\.weight, module\..*1\.wo\.weight"),
        ("shape", r"wrong shape .*1\.wo\.weight is \(32, 64\) instead of \(64, 64\)"),
        ("nan", r"NaN or infinite: model.transformer_encoder.1.wo.weight\."),
        ("inf", r"NaN or infinite: decoder.bias\."),
        ("integers", r"not floating-point numbers: .*1\.wo\.weight \(torch.int8\)"),
        ("large", r"beyond the range of float16: .*1\.wo\.weight; use --dtype bfloat16"),
        ("large negative", r"beyond the range of float16: .*1\.wo\.weight; use --dtype bfloat16"),
        ("no embedding", r"no token embedding"),
        ("no layers", r"no transformer layers"),
    ],
)
def test_refused_tensors(tmp_path, model, tiny_config, kind, message):
    source = save(tmp_path / "run", _broken(model.state_dict(), kind), **tiny_config)
    with pytest.raises(UserError, match=message) as refusal:
        convert(source, tmp_path / "out", "--tokenizer", "none", "--dtype", "float16")
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], (
        "a refused checkpoint left something behind"
    )


def test_wrong_configuration_is_refused(tmp_path, model, tiny_config):
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "hidden_size": 128})
    with pytest.raises(
        UserError,
        match=r"wrong shape .*model.encoder.weight is \(200, 64\) instead of \(200, 128\)",
    ):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "num_hidden_layers": 2})
    with pytest.raises(UserError, match="unexpected tensors: model.transformer_encoder.2"):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "num_attention_heads": 5})
    with pytest.raises(UserError, match="hidden_size must be a multiple of num_attention_heads"):
        convert(source, tmp_path / "out", "--tokenizer", "none")


def test_missing_head_is_refused(tmp_path, checkpoint):
    with pytest.raises(
        UserError,
        match=(
            "missing tensors: dense.weight, dense.bias, classifier.weight, "
            "classifier.bias|missing tensors"
        ),
    ):
        convert(
            checkpoint, tmp_path / "out", "--tokenizer", "none", "--head", "sequence-classification"
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


# -------------------------------------------------------------------------------
# configuration and shapes may say


def stored(state):
    return {
        name: StoredTensor(tuple(value.shape), value.dtype, lambda value=value: value)
        for name, value in state.items()
    }


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,000, but 1000000000"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers must be at most 1,000"),
        ({"vocab_size": 10**18}, "no model can be made of this configuration|wrong shape"),
        ({"vocab_size": 10**40}, "no model can be made of this configuration"),
        ({"hidden_size": 4 * 10**17}, "no model can be made of this configuration|wrong shape"),
        ({"intermediate_size": 10**18}, "no model can be made of this configuration|wrong shape"),
        (
            {"position_embedding_type": "learned", "max_position_embeddings": 10**18},
            "is beyond any text",
        ),
        (
            {"max_position_embeddings": 10**18},
            "of 1,000,000,000,000,000,000 is beyond any text: at most 16,777,216",
        ),
        ({"vocab_size": -1}, "vocab_size must be a positive whole number, but -1"),
        ({"vocab_size": 0}, "vocab_size must be a positive whole number, but 0"),
        ({"vocab_size": True}, "vocab_size must be a positive whole number, but True"),
        ({"vocab_size": "many"}, "vocab_size must be a positive whole number, but 'many'"),
        ({"vocab_size": [1, 2]}, "vocab_size must be a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number"),
        ({"norm_eps": "small"}, "norm_eps must be a number"),
        ({"norm_eps": float("nan")}, "norm_eps must be a number"),
        (
            {"hidden_act": {"a": 1}},
            "hidden_act must be one of swiglu, gelu|does not describe a NeoBERT",
        ),
        (
            {"hidden_act": ["gelu"]},
            "hidden_act must be one of swiglu, gelu|does not describe a NeoBERT",
        ),
        ({"dropout": "0.1"}, "must be a probability"),
        ({"ngpt": True}, "normalised transformers are not supported"),
        ({"pad_token_id": "0"}, "pad_token_id must be None or lie between"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number"),
        ({"rope_scaling": "yarn"}, "must be a dictionary"),
        ({"rope_scaling": [1]}, "must be a dictionary"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
            "'factor' from 1 to 1,000,000, but 1e\\+308",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "2"}},
            "needs a 'factor' from 1 to 1,000,000, but '2'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
            "YaRN needs beta_fast above beta_slow above 0, but 'x'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": float("inf")}},
            "YaRN needs beta_fast",
        ),
        (
            {"rope_parameters": {"rope_type": ["yarn"], "factor": 2.0}},
            "rope_type must be one of|does not describe a NeoBERT",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1e400}}, "needs a 'factor' from 1 to"),
    ],
    ids=range(30),
)
def test_configurations_that_cannot_be(model, tiny_config, given, message):
    start = time.monotonic()
    with pytest.raises(UserError, match=message) as refusal:
        plan(stored(model.state_dict()), {**tiny_config, **given})
    assert time.monotonic() - start < 5 and str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"num_labels": 10**9},
            r"the configuration has 1000000000 labels \(num_labels\), but classifier.weight has 3 "
            r"rows",
        ),
        ({"num_labels": "many"}, r"has 'many' labels"),
        ({"num_labels": 4}, "has 4 labels"),
        (
            {"id2label": {"0": "a", "1": "b"}},
            r"has 2 labels \(id2label\), but classifier.weight has 3 rows",
        ),
        (
            {"id2label": {"a": "x", "b": "y", "c": "z"}},
            "id2label should map the numbers from 0 on to names",
        ),
        (
            {"id2label": {"0": "x", "1": "y", "3": "z"}},
            "id2label should map the numbers from 0 on to names",
        ),
        ({"id2label": {}}, "id2label should map the numbers from 0 on to names"),
        ({"id2label": ["x", "y", "z"]}, "id2label should map the numbers from 0 on to names"),
        ({"id2label": 3}, "id2label should map the numbers from 0 on to names"),
        ({"id2label": {"0": 1, "1": 2, "2": 3}}, "to names that are text"),
        ({"label2id": {"x": 0}}, "label2id should be id2label the other way round"),
        (
            {"id2label": {"0": "x", "1": "y", "2": "z"}, "label2id": [0, 1, 2]},
            "label2id should be id2label the other way round",
        ),
        ({"problem_type": "guess"}, "problem_type should be one of"),
        ({"problem_type": {"a": 1}}, "problem_type should be one of"),
    ],
    ids=range(14),
)
def test_labels_that_cannot_be(tiny_config, given, message):
    state = NeoBERTForSequenceClassification(
        NeoBERTConfig(**tiny_config, num_labels=3)
    ).state_dict()
    with pytest.raises(UserError, match=message):
        plan(stored(state), {**tiny_config, **given})


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
    config = plan(stored(state), given).config
    assert (
        config.id2label == {0: "x", 1: "y", 2: "z"}
        and config.num_labels == 3
        and config.problem_type == "regression"
    )


def test_labels_in_another_order_keep_their_numbers(tiny_config):
    """As in a JSON file whose keys are sorted as text: 0, 1, 10, 11, 2, ..."""
    state = NeoBERTForSequenceClassification(
        NeoBERTConfig(**tiny_config, num_labels=12)
    ).state_dict()
    config = plan(
        stored(state),
        {
            **tiny_config,
            "id2label": {number: f"label {number}" for number in sorted(map(str, range(12)))},
        },
    ).config
    assert config.id2label == {number: f"label {number}" for number in range(12)}


def _without_rows(state):
    state["classifier.weight"], state["classifier.bias"] = torch.zeros(0, 64), torch.zeros(0)


def _far_layer(state):
    state["model.transformer_encoder.999999999.wo.weight"] = torch.zeros(64, 64)


def _layer_of_many_digits(state):
    state[f"model.transformer_encoder.{'9' * 5000}.wo.weight"] = torch.zeros(64, 64)


def _set(name, *shape, dtype=torch.float32):
    def change(state):
        state[name] = torch.zeros(shape, dtype=dtype)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (_without_rows, r"classifier.weight should be a matrix, but has the shape \(0, 64\)"),
        (_far_layer, "num_hidden_layers must be at most 1,000"),
        (_layer_of_many_digits, r"unexpected tensors: model.transformer_encoder.9{100,}\.\.\."),
        (
            _set("model.transformer_encoder.٣.wo.weight", 64, 64),
            "unexpected tensors: model.transformer_encoder.٣.wo.weight",
        ),
        (
            _set("model.encoder.weight"),
            r"model.encoder.weight should be a matrix, but has the shape \(\)",
        ),
        (_set("model.encoder.weight", 200), "model.encoder.weight should be a matrix"),
        (_set("model.encoder.weight", 0, 64), "model.encoder.weight should be a matrix"),
        (_set("model.encoder.weight", 200, 64, 1), "model.encoder.weight should be a matrix"),
        (_set("model.transformer_encoder.0.ffn.w12.weight"), "ffn.w12.weight should be a matrix"),
        (
            _set("model.transformer_encoder.0.ffn.w12.weight", 12, 64),
            "multiple of 8, so rows of 16",
        ),
        (
            _set("model.positional_embedding.weight", 1, 64),
            "max_position_embeddings must be a positive whole number, but 0",
        ),
        (
            _set("model.transformer_encoder.0.wo.weight", 64, 64, dtype=torch.complex64),
            r"not floating-point numbers: .*\(torch.complex64\)",
        ),
        (
            _set("model.transformer_encoder.0.wo.weight", 64, 64, dtype=torch.float8_e4m3fn),
            r"of a dtype that is not converted: .*\(torch.float8_e4m3fn\)",
        ),
        (_set("model.\x1b[2J\n", 2), r"unexpected tensors: model.\\x1b\[2J\\n"),
        (_set("", 2), "unexpected tensors: "),
        (_set("x" * 100_000, 2), r"unexpected tensors: x{197}\.\.\."),
    ],
    ids=range(16),
)
def test_tensors_that_cannot_be(tiny_config, change, message):
    state = dict(
        NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config, num_labels=3)).state_dict()
    )
    change(state)
    with pytest.raises(UserError, match=message) as refusal:
        plan(stored(state), {"num_attention_heads": 4})
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 2000


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
