"""Test the rotary embeddings.

The angles are position * theta^(-2i/K) for adjacent pairs, in float32 for every dtype of the
model. Covers linear, dynamic and YaRN scaling in the forms of transformers 4 (rope_scaling) and
5 (rope_parameters).
"""

import math

import pytest
import torch
from helpers.reference import (
    FIELDS,
    assert_same,
    make_model,
    packing_arguments,
    random_batch,
    reference_states,
    rotary_angles,
    rotate,
)

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.modeling_neobert import apply_rotary_pos_emb, rotary_embeddings


K = 16
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


def table(config, positions):
    """Return the cosines and sines of the model's angles, (L, K / 2) each."""
    (angles,) = rotary_embeddings(config, positions[None], int(positions.max()) + 1)
    assert angles.dtype == torch.complex64
    assert angles.shape == (1, len(positions), 1, 1, config.head_dim // 2)
    return angles.real[0, :, 0, 0].double(), angles.imag[0, :, 0, 0].double()


def check_angles(config, angles, scale=1.0, tolerance=5e-5):
    """Assert that the model has these angles, (L, K / 2), at positions 0 to L - 1."""
    cos, sin = table(config, torch.arange(len(angles)))
    assert (cos - scale * angles.cos()).abs().max() < tolerance
    assert (sin - scale * angles.sin()).abs().max() < tolerance


def dynamic_theta(factor, length, limit, theta=10000.0):
    """Return the base of NTK-aware scaling for a text, which grows beyond `limit` tokens."""
    length = max(length, limit)
    return theta * (factor * length / limit - (factor - 1)) ** (K / (K - 2))


def yarn_frequencies(factor, original, theta=10000.0, beta_fast=32, beta_slow=1):
    """Return the frequencies of YaRN (arXiv 2309.00071, section 3.2).

    As in all implementations, the interpolation is a linear ramp over the pair index between the
    two correction bounds.
    """

    def pair_that_turns(times):
        return K * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), K - 1)
    pairs = torch.arange(K // 2, dtype=torch.float64)
    interpolated = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = theta ** (-2 * pairs / K)
    return plain * (1 - interpolated) + plain / factor * interpolated


def test_angles_match_the_formula():
    """The angles are those of the formula, also at positions beyond the trained length."""
    positions = torch.tensor([0, 1, 2, 63, 500, 4095, 4096, 9000])
    cos, sin = table(NeoBERTConfig(**FIELDS), positions)
    angles = rotary_angles(positions, K)
    assert cos.shape == (len(positions), K // 2)
    # The product of a float32 position and a float32 frequency has a rounding error of half a unit
    # in the last place, for angles below 8,192.
    assert (cos - angles.cos()).abs().max() < 1e-3 and (sin - angles.sin()).abs().max() < 1e-3
    small = positions < 64
    assert (cos - angles.cos())[small].abs().max() < 5e-6


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("form", ("complex", "real", "in place"))
def test_adjacent_pairs_are_rotated(form, dtype):
    """All forms of the rotation rotate adjacent pairs of queries and keys, and not the values.

    The 300 tokens are several slices of the in-place form. Values in low precision are rounded
    only once, after the rotation.
    """
    positions = torch.arange(300)
    config = NeoBERTConfig(**FIELDS)
    qkv = torch.randn(1, 300, 2, 3, K).to(dtype)
    x, value = qkv.clone().split((2, 1), dim=-2)

    angles = rotary_embeddings(config, positions[None], 300, compiled=form == "real")
    assert len(angles) == (2 if form == "real" else 1), "The angles have the wrong form."
    rotated = apply_rotary_pos_emb(x, angles, in_place=form == "in place")
    assert rotated.dtype == dtype and (rotated.data_ptr() == x.data_ptr()) == (form == "in place")
    assert torch.equal(value, qkv[..., 2:, :]), "The values were rotated, too."

    tolerance = {torch.float32: 2e-5, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}[dtype]
    for head in range(2):
        for part in range(2):
            expected = rotate(qkv[0, :, head, part].double(), rotary_angles(positions, K))
            assert_same(rotated[0, :, head, part], expected, tolerance)


@pytest.mark.parametrize("cast", ("to", "half_load", "autocast"))
@torch.no_grad()
def test_a_bf16_model_has_float32_angles(cast, tmp_path):
    """The angles are float32, however the model is converted to bfloat16."""
    fields = {**FIELDS, "num_hidden_layers": 1, "max_position_embeddings": 4200}
    model = NeoBERTModel(NeoBERTConfig(**fields)).eval()
    embeddings = []
    if cast == "to":
        model = model.to(torch.bfloat16)
    elif cast == "half_load":
        model.save_pretrained(tmp_path)
        model = NeoBERTModel.from_pretrained(tmp_path, dtype=torch.bfloat16)

    positions = torch.tensor([[3, 255, 4095, 4097, 4099, 8191]])
    block = model.transformer_encoder[0]
    block.register_forward_pre_hook(lambda module, args: embeddings.append(args[1]))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast == "autocast"):
        model(torch.ones_like(positions), position_ids=positions)

    rotary = embeddings[0][0].squeeze()
    angles = rotary_angles(positions[0], K)
    assert rotary.dtype == torch.complex64, "The angles must be float32."
    expected = torch.polar(torch.ones_like(angles), angles)
    assert (rotary.to(torch.complex128) - expected).abs().max() < 1e-3


@torch.no_grad()
def test_position_ids_per_row():
    """Each row of a batch may have its own position_ids, in any order."""
    model = make_model(NeoBERTModel)
    ids, _ = random_batch([12, 12])
    positions = torch.stack((torch.arange(12) * 3, torch.arange(12).flip(0)))
    hidden = model(ids, position_ids=positions).last_hidden_state
    for row in range(2):
        assert_same(hidden[row], reference_states(model, ids[row], positions[row])[0][-1])


def by_older_name(rope):
    """Return the scaling with its type under the older name `type`."""
    return {"type" if name == "rope_type" else name: value for name, value in rope.items()}


# Forms in which a configuration may contain the scaling, by version of transformers.
WAYS = {
    "4": lambda rope: {"rope_scaling": rope},
    "4, type": lambda rope: {"rope_scaling": by_older_name(rope)},
    "4, theta beside": lambda rope: {"rope_theta": 10000.0, "rope_scaling": rope},
    "5": lambda rope: {"rope_parameters": {**rope, "rope_theta": 10000.0}},
}


@pytest.fixture(params=("constructor", "from_pretrained", "set afterwards"))
def configured(request, tmp_path):
    """Return a function that creates a configuration with the given fields.

    The fields are passed to the constructor or to `from_pretrained`, or are assigned afterwards.
    """

    def make(**fields):
        if request.param == "constructor":
            return NeoBERTConfig(**FIELDS, **fields)
        if request.param == "from_pretrained":
            NeoBERTConfig(**FIELDS).save_pretrained(tmp_path)
            return NeoBERTConfig.from_pretrained(tmp_path, **fields)
        config = NeoBERTConfig(**FIELDS)
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    return make


@pytest.mark.parametrize("way", WAYS)
def test_linear_scaling(configured, way):
    """Linear scaling divides all angles by the factor."""
    config = configured(**WAYS[way]({"rope_type": "linear", "factor": 4.0}))
    check_angles(config, rotary_angles(torch.arange(300), K) / 4)


@pytest.mark.parametrize("way", WAYS)
def test_dynamic_scaling(configured, way):
    """Dynamic scaling changes the base for texts longer than the trained length."""
    config = configured(**WAYS[way]({"rope_type": "dynamic", "factor": 2.0}))
    for length in (50, 128, 200, 400):
        theta = dynamic_theta(2.0, length, 128)
        assert (theta == 10000.0) == (length <= 128)
        check_angles(config, rotary_angles(torch.arange(length), K, theta))


@pytest.mark.parametrize("way", WAYS)
def test_yarn(configured, way):
    """YaRN has the frequencies and the attention factor of the paper."""
    config = configured(**WAYS[way]({"rope_type": "yarn", "factor": 4.0}))
    angles = torch.arange(400).double()[:, None] * yarn_frequencies(4.0, 128)
    check_angles(config, angles, scale=0.1 * math.log(4.0) + 1, tolerance=1e-4)


def test_yarn_attention_factor_and_original_length():
    """YaRN uses the attention factor and the original length of the configuration."""
    rope = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}
    rope |= {"original_max_position_embeddings": 64}
    angles = torch.arange(200).double()[:, None] * yarn_frequencies(2.0, 64)
    check_angles(NeoBERTConfig(**FIELDS, rope_scaling=rope), angles, scale=1.5)


@pytest.mark.parametrize("order", ("length first", "scaling first"))
def test_yarn_does_not_depend_on_the_field_order(order, tmp_path):
    """YaRN scales from the trained length, even if the maximum length changes in the same call.

    `from_pretrained(folder, max_position_embeddings=256, rope_scaling=...)` sets the fields in the
    order of the arguments. Saving and loading preserves the trained length.
    """
    NeoBERTConfig(**FIELDS).save_pretrained(tmp_path)
    fields = {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    ordered = dict(fields if order == "length first" else reversed(fields.items()))

    config = NeoBERTConfig.from_pretrained(tmp_path, **ordered)
    assert config.rope_parameters["original_max_position_embeddings"] == 128
    assert config.max_position_embeddings == 256

    config.save_pretrained(tmp_path / "extended")
    reloaded_config = NeoBERTConfig.from_pretrained(tmp_path / "extended")
    assert reloaded_config.rope_parameters == config.rope_parameters and reloaded_config == config
    assert "_trained_length" not in (tmp_path / "extended" / "config.json").read_text()

    # Another factor scales from the trained length, too, and not from the extended one.
    rope = {"rope_type": "yarn", "factor": 4.0}
    rescaled = NeoBERTConfig.from_pretrained(tmp_path / "extended", rope_scaling=rope)
    assert rescaled.rope_parameters["original_max_position_embeddings"] == 128
    assert rescaled.context_length == 512


@torch.no_grad()
def test_the_model_uses_the_scaled_angles():
    """Linear scaling and the attention factor of YaRN affect the outputs of the model."""
    ids, _ = random_batch([40])
    model = make_model(NeoBERTModel, rope_scaling={"rope_type": "linear", "factor": 4.0})
    angles = rotary_angles(torch.arange(40), K) / 4
    assert_same(model(ids)[0][0], reference_states(model, ids[0], angles=angles)[0][-1])

    yarn = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3}
    plain = make_model(NeoBERTModel)
    scaled = make_model(NeoBERTModel, rope_scaling=yarn)
    assert (scaled(ids).last_hidden_state - plain(ids).last_hidden_state).abs().max() > 0.1


@pytest.mark.parametrize("implementation", ("eager", "sdpa", "flex_attention"))
@torch.no_grad()
def test_dynamic_scaling_ignores_padding(implementation):
    """Dynamic scaling of a padded batch depends on the longest text, not on the padded length.

    A text of 100 tokens in a row of 200 is not scaled.
    """
    fields = {"attn_implementation": implementation, "unpad_inputs": False}
    model = make_model(NeoBERTModel, **DYNAMIC, **fields)
    ids, mask = random_batch([100, 60], length=200)
    padded = model(ids, attention_mask=mask).last_hidden_state
    assert_same(padded[0, :100], model(ids[:1, :100]).last_hidden_state[0])


@pytest.mark.parametrize("compiled", (False, True))
@torch.no_grad()
def test_dynamic_scaling_of_packed_texts(compiled):
    """Dynamic scaling of a packed batch depends on the longest text, as in a padded batch.

    Neither the number of packed tokens nor a larger `max_length_q` matters, also when compiled.
    """
    model = make_model(NeoBERTModel, max_position_embeddings=6, **DYNAMIC)
    ids, mask = random_batch([9, 5])
    expected = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]

    run = torch.compile(model, backend="eager") if compiled else model
    torch._dynamo.reset()

    positions = torch.cat([torch.arange(9), torch.arange(5)])[None]
    for packing in (packing_arguments([9, 5], longest=14), {"position_ids": positions}):
        hidden = run(ids[mask.bool()][None], **packing).last_hidden_state
        assert_same(hidden[0], expected, what=f"output, packed by {sorted(packing)}")
    torch._dynamo.reset()
