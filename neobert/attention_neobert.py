"""Sequence packing, attention kernels and CPU kernels. Blocks do not depend on the batch layout.

    packing = Packing.from_mask(mask, lengths)
    attention = dispatch_attention(config, "sdpa", hidden, None, packing, training=False)
    output, weights = attention.wrap(function)(block, q, k, v, attention.mask, scaling=scaling)

Shape legend: B batch size, L padded length, T packed tokens, N packed sequences, D hidden size,
H heads, K head_dim.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Digest of this file. The modeling file compares it, because one process can load the files of two
# folders.
VERSION = "0f102d5b"

logger = logging.get_logger(__name__)

LOW_PRECISION = (torch.float16, torch.bfloat16)

# (module, query, key, value, attention_mask, **kwargs) -> (output, weights or None)
AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


# --------------------------------------------------------------------------- properties of tensors


def is_tracing() -> bool:
    """Return whether torch.compile, export or jit.trace runs: no shape may depend on values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def has_values(x: torch.Tensor) -> bool:
    """Return whether a tensor has values: not on the meta device, fake, or under torch.func.

    While tracing, only the device counts.
    """
    if x.device.type == "meta":
        return False
    if is_tracing():
        return True
    return not isinstance(x, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def has_host_values(x: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be read without waiting for a device."""
    return not is_tracing() and x.device.type == "cpu" and x.numel() > 0 and has_values(x)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32, or in float64 if it is in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of queries, keys and values: that of autocast if enabled, or `dtype`."""
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if autocast else dtype


# ---------------------------------------------------------------------------------------- packing


PACKING_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# A re-padded batch with more positions per token than this is divided into groups of sequences of
# similar length.
MAX_PADDING = 4


class PaddedGroups(NamedTuple):
    """Groups of padded sequences, for attention functions that take no packed batch.

    Two sequences of 1 and 2 tokens in one group have `tokens` [[0, 1], [1, 2]], `masks`
    [[1, 0], [1, 1]] and `positions` [0, 2, 3].

    Attributes:
        tokens: Packed token of each position, (N, L) per group of N sequences of up to L tokens.
        masks: True at tokens of the sequence, (N, L) per group.
        positions: Position of each packed token in the flattened, concatenated groups, (T,).
    """

    tokens: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor, ...]
    positions: torch.Tensor

    def to(self, device: Any) -> "PaddedGroups":
        """Return these groups on a device."""
        tokens = tuple(x.to(device) for x in self.tokens)
        masks = tuple(x.to(device) for x in self.masks)
        return PaddedGroups(tokens, masks, self.positions.to(device))


class Packing:
    """Bounds of the sequences of a packed batch (1, T, ...), and the origin of its tokens.

    The rows [a b c], [d . .], [e f .] of a padded batch become the tokens d e f a b c, with
    cu_seq_lens [0, 1, 3, 6], max_length 3, index [3, 6, 7, 0, 1, 2] and rows [1, 2, 0].

    Attributes:
        cu_seq_lens: First token of each sequence, then T, (N + 1,) int32.
        max_length: Length of the longest sequence in tokens. While tracing, T if it is unknown.
        shape: Shape (B, L) of the padded batch that the model packed. None, like `index` and
            `rows`, if the caller packed the batch.
        index: Position of each packed token in the flattened (B * L) batch, (T,).
        rows: Row of each sequence in the batch, (N,).
        traced: Whether the bounds were computed from positions while tracing. The sequences at the
            end are then empty.
    """

    def __init__(
        self,
        cu_seq_lens: torch.Tensor,
        max_length: int | torch.Tensor | None,
        lengths: list[int] | None = None,
        shape: torch.Size | None = None,
        index: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        traced: bool = False,
    ) -> None:
        self.cu_seq_lens = cu_seq_lens
        self.max_length: Any = max_length
        self._lengths = lengths
        self.shape = shape
        self.index = index
        self.rows = rows
        self.traced = traced

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths in tokens. The first access waits for the device."""
        if self._lengths is None:
            self._lengths = self.cu_seq_lens.diff().tolist()
        return self._lengths

    @classmethod
    def from_mask(cls, mask: torch.Tensor, lengths: list[int]) -> "Packing":
        """Pack a padded batch, shortest row first, so rows of equal length are adjacent.

        Empty rows are left out.

        Args:
            mask: True at non-padding tokens, (B, L).
            lengths: Non-padding tokens of each row. The host needs no other value of a batch on a
                GPU.
        """
        # Without a device, the tensors would be on that of `torch.set_default_device`.
        order = torch.tensor(sorted(range(len(lengths)), key=lengths.__getitem__), device="cpu")
        order = order.to(mask.device, non_blocking=True)
        lengths = sorted(length for length in lengths if length)

        # In the order of the class docstring, the mask is 1 0 0 | 1 1 0 | 1 1 1. The tokens are at
        # 0, 3, 4, 6, 7, 8, in rows 1, 2, 2, 0, 0, 0. A stable sort returns them and, unlike
        # nonzero, does not have to wait for their number.
        tokens = (~mask[order]).flatten().to(torch.uint8).argsort(stable=True)[: sum(lengths)]
        index = order[tokens // mask.shape[1]] * mask.shape[1] + tokens % mask.shape[1]

        bounds = torch.tensor([0, *lengths], device="cpu").cumsum(0)
        bounds = bounds.to(mask.device, torch.int32, non_blocking=True)
        return cls(bounds, lengths[-1], lengths, mask.shape, index, order[-len(lengths) :])

    @classmethod
    def from_caller(
        cls,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> "Packing | None":
        """Return the packing of a batch that the caller packed, or None for any other batch.

        A packed batch is identified by `cu_seq_lens_q`, or (deprecated) by `position_ids` that
        restart at 0.

        Args:
            shape: Shape (B, L) of the inputs.
            attention_mask: Mask of the caller.
            position_ids: Positions of the caller, (1 or B, L).
            kwargs: Other arguments of the caller.

        Raises:
            ValueError: If the arguments contradict each other.
        """
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            value = kwargs.get(name)
            if value is not None and not (torch.is_tensor(value) and value.dim() == 1):
                shape_or_type = (
                    list(value.shape) if torch.is_tensor(value) else type(value).__name__
                )
                raise ValueError(
                    f"`{name}` must be a tensor of shape (sequences + 1,), got {shape_or_type}."
                )
        bounds = kwargs.get("cu_seq_lens_q")
        longest = kwargs.get("max_length_q")
        if bounds is None and kwargs.get("cu_seq_lens_k") is not None:
            raise ValueError(
                "`cu_seq_lens_q` must be passed with `cu_seq_lens_k`, got `cu_seq_lens_k` alone."
            )

        if bounds is None:
            if shape[0] != 1 or attention_mask is not None or position_ids is None:
                return None
            return cls.from_positions(position_ids) if has_values(position_ids) else None

        if shape[0] != 1:
            raise ValueError(
                "A packed batch with `cu_seq_lens_q` must have shape (1, tokens), "
                f"got {tuple(shape)}."
            )
        packing = cls(bounds, longest)
        if has_host_values(bounds):
            packing._check(shape[1], attention_mask, kwargs)

        if is_tracing():
            packing.max_length = shape[1] if longest is None else longest
        elif longest is None or has_host_values(bounds):
            packing.max_length = max(packing.lengths, default=0)
        else:
            packing.max_length = int(longest)
        return packing

    def _check(
        self, total: int, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        """Raise ValueError for arguments that mix sequences, or hide a part of one."""
        bounds = self.cu_seq_lens
        longest = max(self.lengths, default=0)
        if min(self.lengths, default=0) < 0 or sum(self.lengths) != total or bounds[0] != 0:
            raise ValueError(
                f"`cu_seq_lens_q` must rise from 0 to the number of tokens, {total}, "
                f"got {bounds.tolist()}."
            )

        key_bounds = kwargs.get("cu_seq_lens_k")
        if key_bounds is not None and not torch.equal(key_bounds.to(bounds), bounds):
            raise ValueError(
                "`cu_seq_lens_k` must equal `cu_seq_lens_q`, because every token attends to its "
                f"sequence, got {key_bounds.tolist()} and {bounds.tolist()}."
            )
        for name in ("max_length_q", "max_length_k"):
            if kwargs.get(name) is not None and kwargs[name] < longest:
                raise ValueError(
                    f"`{name}` must be at least the length of the longest sequence, {longest}, "
                    f"got {int(kwargs[name])}."
                )

        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "`attention_mask` must be all ones with `cu_seq_lens_q`, because a packed batch "
                "has no padding, got zeros. Omit `attention_mask`."
            )

    @classmethod
    def from_positions(cls, position_ids: torch.Tensor) -> "Packing | None":
        """Return the packing of positions, (1, T) or (T,); None if they are of a single sequence.

        While tracing, the number of sequences must not depend on values: there are T, and those at
        the end are empty.
        """
        positions = position_ids.flatten()
        total = len(positions)
        tokens = torch.arange(total + 1, device=positions.device)

        # Positions 0 1 2 0 1: sequences start at tokens 0 and 3, the first tokens are 0 0 0 3 3,
        # and the bounds 0 . . 3 . 5, with 5 where no sequence starts, are sorted 0 3 5 5 5 5.
        starts = (positions == 0) | (tokens[:-1] == 0)
        firsts = torch.where(starts, tokens[:-1], 0).cummax(0).values
        # Positions that are all zero are a baseline, not sequences of one token.
        packed = (positions == tokens[:-1] - firsts).all() & positions.any()
        starts = torch.where(packed, starts, tokens[:-1] == 0)
        # A fill with T would turn a symbolic length into a constant.
        bounds = torch.where(F.pad(starts, (0, 1), value=True), tokens, tokens[-1]).sort().values

        packing = cls(bounds.to(torch.int32), total, traced=True)
        if is_tracing():
            return packing
        packing = packing.drop_empty()
        packing.max_length = max(packing.lengths)
        return packing if len(packing.lengths) > 1 else None

    def to(self, device: torch.device) -> "Packing":
        """Return this packing on a device, for models whose layers are on several devices."""
        if self.cu_seq_lens.device == device:
            return self
        index, rows = (None if x is None else x.to(device) for x in (self.index, self.rows))
        bounds = self.cu_seq_lens.to(device)
        return Packing(bounds, self.max_length, self._lengths, self.shape, index, rows, self.traced)

    def drop_empty(self) -> "Packing":
        """Return this packing without the empty sequences that tracing appends."""
        if not self.traced:
            return self
        filled = self.cu_seq_lens.diff().nonzero().squeeze(-1)
        bounds = torch.cat((self.cu_seq_lens[filled], self.cu_seq_lens[-1:]))
        return Packing(bounds, self.max_length)

    def sequence_ids(self, total: int) -> torch.Tensor:
        """Return the sequence of each of `total` packed tokens, (T,)."""
        device, dtype = self.cu_seq_lens.device, self.cu_seq_lens.dtype
        tokens = torch.arange(total, device=device, dtype=dtype)
        return torch.searchsorted(self.cu_seq_lens[1:].contiguous(), tokens, right=True)

    def position_ids(self, total: int) -> torch.Tensor:
        """Return the position of each of `total` packed tokens in its sequence, (1, T)."""
        tokens = torch.arange(total, device=self.cu_seq_lens.device)
        return (tokens - self.cu_seq_lens[:-1].long()[self.sequence_ids(total)])[None]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Pack (B, L, ...) into (1, T, ...).

        A batch that the caller packed is returned as it is.
        """
        return x if self.index is None else x.flatten(0, 1)[self.index][None]

    def unpack(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Unpack (1, T, ...) into (B, L, ...), with `fill` at padding.

        A batch that the caller packed is returned as it is.
        """
        if self.index is None or self.shape is None:
            return x
        output = x.new_full((self.shape.numel(), *x.shape[2:]), fill)
        index = self.index.to(x.device)
        return output.index_copy(0, index, x[0]).unflatten(0, self.shape)

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder sequences (N, ...) into rows (B, ...), with zeros for empty rows.

        A batch that the caller packed is returned as it is.
        """
        if self.rows is None or self.shape is None:
            return x
        return x.new_zeros(self.shape[0], *x.shape[1:]).index_copy(0, self.rows, x)

    def mean_per_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of each sequence, (1, T, D) -> (N, D), and zeros for an empty one.

        The sum is computed in float32 at least: a sum in bfloat16 stops growing after a few hundred
        tokens, and one in float16 is limited to 65,504.
        """
        lengths = self.cu_seq_lens.diff()[:, None]
        tokens = at_least_float32(x[0])
        sums = tokens.new_zeros(len(lengths), x.shape[-1])
        sums = sums.index_add(0, self.sequence_ids(x.shape[1]), tokens)
        return (sums / lengths.clamp(min=1)).to(x.dtype)

    def add_bounds(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs` with the bounds of the sequences, which variable-length kernels take."""
        # The kernels take bounds in int32 only.
        bounds = self.cu_seq_lens.to(torch.int32)
        values = (bounds, bounds, self.max_length, self.max_length)
        return {**kwargs, **dict(zip(PACKING_KWARGS, values))}

    def padded_groups(self, total: int) -> PaddedGroups:
        """Return the padded groups of a batch of `total` packed tokens, one row per sequence."""
        bounds = self.cu_seq_lens.long()
        starts, lengths = bounds[:-1], bounds.diff()
        tokens: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        # Position of the first token of each sequence in the flattened, concatenated groups.
        firsts = torch.zeros_like(starts)
        end = 0

        for sequences, longest in self._length_groups(total):
            steps = torch.arange(longest, device=bounds.device)
            tokens.append((starts[sequences, None] + steps).clamp(max=total - 1))
            masks.append(steps < lengths[sequences, None])
            count = len(starts[sequences])
            firsts[sequences] = end + torch.arange(count, device=bounds.device) * longest
            end += count * longest

        positions = self.position_ids(total)[0] + firsts[self.sequence_ids(total)]
        return PaddedGroups(tuple(tokens), tuple(masks), positions)

    def _length_groups(self, total: int) -> list[tuple[slice | torch.Tensor, int]]:
        """Return the groups of sequences that are padded to the same length.

        All sequences are one group unless most of its positions would be padding: then a group has
        the sequences of 2^n to 2^(n + 1) - 1 tokens.

        Args:
            total: Number of packed tokens.

        Returns:
            Index of the sequences and length of the longest one, per group.
        """
        count = len(self.cu_seq_lens) - 1
        if is_tracing() or count * self.max_length <= MAX_PADDING * total:
            return [(slice(None), self.max_length)]

        groups: dict[int, list[int]] = {}
        for number, length in enumerate(self.lengths):
            if length:
                groups.setdefault(length.bit_length(), []).append(number)
        device = self.cu_seq_lens.device
        return [
            (torch.tensor(numbers, device=device), max(self.lengths[i] for i in numbers))
            for numbers in groups.values()
        ]


def pack_padded(
    attention_mask: torch.Tensor | None, shape: torch.Size, may_pack: bool
) -> tuple[Packing | None, torch.Tensor | None]:
    """Pack a padded batch, if allowed.

    Returns:
        `(packing, None)` for a packed batch and `(None, mask)` for a dense one; `mask` is None if
        nothing is padded.
    """
    mask = _check_mask(attention_mask, shape)
    if mask is None or mask.dim() == 4 or is_tracing() or not has_values(mask):
        return None, mask

    # The only wait for a GPU.
    lengths = mask.sum(dim=-1).tolist()
    if sum(lengths) == mask.numel():
        return None, None
    if may_pack and any(lengths):
        return Packing.from_mask(mask, lengths), None
    return None, mask


def _check_mask(attention_mask: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Return a checked attention mask.

    Returns:
        (B, L) bool; or (B, 1 or H, L, L), bool or additive, also from (B, 1, 1, L); or None.

    Raises:
        ValueError: If the shape does not fit, or a 2-D mask has values other than 0 and 1.
    """
    if attention_mask is None:
        return None
    mask = attention_mask
    batch, length = shape

    if mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[2] in (1, length):
        if mask.shape[3] == length:
            mask = mask.expand(-1, -1, length, -1)
            return mask if mask.is_floating_point() else mask.to(torch.bool)

    if mask.shape == (1, length):
        mask = mask.expand(shape)
    if mask.shape != shape:
        raise ValueError(
            f"`attention_mask` must have shape ({batch}, {length}), ({batch}, 1, 1, {length}) or "
            f"({batch}, 1, {length}, {length}), got {tuple(mask.shape)}."
        )
    if has_host_values(mask) and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            "`attention_mask` must be 1 for tokens and 0 for padding, got values from "
            f"{mask.min().item()} to {mask.max().item()}."
        )
    return mask.to(torch.bool)


def longest_sequence(
    config: PretrainedConfig, length: int, packing: Packing | None, mask: torch.Tensor | None
) -> int | torch.Tensor:
    """Return the length of the longest sequence, which "dynamic" RoPE depends on.

    The first sequence beyond the trained length causes a warning.

    Args:
        config: Configuration of the model.
        length: Length of the rows of the caller's batch, L.
        packing: Bounds of the sequences of a packed batch.
        mask: Mask of a dense batch, as `pack_padded` returns it.

    Raises:
        ValueError: If the sequence has no learned position.
    """
    limit = config.context_length
    dynamic = config.rope_parameters["rope_type"] == "dynamic"
    longest = length if packing is None else packing.max_length
    if is_tracing() and dynamic and packing is not None:
        return packing.cu_seq_lens.diff().max()
    if mask is not None and mask.dim() == 2:
        if dynamic or (not is_tracing() and longest > limit):
            longest = mask.sum(dim=-1).max()
    if is_tracing() or (torch.is_tensor(longest) and not has_values(longest)):
        return longest

    longest = int(longest)
    if longest > limit and config.position_embedding_type == "learned":
        raise ValueError(
            f"The sequence length must be at most {limit}, the number of learned positions, "
            f"got {longest}. Truncate the texts."
        )
    if longest > limit:
        logger.warning_once(
            # The message does not contain the length of the sequence, so that it appears once.
            f"A sequence is longer than the {limit} tokens of max_position_embeddings and RoPE "
            "scaling. Expect worse results, or extend the context with "
            "rope_scaling={'rope_type': 'yarn', 'factor': ...}."
        )
    return longest


# ---------------------------------------------------------------------------- choice of the kernel


# Kernels of packed batches, with their description in `attention_backend()`.
KERNELS = {
    "varlen": "torch.nn.attention.varlen (flash kernels of torch itself)",
    "repadded": "scaled_dot_product_attention on re-padded q, k, v",
    "sequences": "{} sequence by sequence",
    "flash": "the variable-length kernels of {}",
    "flex": "flex_attention with a block mask per sequence",
    "masked": "the registered function {!r} with a mask",
    "engine": "the registered function {!r}, which separates sequences itself",
}
# Kernels for which the model packs padded batches.
PACKING_KERNELS = ("varlen", "repadded", "sequences", "flash", "flex")
# Serving engines whose functions take (1, T) tokens and get the bounds of sequences elsewhere.
_ENGINES = ("vllm", "sglang")


def attention_kernel(
    config: PretrainedConfig,
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
) -> tuple[str, str | None]:
    """Select the kernel of packed batches. No other function depends on an implementation's name.

    Args:
        config: Configuration of the model.
        implementation: Name of the attention implementation.
        device: Device of the model.
        dtype: Data type of queries, keys and values.
        training: Whether attention dropout is active.

    Returns:
        A key of `KERNELS`, and the reason why no faster kernel runs, or None.

    Raises:
        ValueError: If there is no such implementation.
    """
    if implementation == "eager":
        return "sequences", "attn_implementation='sdpa' is faster"

    if implementation not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(
            "`attn_implementation` must be a registered attention function, "
            f"got {implementation!r}. Select one with `model.set_attn_implementation`, such as "
            "'sdpa', or register it with `transformers.AttentionInterface.register`."
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
        # A kernel of the Hub checks its devices itself.
        return "flash", None

    # Besides CUDA, transformers 5 has flash kernels for xpu and npu.
    needs = ["a GPU"] if device.type in ("cpu", "mps") else []
    if dtype not in LOW_PRECISION:
        needs.append("float16 or bfloat16 (dtype=torch.bfloat16, or autocast)")
    if implementation == "flash_attention_2" and config.head_dim > 256:
        needs.append(f"a head_dim of at most 256, not {config.head_dim}")
    return "flash", f"they need {' and '.join(needs)}" if needs else None


def _varlen_obstacle(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, training: bool
) -> str | None:
    """Return why torch's variable-length kernel cannot run on CUDA, or None."""
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


# The paged eager function of transformers 5 and 4, which adds the mask but has no mask function.
_PAGED_EAGER = ("paged|eager", "eager_paged")


def _mask_convention(implementation: str) -> str:
    """Return the form of the mask that an attention function takes.

    Returns:
        "boolean"; "additive"; "flash", a 2-D mask or None; "flex", a BlockMask; or
        "registered", the result of a mask function that a user registered.
    """
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, None)
    if implementation in ("eager", "sdpa"):
        return "boolean"
    if function is None:
        return "additive" if implementation in _PAGED_EAGER else "boolean"
    conventions = {
        "flash_attention_2": "flash",
        "flex_attention": "flex",
        "eager": "additive",
        "sdpa": "boolean",
    }
    by_function = {
        ALL_MASK_ATTENTION_FUNCTIONS[name]: convention for name, convention in conventions.items()
    }
    return by_function.get(function, "registered")


@dataclass(frozen=True, eq=False)
class AttentionDispatch:
    """Attention of one forward pass, the same for all blocks: its kernel and its mask.

    Attributes:
        kernel: Key of `KERNELS`.
        mask: Mask in the form that the attention function takes, or None.
        function: Replacement of the library's attention function, or None.
        packing: Bounds of the sequences of a packed batch, or None.
        padded_groups: Padded sequences of a packed batch, for the kernel "repadded".
    """

    kernel: str
    mask: "torch.Tensor | BlockMask | None"
    function: AttentionFunction | None = None
    packing: Packing | None = None
    padded_groups: PaddedGroups | None = None

    def to(self, device: Any, non_blocking: bool = False) -> "AttentionDispatch":
        """Return this attention with its mask on a device.

        accelerate calls it before each block of a model whose blocks are on several devices
        (`device_map="auto"`).
        """

        def move(x: Any) -> Any:
            return None if x is None else x.to(device)

        return replace(self, mask=move(self.mask), padded_groups=move(self.padded_groups))

    def wrap(self, function: AttentionFunction) -> AttentionFunction:
        """Return the attention function to call for this batch.

        This is `function` itself, its replacement, or a kernel of packed batches that calls it.
        """
        if self.function is not None:
            function = self.function
        if self.kernel == "sequences" and self.packing is not None:
            return partial(_sequence_by_sequence, function, self.packing)
        if self.padded_groups is not None:
            return partial(_repadded, function, self.padded_groups)
        return _varlen if self.kernel == "varlen" else function


def dispatch_attention(
    config: PretrainedConfig,
    implementation: str,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    packing: Packing | None,
    training: bool,
    with_weights: bool = False,
) -> AttentionDispatch:
    """Select the kernel and build the mask of one forward pass.

    Args:
        config: Configuration of the model.
        implementation: Name of the attention implementation.
        hidden: Embeddings, (B, L, D) or packed (1, T, D).
        mask: Mask of a dense batch: (B, L) bool, (B, 1 or H, L, L) bool or additive, or None.
        packing: Bounds of the sequences of a packed batch, or None.
        training: Whether attention dropout is active.
        with_weights: Whether the attention weights of complete rows are returned.

    Raises:
        ValueError: If the implementation does not exist or cannot take the mask.
    """
    device = hidden.device
    dtype = autocast_dtype(device, hidden.dtype)
    kernel, _ = attention_kernel(config, implementation, device, dtype, training)
    kernel = _kernel_of_batch(kernel, packing, with_weights)
    if mask is not None and mask.dim() == 4 and kernel != "masked":
        raise ValueError(
            f"`attention_mask` must have shape (batch, length) for {implementation}, got 4 "
            "dimensions. Use attn_implementation 'sdpa' or 'eager' for 4-D masks."
        )

    if mask is not None and mask.is_floating_point() and mask.dtype != dtype:
        # SDPA takes additive masks in the dtype of the queries only.
        widest = torch.promote_types(mask.dtype, dtype)
        mask = mask.to(widest).clamp(min=torch.finfo(dtype).min).to(dtype)

    function: AttentionFunction | None = None
    if implementation == "eager":
        function = eager_attention_forward
    elif implementation == "sdpa" and packing is not None:
        function = _plain_sdpa
    elif kernel == "flex" and device.type == "cpu":
        function = _flex_on_cpu

    kernel_mask: torch.Tensor | BlockMask | None = None
    if kernel == "flash":
        kernel_mask = mask
    elif kernel in ("flex", "masked") and (packing is not None or mask is not None):
        kernel_mask = _make_mask(config, implementation, hidden, mask, packing)

    padded_groups = None
    if kernel == "repadded" and packing is not None:
        padded_groups = packing.padded_groups(hidden.shape[1])
    return AttentionDispatch(kernel, kernel_mask, function, packing, padded_groups)


def _kernel_of_batch(kernel: str, packing: Packing | None, with_weights: bool) -> str:
    """Return the kernel of this batch, where `kernel` is that of packed batches in general."""
    if kernel not in ("varlen", "repadded", "sequences"):
        return kernel
    if packing is None or with_weights:
        return "masked"
    if kernel == "varlen" or not is_tracing():
        return kernel
    # While tracing, the sequence lengths are unknown. The length of the longest may be known.
    unknown = packing.traced or torch.is_tensor(packing.max_length)
    return "masked" if unknown else "repadded"


# ------------------------------------------------------------------------------------------ masks


def _make_mask(
    config: PretrainedConfig,
    implementation: str,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    packing: Packing | None,
) -> "torch.Tensor | BlockMask":
    """Return the mask of an attention function for a (B, L) `mask` or a `packing`.

    Returns:
        A BlockMask, the result of a registered mask function, or a boolean or additive mask,
        (B or 1, 1, L or 1, L). A 4-D mask keeps its shape.
    """
    convention = _mask_convention(implementation)
    if mask is None or mask.dim() != 4:
        mask = _make_convention_mask(convention, config, implementation, hidden, mask, packing)

    if convention == "additive" and mask.dtype == torch.bool:
        lowest = torch.finfo(hidden.dtype).min
        mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, lowest)
    return mask


def _make_convention_mask(
    convention: str,
    config: PretrainedConfig,
    implementation: str,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    packing: Packing | None,
) -> Any:
    """Return a BlockMask, the result of a registered mask function, or a boolean mask."""
    batch, length = hidden.shape[:2]
    allowed = None
    if packing is not None:
        sequences = packing.sequence_ids(length)

        def visible(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            return sequences[q] == sequences[k]

    elif mask is not None:
        # The softmax over no token is not finite, so a row that is all padding attends to all of
        # it.
        keys = mask | ~mask.any(dim=-1, keepdim=True)
        allowed = keys

        def visible(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            return keys[b, k]

    if convention == "registered":
        function = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
        return _registered_mask(function, visible, allowed, config, hidden)

    if convention == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        # Compiled, the mask is built block by block; otherwise B x L x L booleans exist for a
        # moment.
        create = create_block_mask
        if hidden.device.type == "cuda" and not is_tracing():
            create = torch.compile(create_block_mask)
        return create(visible, batch, None, length, length, device=hidden.device)

    if allowed is not None:
        return allowed[:, None, None]
    return (sequences[:, None] == sequences)[None, None]


def _registered_mask(
    function: Callable[..., Any],
    mask_function: Callable[..., torch.Tensor],
    mask: torch.Tensor | None,
    config: PretrainedConfig,
    hidden: torch.Tensor,
) -> Any:
    """Call a mask function that a user registered with `transformers.AttentionMaskInterface`.

    The argument names are those of transformers 4 and 5.
    """
    batch, length = hidden.shape[:2]
    arguments = {
        "batch_size": batch,
        "q_length": length,
        "kv_length": length,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": mask_function,
        "cache_position": torch.arange(length, device=hidden.device),
        "attention_mask": mask,
        "device": hidden.device,
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
        "dtype": hidden.dtype,
        "config": config,
    }
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    return function(**arguments)


# ------------------------------------------------------------------------------ attention functions


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(q k^T * scaling) v, the reference that can return its weights.

    Args:
        module: Module whose training mode activates dropout.
        query: Queries, (B, H, L, K).
        key: Keys, (B, H, L, K).
        value: Values, (B, H, L, K).
        attention_mask: Boolean, True where attention is allowed, or additive; broadcastable to
            (B, H, L, L); or None.
        dropout: Dropout probability of the weights.
        scaling: Factor of the scores. By default K^-0.5.
        **kwargs: Ignored.

    Returns:
        The output, (B, L, H, K), and the weights, (B, H, L, L).
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask

    weights = at_least_float32(scores).softmax(dim=-1).type_as(query)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


def _plain_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call SDPA directly: the library's function costs as much as a kernel of few tokens."""
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.transpose(1, 2), None


@torch.compiler.disable
def _sequence_by_sequence(
    function: AttentionFunction,
    packing: Packing,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call a dense attention function per sequence, and once for adjacent ones of equal length."""
    low = query.dtype in LOW_PRECISION and function is _plain_sdpa
    on_cpu_in_training = query.device.type == "cpu" and query.requires_grad
    if low and on_cpu_in_training and query.shape[2] < 256 * len(packing.lengths):
        # Below 256 tokens, the backward pass of torch's CPU kernel in 16 bits takes up to 7 times
        # as long as in float32.
        wide = (x.float() for x in (query, key, value))
        with torch.autocast("cpu", enabled=False):
            output, _ = _sequence_by_sequence(function, packing, module, *wide, **kwargs)
        return output.type_as(query), None

    # Lengths 1 2 2 5 are groups of 1, 2 and 1 sequences, with 1, 4 and 5 tokens. Each tensor is
    # split once: the gradients of slices would each have the size of the batch.
    groups = [(len(list(group)), length) for length, group in groupby(packing.lengths)]
    sizes = [count * length for count, length in groups]
    parts = zip(*(x.split(sizes, dim=2) for x in (query, key, value)))

    outputs = []
    for (count, length), (q, k, v) in zip(groups, parts):
        if count > 1:
            # (1, H, count * length, K) -> (count, H, length, K), without a copy.
            q, k, v = (x[0].unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
        output, _ = function(module, q, k, v, None, **kwargs)
        outputs.append(output.flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _repadded(
    function: AttentionFunction,
    groups: PaddedGroups,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call a dense attention function on a packed batch. Only q, k and v are re-padded."""
    outputs = []
    for tokens, mask in zip(groups.tokens, groups.masks):
        q, k, v = (x[0].transpose(0, 1)[tokens].transpose(1, 2) for x in (query, key, value))
        output, _ = function(module, q, k, v, mask[:, None, None], **kwargs)
        outputs.append(output.flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[groups.positions][None], None


def _varlen(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    num_splits: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call torch's variable-length flash kernel (torch >= 2.10, CUDA, 16 bits).

    With `num_splits` 1 (torch >= 2.12), the kernel does not split keys and values between thread
    blocks, and a sequence has the same bits in any batch.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds = (kwargs[name] for name in PACKING_KWARGS)
    # torch 2.10 has no argument for the scale. Its default is also that of the model.
    options: dict[str, Any] = {}
    if scaling not in (None, query.shape[-1] ** -0.5):
        options["scale"] = scaling
    if num_splits is not None:
        options["num_splits"] = num_splits
    output: Any = varlen_attn(q, k, v, *bounds, **options)
    return output[None], None


def _flex_on_cpu(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "BlockMask | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call flex_attention without compilation, which fails on the CPU for changing shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    if dropout > 0:
        raise ValueError(
            f"`attention_dropout` must be 0 for flex_attention, got {dropout}. Set "
            "`attention_dropout=0`, or choose attn_implementation='sdpa'."
        )
    output = flex_attention(query, key, value, block_mask=attention_mask, scale=scaling)
    return output.transpose(1, 2), None


# ------------------------------------------------------------------------------------ CPU inference


# Without gradients, the CPU computes in slices that stay in its caches: 128 tokens in chains of
# elementwise operations, and 1,024 in feed-forwards, whose inner states are the largest tensors.
CPU_ROWS = 128
CPU_TOKENS = 1024


def is_cpu_inference(x: torch.Tensor) -> bool:
    """Return whether `x` is on the CPU without gradients, tracing or torch.func."""
    plain = x.device.type == "cpu" and not torch.is_grad_enabled() and not is_tracing()
    return plain and torch._C._functorch.peek_interpreter_stack() is None


def may_overwrite(x: torch.Tensor, *layers: nn.Module) -> bool:
    """Return whether the outputs of `layers` may be computed in slices and overwritten.

    An adapter that replaces a linear layer may depend on the batch axis, and a hook may keep an
    output.
    """
    if not is_cpu_inference(x) or any(type(layer) is not nn.Linear for layer in layers):
        return False
    return not any(hooks_of(layer) for layer in layers)


def rms_norm_in_slices(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """Compute the RMSNorm of (..., D) in float32, a slice of tokens at a time."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    weight = at_least_float32(norm.weight)
    eps: Any = norm.eps
    slices = (tensor.flatten(0, -2).split(CPU_ROWS) for tensor in (x, output))
    for rows, result in zip(*slices):
        rows = at_least_float32(rows)
        scale = (rows.square().mean(-1, keepdim=True) + eps).rsqrt_()
        result.copy_((rows * scale).mul_(weight))
    return output


def swiglu_in_slices(x: torch.Tensor, w12: nn.Module, w3: nn.Module) -> torch.Tensor:
    """Compute the SwiGLU of (B, L, D), a slice of tokens at a time."""

    def swiglu(rows: torch.Tensor) -> torch.Tensor:
        # The inner states of a slice are freed on return, before the next slice allocates its own.
        gate, value = w12(rows).chunk(2, dim=-1)
        return w3(F.silu(gate).mul_(value))

    outputs = [swiglu(rows) for rows in x.flatten(0, 1).split(CPU_TOKENS)]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).view_as(x)


def rotate_in_place(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate the adjacent pairs of the last axis in place, a slice of tokens at a time.

    Args:
        x: Queries and keys, (B, L, H, 2, K), any strides.
        rotations: One complex number per pair, (B or 1, L, 1, 1, K / 2).
    """
    for rows, factors in zip(x.split(CPU_ROWS, dim=1), rotations.split(CPU_ROWS, dim=1)):
        pairs = at_least_float32(rows).unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs).mul_(factors)
        # In float32 and float64 the pairs are a view of the rows.
        if rows.dtype in LOW_PRECISION:
            rows.copy_(pairs.flatten(-2))
    return x


# -------------------------------------------------------------------------------------------- hooks


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PATCHES = ("forward", "_hf_hook", "_compiled_call_impl")
# Modules with hooks of training and loading, which do not depend on the layout of a batch.
_MACHINERY = ("torch.", "deepspeed.", "accelerate.", "transformers.integrations.tensor_parallel")


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks, patched forwards and compiled calls in a module, and the global hooks."""
    hooks: list[Any] = []
    for name in _HOOKS:
        hooks += getattr(nn.modules.module, f"_global{name}").values()

    for inner in module.modules():
        state = vars(inner)
        for name in _HOOKS:
            hooks += state[name].values()
        for name in _PATCHES:
            patch = state.get(name)
            # accelerate restores the forward of the class as an attribute.
            restored = getattr(patch, "__func__", None) is type(inner).forward
            if patch is not None and not restored:
                hooks.append(patch)
    return hooks


def is_machinery(hook: Any) -> bool:
    """Return whether a hook belongs to training or loading and ignores the layout of a batch."""
    while isinstance(hook, partial):
        hook = hook.func
    is_of_training = getattr(hook, "__name__", "") == "make_inputs_require_grads"
    return is_of_training or (getattr(hook, "__module__", None) or "").startswith(_MACHINERY)
