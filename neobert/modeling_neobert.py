"""NeoBERT (arXiv 2502.19587, section 3): pre-RMSNorm blocks with SwiGLU and RoPE, and its heads.

Shape legend: B rows of a batch, L their padded length, T packed tokens, N packed sequences, D
hidden size, H heads, K head_dim, V vocabulary, C labels.

The file reads from the top: block, backbone, heads, losses; then what these call: checks, rotary
embeddings. A batch is dense, (B, L, D), or packed, (1, T, D), with the bounds of its sequences in a
`Packing` (attention_neobert.py): by the caller, or by `NeoBERTModel` where `attention_mask` has
padding. It is packed once and unpacked once; blocks do not know which it is.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import modeling_outputs
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple, logging

from .attention_neobert import (
    KERNELS,
    LOW_PRECISION,
    PACKS,
    AttentionDispatch,
    Packing,
    at_least_float32,
    attention_kernel,
    autocast_dtype,
    eager_attention_forward,
    has_values,
    is_tracing,
    values_are_free,
)
from .attention_neobert import VERSION as ATTENTION_VERSION
from .configuration_neobert import AUTO_MAP, NeoBERTConfig


# Of attention_neobert.py, of which transformers 4 keeps the first that a process loads.
VERSION = "37296c46"
if ATTENTION_VERSION != VERSION:
    raise ImportError(
        "This process has loaded another version of attention_neobert.py from a folder of the "
        "same name; start Python anew, or rename one of the two folders."
    )

logger = logging.get_logger(__name__)

# Without gradients the CPU works in pieces that stay in its caches: chains of elementwise
# operations 128 tokens at a time, feed-forwards, whose inner states are the largest tensors, 1,024.
_CPU_ROWS, _CPU_TOKENS = 128, 1024


# ------------------------------------------------------------------------------------------- blocks


class NeoBERTRMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), (..., D); float32 inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not _on_cpu_without_gradients(x):
            return super().forward(x)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        weight = at_least_float32(self.weight)
        pieces = (tensor.flatten(0, -2).split(_CPU_ROWS) for tensor in (x, output))
        for rows, result in zip(*pieces):
            rows = at_least_float32(rows)
            scale = (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt_()
            result.copy_((rows * scale).mul_(weight))
        return output


class NeoBERTSwiGLU(nn.Module):
    """w3(silu(a) * b) with (a, b) the halves of w12(x) (Shazeer 2020); (B, L, D) -> (B, L, D)."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.ffn_inner_size, bias=False)
        self.w3 = nn.Linear(config.ffn_inner_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_pieces = _on_cpu_without_gradients(x) and type(self.w12) is type(self.w3) is nn.Linear
        if not in_pieces or _hooks(self):
            return self.gated(x)
        pieces = [self.gated(rows, in_place=True) for rows in x.flatten(0, 1).split(_CPU_TOKENS)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view_as(x)

    def gated(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate).mul_(value) if in_place else F.silu(gate) * value)


class NeoBERTBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + ffn(norm(x)).

    Attention functions receive this module: they read `is_causal`, `layer_idx` and `config`.
    """

    is_causal = False

    def __init__(self, config: NeoBERTConfig, layer_idx: int):
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
        position_embeddings: tuple[torch.Tensor, ...] | None,
        attention: AttentionDispatch,
        output_attentions: bool = False,
        **kwargs,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden: (B, L, D), or packed (1, T, D).
            position_embeddings: from `rotary_embeddings`, or None with learned positions.
            attention: the `AttentionDispatch` of this forward.
            output_attentions: also return the weights, (B, H, L, L).
        Returns:
            hidden states in the same shape; with `output_attentions` a tuple with the weights.
        """
        query, key, value = self.project(hidden, position_embeddings)
        dropout = self.config.attention_dropout if self.training else 0.0
        # vLLM reads this source: it wants one name from ALL_ATTENTION_FUNCTIONS, called once, with
        # `scaling=self.scaling`.
        name = self.config._attn_implementation
        attention_interface = ALL_ATTENTION_FUNCTIONS.get(name, eager_attention_forward)
        attention_interface = attention.around(attention_interface)
        output, weights = attention_interface(
            self, query, key, value, attention.mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        del query, key, value  # before `wo` takes memory of its own
        # Functions return (B, L, H, K); those of serving engines (T, H * K).
        output = self.wo(output.reshape(hidden.shape))
        hidden = hidden + self.dropout(output)
        del output  # before the feed-forward takes memory of its own
        hidden = hidden + self.dropout(self.ffn(self.ffn_norm(hidden)))
        return (hidden, weights) if output_attentions else hidden

    def project(
        self, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys, rotated, and values of the normed hidden states: (B, H, L, K) each."""
        # The rows of qkv.weight are interleaved per head: (H, 3, K).
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (self.num_heads, 3, -1))
        query_key, value = qkv.split((2, 1), dim=-2)
        if position_embeddings is not None:
            in_place = _on_cpu_without_gradients(hidden) and type(self.qkv) is nn.Linear
            in_place = in_place and not _hooks(self.qkv)
            query_key = apply_rotary_pos_emb(query_key, position_embeddings, in_place)
        query, key = query_key.unbind(-2)
        return query.transpose(1, 2), key.transpose(1, 2), value.squeeze(-2).transpose(1, 2)


def _norm(config):
    norm = NeoBERTRMSNorm if config.norm_type == "rms" else nn.LayerNorm
    return norm(config.hidden_size, eps=config.norm_eps)


def _feed_forward(config):
    if config.hidden_act == "swiglu":
        return NeoBERTSwiGLU(config)
    up = nn.Linear(config.hidden_size, config.ffn_inner_size, bias=False)
    down = nn.Linear(config.ffn_inner_size, config.hidden_size, bias=False)
    return nn.Sequential(up, nn.GELU(), down)


# ----------------------------------------------------------------------------------------- backbone


class NeoBERTPreTrainedModel(PreTrainedModel):
    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NeoBERTBlock"]
    _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True
    _supports_flash_attn = _supports_flash_attn_2 = _supports_flash_attn_3 = True
    # Classes without a decoder load masked-LM checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\."]

    def _init_weights(self, module):
        """Paper, section 3: uniform.

        `torch.nn.init` functions only: transformers 5 skips those on weights already loaded.
        """
        if isinstance(module, (nn.Linear, nn.Embedding)):
            is_linear = isinstance(module, nn.Linear)
            bound = getattr(self.config, f"{'decoder' if is_linear else 'embedding'}_init_range")
            nn.init.uniform_(module.weight, -bound, bound)
            if is_linear and module.bias is not None:
                nn.init.zeros_(module.bias)
        else:  # norms, and what a user's subclass holds
            super()._init_weights(module)

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, *args, **kwargs
    ) -> None:
        """As in the library, with the code files that `auto_map` names."""
        if is_main_process and not Path(save_directory).is_file():
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            custom_object_save(NeoBERTPreTrainedModel, save_directory)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self, self.base_model_prefix, self).encoder

    def set_input_embeddings(self, value: nn.Module) -> None:
        getattr(self, self.base_model_prefix, self).encoder = value

    def get_encoder(self, modality: str | None = None) -> nn.ModuleList:
        """The blocks. (`model.encoder` is the token embedding, a published name.)"""
        return getattr(self, self.base_model_prefix, self).transformer_encoder

    def attention_backend(self) -> str:
        """One sentence: the kernel of packed batches here, and why no faster one runs.

        For the model's device, and its dtype or that of autocast.
        """
        implementation, device = self.config._attn_implementation, self.device
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
        words = KERNELS[kernel].format(implementation) + (f"; {reason}." if reason else ".")
        if not self.config.unpad_inputs:
            words += " Padded batches are not packed: unpad_inputs is off."
        return f"{implementation} on {device.type} in {str(dtype).removeprefix('torch.')}: {words}"

    def _is_observed(self):
        """True if a hook or a replaced block would see packed tensors; then nothing is packed."""
        if is_tracing():
            return False
        blocks = getattr(getattr(self, self.base_model_prefix, self), "transformer_encoder", ())
        observers = [hook for hook in _hooks(self) if hook is not vars(self).get("forward")]
        observers += [type(block) for block in blocks if type(block) is not NeoBERTBlock]
        observers = [observer for observer in observers if not _is_machinery(observer)]
        if observers and self.config.unpad_inputs:
            name = getattr(observers[0], "__qualname__", type(observers[0]).__name__)
            logger.warning_once(
                f"Padded batches are not packed while {name} is a hook or a replacement "
                "inside of the model: it sees dense batches."
            )
        return bool(observers)


@dataclass
class NeoBERTModelOutput(modeling_outputs.BaseModelOutput):
    """`BaseModelOutput`, and for heads the `Packing` of a packed `last_hidden_state`, (1, T, D)."""

    packing: Packing | None = None


class NeoBERTModel(NeoBERTPreTrainedModel):
    """The backbone: token ids to hidden states."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        width = config.hidden_size
        self.encoder = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        if config.position_embedding_type == "learned":
            # Row 0 is padding; positions count from 1.
            rows = config.max_position_embeddings + 1
            self.positional_embedding = nn.Embedding(rows, width, padding_idx=0)
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)
        blocks = (NeoBERTBlock(config, i) for i in range(config.num_hidden_layers))
        self.transformer_encoder = nn.ModuleList(blocks)
        self.layer_norm = _norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def n_layers(self) -> int:
        """Number of blocks. Setting it drops those above, as bert-score does."""
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
        **kwargs,
    ) -> NeoBERTModelOutput:
        """
        Args:
            input_ids: (B, L) token ids, or packed (1, T); or `inputs_embeds` (B, L, D) in their
                place.
            attention_mask: (B, L) of ones and zeros, int, bool or float; None if every token is
                real. Or (B, 1, L or 1, L), boolean (True where attention is allowed) or additive,
                which is handed on as it is: such a batch is not packed.
            token_type_ids: accepted for BERT's sake and ignored.
            position_ids: (L,), (1, L) or (B, L). By default the index in the row, or in the
                sequence when packed. A single row without attention_mask whose positions start
                again at 0 is taken as a packed batch, with a warning: this ends in the next
                release.
            output_attentions: also return (B, H, L, L) weights per block, computed by the eager
                function.
            output_hidden_states: also return the num_hidden_layers + 1 hidden states; the last one
                is normed.
            unpad_inputs: whether the model packs a padded batch. By default as
                `config.unpad_inputs` says, but not while a hook or a replacement inside of the
                model would see packed tensors, nor with hidden states that need gradients.
            keep_packed: return packed hidden states with their `Packing`, for heads.
            kwargs: handed to the attention function as they are. `cu_seq_lens_q`, `cu_seq_lens_k`
                ((N + 1,) int32) and `max_length_q`, `max_length_k` mark a packed (1, T) batch.
        Returns:
            `NeoBERTModelOutput` in the caller's shape. Where the model packed a padded batch,
            padding positions are zero.
        Raises:
            ValueError: inputs that do not fit together.
        """
        tensor = self._check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        if position_ids is not None:  # from (L,), (1, L) or (B, L)
            position_ids = position_ids.reshape(-1, tensor.shape[1])
        config, implementation = self.config, self.config._attn_implementation
        defaults = config.output_attentions, config.output_hidden_states
        output_attentions = defaults[0] if output_attentions is None else output_attentions
        output_hidden_states = defaults[1] if output_hidden_states is None else output_hidden_states
        if output_attentions and implementation != "eager":
            logger.warning_once(
                f"output_attentions=True: {implementation} returns no weights, "
                "the eager function is used instead."
            )
            implementation = "eager"
        if unpad_inputs is None:
            # Hidden states of a packed batch are unpacked copies, off the graph.
            needs_states = output_hidden_states and torch.is_grad_enabled()
            observed = not keep_packed and self._is_observed()  # a head has looked itself
            unpad_inputs = config.unpad_inputs and not needs_states and not observed
        may_pack = unpad_inputs and not output_attentions

        packing, mask = self._read_layout(
            tensor, attention_mask, position_ids, implementation, may_pack, kwargs
        )
        longest = self._longest(tensor.shape[1], packing, mask)
        hidden, positions = self._embed(
            input_ids, inputs_embeds, attention_mask, position_ids, packing
        )

        blocks = self.transformer_encoder
        compiled = any(block._compiled_call_impl is not None for block in blocks)
        angles = rotary_embeddings(config, positions, longest, compiled)
        attention = AttentionDispatch(
            config, implementation, hidden, mask, packing, self.training, output_attentions
        )
        kwargs = kwargs if packing is None else packing.kwargs(kwargs)
        hidden, states, weights = self._encode(
            hidden, angles, attention, output_hidden_states, output_attentions, **kwargs
        )
        if packing is not None:
            states = [packing.unpack(state) for state in states]
            hidden = hidden if keep_packed else packing.unpack(hidden)
        return NeoBERTModelOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
            packing=packing if keep_packed else None,
        )

    def _check_inputs(self, input_ids, inputs_embeds, attention_mask, position_ids, kwargs):
        """`input_ids`, or the `inputs_embeds` in their place."""
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
                f"NeoBERT has no use for {', '.join(unknown)}: "
                "the attention function gets it as it is. Is the name right?"
            )
        if (input_ids is None) == (inputs_embeds is None):
            both = "neither was" if input_ids is None else "both were"
            raise ValueError(f"Give either input_ids or inputs_embeds; {both} given.")
        tensor, dimensions = inputs_embeds, 3
        if inputs_embeds is None:
            tensor, dimensions = input_ids, 2
        if tensor.dim() != dimensions or not (is_tracing() or tensor.numel()):
            raise ValueError(
                "Give at least one token, as input_ids of shape (batch, length) or inputs_embeds "
                f"of (batch, length, {self.config.hidden_size}), not of {tuple(tensor.shape)}."
            )
        weight = getattr(self.encoder, "weight", None)  # a user's own module may have none
        if inputs_embeds is None and values_are_free(input_ids) and torch.is_tensor(weight):
            lowest, highest = input_ids.min().item(), input_ids.max().item()
            if lowest < 0 or highest >= len(weight):
                raise ValueError(
                    f"input_ids must lie between 0 and {len(weight) - 1}, but "
                    f"{lowest if lowest < 0 else highest} was given; is it this model's tokenizer?"
                )
        return tensor

    def _read_layout(self, tensor, attention_mask, position_ids, implementation, may_pack, kwargs):
        """The `Packing` of a batch that the caller packed, or that is packed here, and None.

        Or None and the mask of a dense batch, which is None too if every token is real.
        """
        shape = tensor.shape[:2]
        dtype = getattr(getattr(self.encoder, "weight", None), "dtype", None) or self.dtype
        kernel, _ = attention_kernel(
            self.config, implementation, tensor.device, dtype, self.training
        )
        packing = Packing.from_caller(shape, attention_mask, position_ids, kwargs)
        if packing is not None:
            told = kwargs.get("cu_seq_lens_q") is not None
            if not told and not is_tracing() and kernel != "engine":
                logger.warning_once(
                    "A row whose position_ids start again at 0 was taken as packed texts. This "
                    "ends in the next release; give cu_seq_lens_q, as DataCollatorWithFlattening("
                    "return_flash_attn_kwargs=True) does."
                )
            return packing, None
        mask = _check_mask(attention_mask, shape)
        if mask is None or mask.dim() == 4 or is_tracing() or not has_values(mask):
            return None, mask
        lengths = mask.sum(dim=-1).tolist()  # the only wait for a GPU
        if sum(lengths) == mask.numel():
            return None, None
        if may_pack and any(lengths) and kernel in PACKS:
            return Packing.from_mask(mask, lengths), None
        return None, mask

    def _embed(self, input_ids, inputs_embeds, attention_mask, position_ids, packing):
        """Embeddings and positions: (B, L, D) and (1 or B, L), or packed (1, T, D) and (1, T)."""
        tensor = input_ids if inputs_embeds is None else inputs_embeds
        shape, learned = tensor.shape[:2], self.config.position_embedding_type == "learned"
        if position_ids is None and packing is not None and packing.index is None:
            position_ids = packing.position_ids(shape[1])
        if learned:
            positions = self._learned_positions(input_ids, tensor, attention_mask, position_ids)
        elif position_ids is None:
            positions = torch.arange(shape[1], device=tensor.device)[None]
        else:
            positions = position_ids
        if packing is not None:
            input_ids, inputs_embeds = packing.pack(input_ids), packing.pack(inputs_embeds)
            positions = packing.pack(positions.expand(shape))
        hidden = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        if learned:
            hidden = hidden + self.positional_embedding(positions)
        return self.embedding_dropout(hidden), positions

    def _learned_positions(self, input_ids, tensor, attention_mask, position_ids):
        """Positions of ablation M0: from 1 over real tokens, 0 at padding; 1 1 0 1 -> 1 2 0 3."""
        if position_ids is not None:
            return position_ids + 1
        if attention_mask is not None and attention_mask.dim() == 2:
            real = attention_mask != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        else:
            real = torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
        return real.cumsum(dim=-1) * real

    def _longest(self, length, packing, mask):
        """Tokens of the longest sequence, on which "dynamic" RoPE depends.

        The first text past the trained length gives a warning.
        """
        limit = self.config.context_length
        dynamic = self.config.rope_parameters["rope_type"] == "dynamic"
        longest = length if packing is None else packing.max_length
        if is_tracing() and dynamic and packing is not None:
            return packing.cu_seq_lens.diff().max()
        if mask is not None and mask.dim() == 2:
            if dynamic or (not is_tracing() and longest > limit):
                longest = mask.sum(dim=-1).max()
        if is_tracing() or (torch.is_tensor(longest) and not has_values(longest)):
            return longest
        longest = int(longest)
        if longest > limit and self.config.position_embedding_type == "learned":
            raise ValueError(
                f"A text of {longest} tokens was given, but learned positions reach {limit}; "
                "truncate the texts."
            )
        if longest > limit:
            logger.warning_once(
                f"A text of {longest} tokens is longer than the {limit} of max_position_embeddings "
                "and RoPE scaling: expect worse results; "
                "rope_scaling={'rope_type': 'yarn', 'factor': ...} extends the context."
            )
        return longest

    def _encode(self, hidden, angles, attention, output_hidden_states, output_attentions, **kwargs):
        """Blocks and last norm: hidden states, what each block saw, and attention weights."""
        states, weights = [], []
        for block in self.transformer_encoder:
            if output_hidden_states:
                states.append(hidden)
            hidden = block(hidden, angles, attention, output_attentions, **kwargs)
            if output_attentions:
                hidden, block_weights = hidden
                weights.append(block_weights)
        hidden = self.layer_norm(hidden)
        if output_hidden_states:
            states.append(hidden)
        return hidden, states, weights


# -------------------------------------------------------------------------------------------- heads


class _HeadModel(NeoBERTPreTrainedModel):
    """A backbone with a head. `predict` works on packed hidden states and puts back its logits."""

    output_class: type[ModelOutput]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs,
    ) -> (
        modeling_outputs.MaskedLMOutput
        | modeling_outputs.SequenceClassifierOutput
        | modeling_outputs.MultipleChoiceModelOutput
        | modeling_outputs.TokenClassifierOutput
    ):
        """Inputs as in `NeoBERTModel`; the class says what its labels and logits are.

        Args:
            num_items_in_batch: what the summed loss is divided by; by default the labelled items
                of this batch.
        Returns:
            loss (None without labels), logits, and hidden_states and attentions where asked for.
        """
        outputs = self.run_backbone(
            input_ids, attention_mask, position_ids, inputs_embeds, **kwargs
        )
        shape = (inputs_embeds if input_ids is None else input_ids).shape[:2]
        loss, logits = self.predict(outputs, shape, attention_mask, labels, num_items_in_batch)
        states = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return self.output_class(loss=loss, logits=logits, **states)

    def run_backbone(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs,
    ) -> NeoBERTModelOutput:
        """`NeoBERTModelOutput` with the `Packing` of a packed batch."""
        kwargs |= {"return_dict": True, "keep_packed": True}
        if kwargs.get("unpad_inputs") is None and self._is_observed():
            # The model packs nothing itself; what the caller packed stays packed.
            kwargs["unpad_inputs"] = False
        return self.model(input_ids, attention_mask, None, position_ids, inputs_embeds, **kwargs)


class NeoBERTForMaskedLM(_HeadModel):
    """Backbone and decoder: unlike BERT, no transform and (as published) no tied weight.

    labels: (B, L) or (B * L,) token ids; -100 and labels at padding are ignored. logits: (B, L, V),
    zero at padding where the model packed; with `config.sparse_prediction` and labels (labelled
    tokens, V), in the order of the rows.
    """

    output_class = modeling_outputs.MaskedLMOutput
    _keys_to_ignore_on_load_unexpected = None
    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()
        # transformers 5 takes the backbone's pattern over, which is not meant for a decoder.
        self._keys_to_ignore_on_load_unexpected = None

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings

    def predict(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: int | torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden, packing = outputs.last_hidden_state, outputs.packing
        if labels is None:
            return None, _unpacked(self.decoder(hidden), packing)
        labels, items = _token_labels(
            labels, shape, self.config.vocab_size, packing, attention_mask, num_items_in_batch
        )
        if not self.config.sparse_prediction or is_tracing():
            logits = self.decoder(hidden)
            return _cross_entropy(logits, labels, items), _unpacked(logits, packing)
        rows = (labels.flatten() != -100).nonzero().squeeze(-1)
        if packing is not None and packing.index is not None:  # in the caller's order
            rows = rows[packing.index[rows].argsort()]
        logits = self.decoder(hidden.flatten(0, 1)[rows])
        return _cross_entropy(logits, labels.flatten()[rows], items), logits


class _TaskHeadModel(_HeadModel):
    """A head of newly initialised linear layers: normal(0, classifier_init_range), biases zero."""

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.classifier_init_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class _PooledHeadModel(_TaskHeadModel):
    """dropout(pooled) -> dense -> tanh -> dropout -> classifier, as in the authors' code."""

    def __init__(self, config: NeoBERTConfig, outputs: int):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, outputs)

    def _init_weights(self, module):
        """`dense` is the same draw in every process: PEFT saves only the classifier of a head."""
        super()._init_weights(module)
        if module is getattr(self, "dense", None):
            _draw_alike(module.weight, self.config.classifier_init_range)

    def classify(
        self, outputs: NeoBERTModelOutput, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits, (B, outputs), or (N, outputs) of a batch that the caller packed."""
        pooled = self.pool(outputs.last_hidden_state, outputs.packing, attention_mask)
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))

    def pool(
        self,
        hidden: torch.Tensor,
        packing: Packing | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One vector a sequence, of its first real token or the mean over its real tokens.

        As `classifier_pooling` says; zeros for a sequence without a real token.

        Args:
            hidden: (B, L, D) with its `attention_mask`, or packed (1, T, D) with its `packing`.
        Returns:
            (B, D), or (N, D) for a batch that the caller packed.
        """
        mean = self.config.classifier_pooling == "mean"
        if packing is not None:
            packing = packing.drop_empty()
            if mean:
                return packing.to_rows(packing.means(hidden))
            firsts = packing.cu_seq_lens[:-1].long().clamp(max=hidden.shape[1] - 1)
            empty = packing.cu_seq_lens.diff()[:, None] == 0
            return packing.to_rows(hidden[0, firsts].masked_fill(empty, 0.0))
        if attention_mask is None or attention_mask.dim() != 2:
            return hidden.mean(dim=1) if mean else hidden[:, 0]
        mask = attention_mask.to(torch.bool)
        if mean:  # in float32, as in `Packing.means`
            sums = (hidden * mask[..., None]).sum(dim=1, dtype=torch.float32)
            return (sums / mask.sum(dim=-1, keepdim=True).clamp(min=1)).to(hidden.dtype)
        firsts = mask.to(torch.int32).argmax(dim=-1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return hidden[rows, firsts].masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)


@torch.no_grad()
def _draw_alike(weight, std):
    """Fill with a fixed random draw, normal(0, std). Weights from a checkpoint are left alone."""
    if weight.device.type != "meta" and not getattr(weight, "_is_hf_initialized", False):
        generator = torch.Generator().manual_seed(0)
        weight.copy_(std * torch.randn(weight.shape, generator=generator, device="cpu"))


class NeoBERTForSequenceClassification(_PooledHeadModel):
    """Regression, single-label or multi-label classification, by `config.problem_type` as in BERT.

    labels: (B,) or (B, 1) classes; (B,) or (B, C) numbers for regression; (B, C) zeros and ones for
    multi-label. A `problem_type` of None is set to what the labels' shape and dtype say. logits:
    (B, C), or (N, C) for a batch that the caller packed.
    """

    output_class = modeling_outputs.SequenceClassifierOutput

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, config.num_labels)
        self.num_labels = config.num_labels
        self.post_init()

    def predict(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: int | torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        logits = self.classify(outputs, attention_mask)
        return None if labels is None else self.loss(logits, labels, num_items_in_batch), logits

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Loss of (B, C) logits by `config.problem_type`."""
        _check_tensors(labels=labels)
        if self.config.problem_type is None:
            one_column = labels.dim() == 1 or labels.shape[1:] == (1,)
            classes = one_column and not labels.is_floating_point()
            several = "single_label_classification" if classes else "multi_label_classification"
            self.config.problem_type = "regression" if self.num_labels == 1 else several
        problem = self.config.problem_type
        if problem == "single_label_classification":
            labels = _check_labels("labels", labels, logits.shape[:1], self.num_labels)
            return _cross_entropy(logits, labels, num_items_in_batch)
        flat = self.num_labels == 1 and labels.dim() == 1
        _check_shape("labels", labels, logits.shape[:1] if flat else logits.shape)
        multi_label = problem == "multi_label_classification"
        if multi_label and values_are_free(labels) and ((labels < 0) | (labels > 1)).any():
            raise ValueError("Multi-label labels must lie between 0 and 1, but others were given.")
        function = F.binary_cross_entropy_with_logits if multi_label else F.mse_loss
        logits = at_least_float32(logits).view_as(labels)
        total = function(logits, labels.to(logits.dtype), reduction="sum")
        return _mean(total, torch.tensor(labels.numel(), device=total.device), num_items_in_batch)


class NeoBERTForMultipleChoice(_PooledHeadModel):
    """Scores C candidate texts of a question.

    input_ids, attention_mask, position_ids: (B, C, L); inputs_embeds: (B, C, L, D). labels: (B,)
    index of the right candidate. logits: (B, C).
    """

    output_class = modeling_outputs.MultipleChoiceModelOutput

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, 1)
        self.post_init()

    def run_backbone(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs,
    ) -> NeoBERTModelOutput:
        if position_ids is not None and attention_mask is None:
            # So that the positions of a single candidate are not read as a packed batch.
            attention_mask = torch.ones_like(position_ids)
        inputs = (input_ids, attention_mask, position_ids, inputs_embeds)
        flat = [None if x is None else x.flatten(0, 1) for x in inputs]
        return super().run_backbone(*flat, **kwargs)

    def predict(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: int | torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        logits, loss = self.classify(outputs, mask).view(shape), None
        if labels is not None:
            labels = _check_labels("labels", labels, shape[:1], shape[1])
            loss = _cross_entropy(logits, labels, num_items_in_batch)
        return loss, logits


class NeoBERTForTokenClassification(_TaskHeadModel):
    """A label for every token: dropout -> classifier.

    labels: (B, L) or (B * L,) classes; -100 and labels at padding are ignored. logits: (B, L, C),
    zero at padding where the model packed.
    """

    output_class = modeling_outputs.TokenClassifierOutput

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def predict(
        self,
        outputs: NeoBERTModelOutput,
        shape: torch.Size,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: int | torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        logits, loss = self.classifier(self.dropout(outputs.last_hidden_state)), None
        if labels is not None:
            labels, items = _token_labels(
                labels, shape, self.num_labels, outputs.packing, attention_mask, num_items_in_batch
            )
            loss = _cross_entropy(logits, labels, items)
        return loss, _unpacked(logits, outputs.packing)


# The logit of padding: exact in every dtype, and sums, smoothed losses and float16 stay finite.
_NO_ANSWER = -8192.0


class NeoBERTForQuestionAnswering(_TaskHeadModel):
    """Start and end of the answer: a linear layer with two outputs per token."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs,
    ) -> modeling_outputs.QuestionAnsweringModelOutput:
        """Inputs as in `NeoBERTModel`.

        Args:
            start_positions, end_positions: (B,) or (B, 1) token indices; those outside of the row,
                as in BERT, and at padding are ignored.
            num_items_in_batch: what the summed loss is divided by; by default the answers of this
                batch.
        Returns:
            start_logits, end_logits (B, L), -8,192 at padding: no answer is padding.
        """
        outputs = self.run_backbone(
            input_ids, attention_mask, position_ids, inputs_embeds, **kwargs
        )
        logits = self.qa_outputs(outputs.last_hidden_state)
        loss = None
        if outputs.packing is not None:
            logits = outputs.packing.unpack(logits, _NO_ANSWER)
        elif attention_mask is not None and attention_mask.dim() == 2:
            logits = logits.masked_fill(attention_mask[..., None] == 0, _NO_ANSWER)
        start_logits, end_logits = logits.unbind(dim=-1)
        if start_positions is not None and end_positions is not None:
            losses = []
            pairs = (
                ("start_positions", start_positions, start_logits),
                ("end_positions", end_positions, end_logits),
            )
            for name, positions, logits in pairs:
                positions = _check_labels(name, positions, logits.shape[:1]).long()
                outside = (positions < 0) | (positions >= logits.shape[1])
                chosen = logits.gather(1, positions.masked_fill(outside, 0)[:, None])[:, 0]
                outside |= chosen == _NO_ANSWER  # padding
                positions = positions.masked_fill(outside, -100)
                losses.append(_cross_entropy(logits, positions, num_items_in_batch))
            loss = sum(losses) / 2
        states = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return modeling_outputs.QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **states
        )


# -------------------------------------------------------------------------------- losses and labels


def _mean(total, count, num_items_in_batch):
    """total / num_items_in_batch if given (gradient accumulation), else total / count."""
    if num_items_in_batch is None:
        return total / count.clamp(min=1)
    if torch.is_tensor(num_items_in_batch):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def _cross_entropy(logits, labels, num_items_in_batch=None):
    """Mean over labels other than -100, in float32 at least; logits (..., C), labels (...)."""
    logits, labels = at_least_float32(logits.flatten(0, -2)), labels.flatten().long()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return _mean(total, (labels != -100).sum(), num_items_in_batch)


def _token_labels(labels, shape, classes, packing, attention_mask, num_items_in_batch):
    """Checked labels, -100 at padding, (B, L) or packed (1, T), and what their loss is divided by.

    Trainer's count includes labels on padding; it is scaled down by their share.
    """
    labels = _check_labels("labels", labels, shape, classes)
    if packing is not None:
        real = packing.pack(labels)
    elif attention_mask is not None and attention_mask.dim() == 2:
        real = labels.masked_fill(attention_mask == 0, -100)
    else:
        real = labels
    if num_items_in_batch is None or real is labels:
        return real, num_items_in_batch
    share = (real != -100).sum() / (labels != -100).sum().clamp(min=1)
    return real, num_items_in_batch * share


def _unpacked(logits, packing):
    return logits if packing is None else packing.unpack(logits)


# ------------------------------------------------------------------------------------------- checks


# What callers hand to every model: the library's own arguments, and those of attention functions.
_KNOWN_KWARGS = {
    *TransformersKwargs.__annotations__,
    "attention_instances",
    "use_cache",
    "cache_position",
    "return_loss",
    "seq_idx",
}


def _on_cpu_without_gradients(x):
    """True for plain CPU inference: no gradients, no tracing, no functorch."""
    plain = x.device.type == "cpu" and not torch.is_grad_enabled() and not is_tracing()
    return plain and torch._C._functorch.peek_interpreter_stack() is None


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks(module):
    """Hooks, patched forwards and compiled calls in a module, and hooks of all modules."""
    hooks = []
    for name in _HOOKS:
        hooks += getattr(nn.modules.module, f"_global{name}").values()
    for inner in module.modules():
        state = vars(inner)
        for name in _HOOKS:
            hooks += state[name].values()
        patches = (state.get(name) for name in ("forward", "_hf_hook", "_compiled_call_impl"))
        # accelerate puts the class's own forward back, as an attribute.
        hooks += [
            patch
            for patch in patches
            if patch is not None and getattr(patch, "__func__", None) is not type(inner).forward
        ]
    return hooks


# Where hooks of training and loading are from, which do not mind the layout of a batch.
_MACHINERY = ("torch.", "deepspeed.", "accelerate.", "transformers.integrations.tensor_parallel")


def _is_machinery(hook):
    while isinstance(hook, partial):
        hook = hook.func
    is_of_training = getattr(hook, "__name__", "") == "make_inputs_require_grads"
    return is_of_training or (getattr(hook, "__module__", None) or "").startswith(_MACHINERY)


def _check_tensors(**tensors):
    for name, value in tensors.items():
        if value is not None and not torch.is_tensor(value):
            raise ValueError(
                f"{name} must be a tensor, but a {type(value).__name__} was given; "
                "tokenizers give tensors with return_tensors='pt'."
            )


def _check_shape(name, value, shape):
    if value.shape != shape:
        raise ValueError(
            f"{name} must have shape {tuple(shape)}, but {tuple(value.shape)} was given."
        )


def _check_labels(name, labels, shape, classes=None):
    """Labels in this shape, also from a flat tensor or (B, 1): classes, or -100 (ignored)."""
    _check_tensors(**{name: labels})
    if labels.dim() != len(shape) and labels.numel() == shape.numel():
        labels = labels.view(shape)
    _check_shape(name, labels, shape)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers (int64), but {labels.dtype} was given.")
    if classes is not None and values_are_free(labels):
        wrong = (labels != -100) & ((labels < 0) | (labels >= classes))
        if wrong.any():
            raise ValueError(
                f"{name} must lie between 0 and {classes - 1}, or be -100 (ignored), "
                f"but {labels[wrong][0].item()} was given."
            )
    return labels


def _check_mask(attention_mask, shape):
    """(B, L) bool; or (B, 1 or H, L, L), bool or additive, also from (B, 1, 1, L); or None."""
    if attention_mask is None:
        return None
    mask, (batch, length) = attention_mask, shape
    if mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[2] in (1, length):
        if mask.shape[3] == length:
            mask = mask.expand(-1, -1, length, -1)
            return mask if mask.is_floating_point() else mask.to(torch.bool)
    if mask.shape == (1, length):
        mask = mask.expand(shape)
    if mask.shape != shape:
        raise ValueError(
            f"attention_mask must have shape ({batch}, {length}), ({batch}, 1, 1, {length}) or "
            f"({batch}, 1, {length}, {length}), but {tuple(mask.shape)} was given."
        )
    if values_are_free(mask) and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            "attention_mask must hold 1 for real tokens and 0 for padding, "
            "but other values were given."
        )
    return mask.to(torch.bool)


# --------------------------------------------------------------------------------- rotary positions


def rotary_embeddings(
    config: NeoBERTConfig,
    positions: torch.Tensor,
    longest: int | torch.Tensor,
    compiled: bool = False,
) -> tuple[torch.Tensor, ...] | None:
    """Rotary angles, position * theta^(-2i / K) for pair i (RoFormer, eq. 15).

    Worked out in float32 in every forward: a buffer would be cast by `.to(bfloat16)` and lost by
    transformers 5 loading.

    Args:
        positions: (B or 1, L).
        longest: tokens of the longest sequence, on which "dynamic" scaling depends.
        compiled: for compiled blocks, which take the real form.
    Returns:
        what `apply_rotary_pos_emb` takes; None with learned positions. Eager on CPU and CUDA one
        complex number a pair, (.., 1, 1, K / 2), a single pass over memory. Traced, compiled and
        elsewhere cosines and signed sines, (.., 1, 1, K) each, which compilers fuse.
    """
    if config.position_embedding_type != "rope":
        return None
    rope_type, device = config.rope_parameters["rope_type"], positions.device
    if rope_type == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        frequencies, attention_factor = config.rope_theta ** -(steps / config.head_dim), 1.0
    else:
        function, settings = ROPE_INIT_FUNCTIONS[rope_type], _RopeSettings(config)
        frequencies, attention_factor = function(settings, device, seq_len=longest)
    # An elementwise product: unlike a matrix product, autocast leaves it in float32.
    angles = (positions[..., None].float() * frequencies.float())[:, :, None, None]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    if compiled or is_tracing() or device.type not in ("cpu", "cuda", "meta"):
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return (torch.complex(cos, sin),)


def apply_rotary_pos_emb(
    x: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...], in_place: bool = False
) -> torch.Tensor:
    """Rotates the adjacent pairs (2i, 2i + 1) of the last axis, in float32.

    Args:
        x: (B, L, H, 2, K), queries and keys of every head, any strides.
        position_embeddings: from `rotary_embeddings`.
        in_place: write the result over `x`.
    Returns:
        Same shape and dtype as `x`.
    """
    if len(position_embeddings) == 2:
        cos, sin = position_embeddings
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return (at_least_float32(x) * cos + swapped * sin).type_as(x)
    (angles,) = position_embeddings
    if not in_place:
        pairs = torch.view_as_complex(at_least_float32(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)
    for rows, turns in zip(x.split(_CPU_ROWS, dim=1), angles.split(_CPU_ROWS, dim=1)):
        pairs = at_least_float32(rows).unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs).mul_(turns)
        if rows.dtype in LOW_PRECISION:  # else the pairs are a view of the rows
            rows.copy_(pairs.flatten(-2))
    return x


class _RopeSettings:
    """What `ROPE_INIT_FUNCTIONS` reads in transformers 4 and 5; compilers can trace it."""

    def __init__(self, config: NeoBERTConfig):
        self.hidden_size, self.head_dim = config.hidden_size, config.head_dim
        self.num_attention_heads = config.num_attention_heads
        self.max_position_embeddings = config.max_position_embeddings
        self.rope_theta = config.rope_theta
        self.rope_parameters = self.rope_scaling = dict(config.rope_parameters)
        self.partial_rotary_factor = 1.0

    def standardize_rope_params(self):
        pass


# ---------------------------------------------------------------------------------- published names


# Names of the published code, which old auto_maps and other tools use.
NeoBERT, NeoBERTLMHead = NeoBERTModel, NeoBERTForMaskedLM
__all__ = ["NeoBERT", "NeoBERTLMHead", "NeoBERTPreTrainedModel"]
__all__ += [name.partition(".")[2] for name in AUTO_MAP.values() if name.startswith("modeling_")]
