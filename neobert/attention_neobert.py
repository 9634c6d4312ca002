"""How a batch runs: packed batches, and their attention kernels. Blocks do not know which it is.

    packing = Packing.from_mask(mask, lengths)
    attention = AttentionDispatch(config, "sdpa", hidden, None, packing, training)
    output, weights = attention.around(function)(block, q, k, v, attention.mask, scaling=scaling)

Shape legend: B rows of a batch, L their padded length, T packed tokens, N packed sequences,
D hidden size, H heads, K head_dim.
"""

import inspect
from itertools import groupby

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

# Of this file. The modeling file compares it: one process can hold the files of two folders.
VERSION = "37296c46"

LOW_PRECISION = (torch.float16, torch.bfloat16)


# --------------------------------------------------------------------------- questions to tensors


def is_tracing() -> bool:
    """True under torch.compile, export and jit.trace: no shape may depend on values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def has_values(x: torch.Tensor) -> bool:
    """Whether a tensor has values: not on the meta device, in FakeTensorMode or under torch.func.

    While tracing only the device is looked at.
    """
    if x.device.type == "meta":
        return False
    if is_tracing():
        return True
    return not isinstance(x, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def values_are_free(x: torch.Tensor) -> bool:
    """Whether the values of a tensor can be looked at without waiting for a device."""
    return not is_tracing() and x.device.type == "cpu" and x.numel() > 0 and has_values(x)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype that q, k and v will have."""
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if autocast else dtype


# ---------------------------------------------------------------------------------------- packing


PACKING_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Packing:
    """Where the sequences of a packed batch (1, T, ...) are, and where its tokens came from.

    The rows [a b c], [d . .], [e f .] of a padded batch become the tokens d e f a b c, with
    cu_seq_lens [0, 1, 3, 6], max_length 3, index [3, 6, 7, 0, 1, 2] and rows [1, 2, 0].

    Attributes:
        cu_seq_lens: (N + 1,) int32, first token of each sequence, then T.
        max_length: tokens of the longest sequence; while tracing T where it is not known.
        lengths: the N lengths as numbers.
        shape: (B, L) of the padded batch that the model packed; None, like index and rows, if the
            caller packed.
        index: (T,) of each packed token in the flattened (B * L) batch.
        rows: (N,) of each sequence in the batch.
        traced: made while tracing from positions; sequences at the end are empty.
    """

    def __init__(
        self,
        cu_seq_lens: torch.Tensor,
        max_length: int,
        lengths: list[int] | None = None,
        shape: torch.Size | None = None,
        index: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        traced: bool = False,
    ):
        self.cu_seq_lens, self.max_length, self._lengths = cu_seq_lens, max_length, lengths
        self.shape, self.index, self.rows, self.traced = shape, index, rows, traced

    @property
    def lengths(self) -> list[int]:
        """On a GPU this waits for the device, the first time."""
        if self._lengths is None:
            self._lengths = self.cu_seq_lens.diff().tolist()
        return self._lengths

    @classmethod
    def from_mask(cls, mask: torch.Tensor, lengths: list[int]) -> "Packing":
        """Packs a padded batch, shortest row first, so that rows of one length are neighbours.

        Empty rows are left out.

        Args:
            mask: (B, L) bool.
            lengths: real tokens of each row, as numbers: all that the host must know of a batch on
                a GPU.
        """
        order = torch.tensor(sorted(range(len(lengths)), key=lengths.__getitem__))
        order = order.to(mask.device, non_blocking=True)
        lengths = sorted(length for length in lengths if length)
        # In the order of the class's example the mask is 1 0 0 | 1 1 0 | 1 1 1: real tokens are at
        # 0, 3, 4, 6, 7, 8, of rows 1, 2, 2, 0, 0, 0. A stable sort finds them and, unlike nonzero,
        # need not tell the host how many there are.
        real = (~mask[order]).flatten().to(torch.uint8).argsort(stable=True)[: sum(lengths)]
        index = order[real // mask.shape[1]] * mask.shape[1] + real % mask.shape[1]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        bounds = bounds.to(mask.device, torch.int32, non_blocking=True)
        return cls(bounds, lengths[-1], lengths, mask.shape, index, order[-len(lengths) :])

    @classmethod
    def from_caller(
        cls,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        kwargs: dict,
    ) -> "Packing | None":
        """The packing of a batch that the caller packed, or None for any other batch.

        It is told by `cu_seq_lens_q`, or by positions that start again at 0.
        """
        bounds, key_bounds, longest = (kwargs.get(name) for name in PACKING_KWARGS[:3])
        if bounds is None and key_bounds is not None:
            raise ValueError(
                "cu_seq_lens_k was given without cu_seq_lens_q; "
                "a packed batch has both, or cu_seq_lens_q alone."
            )
        if bounds is None:
            if shape[0] != 1 or attention_mask is not None or position_ids is None:
                return None
            return cls.from_positions(position_ids) if has_values(position_ids) else None
        if shape[0] != 1:
            raise ValueError(
                "cu_seq_lens_q marks a packed batch of shape (1, tokens), "
                f"but a batch of {tuple(shape)} was given."
            )
        packing = cls(bounds, longest)
        if values_are_free(bounds):
            packing._check(shape[1], key_bounds, attention_mask, kwargs)
        if is_tracing():
            packing.max_length = shape[1] if longest is None else longest
        elif longest is None or values_are_free(bounds):
            packing.max_length = max(packing.lengths, default=0)
        else:
            packing.max_length = int(longest)
        return packing

    def _check(self, total, key_bounds, attention_mask, kwargs):
        """Each of these would let a sequence see another, or hide a part of it."""
        bounds, longest = self.cu_seq_lens, max(self.lengths, default=0)
        if min(self.lengths, default=0) < 0 or sum(self.lengths) != total or bounds[0] != 0:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens, {total}, "
                f"but {bounds.tolist()} was given."
            )
        if key_bounds is not None and not torch.equal(key_bounds.to(bounds), bounds):
            raise ValueError(
                "cu_seq_lens_k must equal cu_seq_lens_q: the tokens of a text see that text, "
                "but other bounds were given."
            )
        for name in PACKING_KWARGS[2:]:
            if kwargs.get(name) is not None and kwargs[name] < longest:
                raise ValueError(
                    f"{name} must be at least the longest text, {longest} tokens, "
                    f"but {int(kwargs[name])} was given."
                )
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "A packed batch has no padding, but attention_mask has zeros beside cu_seq_lens_q; "
                "leave attention_mask out."
            )

    @classmethod
    def from_positions(cls, position_ids: torch.Tensor) -> "Packing | None":
        """From positions, (1, T) or (T,); None if they are not those of several sequences.

        While tracing the number of sequences must not depend on values: there are T, those at the
        end empty.
        """
        positions = position_ids.flatten()
        total, tokens = len(positions), torch.arange(len(positions) + 1, device=positions.device)
        # Positions 0 1 2 0 1: sequences start at tokens 0 and 3, the first tokens are 0 0 0 3 3,
        # and the bounds 0 . . 3 . 5, with 5 where no sequence starts, are sorted 0 3 5 5 5 5.
        starts = (positions == 0) | (tokens[:-1] == 0)
        firsts = torch.where(starts, tokens[:-1], 0).cummax(0).values
        # All zeros are a baseline, not texts of one token.
        packed = (positions == tokens[:-1] - firsts).all() & positions.any()
        starts = torch.where(packed, starts, tokens[:-1] == 0)
        # Not a fill with T, which would make a symbolic length a constant.
        bounds = torch.where(F.pad(starts, (0, 1), value=True), tokens, tokens[-1]).sort().values
        packing = cls(bounds.to(torch.int32), total, traced=True)
        if is_tracing():
            return packing
        packing = packing.drop_empty()
        packing.max_length = max(packing.lengths)
        return packing if len(packing.lengths) > 1 else None

    def drop_empty(self) -> "Packing":
        """The same without the empty sequences that tracing puts at the end."""
        if not self.traced:
            return self
        filled = self.cu_seq_lens.diff().nonzero().squeeze(-1)
        bounds = torch.cat((self.cu_seq_lens[filled], self.cu_seq_lens[-1:]))
        return Packing(bounds, self.max_length)

    def sequence_ids(self, total: int) -> torch.Tensor:
        """(T,) sequence of each packed token."""
        device, dtype = self.cu_seq_lens.device, self.cu_seq_lens.dtype
        tokens = torch.arange(total, device=device, dtype=dtype)
        return torch.searchsorted(self.cu_seq_lens[1:].contiguous(), tokens, right=True)

    def position_ids(self, total: int) -> torch.Tensor:
        """(1, T) positions within each sequence."""
        tokens = torch.arange(total, device=self.cu_seq_lens.device)
        return (tokens - self.cu_seq_lens[:-1].long()[self.sequence_ids(total)])[None]

    def pack(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """(B, L, ...) -> (1, T, ...); what the caller packed, and None, stay as they are."""
        return x if x is None or self.index is None else x.flatten(0, 1)[self.index][None]

    def unpack(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """(1, T, ...) -> (B, L, ...), `fill` at padding; what the caller packed stays as it is."""
        if self.index is None:
            return x
        output = x.new_full((self.shape.numel(), *x.shape[2:]), fill)
        return output.index_copy(0, self.index, x[0]).unflatten(0, self.shape)

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (B, ...), zero for empty rows; what the caller packed stays as it is."""
        if self.rows is None:
            return x
        return x.new_zeros(self.shape[0], *x.shape[1:]).index_copy(0, self.rows, x)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """(1, T, D) -> (N, D), the mean of each sequence; zeros for an empty one.

        Summed in float32: a sum in bfloat16 stops growing after a few hundred tokens, one in
        float16 ends at 65,504.
        """
        lengths = self.cu_seq_lens.diff()[:, None]
        sums = torch.zeros(len(lengths), x.shape[-1], device=x.device)
        sums = sums.index_add(0, self.sequence_ids(x.shape[1]), x[0].float())
        return (sums / lengths.clamp(min=1)).to(x.dtype)

    def kwargs(self, others: dict) -> dict:
        """`others` with the arguments of variable-length kernels, which want int32 bounds."""
        bounds = self.cu_seq_lens.to(torch.int32)
        values = (bounds, bounds, self.max_length, self.max_length)
        return {**others, **dict(zip(PACKING_KWARGS, values))}

    def padding(self, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A batch with a row for every sequence: index and mask, (N, longest), and places, (T,).

        Lengths 1 and 2: index [[0, 1], [1, 2]], mask [[1, 0], [1, 1]]; the tokens are found again
        at places 0, 2, 3 of the flattened batch.
        """
        bounds = self.cu_seq_lens.long()
        steps = torch.arange(self.max_length, device=bounds.device)
        index = (bounds[:-1, None] + steps).clamp(max=total - 1)
        places = self.position_ids(total)[0] + self.sequence_ids(total) * self.max_length
        return index, steps < bounds.diff()[:, None], places


# -------------------------------------------------------------------------------- which kernel runs


# What runs packed batches. The first five may be given a batch that the model packed.
KERNELS = {
    "varlen": "torch.nn.attention.varlen (flash kernels of torch itself)",
    "repadded": "scaled_dot_product_attention on re-padded q, k, v",
    "sequences": "{} sequence by sequence",
    "flash": "the variable-length kernels of {}",
    "flex": "flex_attention with a block mask per sequence",
    "masked": "the registered function {!r} with a mask",
    "engine": "the registered function {!r}, which keeps sequences apart itself",
}
PACKS = tuple(KERNELS)[:5]
# Serving engines whose functions take (1, T) tokens and know from elsewhere where sequences end.
_ENGINES = ("vllm", "sglang")


def attention_kernel(
    config, implementation: str, device: torch.device, dtype: torch.dtype, training: bool
) -> tuple[str, str | None]:
    """Which kernel packed batches run through. Only here a name of an implementation decides.

    Returns:
        a key of `KERNELS`, and what keeps a faster one away, or None.
    Raises:
        ValueError: there is no such implementation.
    """
    if implementation == "eager":
        return "sequences", "attn_implementation='sdpa' is faster"
    if implementation not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"There is no attention implementation {implementation!r}; set one with "
            "model.set_attn_implementation, such as 'sdpa', or register it with "
            "transformers.AttentionInterface.register."
        )
    if implementation == "sdpa" and device.type != "cuda":
        return "sequences", "variable-length flash kernels need a CUDA device"
    if implementation == "sdpa":
        obstacle = _varlen_obstacle(config, device, dtype, training)
        if obstacle is None:
            return "varlen", None
        return "repadded", f"not torch.nn.attention.varlen, since {obstacle}"
    if implementation in _ENGINES:
        return "engine", None
    convention = _mask_convention(implementation)
    if convention == "flex":
        return "flex", "not compiled on the CPU" if device.type == "cpu" else None
    if convention != "flash":
        return "masked", "padded batches are not packed for it"
    if not implementation.startswith("flash_attention"):
        return "flash", None  # a kernel of the Hub knows its own devices
    # Others than CUDA have such kernels too: xpu and npu from transformers 5 on.
    needs = ["a GPU"] if device.type in ("cpu", "mps") else []
    if dtype not in LOW_PRECISION:
        needs.append("float16 or bfloat16 (dtype=torch.bfloat16, or autocast)")
    if implementation == "flash_attention_2" and config.head_dim > 256:
        needs.append(f"a head_dim of at most 256, not {config.head_dim}")
    return "flash", f"they need {' and '.join(needs)}" if needs else None


def _varlen_obstacle(config, device, dtype, training):
    """Why torch's variable-length kernel cannot run on CUDA, or None."""
    if varlen_attn is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen (2.10 or newer has)"
    if dtype not in LOW_PRECISION:
        return f"the kernel takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if training and config.attention_dropout > 0:
        return "the kernel has no dropout"
    if config.head_dim % 8 or config.head_dim > 256:
        return (
            "the kernel takes a head_dim that is a multiple of 8 and at most 256, "
            f"not {config.head_dim}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8:
        return None
    return f"the kernel needs compute capability 8.0, and this GPU has {major}.{minor}"


def _mask_convention(implementation):
    """The mask that a function takes.

    "boolean"; "additive"; "flash", 2-D or none; "flex", a BlockMask; "own", made by a function that
    a user registered.
    """
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, None)
    if implementation in ("eager", "sdpa") or function is None:
        return "boolean"
    conventions = {
        "flash_attention_2": "flash",
        "flex_attention": "flex",
        "eager": "additive",
        "sdpa": "boolean",
    }
    named = [ALL_MASK_ATTENTION_FUNCTIONS[name] for name in conventions]
    return dict(zip(named, conventions.values())).get(function, "own")


class AttentionDispatch:
    """How the blocks of one forward attend: the kernel of this batch, and its mask.

    Args:
        implementation: name of the attention implementation.
        hidden: embeddings, (B, L, D) or packed (1, T, D).
        mask: of a dense batch: (B, L) bool, (B, 1 or H, L, L) bool or additive, or None.
        packing: `Packing` of a packed batch, else None.
        with_weights: the weights are asked for, over the complete row.
    """

    def __init__(self, config, implementation, hidden, mask, packing, training, with_weights=False):
        device, dtype = hidden.device, autocast_dtype(hidden.device, hidden.dtype)
        self.kernel, _ = attention_kernel(config, implementation, device, dtype, training)
        # What runs in place of the library's function.
        self.function = eager_attention_forward if implementation == "eager" else None
        self.packing, self.padding, self.mask = packing, None, None
        if self.kernel in ("varlen", "repadded", "sequences"):
            if packing is None or with_weights:
                self.kernel = "masked"
            elif self.kernel != "varlen" and is_tracing():
                # The lengths are not known then; the longest may be.
                unknown = packing.traced or torch.is_tensor(packing.max_length)
                self.kernel = "masked" if unknown else "repadded"
            if packing is not None and implementation == "sdpa":
                self.function = _plain_sdpa
        if self.kernel == "repadded":
            self.padding = packing.padding(hidden.shape[1])
        elif self.kernel == "flex" and device.type == "cpu":
            self.function = _flex_on_cpu
        convention = _mask_convention(implementation)
        if self.kernel == "flash":
            self.mask = mask
        elif self.kernel in ("flex", "masked") and (packing is not None or mask is not None):
            self.mask = _make_mask(convention, config, implementation, hidden, mask, packing)
        if mask is not None and mask.dim() == 4 and self.kernel != "masked":
            raise ValueError(
                f"{implementation} takes no 4-D attention_mask; choose 'sdpa' or 'eager', "
                "or give a (batch, length) mask."
            )
        if convention == "additive" and self.mask is not None and self.mask.dtype == torch.bool:
            lowest = torch.finfo(hidden.dtype).min
            zeros = torch.zeros_like(self.mask, dtype=hidden.dtype)
            self.mask = zeros.masked_fill(~self.mask, lowest)

    def around(self, function):
        """`function`, the block's, or what runs around it or in its place in this batch."""
        if self.kernel in ("sequences", "repadded", "varlen"):
            return self
        return function if self.function is None else self.function

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        """The kernel of a packed batch: (1, H, T, K) -> (1, T, H, K), and None for the weights."""
        if self.kernel == "sequences":
            return _sequence_by_sequence(
                self.function, self.packing, module, query, key, value, **kwargs
            )
        if self.kernel == "repadded":
            return _repadded(self.function, self.padding, module, query, key, value, **kwargs)
        return _varlen(query, key, value, **kwargs)


# ------------------------------------------------------------------------------------------ masks


def _make_mask(convention, config, implementation, hidden, mask, packing):
    """What the function takes for a (B, L) `mask` or a `packing`.

    A BlockMask, its own form, or boolean (B or 1, 1, L or 1, L). 4-D masks stay as they are.
    """
    if mask is not None and mask.dim() == 4:
        return mask
    batch, length = hidden.shape[:2]
    sequences = None if packing is None else packing.sequence_ids(length)
    # Rows that are all padding see everything: softmax over nothing is not finite.
    real = None if packing is not None else mask | ~mask.any(dim=-1, keepdim=True)

    def visible(b, h, q, k):
        return real[b, k] if sequences is None else sequences[q] == sequences[k]

    if convention == "own":
        function = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
        return _own_mask(function, visible, real, config, hidden)
    if convention != "flex":
        if sequences is None:
            return real[:, None, None]
        return (sequences[:, None] == sequences)[None, None]
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled, the mask is made block by block; otherwise B x L x L booleans exist for a moment.
    create = create_block_mask
    if hidden.device.type == "cuda" and not is_tracing():
        create = torch.compile(create_block_mask)
    return create(visible, batch, None, length, length, device=hidden.device)


def _own_mask(function, visible, mask, config, hidden):
    """The mask of a function that a user registered with `transformers.AttentionMaskInterface`.

    It is called by the argument names of transformers 4 and 5.
    """
    batch, length = hidden.shape[:2]
    arguments = {
        "batch_size": batch,
        "q_length": length,
        "kv_length": length,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": visible,
        "cache_position": torch.arange(length, device=hidden.device),
        "attention_mask": mask,
        "device": hidden.device,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
        "dtype": hidden.dtype,
        "config": config,
    }
    names = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
        arguments = {name: value for name, value in arguments.items() if name in names}
    return function(**arguments)


# ---------------------------------------------------------------------------------------- kernels


def eager_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scaling) v, the reference that can return its weights.

    Args:
        query, key, value: (B, H, L, K).
        attention_mask: boolean, True where attention is allowed, or additive; broadcastable to
            (B, H, L, L); or None.
    Returns:
        (B, L, H, K) and the weights (B, H, L, L).
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(query)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


def _plain_sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """SDPA alone: the library's function costs as much as the kernel on a short sequence."""
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.transpose(1, 2), None


@torch.compiler.disable
def _sequence_by_sequence(function, packing, module, query, key, value, **kwargs):
    """A dense attention function on each sequence; neighbours of one length together."""
    low = query.dtype in LOW_PRECISION and function is _plain_sdpa
    on_cpu_in_training = query.device.type == "cpu" and query.requires_grad
    if low and on_cpu_in_training and query.shape[2] < 256 * len(packing.lengths):
        # The backward of torch's CPU kernel in 16 bits takes up to 7 times that of float32 on
        # sequences below 256 tokens.
        wide = (x.float() for x in (query, key, value))
        with torch.autocast("cpu", enabled=False):
            output, _ = _sequence_by_sequence(function, packing, module, *wide, **kwargs)
        return output.type_as(query), None
    # Lengths 1 2 2 5: groups of 1, 2 and 1 sequences, of 1, 4 and 5 tokens. One split a tensor: the
    # gradient of many slices would be as many tensors of the complete batch.
    groups = [(len(list(group)), length) for length, group in groupby(packing.lengths)]
    sizes, outputs = [count * length for count, length in groups], []
    for (count, length), *parts in zip(
        groups, *(x.split(sizes, dim=2) for x in (query, key, value))
    ):
        if count > 1:  # (1, H, count * length, K) -> (count, H, length, K), without a copy
            parts = (x[0].unflatten(1, (count, length)).transpose(0, 1) for x in parts)
        output, _ = function(module, *parts, None, **kwargs)
        outputs.append(output.flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _repadded(function, padding, module, query, key, value, **kwargs):
    """A dense attention function on a packed batch; only q, k, v are re-padded."""
    index, mask, places = padding
    q, k, v = (x[0].transpose(0, 1)[index].transpose(1, 2) for x in (query, key, value))
    output, _ = function(module, q, k, v, mask[:, None, None], **kwargs)
    return output.flatten(0, 1)[places][None], None


def _varlen(query, key, value, scaling=None, **kwargs):
    """torch's variable-length flash kernel (torch >= 2.10, CUDA, 16 bits)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # torch 2.10 takes no scale; its own is the default here too.
    scale = {} if scaling in (None, query.shape[-1] ** -0.5) else {"scale": scaling}
    return varlen_attn(q, k, v, *(kwargs[name] for name in PACKING_KWARGS), **scale)[None], None


def _flex_on_cpu(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """flex_attention, not compiled: the compiled CPU kernel does not build for changing shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    if dropout > 0:
        raise ValueError(
            "flex_attention has no dropout; "
            "set attention_dropout=0 or choose attn_implementation='sdpa'."
        )
    output = flex_attention(query, key, value, block_mask=attention_mask, scale=scaling)
    return output.transpose(1, 2), None
