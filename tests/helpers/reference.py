"""Reference implementation of NeoBERT, and the tiny models that are compared with it.

The reference follows the formulas of the paper in float64, one text and one head at a time. It
shares no code with the model. It has no padding, packing or masks: its input is a single text.
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
    """Return a tiny model in eval mode with random weights.

    The weights are so large that attention is far from uniform and that every bias and norm changes
    the outputs.
    """
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
    """Return the arguments that describe texts of these lengths, packed in one row."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = longest or max(lengths)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return dict(zip(names, (bounds, bounds, longest, longest)))


def random_batch(lengths, vocab_size=200, length=None, side="right", seed=1):
    """Return input_ids and attention_mask (B, L) of random texts.

    Args:
        lengths: Number of tokens of each text.
        vocab_size: Token ids are smaller than this number. Token id 0 is used for padding only.
        length: Length L of the rows. By default the length of the longest text.
        side: Side of the padding, "right" or "left".
        seed: Seed of the random token ids.
    """
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
    """Return the non-padding tokens of each row."""
    return [row[row_mask.bool()] for row, row_mask in zip(ids, mask)]


def packed_batch(texts):
    """Return input_ids (1, T) and the four packing arguments of these texts."""
    return {"input_ids": torch.cat(texts)[None], **packing_arguments([*map(len, texts)])}


def rotary_angles(positions, head_dim, theta=10000.0):
    """Return the angles position * theta^(-2i / K) in float64, (L, K / 2)."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    return positions.double()[:, None] * theta ** (-2 * pairs / head_dim)


def rotate(x, angles):
    """Rotate the pairs (x[2i], x[2i + 1]) of (L, K) by angles (L, K / 2).

    Each pair is multiplied by a 2 x 2 rotation matrix.
    """
    rotated = torch.empty_like(x)
    rotated[:, 0::2] = x[:, 0::2] * angles.cos() - x[:, 1::2] * angles.sin()
    rotated[:, 1::2] = x[:, 0::2] * angles.sin() + x[:, 1::2] * angles.cos()
    return rotated


def _norm(x, weights, name, config):
    """Compute the LayerNorm or RMSNorm with the given name."""
    weight = weights[f"{name}.weight"]
    if config.norm_type == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight
    return x + weights[f"{name}.bias"] if config.norm_type == "layer" else x


def _feed_forward(x, weights, name, config):
    """Compute the GELU or SwiGLU feed-forward layer with the given name."""
    if config.hidden_act == "gelu":
        x = x @ weights[f"{name}.0.weight"].T
        return (0.5 * x * (1 + torch.erf(x / math.sqrt(2)))) @ weights[f"{name}.2.weight"].T
    inner = weights[f"{name}.w3.weight"].shape[1]
    gate_and_value = x @ weights[f"{name}.w12.weight"].T
    gate, value = gate_and_value[:, :inner], gate_and_value[:, inner:]
    return (gate / (1 + torch.exp(-gate)) * value) @ weights[f"{name}.w3.weight"].T


def reference_states(model, tokens, positions=None, angles=None):
    """Compute all hidden states and attention weights of one text.

    Args:
        model: Model of any NeoBERT class. Only its weights and configuration are used.
        tokens: Token ids, (L,).
        positions: Positions, (L,). By default 0 to L - 1.
        angles: Rotary angles, (L, K / 2), instead of the unscaled ones.

    Returns:
        A list of num_hidden_layers + 1 hidden states (L, D) in float64, the last of which is
        normalized, and a list of the attention weights (H, L, L) of each block.
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

    states = [x]
    attentions = []
    for i in range(config.num_hidden_layers):
        layer = f"transformer_encoder.{i}"
        qkv = (
            _norm(x, weights, f"{layer}.attention_norm", config) @ weights[f"{layer}.qkv.weight"].T
        )

        outputs = []
        maps = []
        for h in range(heads):
            # The rows of qkv.weight are query, key and value of head 0, then of head 1, and so on.
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
    """Return the last hidden states of texts, concatenated, (T, D).

    Each text is computed on its own.
    """
    return torch.cat([reference_states(model, text)[0][-1] for text in texts])


def count_rows(*modules):
    """Patch modules to record the number of tokens in each call. Return the list of numbers.

    The patched forward pretends to belong to torch. The model would not pack a batch if one of its
    modules had any other hook or forward.
    """
    counts = []
    for module in modules:

        def forward(*args, inner=module.forward, **kwargs):
            output = inner(*args, **kwargs)
            counts.append(output[..., 0].numel())
            return output

        forward.__module__ = "torch.probe"
        module.forward = forward
    return counts


class LiveTensors(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live tensors.

    Only tensors that operations create within the block are counted. Memory that the allocator
    keeps is not.

    Attributes:
        live: Bytes of the tensors that are alive.
        peak: Maximum of `live`.
    """

    def __init__(self, *existing_tensors):
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in existing_tensors}

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
    """Assert that no difference exceeds `tolerance` times the largest expected value."""
    expected = expected.detach().double()
    difference = (actual.detach().double() - expected).abs().max().item()
    bound = tolerance * expected.abs().max().item()
    assert difference <= bound, f"The {what} differs by {difference:.2e}, more than {bound:.2e}."


class FlashReference:
    """The two functions of flash-attn in plain torch.

    Attributes:
        calls: Arguments of every call.
    """

    BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic")

    def __init__(self):
        self.calls = []

    @staticmethod
    def attend(q, k, v, scale):
        """Compute the attention of one text, (L, H, K) each."""
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def varlen(self, q, k, v, *bounds, softmax_scale=None, causal=False, dropout_p=0.0, **others):
        """Replace `flash_attn_varlen_func`: q, k and v are packed, (T, H, K) each."""
        options = {"softmax_scale": softmax_scale, "causal": causal, "dropout_p": dropout_p}
        call = {**dict(zip(self.BOUNDS, bounds)), **others, **options}
        self.calls.append({"q": q, "k": k, "v": v, **call})
        texts = call["cu_seqlens_q"].diff().tolist()
        parts = zip(*(x.split(texts) for x in (q, k, v)))
        return torch.cat([self.attend(*part, softmax_scale) for part in parts])

    def dense(self, q, k, v, softmax_scale=None, causal=False, dropout_p=0.0, **others):
        """Replace `flash_attn_func`: q, k and v have no padding, (B, L, H, K) each."""
        options = {"softmax_scale": softmax_scale, "causal": causal, "dropout_p": dropout_p}
        self.calls.append({"q": q, "k": k, "v": v, **options})
        return torch.stack([self.attend(*row, softmax_scale) for row in zip(q, k, v)])

    def function(self, name, arguments):
        """Return a method as a function with named arguments.

        transformers inspects the signature to find the arguments that flash-attn supports.
        """

        def function(*args, **kwargs):
            return getattr(self, name)(*args, **kwargs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in ("q", "k", "v", *arguments)]
        function.__signature__ = inspect.Signature(parameters)
        return function


def install_flash(monkeypatch):
    """Replace the flash-attn package with a `FlashReference`, and return the reference.

    The code of transformers for flash_attention_2 runs unchanged and calls the reference.
    """
    reference = FlashReference()
    dense = reference.function("dense", reference.OPTIONS)
    varlen = reference.function("varlen", reference.BOUNDS + reference.OPTIONS)
    pads = flash_utils._pad_input, flash_utils._unpad_input
    process = flash_utils._lazy_define_process_function(varlen)
    # transformers 5 added a kernel for key-value caches, and later a function for its arguments.
    cache = (None,) if hasattr(flash_utils, "_flash_with_kvcache_fn") else ()
    if hasattr(flash_utils, "_process_with_kvcache_kwargs_fn"):
        process = (process, dict)
    functions = ((dense, varlen, *cache, *pads), process)
    monkeypatch.setattr(
        flash_utils, "lazy_import_flash_attention", lambda *args, **kwargs: functions
    )
    return reference
