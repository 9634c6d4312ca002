"""Test int8 on the CPU.

Products are exact and timed before they are used. Covers stored values and scales, the distance to
float32 with outliers, unsupported models, and equal bits of a text in every batch.
"""

import copy
import os
import pickle
import platform
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from helpers.encode_runs import make_model_folder  # noqa: F401
from torch import nn

from neobert import NeoBERTConfig, NeoBERTForSequenceClassification, NeoBERTModel, quantize_int8
from neobert.attention_neobert import Packing
from neobert.common.errors import UserError
from neobert.common.packing import compile_blocks, pack
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.quantization import int8, int8_product, smoothing


ENCODER = "examples/sentence-encoder"
TEXTS = [line.split("\t")[1].strip() for line in open("examples/definitions.tsv")][:200]


def cosines(ours, exact):
    return nn.functional.cosine_similarity(ours.double(), exact.double(), dim=-1)


@torch.inference_mode()
def outputs(model, sequences):
    """Hidden states (T, D) and means (N, D) of a packed batch."""
    packed = pack(sequences)
    hidden = model(**packed)[0]
    return hidden[0], Packing(packed["cu_seq_lens_q"], None).means(hidden)


def drawn(count, least=2, most=40, vocabulary=200):
    lengths = torch.randint(least, most, (count,)).tolist()
    return [torch.randint(1, vocabulary, (length,)).tolist() for length in lengths]


@pytest.fixture
def model(tiny_config):
    return NeoBERTModel(NeoBERTConfig(**tiny_config, decoder_init_range=0.1)).eval()


@pytest.fixture(scope="module")
def bundled_pair():
    """The bundled encoder in float32 and in int8."""
    return PackedEncoder(ENCODER, dtype="float32"), PackedEncoder(ENCODER, dtype="int8")


# ------------------------------------------------------------------------------------ the product


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 33, 512])
def test_the_product_is_the_integer_product(rows):
    """Also where every pair of products is as large as it can be."""
    limit_pairs = int8_product.must_limit_pairs(even_if_slow=True)
    largest = 64 if limit_pairs else 127
    weight = torch.randint(-largest, largest + 1, (72, 200), dtype=torch.int8)
    codes = torch.randint(0, 256, (rows, 200), dtype=torch.uint8)
    weight[:2], weight[2], codes[0] = largest, -largest, 255
    weight[3, ::2], weight[3, 1::2] = 127, 1
    weight[4, ::2], weight[4, 1::2] = -3, -125
    exact = (codes.numpy().astype(np.int64) - 128) @ weight.numpy().astype(np.int64).T
    scales = torch.rand(72)
    found = int8_product.product(codes, int8_product.pack_weight(weight), scales)
    assert np.array_equal(found.numpy(), exact.astype(np.float32) * scales.numpy())


def test_the_check_finds_a_product_that_saturates(monkeypatch):
    """As `vpmaddubsw` does: pairs of products are added in 16 bits."""

    def saturating(codes, packed, scales, dtype=torch.float32):
        products = codes.long()[:, None] * packed.long()
        pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(-1) - 128 * packed.long().sum(-1)).to(dtype) * scales

    monkeypatch.setattr(int8_product, "pack_weight", lambda weight: weight)
    monkeypatch.setattr(int8_product, "product", saturating)
    assert not int8_product.is_exact(False, 16)
    assert int8_product.is_exact(True, 16)
    monkeypatch.setattr(int8_product, "LARGEST", 128)
    assert not int8_product.is_exact(True, 16)


def test_largest_weights_by_hand():
    """Pairs of one sign add up to 127 at most; a weight without a neighbor is a pair of its own."""
    weight = torch.tensor([[3.0, 4, -5, 0, 1], [-3, -4, -2, 8, -1], [2, -2, 2, -2, 9], [0] * 5])
    assert int8_product.largest_weights(weight, False).tolist()[:3] == [5, 8, 9]
    assert int8_product.largest_weights(weight, True).tolist()[:3] == [7, 8, 9]
    assert int8_product.largest_weights(weight, True)[3] > 0


def test_rounded_pairs_stay_within_16_bits():
    weight = torch.randn(200, 96)
    weight[:50] = weight[:50].abs()
    integers = (weight * 127 / int8_product.largest_weights(weight, True)[:, None]).round()
    pairs = integers.unflatten(1, (-1, 2))
    assert pairs.clamp(min=0).sum(-1).max() * 255 < 2**15
    assert pairs.clamp(max=0).sum(-1).min() * 255 >= -(2**15)


@pytest.fixture
def measured(monkeypatch):
    """Sets what the measurement finds: seconds of float32 and of int8."""

    def set_seconds(*seconds):
        monkeypatch.setattr(int8_product, "_seconds", lambda *given: list(seconds))
        int8_product.must_limit_pairs.cache_clear()

    yield set_seconds
    monkeypatch.undo()
    int8_product.must_limit_pairs.cache_clear()


def test_a_slow_product_is_never_used_silently(measured, model):
    measured(1.0, 10_000.0)
    with pytest.raises(UserError, match="takes 10000.0 times as long as the one in float32"):
        quantize_int8(model)
    assert not int8.is_int8(model)
    assert int8.is_int8(quantize_int8(model, even_if_slow=True))


def test_a_product_that_is_not_exact_is_refused(measured, model, monkeypatch):
    measured(1.0, 0.5)
    monkeypatch.setattr(int8_product, "is_exact", lambda limit_pairs, rows: False)
    with pytest.raises(UserError, match="not exact"):
        quantize_int8(model, even_if_slow=True)


# ---------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("limit_pairs", [False, True])
def test_a_linear_layer_by_hand(limit_pairs):
    if not limit_pairs and int8_product.must_limit_pairs(even_if_slow=True):
        pytest.skip("the product of this CPU saturates")
    weight, x = torch.randn(24, 40), torch.randn(3, 7, 40)
    x[1, 2] = 0  # a row of zeros has a scale too
    found = int8.Int8Linear(weight, limit_pairs)(x)
    for row, output in zip(x.flatten(0, 1), found.flatten(0, 1)):
        scale = row.abs().max() / 127
        codes = torch.floor(row / scale + 0.5) if scale else torch.zeros(40)
        for column, value in zip(weight, output):
            pairs = column.unflatten(0, (-1, 2))
            sums = torch.stack((pairs.clamp(min=0).sum(1), -pairs.clamp(max=0).sum(1)))
            step = (sums.max() if limit_pairs else column.abs().max()) / 127
            exact = (codes.double() @ torch.round(column / step).double()) * step * scale
            # A value half-way between two codes may be rounded either way.
            assert abs(value - exact) <= 1.01 * step * 127 * scale / 2**14 + 1e-6 * abs(exact) or (
                abs(value - exact) <= step * 127 * scale
                and (((row / scale) % 1) - 0.5).abs().min() < 1e-4
            )
    assert not found[1, 2].any() and found.shape == (3, 7, 24)


def test_a_norm_gives_the_bytes_of_its_output():
    norm = nn.RMSNorm(48, eps=0.5)
    nn.init.uniform_(norm.weight, 0.5, 2)
    x = torch.randn(2, 9, 48)
    with torch.no_grad():
        made = int8.Int8Norm(norm).eval()(x)
        exact = norm(x).flatten(0, 1)
    scales = made.scales * (48**0.5 / 127)  # the factor is part of the next linear layer
    codes = made.codes[:18]
    found = (codes.float() - 128) * scales
    torch.testing.assert_close(scales[:, 0], exact.abs().amax(1) / 127, rtol=1e-5, atol=0)
    assert ((found - exact).abs() <= 0.501 * scales).all() and codes.min() >= 1


def test_outliers_alone_are_smoothed_by_powers_of_two():
    layer = nn.Linear(64, 32, bias=False)
    nn.init.uniform_(layer.weight, -1, 1)
    layer.weight.data[:, 9] /= 16
    largest = torch.rand(64) + 1
    largest[3], largest[9] = 80, 80
    largest[20], largest[21] = (times * largest.median() for times in (7.5, 8.5))
    factors = smoothing.factors(layer, largest)
    assert factors[3] == 8 and factors[9] == 32  # sqrt(80 / 1.5); sqrt(80 / 1.5 * 16)
    assert factors[20] == 1 and factors[21] > 1, "an outlier is 8 times the median"
    assert (factors == 1).sum() == 61


# ----------------------------------------------------------------------------------------- models


def test_factors_by_hand():
    """Equation 4 of SmoothQuant with alpha = 1/2: sqrt(64 / 2^-4) = 2^5 of the outlier, relative to
    the median channel, sqrt(1 / 2^-4) = 2^2."""
    layer = nn.Linear(7, 3, bias=False)
    nn.init.constant_(layer.weight, 2**-4)
    largest = torch.tensor([1.0, 1, 1, 64, 1, 1, 1])
    assert smoothing.factors(layer, largest).tolist() == [1, 1, 1, 2**3, 1, 1, 1]


def test_the_bundled_encoder_is_near(bundled_pair):
    exact, ours = bundled_pair
    tokens = exact.tokenize(TEXTS)
    (hidden, texts), (rounded, rounded_texts) = (
        outputs(encoder.sentence_transformer[0].auto_model, tokens) for encoder in bundled_pair
    )
    assert cosines(rounded, hidden).min() >= 0.995
    assert cosines(rounded_texts, texts).min() >= 0.999
    assert ours.dtype_name == "int8" and not torch.equal(hidden, rounded)


WITHOUT_VNNI = f"""
from neobert import NeoBERTModel, quantize_int8
from neobert.quantization.int8_product import must_limit_pairs

assert must_limit_pairs(even_if_slow=True)
quantize_int8(NeoBERTModel.from_pretrained({ENCODER!r}), even_if_slow=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have no AVX2")
def test_the_bundled_encoder_on_a_cpu_without_vnni():
    """oneDNN runs the kernels of such a CPU, whose sums saturate. `quantize_int8` warns if one of
    256 random tokens has a cosine below 0.99."""
    variables = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_VNNI],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "differs from the original" not in run.stderr, run.stderr


def test_packed_padded_and_dense_agree(tiny_config):
    exact = NeoBERTModel(NeoBERTConfig(**tiny_config, decoder_init_range=0.1)).eval()
    ours = quantize_int8(copy.deepcopy(exact))
    sequences = drawn(8)
    hidden, _ = outputs(exact, sequences)
    found, _ = outputs(ours, sequences)
    assert cosines(found, hidden).min() > 0.99 and not torch.equal(found, hidden)
    longest = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in sequences])
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        padded = ours(input_ids=ids, attention_mask=mask).last_hidden_state
        dense = ours(input_ids=ids[:, :2]).last_hidden_state
    assert torch.equal(padded[mask.bool()], found), "the model packs by itself, as in float32"
    torch.testing.assert_close(dense, outputs(ours, ids[:, :2].tolist())[0].view_as(dense))


def _in_norms(block, channels):
    for norm, layer in ((block.attention_norm, block.qkv), (block.ffn_norm, block.ffn.w12)):
        norm.weight[channels] *= 50
        layer.weight[:, channels] /= 50


def _in_values(block, channels):
    """Of the first head, and of the feed-forward."""
    block.qkv.weight.view(4, 3, 32, -1)[0, 2, channels] *= 50
    block.wo.weight[:, channels] /= 50
    block.ffn.w12.weight[256 + channels] *= 50
    block.ffn.w3.weight[:, channels] /= 50


OUTLIERS = {"norms": _in_norms, "values": _in_values, "states": None}


def with_outliers(where):
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    spread = {"embedding_init_range": 0.2, "decoder_init_range": 0.15}
    config = NeoBERTConfig(**shape, **spread, vocab_size=400, intermediate_size=384)
    model, channels = NeoBERTModel(config).eval(), torch.tensor([3, 17, 30])
    with torch.no_grad():
        if where == "states":
            model.encoder.weight[:, channels] *= 50
        else:
            for block in model.transformer_encoder:
                OUTLIERS[where](block, channels)
    return model


def observed(model):
    """Largest inputs of the linear layers for random tokens, and their hidden states."""
    states = []
    run = lambda: states.append(smoothing.random_token_states(model))  # noqa: E731
    return smoothing.observe_inputs(model, run), states[0]


@pytest.mark.parametrize("where", OUTLIERS)
def test_smoothing_changes_no_bit_of_the_hidden_states(where):
    model = with_outliers(where)
    largest, exact = observed(model)
    smoothing.smooth(model)
    after, hidden = observed(model)
    assert torch.equal(hidden, exact)

    def spread(largest):
        return max(float(values.max() / values.median()) for values in largest.values())

    assert spread(after) < (0.7 if where == "states" else 0.5) * spread(largest)


def test_a_model_without_a_gate_is_smoothed_in_its_norms_and_values(tiny_config):
    fields = {"norm_type": "layer", "hidden_act": "gelu", "position_embedding_type": "learned"}
    model = NeoBERTModel(NeoBERTConfig(**tiny_config, **fields)).eval()
    block = model.transformer_encoder[0]
    with torch.no_grad():
        block.attention_norm.weight[3], block.attention_norm.bias[5] = 90, 90
        block.ffn[0].weight[7] *= 300  # what `down` reads is behind a function of its own
    largest, exact = observed(model)
    down = block.ffn[2].weight.clone()
    smoothing.smooth(model)
    after, hidden = observed(model)
    assert torch.equal(hidden, exact) and torch.equal(block.ffn[2].weight, down)
    assert all(after[block.qkv][i] <= largest[block.qkv][i] / 4 for i in (3, 5))


def test_the_largest_inputs_are_those_of_all_batches(model):
    texts = [torch.tensor([[7, 8, 9]]), torch.tensor([[3, 4]])]
    both = smoothing.observe_inputs(model, lambda: [model(text) for text in texts])
    singles = [smoothing.observe_inputs(model, partial(model, text)) for text in texts]
    assert len(both) == 4 * model.config.num_hidden_layers
    for layer, largest in both.items():
        assert torch.equal(largest, torch.maximum(*(single[layer] for single in singles)))
    assert any(not torch.equal(both[layer], singles[1][layer]) for layer in both)


def test_balanced_factors_by_hand():
    """max^0.65 / norm^0.35 relative to the median channel: 2^(8 * 0.65) of a large input,
    2^(8 * 0.35) of a small column, rounded to powers of two, and 2^8 at most."""
    layer = nn.Linear(7, 4, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    layer.weight.data[:, 5] = 2.0**-8
    largest = torch.tensor([1.0, 1, 1, 2.0**8, 2.0**20, 1, 1])
    factors = smoothing.balanced_factors(layer, largest)
    assert factors.tolist() == [1, 1, 1, 2**5, 2**8, 2**3, 1]


def test_balancing_changes_no_bit_and_brings_int8_nearer():
    """Channels of the feed-forward of different sizes, none of which is an outlier for `smooth`."""
    model = with_outliers("values")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in model.transformer_encoder:
            size = block.ffn.w3.in_features
            scales = torch.randn(size, generator=generator).mul(1.5).exp2()
            block.ffn.w12.weight[size:] *= scales[:, None]
            block.ffn.w3.weight /= scales
    sequences = drawn(20, vocabulary=400)
    hidden, texts = outputs(model, sequences)
    with pytest.warns(UserWarning, match="the int8 model differs"):
        before = outputs(quantize_int8(copy.deepcopy(model)), sequences)[1]

    smoothing.balance(model, lambda: outputs(model, sequences))
    same, _ = outputs(model, sequences)
    after = outputs(quantize_int8(copy.deepcopy(model)), sequences)[1]
    assert torch.equal(same, hidden)
    assert cosines(before, texts).min() < 0.985 and cosines(after, texts).min() > 0.998


@pytest.mark.parametrize("where", OUTLIERS)
def test_outliers_of_50_times_the_rest_hold(where):
    """As real encoders have them, in a few channels of norms, of values, or of the states."""
    exact, sequences = with_outliers(where), drawn(20, vocabulary=400)
    ours = quantize_int8(copy.deepcopy(exact))
    (_, texts), (_, found) = outputs(exact, sequences), outputs(ours, sequences)
    assert cosines(found, texts).min() >= 0.99


def test_a_model_that_int8_is_not_near_to_is_told_about(monkeypatch):
    monkeypatch.setattr(smoothing, "TIMES", 1e9)  # nothing is smoothed
    with pytest.warns(UserWarning, match=r"cosine similarity of 256 random tokens is 0\.[0-8]"):
        quantize_int8(with_outliers("norms"))


def test_vectors_without_a_number_are_told_about(model):
    with torch.no_grad():
        model.layer_norm.weight[0] = float("nan")
    with pytest.warns(UserWarning, match="random tokens is nan"):
        quantize_int8(model)


def test_heads_and_sentence_transformers(tiny_config, bundled_pair):
    head = NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config, num_labels=3)).eval()
    ids = torch.randint(1, 200, (4, 20))
    with torch.no_grad():
        exact = head(input_ids=ids).logits
        ours = quantize_int8(head)
        assert cosines(ours(input_ids=ids).logits, exact).min() > 0.99
    encoder = bundled_pair[1]
    vectors = encoder.sentence_transformer.encode(TEXTS[:20])
    assert np.abs(vectors - encoder.encode(TEXTS[:20])).max() < 1e-5


def test_bfloat16_around_the_products(tiny_config):
    exact = NeoBERTModel(NeoBERTConfig(**tiny_config, decoder_init_range=0.1)).eval()
    ours, sequences = quantize_int8(copy.deepcopy(exact)).to(torch.bfloat16), drawn(5)
    hidden, _ = outputs(ours, sequences)
    assert hidden.dtype == torch.bfloat16
    assert cosines(hidden, outputs(exact, sequences)[0]).min() > 0.99


@pytest.mark.slow
def test_compiled_blocks_are_as_near(model):
    ours = quantize_int8(copy.deepcopy(model))
    compiled = compile_blocks(quantize_int8(copy.deepcopy(model)))
    for sequences in (drawn(4), drawn(9), drawn(1)):
        found, exact = outputs(compiled, sequences)[0], outputs(ours, sequences)[0]
        assert cosines(found, exact).min() > 0.999


# --------------------------------------------------------------------------------------- refusals


def test_what_int8_is_not_for(model, bundled_pair, tmp_path):
    with pytest.raises(UserError, match="must contain a NeoBERT to be quantized, got a Linear"):
        quantize_int8(nn.Linear(4, 4))
    with pytest.raises(UserError, match="float32 or bfloat16 on the CPU, got float16 on cpu"):
        quantize_int8(copy.deepcopy(model).half())
    with pytest.raises(UserError, match="got float32 on meta"):
        quantize_int8(copy.deepcopy(model).to("meta"))
    ablation = NeoBERTConfig(**model.config.to_diff_dict() | {"norm_type": "layer"})
    with pytest.raises(UserError, match="rms, swiglu and rope, got .'layer'"):
        quantize_int8(NeoBERTModel(ablation))
    adapted = copy.deepcopy(model)
    adapted.transformer_encoder[1].wo = type("Adapted", (nn.Linear,), {})(64, 64)
    with pytest.raises(UserError, match="got transformer_encoder.1.wo of type Adapted. Merge"):
        quantize_int8(adapted)
    ours = quantize_int8(model)
    with pytest.raises(UserError, match="got a model that is in int8"):
        quantize_int8(ours)
    for save in (
        lambda: ours.save_pretrained(tmp_path),
        lambda: pickle.dumps(ours),
        lambda: copy.deepcopy(ours),
    ):
        with pytest.raises(UserError, match="cannot be saved"):
            save()
    with pytest.raises(UserError, match="in evaluation mode"):
        ours.train()(input_ids=torch.ones(1, 4, dtype=torch.long))


# ------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_text_has_the_same_bits_in_every_batch(model_folder, dtype, threads):
    """1,000 random batches: any neighbors, any order, any number of tokens a batch."""
    torch.set_num_threads(threads)
    encoder, generator = PackedEncoder(str(model_folder), dtype=dtype), np.random.default_rng(0)
    lengths = [*range(1, 40), 64, 100, 130, 257, 513, 700]
    tokens = [generator.integers(1000, 20000, length) for length in lengths]
    alone = np.concatenate([encoder.embed([ids]) for ids in tokens])
    for batch in range(1000 if threads == 1 else 100):
        encoder.batch_tokens = int(generator.choice([1, 50, 300, 3072]))
        shortest = len(tokens) if batch % 50 == 0 else 40  # long texts take long
        chosen = generator.choice(shortest, generator.integers(1, 9))
        assert np.array_equal(encoder.embed([tokens[i] for i in chosen]), alone[chosen])
