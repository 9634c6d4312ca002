"""Test int8 quantization on the CPU.

The tests cover the integer matrix product, which is checked and timed before it is used, the codes
and scales of layers, the agreement of models with float32, also if they have outliers, unsupported
models, and bit-identical results in every batch.
"""

import copy
import os
import pickle
import platform
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.encode_runs import make_model_folder  # noqa: F401
from torch import nn

from neobert import (
    NeoBERTConfig,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
    modeling_neobert,
    quantize_int8,
)
from neobert.attention_neobert import Packing
from neobert.common.errors import UserError
from neobert.common.packing import compile_blocks, pack
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.quantization import int8, int8_product, smoothing


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENCODER = str(EXAMPLES / "sentence-encoder")
DEFINITIONS = (EXAMPLES / "definitions.tsv").read_text(encoding="utf-8").splitlines()
TEXTS = [line.split("\t")[1].strip() for line in DEFINITIONS[:200]]


def cosines(actual, expected):
    """Return the cosine similarities of rows."""
    return nn.functional.cosine_similarity(actual.double(), expected.double(), dim=-1)


@torch.inference_mode()
def outputs(model, sequences):
    """Run a packed batch, and return the hidden states (T, D) and their means per text (N, D)."""
    packed = pack(sequences)
    hidden = model(**packed)[0]
    return hidden[0], Packing(packed["cu_seq_lens_q"], None).mean_per_sequence(hidden)


def random_sequences(count, min_length=2, length_limit=40, vocabulary=200):
    """Return lists of random token ids, shorter than `length_limit`."""
    lengths = torch.randint(min_length, length_limit, (count,)).tolist()
    return [torch.randint(1, vocabulary, (length,)).tolist() for length in lengths]


@pytest.fixture
def model(tiny_config):
    """Return a tiny random encoder in float32."""
    return NeoBERTModel(NeoBERTConfig(**tiny_config, decoder_init_range=0.1)).eval()


@pytest.fixture(scope="module")
def bundled_pair():
    """Return the bundled encoder in float32 and in int8."""
    return PackedEncoder(ENCODER, dtype="float32"), PackedEncoder(ENCODER, dtype="int8")


# ---------------------------------------------------------------------------------- Integer product


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 33, 512])
def test_product_matches_int64(rows):
    """The product equals the one in int64, also if all pairs of products have the largest sum.

    CPUs without VNNI add two products in 16 bits, and saturate larger sums. There, the weights of
    a pair are limited.
    """
    limit_pairs = int8_product.check_int8_product(even_if_slow=True)
    largest = 64 if limit_pairs else 127
    weight = torch.randint(-largest, largest + 1, (72, 200), dtype=torch.int8)
    codes = torch.randint(0, 256, (rows, 200), dtype=torch.uint8)
    # These rows and outputs have the largest sums of both signs.
    weight[:2] = largest
    weight[2] = -largest
    codes[0] = 255
    weight[3, ::2] = 127
    weight[3, 1::2] = 1
    weight[4, ::2] = -3
    weight[4, 1::2] = -125

    expected = (codes.numpy().astype(np.int64) - 128) @ weight.numpy().astype(np.int64).T
    scales = torch.rand(72)
    actual = int8_product.product(codes, int8_product.pack_weight(weight), scales)
    assert np.array_equal(actual.numpy(), expected.astype(np.float32) * scales.numpy())


def test_is_exact_detects_saturation(monkeypatch):
    """`is_exact` detects a product that saturates, like that of CPUs without VNNI.

    Their instruction `vpmaddubsw` adds pairs of products in 16 bits. The product is exact if pairs
    of weights are limited to a sum of 128, as 255 * 128 < 2^15.
    """

    def saturating(codes, packed, scales, dtype=torch.float32):
        products = codes.long()[:, None] * packed.long()
        pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(-1) - 128 * packed.long().sum(-1)).to(dtype) * scales

    monkeypatch.setattr(int8_product, "pack_weight", lambda weight: weight)
    monkeypatch.setattr(int8_product, "product", saturating)

    assert not int8_product.is_exact(False, 16)
    assert int8_product.is_exact(True, 16)


def test_largest_weights():
    """Check the magnitude that becomes 127, without and with limited pairs.

    With limited pairs it is the largest sum of two neighbors that have the same sign. The last
    weight of an odd number has no neighbor. The magnitude of a row of zeros is positive.
    """
    weight = torch.tensor([[3.0, 4, -5, 0, 1], [-3, -4, -2, 8, -1], [2, -2, 2, -2, 9], [0] * 5])
    assert int8_product.largest_weights(weight, False).tolist()[:3] == [5, 8, 9]
    assert int8_product.largest_weights(weight, True).tolist()[:3] == [7, 8, 9]
    assert int8_product.largest_weights(weight, True)[3] > 0


def test_rounded_pairs_stay_within_16_bits():
    """The sum of two products fits into 16 bits after rounding, for inputs of up to 255."""
    weight = torch.randn(200, 96)
    weight[:50] = weight[:50].abs()
    integers = (weight * 127 / int8_product.largest_weights(weight, True)[:, None]).round()
    pairs = integers.unflatten(1, (-1, 2))
    assert pairs.clamp(min=0).sum(-1).max() * 255 < 2**15
    assert pairs.clamp(max=0).sum(-1).min() * 255 >= -(2**15)


@pytest.fixture
def measured(monkeypatch):
    """Return a function that replaces the measured seconds of float32 and of int8."""

    def set_seconds(*seconds):
        monkeypatch.setattr(int8_product, "_seconds", lambda *args: list(seconds))
        int8_product.check_int8_product.cache_clear()

    yield set_seconds
    monkeypatch.undo()
    int8_product.check_int8_product.cache_clear()


@pytest.mark.parametrize("seconds, speedup", [(0.8, None), (0.95, "1.05"), (1.9, "0.53")])
def test_product_about_as_fast_as_float32_is_used(measured, model, caplog, seconds, speedup):
    """A product that is not clearly faster than the one in float32 is used with a warning."""
    measured(1.0, seconds)
    with caplog.at_level("WARNING"):
        assert int8.is_int8(quantize_int8(model))
    reported = re.findall(r"a speedup of (\S+) over the one in float32", caplog.text)
    assert reported == ([] if speedup is None else [speedup])


def test_slow_product_is_rejected_unless_requested(measured, model):
    """A slow product is an error that leaves the model unchanged, unless `even_if_slow` is set."""
    measured(1.0, 10_000.0)
    with pytest.raises(UserError, match="takes 10000.0 times as long as the one in float32"):
        quantize_int8(model)
    assert not int8.is_int8(model)
    assert int8.is_int8(quantize_int8(model, even_if_slow=True))


def test_inexact_product_is_rejected(measured, model, monkeypatch):
    """A product that is not exact is an error, also with `even_if_slow`."""
    measured(1.0, 0.5)
    monkeypatch.setattr(int8_product, "is_exact", lambda limit_pairs, rows: False)
    with pytest.raises(UserError, match="not exact"):
        quantize_int8(model, even_if_slow=True)


# ------------------------------------------------------------------------------------------- Layers


@pytest.mark.parametrize("limit_pairs", [False, True])
def test_int8_linear_outputs(limit_pairs):
    """The outputs of an int8 layer equal those of codes and integers that are computed here.

    Float rounding is tolerated. If an input is halfway between two codes, its code may differ by
    one.
    """
    if not limit_pairs and int8_product.check_int8_product(even_if_slow=True):
        pytest.skip("the int8 product of this CPU saturates without limited pairs")

    weight = torch.randn(24, 40)
    x = torch.randn(3, 7, 40)
    # The scale of a row of zeros must not be 0.
    x[1, 2] = 0
    layer_outputs = int8.Int8Linear(weight, limit_pairs)(x)

    for row, row_outputs in zip(x.flatten(0, 1), layer_outputs.flatten(0, 1)):
        scale = row.abs().max() / 127
        codes = torch.floor(row / scale + 0.5) if scale else torch.zeros(40)
        for channel, value in zip(weight, row_outputs):
            pairs = channel.unflatten(0, (-1, 2))
            sums = torch.stack((pairs.clamp(min=0).sum(1), -pairs.clamp(max=0).sum(1)))
            step = (sums.max() if limit_pairs else channel.abs().max()) / 127
            exact = (codes.double() @ torch.round(channel / step).double()) * step * scale
            # A value halfway between two codes may be rounded up or down.
            assert abs(value - exact) <= 1.01 * step * 127 * scale / 2**14 + 1e-6 * abs(exact) or (
                abs(value - exact) <= step * 127 * scale
                and (((row / scale) % 1) - 0.5).abs().min() < 1e-4
            )

    assert not layer_outputs[1, 2].any() and layer_outputs.shape == (3, 7, 24)


def test_int8_norm_returns_codes_and_scales():
    """`Int8Norm` returns the codes and scales of the RMSNorm of its inputs."""
    norm = nn.RMSNorm(48, eps=0.5)
    nn.init.uniform_(norm.weight, 0.5, 2)
    x = torch.randn(2, 9, 48)
    with torch.no_grad():
        tokens = int8.Int8Norm(norm).eval()(x)
        expected = norm(x).flatten(0, 1)

    # The row factors lack a constant, which is part of the next linear layer.
    scales = tokens.row_factors * (48**0.5 / 127)
    codes = tokens.codes[:18]
    actual = (codes.float() - 128) * scales
    torch.testing.assert_close(scales[:, 0], expected.abs().amax(1) / 127, rtol=1e-5, atol=0)
    # Each value is rounded to the nearest code.
    assert ((actual - expected).abs() <= 0.501 * scales).all() and codes.min() >= 1


def test_only_outliers_are_smoothed_by_powers_of_two():
    """Only channels above 8 times the median are smoothed, and their factors are powers of two."""
    layer = nn.Linear(64, 32, bias=False)
    nn.init.uniform_(layer.weight, -1, 1)
    layer.weight.data[:, 9] /= 16
    largest = torch.rand(64) + 1
    largest[3] = 80
    largest[9] = 80
    largest[20], largest[21] = (times * largest.median() for times in (7.5, 8.5))

    factors = smoothing.outlier_factors(layer, largest)
    # sqrt(80 / 1.5) is about 8, and sqrt(80 / 1.5 * 16) about 32.
    assert factors[3] == 8 and factors[9] == 32
    assert factors[20] == 1 and factors[21] > 1, "outliers exceed 8 times the median"
    assert (factors == 1).sum() == 61


# ------------------------------------------------------------------------------------------- Models


def test_smoothing_factors():
    """Check the factor of an outlier against equation 4 of SmoothQuant with alpha = 1/2.

    The outlier has sqrt(64 / 2^-4) = 2^5 and the median channel sqrt(1 / 2^-4) = 2^2, so that the
    factor is 2^3.
    """
    layer = nn.Linear(7, 3, bias=False)
    nn.init.constant_(layer.weight, 2**-4)
    largest = torch.tensor([1.0, 1, 1, 64, 1, 1, 1])
    assert smoothing.outlier_factors(layer, largest).tolist() == [1, 1, 1, 2**3, 1, 1, 1]


def test_bundled_encoder_is_close_to_float32(bundled_pair):
    """Check the cosines between int8 and float32 for tokens and texts of the bundled encoder."""
    original, quantized = bundled_pair
    tokens = original.tokenize(TEXTS)
    (hidden, means), (int8_hidden, int8_means) = (
        outputs(encoder.sentence_transformer[0].auto_model, tokens) for encoder in bundled_pair
    )
    assert cosines(int8_hidden, hidden).min() >= 0.995
    # 0.9989 on a CPU without VNNI, whose products are exact only for limited pairs of weights.
    assert cosines(int8_means, means).min() >= 0.998
    assert quantized.dtype_name == "int8" and not torch.equal(hidden, int8_hidden)


# Program that quantizes the bundled encoder, on a CPU whose products saturate.
WITHOUT_VNNI = f"""
from neobert import NeoBERTModel, quantize_int8
from neobert.quantization.int8_product import check_int8_product

assert check_int8_product(even_if_slow=True)
quantize_int8(NeoBERTModel.from_pretrained({ENCODER!r}), even_if_slow=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have no AVX2")
def test_bundled_encoder_on_a_cpu_without_vnni():
    """The bundled encoder loses little precision on a CPU whose products saturate.

    oneDNN runs the kernels of such a CPU. `quantize_int8` would warn if the cosine of one of 256
    random tokens were below 0.99.
    """
    variables = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_VNNI],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "differs from the original" not in process.stderr, process.stderr


def test_packed_padded_and_dense_agree(tiny_config):
    """Packed, padded and dense batches have the same int8 hidden states, close to float32."""
    original = NeoBERTModel(NeoBERTConfig(**tiny_config, decoder_init_range=0.1)).eval()
    quantized = quantize_int8(copy.deepcopy(original))
    sequences = random_sequences(8)
    hidden, _ = outputs(original, sequences)
    int8_hidden, _ = outputs(quantized, sequences)
    assert cosines(int8_hidden, hidden).min() > 0.99 and not torch.equal(int8_hidden, hidden)

    longest = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in sequences])
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        padded = quantized(input_ids=ids, attention_mask=mask).last_hidden_state
        dense = quantized(input_ids=ids[:, :2]).last_hidden_state
    assert torch.equal(padded[mask.bool()], int8_hidden), (
        "the model must remove the padding itself, as in float32"
    )
    torch.testing.assert_close(dense, outputs(quantized, ids[:, :2].tolist())[0].view_as(dense))


def _in_norms(block, channels):
    """Multiply channels of the norms, and divide the columns that read them."""
    for norm, layer in ((block.attention_norm, block.qkv), (block.ffn_norm, block.ffn.w12)):
        norm.weight[channels] *= 50
        layer.weight[:, channels] /= 50


def _in_values(block, channels):
    """Multiply channels of the values, and divide the columns that read them.

    These are the values of the first head and of the gated feed-forward.
    """
    block.qkv.weight.view(4, 3, 32, -1)[0, 2, channels] *= 50
    block.wo.weight[:, channels] /= 50
    block.ffn.w12.weight[256 + channels] *= 50
    block.ffn.w3.weight[:, channels] /= 50


OUTLIERS = {"norms": _in_norms, "values": _in_values, "states": None}


def with_outliers(where):
    """Return a random encoder with three outlier channels, 50 times as large as the others.

    Args:
        where: Key of `OUTLIERS`. With "states", the outliers are in the token embeddings.
    """
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    spread = {"embedding_init_range": 0.2, "decoder_init_range": 0.15}
    config = NeoBERTConfig(**shape, **spread, vocab_size=400, intermediate_size=384)
    model = NeoBERTModel(config).eval()
    channels = torch.tensor([3, 17, 30])

    with torch.no_grad():
        if where == "states":
            model.encoder.weight[:, channels] *= 50
        else:
            for block in model.transformer_encoder:
                OUTLIERS[where](block, channels)
    return model


def observe(model):
    """Run random tokens, and return the largest inputs per linear layer and the hidden states."""
    states = []
    run = lambda: states.append(smoothing.random_token_states(model))  # noqa: E731
    return smoothing.observe_inputs(model, run), states[0]


@pytest.mark.parametrize("where", OUTLIERS)
def test_smoothing_keeps_hidden_states_bit_identical(where):
    """Smoothing keeps the hidden states bit-identical, and makes the outliers smaller."""
    model = with_outliers(where)
    largest, expected = observe(model)
    smoothing.smooth(model)
    largest_after, hidden = observe(model)
    assert torch.equal(hidden, expected)

    def spread(largest):
        return max(float(values.max() / values.median()) for values in largest.values())

    assert spread(largest_after) < (0.7 if where == "states" else 0.5) * spread(largest)


def test_gelu_model_is_smoothed_except_for_feed_forward_output(tiny_config):
    """The GELU ablation is smoothed, except for the inputs of the last layer of the feed-forward.

    These inputs come from an activation function, which is not linear.
    """
    fields = {"norm_type": "layer", "hidden_act": "gelu", "position_embedding_type": "learned"}
    model = NeoBERTModel(NeoBERTConfig(**tiny_config, **fields)).eval()
    block = model.transformer_encoder[0]
    with torch.no_grad():
        block.attention_norm.weight[3] = 90
        block.attention_norm.bias[5] = 90
        # An outlier before the activation function, which must stay.
        block.ffn[0].weight[7] *= 300
    largest, expected = observe(model)
    down_before = block.ffn[2].weight.clone()

    smoothing.smooth(model)
    largest_after, hidden = observe(model)
    assert torch.equal(hidden, expected) and torch.equal(block.ffn[2].weight, down_before)
    assert all(largest_after[block.qkv][i] <= largest[block.qkv][i] / 4 for i in (3, 5))


def test_observe_inputs_returns_the_maximum_over_batches(model):
    """`observe_inputs` returns the maximum over batches, and not that of the last batch."""
    texts = [torch.tensor([[7, 8, 9]]), torch.tensor([[3, 4]])]
    both = smoothing.observe_inputs(model, lambda: [model(text) for text in texts])
    singles = [smoothing.observe_inputs(model, partial(model, text)) for text in texts]
    assert len(both) == 4 * model.config.num_hidden_layers
    for layer, largest in both.items():
        assert torch.equal(largest, torch.maximum(*(single[layer] for single in singles)))
    assert any(not torch.equal(both[layer], singles[1][layer]) for layer in both)


def test_observation_does_not_warn_about_its_hooks(model, monkeypatch):
    """Check that `observe_inputs` does not log that a model with hooks runs on dense batches."""
    messages = []
    monkeypatch.setattr(modeling_neobert.logger, "warning_once", messages.append)
    ids = torch.arange(8)[None]
    smoothing.observe_inputs(model, lambda: model(ids, attention_mask=torch.ones_like(ids)))
    assert not messages and model.config.unpad_inputs


def test_balanced_factors():
    """Check the factors max^0.65 / norm^0.35, relative to the median channel.

    A large input has the factor 2^(8 * 0.65), and a small column 2^(8 * 0.35). Both are rounded to
    powers of two. A factor is at most 2^8.
    """
    layer = nn.Linear(7, 4, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    layer.weight.data[:, 5] = 2.0**-8
    largest = torch.tensor([1.0, 1, 1, 2.0**8, 2.0**20, 1, 1])
    factors = smoothing.balanced_factors(layer, largest)
    assert factors.tolist() == [1, 1, 1, 2**5, 2**8, 2**3, 1]


def test_balancing_is_bit_identical_and_improves_int8():
    """Balancing keeps the hidden states bit-identical, and brings int8 closer to float32.

    The channels of the feed-forward have different sizes, but `smooth` treats none as an outlier.
    """
    model = with_outliers("values")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in model.transformer_encoder:
            size = block.ffn.w3.in_features
            scales = torch.randn(size, generator=generator).mul(1.5).exp2()
            block.ffn.w12.weight[size:] *= scales[:, None]
            block.ffn.w3.weight /= scales

    sequences = random_sequences(20, vocabulary=400)
    hidden, means = outputs(model, sequences)
    with pytest.warns(UserWarning, match="the int8 model differs"):
        before = outputs(quantize_int8(copy.deepcopy(model)), sequences)[1]

    smoothing.balance(model, lambda: outputs(model, sequences))
    balanced_hidden, _ = outputs(model, sequences)
    after = outputs(quantize_int8(copy.deepcopy(model)), sequences)[1]
    assert torch.equal(balanced_hidden, hidden)
    assert cosines(before, means).min() < 0.985 and cosines(after, means).min() > 0.998


def test_balancing_fits_weights_into_float16():
    """Weights beyond the range of float16 are divided, with bit-identical hidden states.

    Training increased the weights of the last blocks to 100,000 in a student on a GPU.
    """
    model = with_outliers("values")
    size = model.transformer_encoder[0].ffn.w3.in_features
    with torch.no_grad():
        model.transformer_encoder[0].ffn.w12.weight[size:] *= 2.0**20
        for block in model.transformer_encoder[1:]:
            block.wo.weight *= 2.0**20
            block.ffn.w3.weight *= 2.0**20

    sequences = random_sequences(20, vocabulary=400)
    hidden, _ = outputs(model, sequences)
    smoothing.balance(model, lambda: outputs(model, sequences))
    balanced_hidden, _ = outputs(model, sequences)
    assert torch.equal(balanced_hidden, hidden) and hidden.isfinite().all()
    for weight in model.transformer_encoder.parameters():
        assert weight.half().isfinite().all()


@pytest.mark.parametrize("where", OUTLIERS)
def test_int8_is_accurate_with_large_outliers(where):
    """int8 stays close to float32 with outliers in norms, values, or hidden states.

    Trained encoders have such outliers in a few channels.
    """
    original = with_outliers(where)
    sequences = random_sequences(20, vocabulary=400)
    quantized = quantize_int8(copy.deepcopy(original))
    _, means = outputs(original, sequences)
    _, int8_means = outputs(quantized, sequences)
    assert cosines(int8_means, means).min() >= 0.99


def test_warn_about_inaccurate_quantization(monkeypatch):
    """`quantize_int8` warns if the int8 model differs too much from the original one."""
    # With this threshold no channel is an outlier, so nothing is smoothed.
    monkeypatch.setattr(smoothing, "OUTLIER_RATIO", 1e9)
    with pytest.warns(UserWarning, match=r"cosine similarity of 256 random tokens is 0\.[0-8]"):
        quantize_int8(with_outliers("norms"))


def test_warn_about_nan_hidden_states(model):
    """`quantize_int8` also warns if the hidden states are NaN, for which comparisons are false."""
    with torch.no_grad():
        model.layer_norm.weight[0] = float("nan")
    with pytest.warns(UserWarning, match="random tokens is nan"):
        quantize_int8(model)


def test_heads_and_sentence_transformers(tiny_config, bundled_pair):
    """A model with a head and the encoder of a SentenceTransformer can be quantized."""
    head = NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config, num_labels=3)).eval()
    ids = torch.randint(1, 200, (4, 20))
    with torch.no_grad():
        expected = head(input_ids=ids).logits
        quantized = quantize_int8(head)
        assert cosines(quantized(input_ids=ids).logits, expected).min() > 0.99

    encoder = bundled_pair[1]
    embeddings = encoder.sentence_transformer.encode(TEXTS[:20])
    assert np.abs(embeddings - encoder.encode(TEXTS[:20])).max() < 1e-5


def test_quantized_model_in_bfloat16(tiny_config):
    """A quantized model can be converted to bfloat16, except for its codes and scales."""
    original = NeoBERTModel(NeoBERTConfig(**tiny_config, decoder_init_range=0.1)).eval()
    quantized = quantize_int8(copy.deepcopy(original)).to(torch.bfloat16)
    sequences = random_sequences(5)
    hidden, _ = outputs(quantized, sequences)
    assert hidden.dtype == torch.bfloat16
    assert cosines(hidden, outputs(original, sequences)[0]).min() > 0.99


@pytest.mark.slow
def test_compiled_int8_blocks_match_eager_blocks(model):
    """Compiled int8 blocks have the hidden states of blocks that are not compiled."""
    quantized = quantize_int8(copy.deepcopy(model))
    compiled = compile_blocks(quantize_int8(copy.deepcopy(model)))
    for sequences in (random_sequences(4), random_sequences(9), random_sequences(1)):
        actual = outputs(compiled, sequences)[0]
        expected = outputs(quantized, sequences)[0]
        assert cosines(actual, expected).min() > 0.999


# ------------------------------------------------------------------------------- Unsupported models


def test_unsupported_models_and_uses_are_rejected(model, bundled_pair, tmp_path):
    """Check the errors for unsupported models, and for saving or training a quantized model."""
    with pytest.raises(UserError, match="must contain a NeoBERT to be quantized, got a Linear"):
        quantize_int8(nn.Linear(4, 4))
    with pytest.raises(UserError, match="float32 or bfloat16 on the CPU, got float16 on cpu"):
        quantize_int8(copy.deepcopy(model).half())
    with pytest.raises(UserError, match="got float32 on meta"):
        quantize_int8(copy.deepcopy(model).to("meta"))

    ablation = NeoBERTConfig(**model.config.to_diff_dict() | {"norm_type": "layer"})
    with pytest.raises(UserError, match="RMSNorm, SwiGLU and RoPE, got layer"):
        quantize_int8(NeoBERTModel(ablation))

    adapted = copy.deepcopy(model)
    adapted.transformer_encoder[1].wo = type("Adapted", (nn.Linear,), {})(64, 64)
    with pytest.raises(UserError, match="got transformer_encoder.1.wo of type Adapted. Merge"):
        quantize_int8(adapted)

    quantized = quantize_int8(model)
    with pytest.raises(UserError, match="is already quantized to int8"):
        quantize_int8(quantized)
    for save in (
        lambda: quantized.save_pretrained(tmp_path),
        lambda: pickle.dumps(quantized),
        lambda: copy.deepcopy(quantized),
    ):
        with pytest.raises(UserError, match="cannot be saved"):
            save()
    with pytest.raises(UserError, match="in evaluation mode"):
        quantized.train()(input_ids=torch.ones(1, 4, dtype=torch.long))


# ---------------------------------------------------------------------------- Bit-identical results


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_embedding_is_bit_identical_in_every_batch(model_folder, dtype, threads):
    """The embedding of a text is bit-identical in random batches and alone.

    The batches differ in their texts, the order of the texts and the maximum number of tokens.
    """
    torch.set_num_threads(threads)
    encoder = PackedEncoder(str(model_folder), dtype=dtype)
    generator = np.random.default_rng(0)
    lengths = [*range(1, 40), 64, 100, 130, 257, 513, 700]
    tokens = [generator.integers(1000, 20000, length) for length in lengths]
    alone = np.concatenate([encoder.embed([ids]) for ids in tokens])

    for batch in range(1000 if threads == 1 else 100):
        encoder.batch_tokens = int(generator.choice([1, 50, 300, 3072]))
        # Long texts are slow, so that only every 50th batch may contain them.
        text_limit = len(tokens) if batch % 50 == 0 else 40
        chosen = generator.choice(text_limit, generator.integers(1, 9))
        assert np.array_equal(encoder.embed([tokens[i] for i in chosen]), alone[chosen])
