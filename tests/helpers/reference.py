"""NeoBERT written from the paper's formulas in float64, one text and one head at a time, and the
tiny models that are compared with it.

It shares no line with the model and knows no padding, packing or mask: a text is what is left of
its row.
"""

import inspect
import math
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import modeling_flash_attention_utils as flash_utils

from neobert import NeoBERTConfig


FIELDS = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
LEARNED = {"position_embedding_type": "learned", "norm_type": "layer", "hidden_act": "gelu"}


def make_model(model_class, seed=0, **fields):
    """A tiny model in eval mode whose weights are so large that attention is far from uniform and
    no bias or norm is trivial."""
    implementation = fields.pop("attn_implementation", "sdpa")
    model = model_class._from_config(
        NeoBERTConfig(**{**FIELDS, **fields}), attn_implementation=implementation
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            noise = 1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise
        elif not name.endswith(("encoder.weight", "positional_embedding.weight")):
            noise = noise * 1.5 / math.sqrt(parameter.shape[1])
        parameter.data.copy_(noise)
    return model.eval()


def packing_arguments(lengths, longest=None):
    """What tells of texts of these lengths in a row (1, T)."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = longest or max(lengths)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return dict(zip(names, (bounds, bounds, longest, longest)))


def random_batch(lengths, vocab_size=200, length=None, side="right", seed=1):
    """input_ids and attention_mask (B, L) of texts of these lengths, 0 at padding."""
    generator = torch.Generator().manual_seed(seed)
    length = length or max(lengths)
    ids = torch.zeros(len(lengths), length, dtype=torch.long)
    mask = torch.zeros(len(lengths), length, dtype=torch.long)
    for row, n in enumerate(lengths):
        where = slice(0, n) if side == "right" else slice(length - n, length)
        ids[row, where] = torch.randint(1, vocab_size, (n,), generator=generator)
        mask[row, where] = 1
    return ids, mask


def texts_of(ids, mask):
    """What is left of each row, without its padding."""
    return [row[real.bool()] for row, real in zip(ids, mask)]


def packed_batch(texts):
    """input_ids (1, T) and the four packing arguments."""
    return {"input_ids": torch.cat(texts)[None], **packing_arguments([*map(len, texts)])}


def rotary_angles(positions, head_dim, theta=10000.0):
    """(L, K / 2) angles in float64: position * theta^(-2i / K)."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    return positions.double()[:, None] * theta ** (-2 * pairs / head_dim)


def rotate(x, angles):
    """Rotates the pairs (x[2i], x[2i + 1]) of (L, K) by angles (L, K / 2), written as a 2 x 2
    matrix a pair."""
    turned = torch.empty_like(x)
    turned[:, 0::2] = x[:, 0::2] * angles.cos() - x[:, 1::2] * angles.sin()
    turned[:, 1::2] = x[:, 0::2] * angles.sin() + x[:, 1::2] * angles.cos()
    return turned


def _norm(x, weights, name, config):
    weight = weights[f"{name}.weight"]
    if config.norm_type == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight
    return x + weights[f"{name}.bias"] if config.norm_type == "layer" else x


def _feed_forward(x, weights, name, config):
    if config.hidden_act == "gelu":
        x = x @ weights[f"{name}.0.weight"].T
        return (0.5 * x * (1 + torch.erf(x / math.sqrt(2)))) @ weights[f"{name}.2.weight"].T
    inner = weights[f"{name}.w3.weight"].shape[1]
    both = x @ weights[f"{name}.w12.weight"].T
    gate, value = both[:, :inner], both[:, inner:]
    return (gate / (1 + torch.exp(-gate)) * value) @ weights[f"{name}.w3.weight"].T


def reference_states(model, tokens, positions=None, angles=None):
    """Every hidden state of one text.

    Args:
        model: any NeoBERT class; only its weights and configuration are read.
        tokens: (L,) ids.
        positions: (L,), by default 0 ... L - 1.
        angles: (L, K / 2) in place of the plain rotary angles.
    Returns:
        list of num_hidden_layers + 1 tensors (L, D) in float64, the last one normed; list of
        weights (H, L, L) per block.
    """
    config = model.config
    weights = {
        name.removeprefix("model."): value.detach().double()
        for name, value in model.state_dict().items()
    }
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    positions = torch.arange(len(tokens)) if positions is None else positions
    x = weights["encoder.weight"][tokens]
    if config.position_embedding_type == "learned":
        x = x + weights["positional_embedding.weight"][positions + 1]
    elif angles is None:
        angles = rotary_angles(positions, size, config.rope_theta)
    states, attentions = [x], []
    for i in range(config.num_hidden_layers):
        layer = f"transformer_encoder.{i}"
        qkv = (
            _norm(x, weights, f"{layer}.attention_norm", config) @ weights[f"{layer}.qkv.weight"].T
        )
        outputs, maps = [], []
        for h in range(heads):
            # Rows of qkv.weight: head 0's query, key, value, then head 1's, ...
            q, k, v = (qkv[:, (3 * h + j) * size : (3 * h + j + 1) * size] for j in range(3))
            if config.position_embedding_type == "rope":
                q, k = rotate(q, angles), rotate(k, angles)
            scores = q @ k.T / math.sqrt(size)
            scores = torch.exp(scores - scores.max(-1, keepdim=True).values)
            maps.append(scores / scores.sum(-1, keepdim=True))
            outputs.append(maps[-1] @ v)
        attentions.append(torch.stack(maps))
        x = x + torch.cat(outputs, -1) @ weights[f"{layer}.wo.weight"].T
        x = x + _feed_forward(
            _norm(x, weights, f"{layer}.ffn_norm", config), weights, f"{layer}.ffn", config
        )
        states.append(x)
    states[-1] = _norm(x, weights, "layer_norm", config)
    return states, attentions


def last_states(model, *texts):
    """(T, D): the last hidden states of texts, each computed alone, one behind the other."""
    return torch.cat([reference_states(model, text)[0][-1] for text in texts])


def count_rows(*modules):
    """Makes modules note the tokens that each of their calls sees, in the list that is returned.

    As the machinery of torch does: a model whose inner modules have other hooks or forwards runs on
    dense batches.
    """
    seen = []
    for module in modules:

        def forward(*args, inner=module.forward, **kwargs):
            output = inner(*args, **kwargs)
            seen.append(output[..., 0].numel())
            return output

        forward.__module__ = "torch.probe"
        module.forward = forward
    return seen


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still alive: their peak,
    whatever the allocator keeps."""

    def __init__(self, *made_before):
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in made_before}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for storage in (
            leaf.untyped_storage() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)
        ):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return output

    def _forget(self, key, size):
        self.known.discard(key)
        self.live -= size


def assert_same(actual, expected, tolerance=1e-5, what="output"):
    """The largest difference is at most `tolerance` times the largest expected value."""
    expected = expected.detach().double()
    difference = (actual.detach().double() - expected).abs().max().item()
    bound = tolerance * expected.abs().max().item()
    assert difference <= bound, f"The {what} differs by {difference:.2e}, more than {bound:.2e}."


class FlashReference:
    """flash-attn's two functions in plain torch; keeps the arguments of every call."""

    BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic")

    def __init__(self):
        self.calls = []

    @staticmethod
    def attend(q, k, v, scale):
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def varlen(self, q, k, v, *bounds, softmax_scale=None, causal=False, dropout_p=0.0, **others):
        options = {"softmax_scale": softmax_scale, "causal": causal, "dropout_p": dropout_p}
        call = {**dict(zip(self.BOUNDS, bounds)), **others, **options}
        self.calls.append({"q": q, "k": k, "v": v, **call})
        texts = call["cu_seqlens_q"].diff().tolist()
        parts = zip(*(x.split(texts) for x in (q, k, v)))
        return torch.cat([self.attend(*part, softmax_scale) for part in parts])

    def dense(self, q, k, v, softmax_scale=None, causal=False, dropout_p=0.0, **others):
        options = {"softmax_scale": softmax_scale, "causal": causal, "dropout_p": dropout_p}
        self.calls.append({"q": q, "k": k, "v": v, **options})
        return torch.stack([self.attend(*row, softmax_scale) for row in zip(q, k, v)])

    def function(self, name, arguments):
        """One of the two, with a signature such as transformers reads."""

        def function(*args, **kwargs):
            return getattr(self, name)(*args, **kwargs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in ("q", "k", "v", *arguments)]
        function.__signature__ = inspect.Signature(parameters)
        return function


def install_flash(monkeypatch):
    """Puts a `FlashReference` in the place of the flash-attn package, behind transformers' own
    flash_attention_2; returns it."""
    reference = FlashReference()
    dense = reference.function("dense", reference.OPTIONS)
    varlen = reference.function("varlen", reference.BOUNDS + reference.OPTIONS)
    pads = flash_utils._pad_input, flash_utils._unpad_input
    process = flash_utils._lazy_define_process_function(varlen)
    # transformers 5 added a kernel for caches, then its arguments.
    cache = (None,) if hasattr(flash_utils, "_flash_with_kvcache_fn") else ()
    if hasattr(flash_utils, "_process_with_kvcache_kwargs_fn"):
        process = (process, dict)
    loaded = ((dense, varlen, *cache, *pads), process)
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *args, **kwargs: loaded)
    return reference
