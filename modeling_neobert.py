"""NeoBERT (arXiv 2502.19587, section 3): pre-RMSNorm blocks with SwiGLU and RoPE, and its heads.

Shape legend: B batch size, L padded length, T packed tokens, N packed sequences, D hidden size,
H heads, K head_dim, V vocabulary size, C labels.

The file reads from top to bottom: blocks, backbone, heads, losses; then the functions that these
call: checks and rotary embeddings. A batch is dense, (B, L, D), or packed, (1, T, D), with the
bounds of its sequences in a `Packing` (attention_neobert.py). The caller packs it, or
`NeoBERTModel` does if `attention_mask` has padding. It is packed once and unpacked once, and blocks
do not depend on the layout.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import modeling_outputs
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import TransformersKwargs, can_return_tuple, logging

from .attention_neobert import (
    KERNELS,
    PACKING_KERNELS,
    AttentionDispatch,
    Packing,
    at_least_float32,
    attention_kernel,
    autocast_dtype,
    dispatch_attention,
    eager_attention_forward,
    has_host_values,
    hooks_of,
    is_cpu_inference,
    is_machinery,
    is_tracing,
    longest_sequence,
    may_overwrite,
    pack_padded,
    rms_norm_in_slices,
    rotate_in_place,
    swiglu_in_slices,
)
from .attention_neobert import VERSION as ATTENTION_VERSION
from .configuration_neobert import AUTO_MAP, PROBLEM_TYPES, NeoBERTConfig, ProblemType


# Digest of attention_neobert.py. transformers 4 keeps the first file of this name that a process
# loads, so a second model could get the attention code of the first.
VERSION = "0f102d5b"
if ATTENTION_VERSION != VERSION:
    raise ImportError(
        "attention_neobert.py must be of the same version as modeling_neobert.py, but this process "
        "has loaded another version of attention_neobert.py from a folder of the same name. "
        "Restart Python, or rename one of the two folders."
    )

logger = logging.get_logger(__name__)

Loss = torch.Tensor | None
NumItems = int | torch.Tensor | None
PositionEmbeddings = tuple[torch.Tensor, ...]
HeadOutput = (
    modeling_outputs.MaskedLMOutput
    | modeling_outputs.SequenceClassifierOutput
    | modeling_outputs.MultipleChoiceModelOutput
    | modeling_outputs.TokenClassifierOutput
)


# ------------------------------------------------------------------------------------------- blocks


class NeoBERTRMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), (..., D); float32 inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (..., D)."""
        if is_cpu_inference(x):
            return rms_norm_in_slices(x, self)
        return super().forward(x)


class NeoBERTSwiGLU(nn.Module):
    """w3(silu(a) * b) with (a, b) the halves of w12(x) (Shazeer 2020)."""

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.ffn_inner_size, bias=False)
        self.w3 = nn.Linear(config.ffn_inner_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform (B, L, D) into (B, L, D)."""
        if may_overwrite(x, self.w12, self.w3):
            return swiglu_in_slices(x, self.w12, self.w3)
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class NeoBERTBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + ffn(norm(x)).

    Attention functions receive this module: they read `is_causal`, `layer_idx` and `config`.
    """

    is_causal = False

    def __init__(self, config: NeoBERTConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.scaling = config.head_dim**-0.5
        self.attention_norm = _norm(config)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = _norm(config)
        self.ffn = _feed_forward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: torch.Tensor,
        position_embeddings: PositionEmbeddings | None,
        attention: AttentionDispatch,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Compute one block.

        Args:
            hidden: Hidden states, (B, L, D), or packed (1, T, D).
            position_embeddings: Result of `rotary_embeddings`, or None with learned positions.
            attention: Kernel and mask of this forward pass.
            output_attentions: Whether to return the attention weights, too.
            **kwargs: Further arguments of the attention function.

        Returns:
            Hidden states in the same shape; with `output_attentions` a tuple of them and the
            weights, (B, H, L, L).
        """
        query, key, value = self.project(hidden, position_embeddings)
        dropout = self.config.attention_dropout if self.training else 0.0

        # vLLM parses this source. It requires one name from ALL_ATTENTION_FUNCTIONS that is called
        # once, with `scaling=self.scaling`.
        name = self.config._attn_implementation
        attention_interface = ALL_ATTENTION_FUNCTIONS.get(name, eager_attention_forward)
        attention_interface = attention.wrap(attention_interface)
        output, weights = attention_interface(
            self, query, key, value, attention.mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        # Free memory before `wo` allocates its output.
        del query, key, value

        # Attention functions return (B, L, H, K); those of serving engines (T, H * K).
        output = self.wo(output.reshape(hidden.shape))
        hidden = hidden + self.dropout(output)
        # Free memory before the feed-forward allocates its inner states.
        del output

        hidden = hidden + self.dropout(self.ffn(self.ffn_norm(hidden)))
        return (hidden, weights) if output_attentions else hidden

    def project(
        self, hidden: torch.Tensor, position_embeddings: PositionEmbeddings | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries, rotated keys, and values, (B, H, L, K) each."""
        # The rows of qkv.weight are interleaved per head: (H, 3, K).
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (self.num_heads, 3, -1))
        query_key, value = qkv.split((2, 1), dim=-2)
        if position_embeddings is not None:
            in_place = may_overwrite(hidden, self.qkv)
            query_key = apply_rotary_pos_emb(query_key, position_embeddings, in_place)
        query, key = query_key.unbind(-2)
        return query.transpose(1, 2), key.transpose(1, 2), value.squeeze(-2).transpose(1, 2)


def _norm(config: NeoBERTConfig) -> nn.Module:
    norm = NeoBERTRMSNorm if config.norm_type == "rms" else nn.LayerNorm
    return norm(config.hidden_size, eps=config.norm_eps)


def _feed_forward(config: NeoBERTConfig) -> nn.Module:
    if config.hidden_act == "swiglu":
        return NeoBERTSwiGLU(config)
    up = nn.Linear(config.hidden_size, config.ffn_inner_size, bias=False)
    down = nn.Linear(config.ffn_inner_size, config.hidden_size, bias=False)
    return nn.Sequential(up, nn.GELU(), down)


# ----------------------------------------------------------------------------------------- backbone


class NeoBERTPreTrainedModel(PreTrainedModel):
    """Base class of all NeoBERT models: initialization, saving and the choice of the layout."""

    config: NeoBERTConfig
    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NeoBERTBlock"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True
    _supports_flash_attn_3 = True
    # Classes without a decoder load masked-LM checkpoints.
    _keys_to_ignore_on_load_unexpected: list[str] | None = [r"^decoder\."]

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize uniformly (paper, section 3).

        Only functions of `torch.nn.init` are used: transformers 5 skips them on loaded weights.
        """
        if isinstance(module, nn.Linear):
            bound = self.config.decoder_init_range
            nn.init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            bound = self.config.embedding_init_range
            nn.init.uniform_(module.weight, -bound, bound)
        else:
            # Norms, and other modules of a user's subclass.
            super()._init_weights(module)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save the model as transformers does, with the code files that `auto_map` names.

        Args:
            save_directory: Directory to write to.
            is_main_process: Whether this process writes the files.
            *args: Further arguments of `PreTrainedModel.save_pretrained`.
            **kwargs: Further arguments of `PreTrainedModel.save_pretrained`.
        """
        if is_main_process and not Path(save_directory).is_file():
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            custom_object_save(NeoBERTPreTrainedModel, save_directory)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def _get_files_timestamps(self, working_dir: Any) -> dict[str, float]:
        """Return the modification times of files, which show what an upload has to contain.

        `save_pretrained(push_to_hub=True)` calls this method after the code files were written.
        They are left out of the result, so they are always uploaded.
        """
        times = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in times.items() if not name.endswith("_neobert.py")}

    def _backbone(self) -> "NeoBERTModel":
        """Return the `NeoBERTModel` of this model."""
        backbone: Any = getattr(self, self.base_model_prefix, self)
        return backbone

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self._backbone().encoder

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self._backbone().encoder = value

    def get_encoder(self, modality: str | None = None) -> nn.ModuleList:
        """Return the blocks. `model.encoder` is the token embedding, a published name."""
        return self._backbone().transformer_encoder

    def attention_backend(self) -> str:
        """Describe the kernel of packed batches, and why no faster one runs.

        The answer is for the device of the model, and for its dtype or that of autocast.
        """
        implementation = self.config._attn_implementation
        device = self.device
        if device.type == "meta":
            return (
                "The weights are not on a device yet (or accelerate moves them there one by one), "
                "so no kernel can be named."
            )

        dtype = autocast_dtype(device, self.dtype)
        try:
            kernel, reason = attention_kernel(
                self.config, implementation, device, dtype, self.training
            )
        except ValueError as error:
            return str(error)

        description = KERNELS[kernel].format(implementation) + (f"; {reason}." if reason else ".")
        if not self.config.unpad_inputs:
            description += " Padded batches are not packed: unpad_inputs is off."
        dtype_name = str(dtype).removeprefix("torch.")
        return f"{implementation} on {device.type} in {dtype_name}: {description}"

    def _is_observed(self) -> bool:
        """Return whether a hook or a replaced block would see packed tensors.

        Padded batches are then not packed.
        """
        if is_tracing():
            return False

        # Hooks and a patched forward of the model itself see the batch of the caller.
        hooks: list[Any] = []
        for child in self.children():
            hooks += hooks_of(child)
        blocks = getattr(self._backbone(), "transformer_encoder", ())
        replaced = [type(block) for block in blocks if type(block) is not NeoBERTBlock]
        observers = [observer for observer in hooks + replaced if not is_machinery(observer)]

        if observers and self.config.unpad_inputs:
            name = getattr(observers[0], "__qualname__", type(observers[0]).__name__)
            logger.warning_once(
                f"{name} is a hook or a replaced block that expects dense batches. Padded batches "
                "are therefore not packed, and the model also computes on padding."
            )
        return bool(observers)


@dataclass
class NeoBERTModelOutput(modeling_outputs.BaseModelOutput):
    """`BaseModelOutput`, and for heads the `Packing` of a packed `last_hidden_state`, (1, T, D)."""

    last_hidden_state: torch.Tensor = None  # type: ignore[assignment]
    packing: Packing | None = None


class NeoBERTModel(NeoBERTPreTrainedModel):
    """Backbone: token IDs to hidden states."""

    def __init__(self, config: NeoBERTConfig) -> None:
        config.check()
        super().__init__(config)
        size = config.hidden_size
        self.encoder: nn.Module = nn.Embedding(
            config.vocab_size, size, padding_idx=config.pad_token_id
        )
        if config.position_embedding_type == "learned":
            # Row 0 is padding; positions count from 1.
            rows = config.max_position_embeddings + 1
            self.positional_embedding = nn.Embedding(rows, size, padding_idx=0)
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)
        blocks = (NeoBERTBlock(config, i) for i in range(config.num_hidden_layers))
        self.transformer_encoder = nn.ModuleList(blocks)
        self.layer_norm = _norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def n_layers(self) -> int:
        """Number of blocks. Setting it drops the blocks above, as bert-score does."""
        return len(self.transformer_encoder)

    @n_layers.setter
    def n_layers(self, count: int) -> None:
        self.transformer_encoder = self.transformer_encoder[:count]
        self.config.num_hidden_layers = count

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        unpad_inputs: bool | None = None,
        keep_packed: bool = False,
        **kwargs: Any,
    ) -> NeoBERTModelOutput:
        """Compute hidden states.

        Args:
            input_ids: Token IDs, (B, L), or packed (1, T).
            attention_mask: Mask of shape (B, L) with 1 for tokens and 0 for padding, or None
                without padding. A 4-D mask of shape (B, 1 or H, 1 or L, L), either boolean (True
                where attention is allowed) or additive, is passed to the attention function, and
                the batch is not packed.
            token_type_ids: Ignored; accepted because BERT has them.
            position_ids: Positions, (L,), (1, L) or (B, L). By default the index in the row, or in
                the sequence of a packed batch. A single row without attention_mask whose positions
                restart at 0 is treated as a packed batch, with a warning. This is deprecated.
            inputs_embeds: Embeddings instead of `input_ids`, (B, L, D).
            output_attentions: Whether to return the weights of each block, (B, H, L, L), computed
                by the eager function.
            output_hidden_states: Whether to return the num_hidden_layers + 1 hidden states, the
                last of which is normalized.
            unpad_inputs: Whether the model packs a padded batch. By default `config.unpad_inputs`,
                except while a hook or a replacement inside the model would see packed tensors, and
                except for hidden states that need gradients.
            keep_packed: Whether to return packed hidden states with their `Packing`, for heads.
            **kwargs: Passed on to the attention function. `cu_seq_lens_q`, `cu_seq_lens_k`
                ((N + 1,) int32) and `max_length_q`, `max_length_k` identify a packed batch (1, T).
                `num_splits=1` makes the result of a sequence independent of its batch with the
                variable-length kernel of torch 2.12 on CUDA (not tested).

        Returns:
            Outputs in the caller's shape. Where the model packed a padded batch, padding positions
            are zero.

        Raises:
            ValueError: If inputs are invalid or do not fit together.
        """
        tensor = self._check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        shape = tensor.shape[:2]
        if position_ids is not None:
            position_ids = self._check_position_ids(position_ids, shape)

        config = self.config
        implementation = config._attn_implementation
        if output_attentions is None:
            output_attentions = bool(config.output_attentions)
        if output_hidden_states is None:
            output_hidden_states = bool(config.output_hidden_states)
        if output_attentions and implementation != "eager":
            if not is_tracing():
                logger.warning_once(
                    f"output_attentions=True: {implementation} returns no weights, so the eager "
                    "function is used."
                )
            implementation = "eager"

        # Pack the batch, unless the caller did or must get a dense one.
        kernel = self._kernel(implementation, tensor.device)
        packing = self._read_packing(shape, attention_mask, position_ids, kernel, kwargs)
        mask = None
        if packing is None:
            if unpad_inputs is None:
                unpad_inputs = self._unpads_by_default(output_hidden_states, keep_packed)
            may_pack = unpad_inputs and not output_attentions and kernel in PACKING_KERNELS
            packing, mask = pack_padded(attention_mask, shape, may_pack)

        # Embed the tokens, and compute their rotary embeddings.
        longest = longest_sequence(config, shape[1], packing, mask)
        # The positions of a batch that the caller packed restart in each sequence.
        if position_ids is None and packing is not None and packing.index is None:
            position_ids = packing.position_ids(shape[1])
        hidden, positions = self._embed(tensor, input_ids, attention_mask, position_ids, packing)
        blocks = self.transformer_encoder
        compiled = any(block._compiled_call_impl is not None for block in blocks)
        rotations = rotary_embeddings(config, positions, longest, compiled)

        # Run the blocks, which share one kernel and one mask.
        attention = dispatch_attention(
            config, implementation, hidden, mask, packing, self.training, output_attentions
        )
        if packing is not None:
            kwargs = packing.add_bounds(kwargs)

        states: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for block in blocks:
            if output_hidden_states:
                states.append(hidden)
            hidden = block(hidden, rotations, attention, output_attentions, **kwargs)
            if output_attentions:
                hidden, block_weights = hidden
                weights.append(block_weights)
        hidden = self.layer_norm(hidden)
        if output_hidden_states:
            states.append(hidden)

        # Return to the layout of the caller.
        if packing is not None:
            # The last blocks may be on another device than the inputs.
            packing = packing.to(hidden.device)
            states = [packing.unpack(state) for state in states]
            hidden = hidden if keep_packed else packing.unpack(hidden)
        return NeoBERTModelOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
            packing=packing if keep_packed else None,
        )

    def _check_inputs(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Return `input_ids`, or `inputs_embeds` instead.

        Raises:
            ValueError: If neither or both are passed, or a value is invalid.
        """
        _check_tensors(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
        )
        names = {name for name, value in kwargs.items() if value is not None}
        unknown = sorted(names - _KNOWN_KWARGS)
        if unknown and not is_tracing():
            logger.warning_once(
                f"NeoBERT does not use the arguments {', '.join(unknown)} and passes them to the "
                "attention function. Check their spelling."
            )

        if kwargs.get("is_causal"):
            raise ValueError("`is_causal` must be False, got True. NeoBERT is bidirectional.")

        if input_ids is not None and inputs_embeds is not None:
            raise ValueError("Either `input_ids` or `inputs_embeds` must be passed, got both.")
        if input_ids is not None:
            tensor = input_ids
            dimensions = 2
        elif inputs_embeds is not None:
            tensor = inputs_embeds
            dimensions = 3
        else:
            raise ValueError("Either `input_ids` or `inputs_embeds` must be passed, got neither.")
        if tensor.dim() != dimensions or not (is_tracing() or tensor.numel()):
            raise ValueError(
                "`input_ids` must have shape (batch, length), or `inputs_embeds` (batch, length, "
                f"{self.config.hidden_size}), with at least one token, got {tuple(tensor.shape)}."
            )

        # A user's module that replaces the embedding may have no weight.
        weight = getattr(self.encoder, "weight", None)
        if input_ids is not None and has_host_values(input_ids) and torch.is_tensor(weight):
            lowest = input_ids.min().item()
            highest = input_ids.max().item()
            if lowest < 0 or highest >= len(weight):
                raise ValueError(
                    f"`input_ids` must be from 0 to {len(weight) - 1}, got "
                    f"{lowest if lowest < 0 else highest}. Use the tokenizer of this model."
                )
        return tensor

    def _check_position_ids(self, position_ids: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return `position_ids` of shape (L,), (1, L) or (B, L) as (1, L) or (B, L).

        Raises:
            ValueError: If they have another shape, or there is no learned position for one of them.
        """
        shapes = (shape[1:], (1, shape[1]), shape)
        if not is_tracing() and position_ids.shape not in shapes:
            raise ValueError(
                f"`position_ids` must have shape {(1, shape[1])} or {tuple(shape)}, got "
                f"{tuple(position_ids.shape)}."
            )
        if self.config.position_embedding_type == "learned" and has_host_values(position_ids):
            lowest = position_ids.min().item()
            highest = position_ids.max().item()
            limit = self.config.max_position_embeddings
            if lowest < 0 or highest >= limit:
                raise ValueError(
                    f"`position_ids` must be from 0 to {limit - 1}, the last learned position, "
                    f"got {lowest if lowest < 0 else highest}. Truncate the texts."
                )
        return position_ids.reshape(-1, shape[1])

    def _kernel(self, implementation: str, device: torch.device) -> str:
        """Return the kernel of packed batches on a device."""
        dtype = getattr(getattr(self.encoder, "weight", None), "dtype", None) or self.dtype
        kernel, _ = attention_kernel(self.config, implementation, device, dtype, self.training)
        return kernel

    def _unpads_by_default(self, output_hidden_states: bool, keep_packed: bool) -> bool:
        """Return whether the model packs a padded batch for which the caller does not decide."""
        # Hidden states of a packed batch are unpacked copies, off the graph.
        needs_states = output_hidden_states and torch.is_grad_enabled()
        # A head, which keeps the batch packed, has looked for observers itself.
        observed = not keep_packed and self._is_observed()
        return self.config.unpad_inputs and not needs_states and not observed

    def _read_packing(
        self,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        kernel: str,
        kwargs: dict[str, Any],
    ) -> Packing | None:
        """Return the packing of a batch that the caller packed, or None."""
        packing = Packing.from_caller(shape, attention_mask, position_ids, kwargs)
        from_positions = packing is not None and kwargs.get("cu_seq_lens_q") is None
        if from_positions and not is_tracing() and kernel != "engine":
            logger.warning_once(
                "A row whose position_ids restart at 0 was treated as a packed batch. This is "
                "deprecated and ends in the next release. Pass cu_seq_lens_q, as "
                "DataCollatorWithFlattening(return_flash_attn_kwargs=True) does."
            )
        return packing

    def _embed(
        self,
        tensor: torch.Tensor,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        packing: Packing | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings and positions.

        Args:
            tensor: `input_ids`, or embeddings if there are none.
            input_ids: Token IDs, or None.
            attention_mask: Mask of the caller.
            position_ids: Positions of the caller, (1 or B, L), or in the sequences of a batch that
                the caller packed.
            packing: Bounds of the sequences of a packed batch.

        Returns:
            (B, L, D) and (1 or B, L), or packed (1, T, D) and (1, T).
        """
        shape = tensor.shape[:2]
        learned = self.config.position_embedding_type == "learned"
        if learned:
            positions = self._learned_positions(input_ids, tensor, attention_mask, position_ids)
        elif position_ids is None:
            positions = torch.arange(shape[1], device=tensor.device)[None]
        else:
            positions = position_ids

        if packing is not None:
            tensor = packing.pack(tensor)
            positions = packing.pack(positions.expand(shape))
        hidden = tensor if input_ids is None else self.encoder(tensor)
        if learned:
            hidden = hidden + self.positional_embedding(positions)
        return self.embedding_dropout(hidden), positions

    def _learned_positions(
        self,
        input_ids: torch.Tensor | None,
        tensor: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the positions of ablation M0, from 1 over tokens, and 0 at padding.

        The mask 1 1 0 1 has the positions 1 2 0 3.
        """
        if position_ids is not None:
            return position_ids + 1
        mask = _token_mask(attention_mask)
        if mask is not None:
            tokens = mask != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            tokens = input_ids != self.config.pad_token_id
        else:
            tokens = torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
        return tokens.cumsum(dim=-1) * tokens


# -------------------------------------------------------------------------------------------- heads


class _HeadModel(NeoBERTPreTrainedModel):
    """Backbone with a head that works on packed hidden states and unpacks only its logits."""

    model: NeoBERTModel
    output_class: type[HeadOutput]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: NumItems = None,
        **kwargs: Any,
    ) -> HeadOutput:
        """Compute logits, and the loss if labels are passed.

        Args:
            input_ids: See `NeoBERTModel`.
            attention_mask: See `NeoBERTModel`.
            token_type_ids: Ignored; accepted because BERT has them.
            position_ids: See `NeoBERTModel`.
            inputs_embeds: See `NeoBERTModel`.
            labels: Labels in the shape that the class documents.
            num_items_in_batch: Divisor of the summed loss. By default the number of labeled items
                of this batch.
            **kwargs: See `NeoBERTModel`.

        Returns:
            The loss (None without labels), logits, and hidden states and attention weights if they
            are requested.
        """
        outputs = self.run_backbone(
            input_ids, attention_mask, position_ids, inputs_embeds, **kwargs
        )
        # The backbone has checked that there is one of them.
        tensor = inputs_embeds if input_ids is None else input_ids
        assert tensor is not None
        shape = tensor.shape[:2]
        device = outputs.last_hidden_state.device
        attention_mask = _token_mask(_on_device(device, attention_mask))
        labels = _on_device(device, labels)
        loss, logits = self.loss_and_logits(
            outputs, shape, attention_mask, labels, num_items_in_batch
        )
        return self.output_class(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def run_backbone(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs: Any,
    ) -> NeoBERTModelOutput:
        """Return the outputs of the backbone, with the `Packing` of a packed batch."""
        kwargs["return_dict"] = True
        kwargs["keep_packed"] = True
        if kwargs.get("unpad_inputs") is None and self._is_observed():
            # The model packs nothing itself. A batch that the caller packed stays packed.
            kwargs["unpad_inputs"] = False
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def loss_and_logits(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: NumItems,
    ) -> tuple[Loss, torch.Tensor]:
        """Return the loss and the logits of the outputs of the backbone.

        Args:
            outputs: Outputs of `run_backbone`.
            shape: First two dimensions of the inputs.
            attention_mask: Mask of the caller, or None if it is not a mask of tokens.
            labels: Labels of the caller.
            num_items_in_batch: Divisor of the summed loss, or None.
        """
        raise NotImplementedError


class NeoBERTForMaskedLM(_HeadModel):
    """Backbone and decoder: unlike BERT, no transform and (as published) no tied weight.

    labels: (B, L) or (B * L,) token IDs; -100 and labels at padding are ignored. logits: (B, L, V),
    zero at padding where the model packed; with `config.sparse_prediction` and labels (labeled
    tokens, V), in the order of the rows.
    """

    output_class = modeling_outputs.MaskedLMOutput
    _keys_to_ignore_on_load_unexpected = None
    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.decoder: nn.Module = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()
        # transformers 5 copies the pattern of the backbone, which must not match this decoder.
        self._keys_to_ignore_on_load_unexpected = None

    def get_output_embeddings(self) -> nn.Module:
        """Return the decoder."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the decoder."""
        self.decoder = new_embeddings

    def loss_and_logits(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: NumItems,
    ) -> tuple[Loss, torch.Tensor]:
        """Return the loss and the logits. See `_HeadModel.loss_and_logits`."""
        hidden = outputs.last_hidden_state
        packing = outputs.packing
        if labels is None:
            return None, _unpacked(self.decoder(hidden), packing)

        labels, num_items = _token_labels(
            labels, shape, self.config.vocab_size, packing, attention_mask, num_items_in_batch
        )
        if not self.config.sparse_prediction or is_tracing():
            logits = self.decoder(hidden)
            return _cross_entropy(logits, labels, num_items), _unpacked(logits, packing)

        labeled = (labels.flatten() != -100).nonzero().squeeze(-1)
        if packing is not None and packing.index is not None:
            # Restore the order of the caller's rows.
            labeled = labeled[packing.index[labeled].argsort()]
        logits = self.decoder(hidden.flatten(0, 1)[labeled])
        return _cross_entropy(logits, labels.flatten()[labeled], num_items), logits


class _TaskHeadModel(_HeadModel):
    """Head of newly initialized linear layers: normal(0, classifier_init_range), zero biases."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.classifier_init_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class _PooledHeadModel(_TaskHeadModel):
    """dropout(pooled) -> dense -> tanh -> dropout -> classifier, as in the authors' code."""

    def __init__(self, config: NeoBERTConfig, num_outputs: int) -> None:
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, num_outputs)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize `dense` identically in every process: PEFT saves only the classifier."""
        super()._init_weights(module)
        if module is getattr(self, "dense", None):
            _init_reproducibly(module.weight, self.config.classifier_init_range)

    def classify(
        self, outputs: NeoBERTModelOutput, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits, (B, num_outputs), or (N, num_outputs) if the caller packed the batch."""
        pooled = self.pool(outputs.last_hidden_state, outputs.packing, attention_mask)
        pooled = torch.tanh(self.dense(self.dropout(pooled)))
        return self.classifier(self.dropout(pooled))

    def pool(
        self,
        hidden: torch.Tensor,
        packing: Packing | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pool each sequence as `config.classifier_pooling` selects, zeros for an empty sequence.

        Args:
            hidden: Hidden states, (B, L, D) or packed (1, T, D).
            packing: Bounds of the sequences of packed hidden states.
            attention_mask: Mask of (B, L, D) hidden states.

        Returns:
            (B, D), or (N, D) if the caller packed the batch.
        """
        mean = self.config.classifier_pooling == "mean"
        if packing is not None:
            packing = packing.drop_empty()
            if mean:
                return packing.to_rows(packing.mean_per_sequence(hidden))
            firsts = packing.cu_seq_lens[:-1].long().clamp(max=hidden.shape[1] - 1)
            empty = packing.cu_seq_lens.diff()[:, None] == 0
            return packing.to_rows(hidden[0, firsts].masked_fill(empty, 0.0))

        if attention_mask is None:
            return hidden.mean(dim=1) if mean else hidden[:, 0]
        mask = attention_mask.to(torch.bool)
        if mean:
            # In float32 at least, as in `Packing.mean_per_sequence`.
            sums = (at_least_float32(hidden) * mask[..., None]).sum(dim=1)
            return (sums / mask.sum(dim=-1, keepdim=True).clamp(min=1)).to(hidden.dtype)
        firsts = mask.to(torch.int32).argmax(dim=-1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return hidden[rows, firsts].masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)


@torch.no_grad()
def _init_reproducibly(weight: torch.Tensor, std: float) -> None:
    """Fill a weight with a fixed sample of normal(0, std), unless a checkpoint has filled it."""
    if weight.device.type != "meta" and not getattr(weight, "_is_hf_initialized", False):
        generator = torch.Generator().manual_seed(0)
        weight.copy_(std * torch.randn(weight.shape, generator=generator, device="cpu"))


class NeoBERTForSequenceClassification(_PooledHeadModel):
    """Regression, single-label or multi-label classification, by `config.problem_type` as in BERT.

    labels: (B,) or (B, 1) classes; (B,) or (B, C) values for regression; (B, C) zeros and ones for
    multi-label classification. The shape and dtype of the first labels set a `problem_type` of
    None. logits: (B, C), or (N, C) if the caller packed the batch.
    """

    output_class = modeling_outputs.SequenceClassifierOutput

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config, config.num_labels)  # type: ignore[arg-type]
        self.num_labels: int = config.num_labels  # type: ignore[assignment]
        self.post_init()

    def loss_and_logits(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: NumItems,
    ) -> tuple[Loss, torch.Tensor]:
        """Return the loss and the logits. See `_HeadModel.loss_and_logits`."""
        logits = self.classify(outputs, attention_mask)
        if labels is None:
            return None, logits
        return self.loss(logits, labels, num_items_in_batch), logits

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: NumItems = None,
    ) -> torch.Tensor:
        """Return the loss of (B, C) logits for `config.problem_type`.

        Raises:
            ValueError: If the labels have another shape or dtype, or are out of range.
        """
        _check_tensors(labels=labels)
        problem_type = self.config.problem_type or self._infer_problem_type(labels)
        if problem_type not in PROBLEM_TYPES:
            # The field was set after the model had checked its configuration.
            self.config.check()

        if problem_type == "single_label_classification":
            labels = _check_labels("labels", labels, logits.shape[:1], self.num_labels)
            loss = _cross_entropy(logits, labels, num_items_in_batch)
        else:
            is_multi_label = problem_type == "multi_label_classification"
            loss = self._elementwise_loss(logits, labels, is_multi_label, num_items_in_batch)

        # Labels that were refused do not determine the type of later ones.
        self.config.problem_type = problem_type
        return loss

    def _elementwise_loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        is_multi_label: bool,
        num_items_in_batch: NumItems,
    ) -> torch.Tensor:
        """Return the mean binary cross-entropy or squared error of (B, C) logits."""
        flat = self.num_labels == 1 and labels.dim() <= 1
        _check_shape("labels", labels, logits.shape[:1] if flat else logits.shape)
        if is_multi_label and has_host_values(labels) and ((labels < 0) | (labels > 1)).any():
            raise ValueError(
                "`labels` must be between 0 and 1 for multi-label classification, got values from "
                f"{labels.min().item()} to {labels.max().item()}."
            )

        loss_function = F.binary_cross_entropy_with_logits if is_multi_label else F.mse_loss
        logits = at_least_float32(logits).view_as(labels)
        total = loss_function(logits, labels.to(logits), reduction="sum")
        count = torch.tensor(labels.numel(), device=total.device)
        return _mean(total, count, num_items_in_batch)

    def _infer_problem_type(self, labels: torch.Tensor) -> ProblemType:
        """Return the problem type of labels of this shape and dtype, as BERT does.

        Raises:
            ValueError: If there is one label per text, several classes, and no integer dtype.
        """
        if self.num_labels == 1:
            return "regression"
        if labels.dim() > 1 and labels.shape[1:] != (1,):
            return "multi_label_classification"
        if labels.is_floating_point():
            raise ValueError(
                "`labels` must be integers (int64) for one label per text, or have shape "
                f"({len(labels)}, {self.num_labels}) for multi-label classification, got "
                f"{labels.dtype} of shape {tuple(labels.shape)}."
            )
        return "single_label_classification"


class NeoBERTForMultipleChoice(_PooledHeadModel):
    """Scores of C candidate texts.

    input_ids, attention_mask, position_ids: (B, C, L); inputs_embeds: (B, C, L, D). labels: index
    of the correct candidate, (B,). logits: (B, C).
    """

    output_class = modeling_outputs.MultipleChoiceModelOutput

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config, 1)
        self.post_init()

    def run_backbone(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs: Any,
    ) -> NeoBERTModelOutput:
        """Return the outputs of the backbone for the flattened candidates."""
        _check_tensors(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
        )
        tensor = inputs_embeds if input_ids is None else input_ids
        dimensions = 4 if input_ids is None else 3
        if tensor is not None and tensor.dim() != dimensions:
            raise ValueError(
                "`input_ids` must have shape (batch, choices, length), or `inputs_embeds` (batch, "
                f"choices, length, {self.config.hidden_size}), got {tuple(tensor.shape)}."
            )

        # A mask of 5 dimensions contains a 4-D mask for each text.
        if attention_mask is not None and attention_mask.dim() not in (3, 5):
            raise ValueError(
                "`attention_mask` must have shape (batch, choices, length), got "
                f"{tuple(attention_mask.shape)}."
            )

        if tensor is not None and position_ids is not None:
            try:
                position_ids = position_ids.expand(tensor.shape[:3])
            except RuntimeError:
                raise ValueError(
                    "`position_ids` must have a shape that broadcasts to (batch, choices, length), "
                    f"{tuple(tensor.shape[:3])}, got {tuple(position_ids.shape)}."
                ) from None
            if attention_mask is None:
                # The positions of a single candidate must not be treated as a packed batch.
                attention_mask = torch.ones_like(position_ids)
        inputs = (input_ids, attention_mask, position_ids, inputs_embeds)
        flat = [None if x is None else x.flatten(0, 1) for x in inputs]
        return super().run_backbone(*flat, **kwargs)

    def loss_and_logits(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: NumItems,
    ) -> tuple[Loss, torch.Tensor]:
        """Return the loss and the logits. See `_HeadModel.loss_and_logits`."""
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        logits = self.classify(outputs, mask).view(shape)
        if labels is None:
            return None, logits
        labels = _check_labels("labels", labels, shape[:1], shape[1])
        return _cross_entropy(logits, labels, num_items_in_batch), logits


class NeoBERTForTokenClassification(_TaskHeadModel):
    """Classification of tokens: dropout -> classifier.

    labels: (B, L) or (B * L,) classes; -100 and labels at padding are ignored. logits: (B, L, C),
    zero at padding where the model packed.
    """

    output_class = modeling_outputs.TokenClassifierOutput

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels  # type: ignore[assignment]
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def loss_and_logits(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: NumItems,
    ) -> tuple[Loss, torch.Tensor]:
        """Return the loss and the logits. See `_HeadModel.loss_and_logits`."""
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            labels, num_items = _token_labels(
                labels, shape, self.num_labels, outputs.packing, attention_mask, num_items_in_batch
            )
            loss = _cross_entropy(logits, labels, num_items)
        return loss, _unpacked(logits, outputs.packing)


# Logit of padding: exact in every dtype; sums, smoothed losses and float16 stay finite.
_NO_ANSWER = -8192.0


class NeoBERTForQuestionAnswering(_TaskHeadModel):
    """Start and end of the answer: a linear layer with two outputs per token."""

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        num_items_in_batch: NumItems = None,
        **kwargs: Any,
    ) -> modeling_outputs.QuestionAnsweringModelOutput:
        """Compute the logits of start and end, and the loss if both positions are passed.

        Args:
            input_ids: See `NeoBERTModel`.
            attention_mask: See `NeoBERTModel`.
            token_type_ids: Ignored; accepted because BERT has them.
            position_ids: See `NeoBERTModel`.
            inputs_embeds: See `NeoBERTModel`.
            start_positions: Index of the first token of the answer, (B,) or (B, 1). Indices of
                padding and outside the row are ignored; BERT changes negative ones to 0.
            end_positions: Index of the last token of the answer, likewise.
            num_items_in_batch: Divisor of the summed loss. By default the number of answers of this
                batch.
            **kwargs: See `NeoBERTModel`.

        Returns:
            The loss (None without positions), and start_logits and end_logits, (B, L), -8,192 at
            padding, which is never an answer.
        """
        outputs = self.run_backbone(
            input_ids, attention_mask, position_ids, inputs_embeds, **kwargs
        )
        logits = self.qa_outputs(outputs.last_hidden_state)
        attention_mask = _token_mask(_on_device(logits.device, attention_mask))
        if outputs.packing is not None:
            logits = outputs.packing.unpack(logits, _NO_ANSWER)
        elif attention_mask is not None:
            logits = logits.masked_fill(attention_mask[..., None] == 0, _NO_ANSWER)
        start_logits, end_logits = logits.unbind(dim=-1)

        loss = None
        if start_positions is not None and end_positions is not None:
            start_positions = _check_labels(
                "start_positions", start_positions, start_logits.shape[:1]
            )
            end_positions = _check_labels("end_positions", end_positions, end_logits.shape[:1])
            start_loss = _position_loss(start_logits, start_positions, num_items_in_batch)
            end_loss = _position_loss(end_logits, end_positions, num_items_in_batch)
            loss = (start_loss + end_loss) / 2
        return modeling_outputs.QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# -------------------------------------------------------------------------------- losses and labels


def _on_device(device: torch.device, value: Any) -> Any:
    """Return a tensor on a device, and any other value as it is."""
    return value.to(device) if torch.is_tensor(value) and value.device != device else value


def _token_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask of tokens, (B, L), that a mask of the caller contains.

    Args:
        mask: Mask of tokens; or a 4-D mask, boolean (or integer) or additive, as
            `get_extended_attention_mask` of BERT and `create_bidirectional_mask` return it. A
            token that no query attends to is padding.
    """
    if mask is None or mask.dim() != 4:
        return mask
    # Additive masks have -10,000, the smallest value of the dtype, or -inf at padding.
    is_visible = mask > -1e4 if mask.is_floating_point() else mask != 0
    return is_visible.flatten(1, 2).any(dim=1)


def _mean(total: torch.Tensor, count: torch.Tensor, num_items_in_batch: NumItems) -> torch.Tensor:
    """Return total / num_items_in_batch (gradient accumulation), or total / count without it."""
    if num_items_in_batch is None:
        return total / count.clamp(min=1)
    if torch.is_tensor(num_items_in_batch):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: NumItems = None
) -> torch.Tensor:
    """Return the mean loss of labels other than -100, in float32 at least.

    Args:
        logits: Logits, (..., C).
        labels: Classes, (...).
        num_items_in_batch: Divisor of the summed loss, or None.
    """
    logits = at_least_float32(logits.flatten(0, -2))
    labels = labels.flatten().to(logits.device)
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return _mean(total, (labels != -100).sum(), num_items_in_batch)


def _position_loss(
    logits: torch.Tensor, positions: torch.Tensor, num_items_in_batch: NumItems
) -> torch.Tensor:
    """Return the loss of (B, L) logits for positions (B,), without positions outside the text."""
    positions = positions.to(logits.device)
    outside = (positions < 0) | (positions >= logits.shape[1])
    labeled = logits.gather(1, positions.masked_fill(outside, 0)[:, None])[:, 0]
    at_padding = labeled == _NO_ANSWER
    positions = positions.masked_fill(outside | at_padding, -100)
    return _cross_entropy(logits, positions, num_items_in_batch)


def _token_labels(
    labels: torch.Tensor,
    shape: torch.Size,
    num_classes: int,
    packing: Packing | None,
    attention_mask: torch.Tensor | None,
    num_items_in_batch: NumItems,
) -> tuple[torch.Tensor, NumItems]:
    """Check the labels of tokens, and ignore those at padding.

    Returns:
        Labels with -100 at padding, (B, L) or packed (1, T), and the divisor of their loss. Trainer
        counts labels at padding, so its divisor is scaled by the fraction of the other ones.
    """
    labels = _check_labels("labels", labels, shape, num_classes)
    if packing is not None:
        kept = packing.pack(labels)
    elif attention_mask is not None:
        kept = labels.masked_fill(attention_mask == 0, -100)
    else:
        kept = labels
    if num_items_in_batch is None or kept is labels:
        return kept, num_items_in_batch

    fraction = (kept != -100).sum() / (labels != -100).sum().clamp(min=1)
    return kept, _on_device(fraction.device, num_items_in_batch) * fraction


def _unpacked(logits: torch.Tensor, packing: Packing | None) -> torch.Tensor:
    return logits if packing is None else packing.unpack(logits)


# ------------------------------------------------------------------------------------------- checks


# Arguments that callers pass to every model: those of the library and of attention functions.
_KNOWN_KWARGS = {
    *TransformersKwargs.__annotations__,
    "attention_instances",
    "use_cache",
    "cache_position",
    "num_splits",
    "return_loss",
    "seq_idx",
}


def _check_tensors(**tensors: Any) -> None:
    """Raise ValueError unless every value is a tensor or None."""
    for name, value in tensors.items():
        if value is not None and not torch.is_tensor(value):
            raise ValueError(
                f"`{name}` must be a tensor, got {type(value).__name__}. Tokenizers return tensors "
                "with return_tensors='pt'."
            )


def _check_shape(name: str, value: torch.Tensor, shape: torch.Size) -> None:
    """Raise ValueError for another shape."""
    if value.shape != shape:
        raise ValueError(f"`{name}` must have shape {tuple(shape)}, got {tuple(value.shape)}.")


def _check_labels(
    name: str, labels: torch.Tensor, shape: torch.Size, num_classes: int | None = None
) -> torch.Tensor:
    """Return labels as int64 in a shape, also from a flat tensor or (B, 1).

    Args:
        name: Name of the labels, for messages.
        labels: Classes, or -100 (ignored).
        shape: Shape of the result.
        num_classes: Upper limit of the classes, or None.

    Raises:
        ValueError: If the labels have another shape or dtype, or are out of range.
    """
    _check_tensors(**{name: labels})
    if labels.dim() != len(shape) and labels.numel() == shape.numel():
        labels = labels.view(shape)
    _check_shape(name, labels, shape)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"`{name}` must be integers (int64), got {labels.dtype}.")

    # Unsigned labels cannot be -100.
    labels = labels.long()
    if num_classes is not None and has_host_values(labels):
        wrong = (labels != -100) & ((labels < 0) | (labels >= num_classes))
        if wrong.any():
            raise ValueError(
                f"`{name}` must be from 0 to {num_classes - 1}, or -100 (ignored), "
                f"got {labels[wrong][0].item()}."
            )
    return labels


# -------------------------------------------------------------------------------- rotary embeddings


def rotary_embeddings(
    config: NeoBERTConfig,
    positions: torch.Tensor,
    longest: int | torch.Tensor,
    compiled: bool = False,
) -> PositionEmbeddings | None:
    """Return the rotations of positions by the angles position * theta^(-2i / K) of pair i.

    See RoFormer, eq. 15. They are computed in float32 in every forward pass: `.to(bfloat16)` would
    cast a buffer, and the loader of transformers 5 would lose it.

    Args:
        config: Configuration of the model.
        positions: Positions, (B or 1, L).
        longest: Length of the longest sequence in tokens, which "dynamic" scaling depends on.
        compiled: Whether the blocks are compiled.

    Returns:
        None with learned positions. On CPU and CUDA one complex number per pair,
        (B or 1, L, 1, 1, K / 2), which needs a single pass over memory. While tracing, for compiled
        blocks and on other devices cosines and signed sines, (B or 1, L, 1, 1, K) each, which
        compilers fuse.
    """
    if config.position_embedding_type != "rope":
        return None

    rope_type = config.rope_parameters["rope_type"]
    device = positions.device
    if rope_type == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = config.rope_theta ** -(steps / config.head_dim)
        attention_factor = 1.0
    else:
        init_function = ROPE_INIT_FUNCTIONS[rope_type]
        frequencies, attention_factor = init_function(_RopeSettings(config), device, longest)

    # An elementwise product: unlike a matrix product, autocast leaves it in float32.
    angles = (positions[..., None].float() * frequencies.float())[:, :, None, None]
    cos = angles.cos() * attention_factor
    sin = angles.sin() * attention_factor
    if compiled or is_tracing() or device.type not in ("cpu", "cuda", "meta"):
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return (torch.complex(cos, sin),)


def apply_rotary_pos_emb(
    x: torch.Tensor, position_embeddings: PositionEmbeddings, in_place: bool = False
) -> torch.Tensor:
    """Rotate the adjacent pairs (2i, 2i + 1) of the last axis, in float32.

    Args:
        x: Queries and keys of all heads, (B, L, H, 2, K), any strides.
        position_embeddings: Result of `rotary_embeddings`.
        in_place: Whether the result may overwrite `x`.

    Returns:
        Tensor of the shape and dtype of `x`.
    """
    if len(position_embeddings) == 2:
        cos, sin = position_embeddings
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return (at_least_float32(x) * cos + swapped * sin).type_as(x)

    (rotations,) = position_embeddings
    if in_place:
        return rotate_in_place(x, rotations)
    pairs = torch.view_as_complex(at_least_float32(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x)


class _RopeSettings:
    """Attributes that `ROPE_INIT_FUNCTIONS` reads in transformers 4 and 5, traceable."""

    def __init__(self, config: NeoBERTConfig) -> None:
        self.hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        self.num_attention_heads = config.num_attention_heads
        self.max_position_embeddings = config.max_position_embeddings
        self.partial_rotary_factor = 1.0
        self.rope_theta = config.rope_theta
        self.rope_parameters = dict(config.rope_parameters)
        self.rope_scaling = self.rope_parameters

    def standardize_rope_params(self) -> None:
        """Do nothing: the configuration has normalized the parameters."""


# ---------------------------------------------------------------------------------- published names


# Names of the published code, which old auto_maps and other tools use.
NeoBERT = NeoBERTModel
NeoBERTLMHead = NeoBERTForMaskedLM
__all__ = ["NeoBERT", "NeoBERTLMHead", "NeoBERTPreTrainedModel"]
__all__ += [name.partition(".")[2] for name in AUTO_MAP.values() if name.startswith("modeling_")]
