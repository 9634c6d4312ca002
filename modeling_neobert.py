"""NeoBERT (arXiv 2502.19587, section 3): pre-RMSNorm blocks with SwiGLU and RoPE, and its task heads.

Shape legend: B rows of a batch, L their padded length, T packed tokens, N packed sequences, D hidden size, H heads, K head_dim, V vocabulary,
C labels.

The file reads from the top: block, backbone, heads, losses; then what these call: checks, rotary embeddings, packing, attention. A batch is
dense, (B, L, D), or packed, (1, T, D), with the bounds of its sequences in a `Packing`: by the caller, or by `NeoBERTModel` where
`attention_mask` has padding. It is packed once and unpacked once; blocks do not know which it is.
"""

import inspect
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor
from transformers import modeling_outputs
from transformers.dynamic_module_utils import custom_object_save
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import TransformersKwargs, can_return_tuple, logging

from .configuration_neobert import AUTO_MAP, NeoBERTConfig


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

logger = logging.get_logger(__name__)

# Without gradients the CPU works in pieces that stay in its caches: chains of elementwise operations 128 tokens at a time, feed-forwards,
# whose inner states are the largest tensors of a forward, 1,024.
_CPU_ROWS, _CPU_TOKENS = 128, 1024


# ------------------------------------------------------------------------------------------------------------------- blocks


class NeoBERTRMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), in float32 inside; (..., D) -> (..., D)."""

    def forward(self, x):
        if not _on_cpu_without_gradients(x):
            return super().forward(x)
        output, weight = torch.empty_like(x, memory_format=torch.contiguous_format), _at_least_float32(self.weight)
        for rows, result in zip(x.flatten(0, -2).split(_CPU_ROWS), output.flatten(0, -2).split(_CPU_ROWS)):
            rows = _at_least_float32(rows)
            result.copy_((rows * (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt_()).mul_(weight))
        return output


class NeoBERTSwiGLU(nn.Module):
    """w3(silu(a) * b) with (a, b) the halves of w12(x) (Shazeer 2020); (B, L, D) -> (B, L, D)."""

    def __init__(self, config):
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.ffn_inner_size, bias=False)
        self.w3 = nn.Linear(config.ffn_inner_size, config.hidden_size, bias=False)

    def forward(self, x):
        if _on_cpu_without_gradients(x) and type(self.w12) is type(self.w3) is nn.Linear and not _hooks(self):
            pieces = [self.gated(rows, in_place=True) for rows in x.flatten(0, 1).split(_CPU_TOKENS)]
            return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view_as(x)
        return self.gated(x)

    def gated(self, x, in_place=False):
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate).mul_(value) if in_place else F.silu(gate) * value)


class NeoBERTBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + ffn(norm(x)).

    Attention functions receive this module: they read `is_causal`, `layer_idx` and `config`.
    """

    is_causal = False

    def __init__(self, config, layer_idx):
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

    def forward(self, hidden, position_embeddings, attention, output_attentions=False, **kwargs):
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
        # vLLM and others read this source: one name from ALL_ATTENTION_FUNCTIONS, called once, with `scaling=self.scaling`.
        attention_interface = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
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

    def project(self, hidden, position_embeddings):
        """Queries and keys, rotated, and values of the normed hidden states: (B, H, L, K) each."""
        # The rows of qkv.weight are interleaved per head: (H, 3, K).
        query_key, value = self.qkv(self.attention_norm(hidden)).unflatten(-1, (self.num_heads, 3, -1)).split((2, 1), dim=-2)
        if position_embeddings is not None:
            in_place = _on_cpu_without_gradients(hidden) and type(self.qkv) is nn.Linear and not _hooks(self.qkv)
            query_key = apply_rotary_pos_emb(query_key, position_embeddings, in_place)
        return (states.transpose(1, 2) for states in (*query_key.unbind(-2), value.squeeze(-2)))


def _norm(config):
    norm = NeoBERTRMSNorm if config.norm_type == "rms" else nn.LayerNorm
    return norm(config.hidden_size, eps=config.norm_eps)


def _feed_forward(config):
    if config.hidden_act == "swiglu":
        return NeoBERTSwiGLU(config)
    up, down = ((config.hidden_size, config.ffn_inner_size), (config.ffn_inner_size, config.hidden_size))
    return nn.Sequential(nn.Linear(*up, bias=False), nn.GELU(), nn.Linear(*down, bias=False))


# ----------------------------------------------------------------------------------------------------------------- backbone


class NeoBERTPreTrainedModel(PreTrainedModel):
    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NeoBERTBlock"]
    _supports_sdpa = _supports_flash_attn = _supports_flash_attn_2 = _supports_flash_attn_3 = _supports_flex_attn = True
    _supports_attention_backend = True
    # Classes without a decoder load masked-LM checkpoints.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\."]

    def _init_weights(self, module):
        """Paper, section 3: uniform. `torch.nn.init` functions only: transformers 5 skips those on weights already loaded."""
        if isinstance(module, nn.Linear):
            nn.init.uniform_(module.weight, -self.config.decoder_init_range, self.config.decoder_init_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -self.config.embedding_init_range, self.config.embedding_init_range)
        else:  # norms, and what a user's subclass holds
            super()._init_weights(module)

    def save_pretrained(self, save_directory, is_main_process=True, *args, **kwargs):
        """As in the library, with the code files that `auto_map` names."""
        if is_main_process and not Path(save_directory).is_file():
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            custom_object_save(NeoBERTPreTrainedModel, save_directory)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def get_input_embeddings(self):
        return getattr(self, self.base_model_prefix, self).encoder

    def set_input_embeddings(self, value):
        getattr(self, self.base_model_prefix, self).encoder = value

    def get_encoder(self, modality=None):
        """The blocks. (`model.encoder` is the token embedding, a published name.)"""
        return getattr(self, self.base_model_prefix, self).transformer_encoder

    def attention_backend(self):
        """One sentence: the kernel of packed batches on the model's device, in its dtype or that of autocast, and why no faster one runs."""
        implementation, device = self.config._attn_implementation, self.device
        if device.type == "meta":
            return "The weights are not on a device yet (or accelerate moves them there one by one), so no kernel can be named."
        dtype = _autocast_dtype(device, self.dtype)
        try:
            kernel, reason = attention_kernel(self.config, implementation, device, dtype, self.training)
        except ValueError as error:
            return str(error)
        words = KERNELS[kernel].format(implementation) + (f"; {reason}" if reason else "")
        off = "" if self.config.unpad_inputs else " Padded batches are not packed: unpad_inputs is off."
        return f"{implementation} on {device.type} in {str(dtype).removeprefix('torch.')}: {words}.{off}"

    def _is_observed(self):
        """Whether a hook, a patched forward or a replaced block sees tensors inside of the model. It then runs on dense batches."""
        if _is_tracing():
            return False
        blocks = getattr(getattr(self, self.base_model_prefix, self), "transformer_encoder", ())
        found = [hook for hook in _hooks(self) if hook is not self.__dict__.get("forward")]
        found += [type(block) for block in blocks if type(block) is not NeoBERTBlock]
        name = next((getattr(x, "__qualname__", type(x).__name__) for x in found if not _is_machinery(x)), None)
        if name is not None and self.config.unpad_inputs:
            logger.warning_once(
                f"Padded batches are not packed while {name} is a hook or a replacement inside of the model: it sees dense batches."
            )
        return name is not None


@dataclass
class NeoBERTModelOutput(modeling_outputs.BaseModelOutput):
    """`BaseModelOutput`, and for heads the `Packing` of a `last_hidden_state` that is still packed, (1, T, D)."""

    packing: "Packing | None" = None


class NeoBERTModel(NeoBERTPreTrainedModel):
    """The backbone: token ids to hidden states."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        if config.position_embedding_type == "learned":
            # Row 0 is padding; positions count from 1.
            self.positional_embedding = nn.Embedding(config.max_position_embeddings + 1, config.hidden_size, padding_idx=0)
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)
        self.transformer_encoder = nn.ModuleList(NeoBERTBlock(config, i) for i in range(config.num_hidden_layers))
        self.layer_norm = _norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def n_layers(self):
        """Number of blocks. Setting it drops those above: bert-score keeps the blocks up to the one that it reads."""
        return len(self.transformer_encoder)

    @n_layers.setter
    def n_layers(self, count):
        self.transformer_encoder = self.transformer_encoder[:count]
        self.config.num_hidden_layers = count

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None,
                output_attentions=None, output_hidden_states=None, unpad_inputs=None, keep_packed=False, **kwargs):  # fmt: skip
        """
        Args:
            input_ids: (B, L) token ids, or packed (1, T); or `inputs_embeds` (B, L, D) in their place.
            attention_mask: (B, L) of ones and zeros, int, bool or float; None if every token is real. Or (B, 1, L or 1, L), boolean (True
                where attention is allowed) or additive, which is handed on as it is: such a batch is not packed.
            token_type_ids: accepted for BERT's sake and ignored.
            position_ids: (L,), (1, L) or (B, L). By default the index in the row, or in the sequence when packed. A single row without
                attention_mask whose positions start again at 0 is a packed batch.
            output_attentions: also return (B, H, L, L) weights per block, computed by the eager function.
            output_hidden_states: also return the num_hidden_layers + 1 hidden states; the last one is normed.
            unpad_inputs: whether the model packs a padded batch. By default as `config.unpad_inputs` says, but not while a hook or a
                replacement inside of the model would see packed tensors, nor with hidden states that need gradients.
            keep_packed: return packed hidden states with their `Packing`, for heads.
            kwargs: handed to the attention function as they are. `cu_seq_lens_q`, `cu_seq_lens_k` ((N + 1,) int32) and `max_length_q`,
                `max_length_k` mark a packed (1, T) batch.
        Returns:
            `NeoBERTModelOutput` in the caller's shape. Where the model packed a padded batch, padding positions are zero.
        Raises:
            ValueError: inputs that do not fit together.
        """
        tokens = self._check_inputs(input_ids, inputs_embeds, attention_mask, position_ids, kwargs)
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        implementation = self.config._attn_implementation
        if output_attentions and implementation != "eager":
            logger.warning_once(f"output_attentions=True: {implementation} returns no weights, the eager function is used instead.")
            implementation = "eager"

        if unpad_inputs is None:
            # Hidden states are unpacked copies, off the graph.
            needs_states = output_hidden_states and torch.is_grad_enabled()
            observed = not keep_packed and self._is_observed()  # a head has looked itself
            unpad_inputs = self.config.unpad_inputs and not needs_states and not observed
        may_pack = unpad_inputs and not output_attentions
        packing, mask = self._read_layout(tokens, attention_mask, position_ids, implementation, may_pack, kwargs)
        longest = self._longest(tokens.shape[1], mask, packing)
        hidden, positions = self._embed(tokens, attention_mask, position_ids, packing)
        mask = mask if packing is None else None

        compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in self.transformer_encoder)
        position_embeddings = rotary_embeddings(self.config, positions, longest, compiled)
        attention = AttentionDispatch(self.config, implementation, hidden, mask, packing, self.training, output_attentions)
        kwargs = kwargs if packing is None else packing.kwargs(kwargs)
        hidden, states, weights = self._encode(hidden, position_embeddings, attention, output_hidden_states, output_attentions, **kwargs)
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
        """The tokens, (B, L) ids or (B, L, D) embeddings."""
        _check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids)
        unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN_KWARGS)
        if unknown and not _is_tracing():
            logger.warning_once(f"NeoBERT has no use for {', '.join(unknown)}: the attention function gets it as it is. Is the name right?")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"Give either input_ids or inputs_embeds; {'neither was' if input_ids is None else 'both were'} given.")
        tokens, width = (inputs_embeds, self.config.hidden_size) if input_ids is None else (input_ids, None)
        given = f"but {tuple(tokens.shape)} of {tokens.dtype} was given"
        if width is None and (tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32)):
            raise ValueError(f"input_ids must be a (batch, length) tensor of int64 or int32, {given}.")
        if width is not None and (tokens.dim() != 3 or tokens.shape[-1] != width or not tokens.is_floating_point()):
            raise ValueError(f"inputs_embeds must be a floating-point tensor of shape (batch, length, {width}), {given}.")
        if not _is_tracing() and 0 in tokens.shape[:2]:
            raise ValueError(f"A batch must hold at least one text of one token, but {tuple(tokens.shape[:2])} was given.")
        if width is None and _values_are_free(tokens):
            weight = getattr(self.encoder, "weight", None)  # a user's own module may have none
            if torch.is_tensor(weight):
                _check_range("input_ids", tokens, weight.shape[0], "; is it this model's tokenizer?")
        return tokens

    def _read_layout(self, tokens, attention_mask, position_ids, implementation, may_pack, kwargs):
        """Where the real tokens are: the `Packing` (of the caller, or to be made by the model) or None, and the mask."""
        shape = tokens.shape[:2]
        packing = Packing.of_caller(shape, attention_mask, position_ids, kwargs)
        mask = _check_mask(attention_mask, shape) if packing is None else None
        if mask is not None and mask.dim() == 2 and not _is_tracing() and _has_values(mask):
            lengths = mask.sum(dim=-1).tolist()  # the only wait for a GPU
            dtype = getattr(getattr(self.encoder, "weight", None), "dtype", None) or self.dtype
            kernel, _ = attention_kernel(self.config, implementation, tokens.device, dtype, self.training)
            mask = None if sum(lengths) == mask.numel() else mask
            if mask is not None and any(lengths) and may_pack and kernel in _PACKS:
                packing = Packing.of_mask(mask, lengths)
        return packing, mask

    def _embed(self, tokens, attention_mask, position_ids, packing):
        """Embeddings and positions: (B, L, D) and (1 or B, L), or (1, T, D) and (1, T) of a packed batch.

        Positions count from 0, or for learned ones (ablation M0) from 1 over real tokens with 0 at padding.
        """
        shape, learned = tokens.shape[:2], self.config.position_embedding_type == "learned"
        positions = _check_positions(position_ids, shape)
        if positions is None and packing is not None and packing.index is None:
            positions = packing.position_ids(shape[1])
        if positions is not None:
            if learned and _values_are_free(positions):
                _check_range("Learned position_ids", positions, self.config.max_position_embeddings)
            positions = positions + learned
        elif learned:
            real = torch.ones(shape, dtype=torch.bool, device=tokens.device)
            if attention_mask is not None and attention_mask.dim() == 2:
                real = attention_mask != 0
            elif not tokens.is_floating_point() and self.config.pad_token_id is not None:
                real = tokens != self.config.pad_token_id
            positions = real.cumsum(dim=-1) * real
        else:
            positions = torch.arange(shape[1], device=tokens.device)[None]
        if packing is not None:
            tokens, positions = packing.pack(tokens), packing.pack(positions.expand(shape))
        hidden = tokens if tokens.is_floating_point() else self.encoder(tokens)
        return self.embedding_dropout(hidden + self.positional_embedding(positions) if learned else hidden), positions

    def _longest(self, length, mask, packing):
        """Tokens of the longest sequence, on which "dynamic" RoPE depends; the first one past the trained length gives a warning."""
        limit, dynamic = self.config.context_length, self.config.rope_parameters["rope_type"] == "dynamic"
        longest = length if packing is None else packing.max_length
        if _is_tracing() and dynamic and packing is not None:
            return packing.cu_seq_lens.diff().max()
        if packing is None and mask is not None and mask.dim() == 2 and (dynamic or (not _is_tracing() and longest > limit)):
            longest = mask.sum(dim=-1).max()
        if _is_tracing() or (torch.is_tensor(longest) and not _has_values(longest)):
            return longest
        longest = int(longest)
        if longest > limit and self.config.position_embedding_type == "learned":
            raise ValueError(f"A text of {longest} tokens was given, but learned positions reach {limit}; truncate the texts.")
        if longest > limit:
            logger.warning_once(
                f"A text of {longest} tokens is longer than the {limit} of max_position_embeddings and RoPE scaling: expect worse results; "
                "rope_scaling={'rope_type': 'yarn', 'factor': ...} extends the context."
            )
        return longest

    def _encode(self, hidden, position_embeddings, attention, output_hidden_states, output_attentions, **kwargs):
        """Blocks and last norm: hidden states, and the lists of what every block saw and of its attention weights, where asked for."""
        states, weights = [], []
        for block in self.transformer_encoder:
            states += [hidden] * output_hidden_states
            hidden = block(hidden, position_embeddings, attention, output_attentions, **kwargs)
            if output_attentions:
                hidden, block_weights = hidden
                weights.append(block_weights)
        hidden = self.layer_norm(hidden)
        return hidden, states + [hidden] * output_hidden_states, weights


# -------------------------------------------------------------------------------------------------------------------- heads


class _HeadModel(NeoBERTPreTrainedModel):
    """A backbone with a head, whose `predict` works on packed hidden states and puts back its logits."""

    output_class = None

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None, labels=None,
                num_items_in_batch=None, **kwargs):  # fmt: skip
        """Inputs as in `NeoBERTModel`; the class says what its labels and logits are.

        Args:
            num_items_in_batch: what the summed loss is divided by; by default the labelled items of this batch.
        Returns:
            loss (None without labels), logits, and hidden_states and attentions where asked for.
        """
        outputs = self.run_backbone(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        shape = (inputs_embeds if input_ids is None else input_ids).shape[:2]
        loss, logits = self.predict(outputs, shape, attention_mask, labels, num_items_in_batch)
        return self.output_class(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def run_backbone(self, input_ids, attention_mask, position_ids, inputs_embeds, **kwargs):
        """`NeoBERTModelOutput` with the `Packing` of a packed batch."""
        if kwargs.get("unpad_inputs") is None and self._is_observed():
            kwargs["unpad_inputs"] = False  # the model packs nothing; what the caller packed stays packed
        return self.model(input_ids, attention_mask, None, position_ids, inputs_embeds, return_dict=True, keep_packed=True, **kwargs)


class NeoBERTForMaskedLM(_HeadModel):
    """Backbone and decoder: a bias and, unlike BERT, no transform and (as published) no tied weight.

    labels: (B, L) or (B * L,) token ids; -100 and labels at padding are ignored. logits: (B, L, V), zero at padding where the model packed; with
    `config.sparse_prediction` and labels (labelled tokens, V), in the order of the rows.
    """

    output_class = modeling_outputs.MaskedLMOutput
    _keys_to_ignore_on_load_unexpected = None
    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self):
        return self.decoder

    def set_output_embeddings(self, new_embeddings):
        self.decoder = new_embeddings

    def predict(self, outputs, shape, attention_mask, labels, num_items_in_batch):
        hidden, packing = outputs.last_hidden_state, outputs.packing
        if labels is None:
            return None, _unpacked(self.decoder(hidden), packing)
        labels, items = _token_labels(labels, shape, self.config.vocab_size, packing, attention_mask, num_items_in_batch)
        if not self.config.sparse_prediction or _is_tracing():
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
    """dropout(pooled) -> dense -> tanh -> dropout -> classifier, as in the authors' sequence classifier."""

    def __init__(self, config, outputs):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, outputs)

    def _init_weights(self, module):
        """`dense` is the same draw in every process: PEFT saves the classifier with an adapter and takes the rest from the base model."""
        super()._init_weights(module)
        if module is getattr(self, "dense", None):
            _draw_alike(module.weight, self.config.classifier_init_range)

    def classify(self, outputs, attention_mask):
        """Logits of the backbone's output, (B, outputs), or (N, outputs) of a batch that the caller packed."""
        pooled = self.pool(outputs.last_hidden_state, outputs.packing, attention_mask)
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))

    def pool(self, hidden, packing=None, attention_mask=None):
        """One vector a sequence, of its first real token or the mean over its real tokens (`classifier_pooling`); zeros if it has none.

        Args:
            hidden: (B, L, D) with its `attention_mask`, or packed (1, T, D) with its `packing`.
        Returns:
            (B, D), or (N, D) for a batch that the caller packed.
        """
        mean = self.config.classifier_pooling == "mean"
        if packing is not None:
            packing = packing.counted()
            lengths = packing.cu_seq_lens.diff()[:, None]
            if mean:
                sequences = packing.sequence_ids(hidden.shape[1])
                # In float32, here and below: a sum in bfloat16 stops growing after a few hundred tokens, one in float16 ends at 65,504.
                sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device).index_add(0, sequences, hidden[0].float())
                return packing.to_rows((sums / lengths.clamp(min=1)).to(hidden.dtype))
            firsts = packing.cu_seq_lens[:-1].long().clamp(max=hidden.shape[1] - 1)
            return packing.to_rows(hidden[0, firsts].masked_fill(lengths == 0, 0.0))
        if attention_mask is None or attention_mask.dim() != 2:
            return hidden.mean(dim=1) if mean else hidden[:, 0]
        mask = attention_mask.to(torch.bool)
        if mean:
            sums = (hidden * mask[..., None]).sum(dim=1, dtype=torch.float32)
            return (sums / mask.sum(dim=-1, keepdim=True).clamp(min=1)).to(hidden.dtype)
        firsts = mask.to(torch.int32).argmax(dim=-1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return hidden[rows, firsts].masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)


@torch.no_grad()
def _draw_alike(weight, std):
    """normal(0, std), the same numbers on every device and in every process; like `torch.nn.init`, not over a weight that was loaded."""
    if weight.device.type != "meta" and not getattr(weight, "_is_hf_initialized", False):
        weight.copy_(std * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), device="cpu"))


class NeoBERTForSequenceClassification(_PooledHeadModel):
    """Regression, single-label and multi-label classification of texts, chosen by `config.problem_type` as in BERT.

    labels: (B,) or (B, 1) classes; (B,) or (B, C) numbers for regression; (B, C) zeros and ones for multi-label. A `problem_type` of None is
    set to what the labels' shape and dtype say. logits: (B, C), or (N, C) for a batch that the caller packed.
    """

    output_class = modeling_outputs.SequenceClassifierOutput

    def __init__(self, config):
        super().__init__(config, config.num_labels)
        self.num_labels = config.num_labels
        self.post_init()

    def predict(self, outputs, shape, attention_mask, labels, num_items_in_batch):
        logits = self.classify(outputs, attention_mask)
        return None if labels is None else self.loss(logits, labels, num_items_in_batch), logits

    def loss(self, logits, labels, num_items_in_batch=None):
        """Loss of (B, C) logits by `config.problem_type`."""
        _check_tensors(labels=labels)
        if self.config.problem_type is None:
            classes = not labels.is_floating_point() and (labels.dim() == 1 or labels.shape[1:] == (1,))
            several = "single_label_classification" if classes else "multi_label_classification"
            self.config.problem_type = "regression" if self.num_labels == 1 else several
        problem = self.config.problem_type
        if problem == "single_label_classification":
            labels = _check_labels("labels", labels, logits.shape[:1], self.num_labels)
            return _cross_entropy(logits, labels, num_items_in_batch)
        _check_shape("labels", labels, logits.shape[:1] if self.num_labels == 1 and labels.dim() == 1 else logits.shape)
        multi_label = problem == "multi_label_classification"
        if multi_label and _values_are_free(labels) and ((labels < 0) | (labels > 1)).any():
            given = labels.max().item() if labels.max() > 1 else labels.min().item()
            raise ValueError(f"Multi-label labels must lie between 0 and 1, but {given} was given.")
        function = F.binary_cross_entropy_with_logits if multi_label else F.mse_loss
        logits = _at_least_float32(logits).view_as(labels)
        total = function(logits, labels.to(logits.dtype), reduction="sum")
        return _mean(total, torch.tensor(labels.numel(), device=total.device), num_items_in_batch)


class NeoBERTForMultipleChoice(_PooledHeadModel):
    """Scores C candidate texts of a question.

    input_ids, attention_mask, position_ids: (B, C, L); inputs_embeds: (B, C, L, D). labels: (B,) index of the right candidate. logits: (B, C).
    """

    output_class = modeling_outputs.MultipleChoiceModelOutput

    def __init__(self, config):
        super().__init__(config, 1)
        self.post_init()

    def run_backbone(self, input_ids, attention_mask, position_ids, inputs_embeds, **kwargs):
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        _check_tensors(**given)
        for name, value in given.items():
            if value is not None and value.dim() != (4 if name == "inputs_embeds" else 3):
                raise ValueError(f"Multiple choice takes {name} of (batch, choices, length), but {tuple(value.shape)} was given.")
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("Multiple choice takes no packed batch, but cu_seq_lens_q was given; give (batch, choices, length).")
        if position_ids is not None and attention_mask is None:
            # So that the positions of a single candidate are not read as a packed batch.
            attention_mask = torch.ones_like(position_ids)
        given["attention_mask"] = attention_mask
        return super().run_backbone(**{name: x if x is None else x.flatten(0, 1) for name, x in given.items()}, **kwargs)

    def predict(self, outputs, shape, attention_mask, labels, num_items_in_batch):
        logits = self.classify(outputs, None if attention_mask is None else attention_mask.flatten(0, 1)).view(shape)
        if labels is None:
            return None, logits
        return _cross_entropy(logits, _check_labels("labels", labels, shape[:1], shape[1]), num_items_in_batch), logits


class NeoBERTForTokenClassification(_TaskHeadModel):
    """A label for every token: dropout -> classifier.

    labels: (B, L) or (B * L,) classes; -100 and labels at padding are ignored. logits: (B, L, C), zero at padding where the model packed.
    """

    output_class = modeling_outputs.TokenClassifierOutput

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def predict(self, outputs, shape, attention_mask, labels, num_items_in_batch):
        logits, loss = self.classifier(self.dropout(outputs.last_hidden_state)), None
        if labels is not None:
            labels, items = _token_labels(labels, shape, self.num_labels, outputs.packing, attention_mask, num_items_in_batch)
            loss = _cross_entropy(logits, labels, items)
        return loss, _unpacked(logits, outputs.packing)


# The logit of padding: exact in every dtype, and sums, smoothed losses and float16 stay finite.
_NO_ANSWER = -8192.0


class NeoBERTForQuestionAnswering(_TaskHeadModel):
    """Start and end of the answer: a linear layer with two outputs per token."""

    def __init__(self, config):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None, start_positions=None,
                end_positions=None, num_items_in_batch=None, **kwargs):  # fmt: skip
        """Inputs as in `NeoBERTModel`.

        Args:
            start_positions, end_positions: (B,) or (B, 1) token indices; those outside of the row, as in BERT, and at padding are ignored.
            num_items_in_batch: what the summed loss is divided by; by default the answers of this batch.
        Returns:
            start_logits, end_logits (B, L), -8,192 at padding: no answer is padding.
        """
        outputs = self.run_backbone(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        loss = None
        if outputs.packing is not None:
            logits = outputs.packing.unpack(logits, _NO_ANSWER)
        elif attention_mask is not None and attention_mask.dim() == 2:
            logits = logits.masked_fill(attention_mask[..., None] == 0, _NO_ANSWER)
        start_logits, end_logits = logits.unbind(dim=-1)
        if (start_positions is None) != (end_positions is None):
            raise ValueError("A loss needs both start_positions and end_positions, but one of them is missing.")
        if start_positions is not None:
            losses = []
            pairs = (("start_positions", start_positions, start_logits), ("end_positions", end_positions, end_logits))
            for name, positions, logits in pairs:
                positions = _check_labels(name, positions, logits.shape[:1]).long()
                outside = (positions < 0) | (positions >= logits.shape[1])
                outside |= logits.gather(1, positions.masked_fill(outside, 0)[:, None])[:, 0] == _NO_ANSWER  # padding
                losses.append(_cross_entropy(logits, positions.masked_fill(outside, -100), num_items_in_batch))
            loss = sum(losses) / 2
        states = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return modeling_outputs.QuestionAnsweringModelOutput(loss=loss, start_logits=start_logits, end_logits=end_logits, **states)


# ------------------------------------------------------------------------------------------------------- losses and labels


def _mean(total, count, num_items_in_batch):
    """`total` over the items of the complete (accumulated) batch if they are given, else over this one's."""
    if num_items_in_batch is None:
        return total / count.clamp(min=1)
    if torch.is_tensor(num_items_in_batch):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def _cross_entropy(logits, labels, num_items_in_batch=None):
    """Mean cross-entropy, in float32 at least, over labels other than -100; logits (..., C), labels (...)."""
    labels = labels.flatten().long()
    total = F.cross_entropy(_at_least_float32(logits.flatten(0, -2)), labels, ignore_index=-100, reduction="sum")
    return _mean(total, (labels != -100).sum(), num_items_in_batch)


def _token_labels(labels, shape, classes, packing, attention_mask, num_items_in_batch):
    """Checked labels of tokens, -100 at padding: (B, L), or (1, T) where the hidden states are packed; and what their loss is divided by.

    Trainer counts labels at padding into `num_items_in_batch`: their share of this batch is taken off.
    """
    given = _check_labels("labels", labels, shape, classes)
    if packing is not None:
        labels = packing.pack(given)
    else:
        dense = attention_mask is None or attention_mask.dim() != 2
        labels = given if dense else given.masked_fill(attention_mask == 0, -100)
    if num_items_in_batch is None or labels is given:
        return labels, num_items_in_batch
    return labels, num_items_in_batch * ((labels != -100).sum() / (given != -100).sum().clamp(min=1))


def _unpacked(logits, packing):
    return logits if packing is None else packing.unpack(logits)


# ------------------------------------------------------------------------------------------------------------------- checks


# What callers hand to every model: the library's own arguments, and those of attention functions.
_KNOWN_KWARGS = {*TransformersKwargs.__annotations__, "attention_instances", "use_cache", "cache_position", "return_loss", "seq_idx"}


def _is_tracing():
    """True under torch.compile, torch.export and torch.jit.trace, where shapes must not depend on values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _has_values(x):
    """Whether a tensor has values: none on the meta device, in FakeTensorMode and under torch.func. Tracing is not asked for the last two."""
    wrapped = not _is_tracing() and (isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x))
    return x.device.type != "meta" and not wrapped


def _values_are_free(x):
    """Whether the values of a tensor can be looked at without waiting for a device."""
    return not _is_tracing() and x.device.type == "cpu" and x.numel() > 0 and _has_values(x)


def _at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _on_cpu_without_gradients(x):
    """True where what is best for the CPU's caches and memory is in nobody's way."""
    plain = x.device.type == "cpu" and not torch.is_grad_enabled() and not _is_tracing()
    return plain and torch._C._functorch.peek_interpreter_stack() is None


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks(*modules):
    """What sees or changes the tensors inside of modules: hooks of all modules, their own, accelerate's, and patched or compiled forwards."""
    found = [hook for name in _HOOKS for hook in getattr(nn.modules.module, f"_global{name}").values()]
    for module in modules:
        for inner in module.modules():
            state = inner.__dict__
            for name in _HOOKS:
                if state[name]:
                    found.extend(state[name].values())
            for name in ("forward", "_hf_hook", "_compiled_call_impl"):
                hook = state.get(name)
                if hook is not None and getattr(hook, "__func__", None) is not type(inner).forward:  # accelerate puts the original back
                    found.append(hook)
    return found


def _is_machinery(hook):
    """Whether a hook, or the class of a block, belongs to the machinery of training and loading, which does not mind the layout of a batch."""
    while isinstance(hook, partial):
        hook = hook.func
    home = ("torch.", "deepspeed.", "accelerate.", "transformers.integrations.tensor_parallel")
    return (getattr(hook, "__module__", None) or "").startswith(home) or getattr(hook, "__name__", "") == "make_inputs_require_grads"


def _check_tensors(**given):
    for name, value in given.items():
        if value is not None and not torch.is_tensor(value):
            given = type(value).__name__
            raise ValueError(f"{name} must be a tensor, but a {given} was given; tokenizers give tensors with return_tensors='pt'.")


def _check_shape(name, value, shape):
    if value.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, but {tuple(value.shape)} was given.")


def _check_range(name, values, count, hint="."):
    lowest, highest = values.min().item(), values.max().item()
    if lowest < 0 or highest >= count:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{name} must lie between 0 and {count - 1}, but {wrong} was given{hint}")


def _check_labels(name, labels, shape, classes=None):
    """`labels` in this shape (a flat tensor or one of an axis more has the same items): whole numbers, each a class or -100 (ignored)."""
    _check_tensors(**{name: labels})
    if labels.dim() != len(shape) and labels.numel() == shape.numel():
        labels = labels.view(shape)
    _check_shape(name, labels, shape)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers (int64), but {labels.dtype} was given.")
    if classes is not None and _values_are_free(labels):
        wrong = (labels != -100) & ((labels < 0) | (labels >= classes))
        if wrong.any():
            raise ValueError(f"{name} must lie between 0 and {classes - 1}, or be -100 (ignored), but {labels[wrong][0].item()} was given.")
    return labels


def _check_positions(position_ids, shape):
    """(1 or B, L) or None."""
    if position_ids is None:
        return None
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    if position_ids.dim() != 2 or position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
        raise ValueError(f"position_ids must have shape {tuple(shape)} or (1, {shape[1]}), but {tuple(position_ids.shape)} was given.")
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise ValueError(f"position_ids must be whole numbers (int64), but {position_ids.dtype} was given.")
    return position_ids


def _check_mask(attention_mask, shape):
    """(B, L) bool; or (B, 1 or H, L, L), bool or additive, also from (B, 1, 1, L); or None."""
    if attention_mask is None:
        return None
    if (
        attention_mask.dim() == 4
        and attention_mask.shape[0] in (1, shape[0])
        and attention_mask.shape[2:] in ((1, shape[1]), (shape[1],) * 2)
    ):
        attention_mask = attention_mask.expand(-1, -1, shape[1], -1)
        return attention_mask if attention_mask.is_floating_point() else attention_mask.to(torch.bool)
    if attention_mask.shape == (1, shape[1]):
        attention_mask = attention_mask.expand(shape)
    if attention_mask.shape != shape:
        batch, length = shape
        wanted = f"({batch}, {length}), ({batch}, 1, 1, {length}) or ({batch}, 1, {length}, {length})"
        raise ValueError(f"attention_mask must have shape {wanted}, but {tuple(attention_mask.shape)} was given.")
    if _values_are_free(attention_mask) and not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError("attention_mask must hold 1 for real tokens and 0 for padding, but other values were given.")
    return attention_mask.to(torch.bool)


# ----------------------------------------------------------------------------------------------------------- rotary positions


def rotary_embeddings(config, positions, longest, compiled=False):
    """Rotary angles, position * theta^(-2i / K) for pair i (RoFormer, eq. 15), for `apply_rotary_pos_emb`; None with learned positions.

    Worked out in float32 in every forward: a buffer would be cast by `.to(bfloat16)` and lost by transformers 5 loading.

    Args:
        positions: (B or 1, L).
        longest: tokens of the longest sequence, on which "dynamic" scaling depends.
        compiled: for compiled blocks, which take the real form.
    Returns:
        Eager on CPU and CUDA one complex number a pair, (.., 1, 1, K / 2), a single pass over memory. Traced, compiled and elsewhere cosines
        and signed sines, (.., 1, 1, K) each, which compilers fuse.
    """
    if config.position_embedding_type != "rope":
        return None
    rope_type, device = config.rope_parameters["rope_type"], positions.device
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        frequencies, attention_factor = config.rope_theta**-exponents, 1.0
    else:
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](_RopeSettings(config), device, seq_len=longest)
    # An elementwise product: unlike a matrix product, autocast leaves it in float32.
    angles = (positions[..., None].float() * frequencies.float())[:, :, None, None]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    if compiled or _is_tracing() or device.type not in ("cpu", "cuda", "meta"):
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return (torch.complex(cos, sin),)


def apply_rotary_pos_emb(x, position_embeddings, in_place=False):
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
        return (_at_least_float32(x) * cos + swapped * sin).type_as(x)
    (angles,) = position_embeddings
    if not in_place:
        pairs = torch.view_as_complex(_at_least_float32(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)
    for rows, turns in zip(x.split(_CPU_ROWS, dim=1), angles.split(_CPU_ROWS, dim=1)):
        pairs = _at_least_float32(rows).unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs).mul_(turns)
        if rows.dtype in _LOW_PRECISION:  # else the pairs are a view of the rows
            rows.copy_(pairs.flatten(-2))
    return x


class _RopeSettings:
    """The fields that `ROPE_INIT_FUNCTIONS` reads, under the names of both transformers 4 and 5; a class that torch.compile can trace."""

    def __init__(self, config):
        for name in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta"):
            setattr(self, name, getattr(config, name))
        self.rope_parameters = self.rope_scaling = dict(config.rope_parameters)
        self.partial_rotary_factor = 1.0

    def standardize_rope_params(self):
        pass


# ------------------------------------------------------------------------------------------------------------------ packing


_PACKING_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Packing:
    """Where the sequences of a packed batch (1, T, ...) are, and where its tokens came from.

    Attributes:
        cu_seq_lens: (N + 1,) int32, first token of each sequence, then T.
        max_length: tokens of the longest sequence; while tracing T where it is not known.
        lengths: the N lengths as numbers.
        shape: (B, L) of the padded batch that the model packed; None, like index and rows, if the caller packed.
        index: (T,) of each packed token in the flattened (B * L) batch.
        rows: (N,) of each sequence in the batch.
        traced: made while tracing from positions; sequences at the end are empty.
    """

    def __init__(self, cu_seq_lens, max_length, lengths=None, shape=None, index=None, rows=None, traced=False):
        self.cu_seq_lens, self.max_length, self._lengths = cu_seq_lens, max_length, lengths
        self.shape, self.index, self.rows, self.traced = shape, index, rows, traced

    @property
    def lengths(self):
        """On a GPU this waits for the device, the first time."""
        if self._lengths is None:
            self._lengths = self.cu_seq_lens.diff().tolist()
        return self._lengths

    @classmethod
    def of_mask(cls, mask, lengths):
        """Packing of a padded batch, shortest row first, so that rows of one length are neighbours; empty rows are left out.

        Args:
            mask: (B, L) bool.
            lengths: real tokens of each row, as numbers: all that the host must know of a batch on a GPU.
        """
        order = torch.tensor(sorted(range(len(lengths)), key=lengths.__getitem__)).to(mask.device, non_blocking=True)
        lengths = sorted(length for length in lengths if length)
        # A stable sort puts the real tokens first, in their order; unlike nonzero, it need not tell the host how many there are.
        real = (~mask[order]).flatten().to(torch.uint8).argsort(stable=True)[: sum(lengths)]
        index = order[real // mask.shape[1]] * mask.shape[1] + real % mask.shape[1]
        cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0).to(mask.device, torch.int32, non_blocking=True)
        return cls(cu_seq_lens, lengths[-1], lengths, mask.shape, index, order[-len(lengths) :])

    @classmethod
    def of_caller(cls, shape, attention_mask, position_ids, kwargs):
        """Packing of a batch that the caller packed, by `cu_seq_lens_q` or by positions that start again at 0; None for any other batch."""
        bounds, other, longest = (kwargs.get(name) for name in _PACKING_KWARGS[:3])
        if bounds is None and other is not None:
            raise ValueError("cu_seq_lens_k was given without cu_seq_lens_q; a packed batch has both, or cu_seq_lens_q alone.")
        if bounds is None:
            if shape[0] != 1 or attention_mask is not None or position_ids is None or not _has_values(position_ids):
                return None
            return cls._of_positions(_check_positions(position_ids, shape)[0])
        if not torch.is_tensor(bounds) or bounds.dim() != 1 or bounds.dtype not in (torch.int32, torch.int64):
            given = f"{tuple(bounds.shape)} of {bounds.dtype}" if torch.is_tensor(bounds) else f"a {type(bounds).__name__}"
            raise ValueError(f"cu_seq_lens_q must be an int32 tensor of shape (texts + 1,), but {given} was given.")
        if shape[0] != 1:
            raise ValueError(f"cu_seq_lens_q marks a packed batch of shape (1, tokens), but a batch of {tuple(shape)} was given.")
        packing = cls(bounds, longest)
        if _values_are_free(bounds):
            packing._check(shape[1], other, attention_mask, kwargs)
        if _is_tracing():
            packing.max_length = shape[1] if longest is None else longest
        elif longest is None or _values_are_free(bounds):
            packing.max_length = max(packing.lengths, default=0)
        else:
            packing.max_length = int(longest)
        return packing

    def _check(self, total, other, attention_mask, kwargs):
        """Each of these would let a sequence see another, or hide a part of it."""
        bounds, longest = self.cu_seq_lens, max(self.lengths, default=0)
        if min(self.lengths, default=0) < 0 or sum(self.lengths) != total or bounds[0] != 0:
            raise ValueError(f"cu_seq_lens_q must rise from 0 to the number of tokens, {total}, but {bounds.tolist()} was given.")
        if other is not None and other is not bounds and not torch.equal(other.to(bounds), bounds):
            raise ValueError("cu_seq_lens_k must equal cu_seq_lens_q: the tokens of a text see that text, but other bounds were given.")
        for name in _PACKING_KWARGS[2:]:
            if kwargs.get(name) is not None and kwargs[name] < longest:
                raise ValueError(f"{name} must be at least the longest text, {longest} tokens, but {int(kwargs[name])} was given.")
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("A packed batch has no padding, but attention_mask has zeros beside cu_seq_lens_q; leave attention_mask out.")

    @classmethod
    def _of_positions(cls, positions):
        """From positions (T,); None if they are not those of several sequences, one after another.

        While tracing in shapes that do not depend on values: T sequences, those at the end empty; one if the positions are not packed.
        """
        total, tokens = positions.shape[0], torch.arange(positions.shape[0] + 1, device=positions.device)
        starts = (positions == 0) | (tokens[:-1] == 0)
        firsts = torch.where(starts, tokens[:-1], 0).cummax(0).values
        packed = (positions == tokens[:-1] - firsts).all() & positions.any()  # all zeros: a baseline, not texts of one token
        starts = torch.where(packed, starts, tokens[:-1] == 0)
        # Not a fill with T, which would make a symbolic length a constant.
        bounds = torch.where(F.pad(starts, (0, 1), value=True), tokens, tokens[-1]).sort().values
        packing = cls(bounds.to(torch.int32), total, traced=True)
        if _is_tracing():
            return packing
        packing = packing.counted()
        packing.max_length = max(packing.lengths)
        return packing if len(packing.lengths) > 1 else None

    def counted(self):
        """The same without the empty sequences that tracing puts at the end."""
        if not self.traced:
            return self
        filled = self.cu_seq_lens.diff().nonzero().squeeze(-1)
        return Packing(torch.cat((self.cu_seq_lens[filled], self.cu_seq_lens[-1:])), self.max_length)

    def sequence_ids(self, total):
        """(T,) sequence of each packed token."""
        tokens = torch.arange(total, device=self.cu_seq_lens.device, dtype=self.cu_seq_lens.dtype)
        return torch.searchsorted(self.cu_seq_lens[1:].contiguous(), tokens, right=True)

    def position_ids(self, total):
        """(1, T) positions within each sequence."""
        tokens = torch.arange(total, device=self.cu_seq_lens.device)
        return (tokens - self.cu_seq_lens[:-1].long()[self.sequence_ids(total)])[None]

    def pack(self, x):
        """(B, L, ...) -> (1, T, ...); what the caller packed stays as it is."""
        return x if self.index is None else x.flatten(0, 1)[self.index][None]

    def unpack(self, x, fill=0.0):
        """(1, T, ...) -> (B, L, ...) with `fill` at padding; what the caller packed stays as it is."""
        if self.index is None:
            return x
        output = x.new_full((self.shape.numel(), *x.shape[2:]), fill)
        return output.index_copy(0, self.index, x[0]).unflatten(0, self.shape)

    def to_rows(self, x):
        """(N, ...) -> (B, ...), zero for rows without a token; (N, ...) of what the caller packed stays as it is."""
        return x if self.rows is None else x.new_zeros(self.shape[0], *x.shape[1:]).index_copy(0, self.rows, x)

    def kwargs(self, given):
        """`given`, and the keyword arguments of variable-length attention functions; bounds are int32, as kernels ask for."""
        bounds = self.cu_seq_lens.to(torch.int32)
        return {**given, **dict(zip(_PACKING_KWARGS, (bounds, bounds, self.max_length, self.max_length)))}

    def padding(self, total):
        """The batch in which every sequence has a row: index and mask, (N, longest), and where each packed token is in it, (T,)."""
        bounds = self.cu_seq_lens.long()
        steps = torch.arange(self.max_length, device=bounds.device)
        index = (bounds[:-1, None] + steps).clamp(max=total - 1)
        places = self.position_ids(total)[0] + self.sequence_ids(total) * self.max_length
        return index, steps < bounds.diff()[:, None], places


# ---------------------------------------------------------------------------------------------------------------- attention


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
_PACKS = tuple(KERNELS)[:5]
# Serving engines whose functions take (1, T) tokens and know from elsewhere where sequences end.
_ENGINES = ("vllm", "sglang")
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def attention_kernel(config, implementation, device, dtype, training):
    """Which kernel packed batches run through. The only place that decides by the name of an implementation.

    Returns:
        a key of `KERNELS`, and what keeps a faster one away, or None.
    Raises:
        ValueError: there is no such implementation.
    """
    if implementation == "eager":
        return "sequences", "attn_implementation='sdpa' is faster"
    if implementation not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"There is no attention implementation {implementation!r}; set one with model.set_attn_implementation, such as 'sdpa', "
            "or register it with transformers.AttentionInterface.register."
        )
    if implementation == "sdpa" and device.type != "cuda":
        return "sequences", "variable-length flash kernels need a CUDA device"
    if implementation == "sdpa":
        obstacle = _varlen_obstacle(config, device, dtype, training)
        return ("varlen", None) if obstacle is None else ("repadded", f"not torch.nn.attention.varlen, since {obstacle}")
    if implementation in _ENGINES:
        return "engine", None
    convention = _mask_convention(implementation)
    if convention == "flex":
        return "flex", "not compiled on the CPU" if device.type == "cpu" else None
    if convention != "flash":
        return "masked", "padded batches are not packed for it"
    needs = [] if device.type == "cuda" else ["a CUDA device"]
    needs += [] if dtype in _LOW_PRECISION else ["float16 or bfloat16 (dtype=torch.bfloat16, or autocast)"]
    known = implementation.startswith("flash_attention")  # a Hub kernel knows its own devices
    return "flash", f"they need {' and '.join(needs)}" if needs and known else None


def _varlen_obstacle(config, device, dtype, training):
    """Why torch's variable-length kernel cannot run on CUDA, or None."""
    if varlen_attn is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen (2.10 or newer has)"
    if dtype not in _LOW_PRECISION:
        return f"the kernel takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if training and config.attention_dropout > 0:
        return "the kernel has no dropout"
    if config.head_dim % 8 or config.head_dim > 256:
        return f"the kernel takes a head_dim that is a multiple of 8 and at most 256, not {config.head_dim}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"the kernel needs compute capability 8.0, and this GPU has {major}.{minor}"


def _mask_convention(implementation):
    """What mask a function takes: "flash" (2-D or none), "flex" (BlockMask), "additive", "boolean", or "own" (made by a registered function)."""
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, None)
    if implementation in ("eager", "sdpa") or function is None:
        return "boolean"
    conventions = {"flash_attention_2": "flash", "flex_attention": "flex", "eager": "additive", "sdpa": "boolean"}
    return next((convention for name, convention in conventions.items() if function is ALL_MASK_ATTENTION_FUNCTIONS[name]), "own")


def _autocast_dtype(device, dtype):
    """The dtype that q, k and v will have."""
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if autocast else dtype


class AttentionDispatch:
    """What the blocks of one forward call: the attention function for this batch, with what it must know.

    Args:
        implementation: name of the attention implementation.
        hidden: embeddings, (B, L, D) or packed (1, T, D).
        mask: of a dense batch: (B, L) bool, (B, 1 or H, L, L) bool or additive, or None.
        packing: `Packing` of a packed batch, else None.
        with_weights: the weights are asked for, over the complete row.
    """

    def __init__(self, config, implementation, hidden, mask, packing, training, with_weights=False):
        dtype = _autocast_dtype(hidden.device, hidden.dtype)
        self.kernel, _ = attention_kernel(config, implementation, hidden.device, dtype, training)
        # What runs in place of the function of the library.
        self.function = eager_attention_forward if implementation == "eager" else None
        self.packing, self.padding, self.mask = packing, None, None
        if self.kernel in ("varlen", "repadded", "sequences"):
            if packing is None or with_weights:
                self.kernel = "masked"
            elif self.kernel != "varlen" and _is_tracing():
                # The lengths are not known then; the longest may be.
                self.kernel = "masked" if packing.traced or torch.is_tensor(packing.max_length) else "repadded"
            if packing is not None and implementation == "sdpa":
                self.function = _plain_sdpa
        if self.kernel == "repadded":
            self.padding = packing.padding(hidden.shape[1])
        elif self.kernel == "flex" and hidden.device.type == "cpu":
            self.function = _flex_on_cpu
        convention = _mask_convention(implementation)
        if self.kernel == "flash":
            self.mask = mask
        elif self.kernel in ("flex", "masked") and (packing is not None or mask is not None):
            self.mask = _make_mask(convention, config, implementation, hidden, mask, packing)
        if mask is not None and mask.dim() == 4 and self.kernel != "masked":
            raise ValueError(f"{implementation} takes no 4-D attention_mask; choose 'sdpa' or 'eager', or give a (batch, length) mask.")
        if convention == "additive" and self.mask is not None and self.mask.dtype == torch.bool:
            self.mask = torch.zeros_like(self.mask, dtype=hidden.dtype).masked_fill(~self.mask, torch.finfo(hidden.dtype).min)

    def around(self, function):
        """`function`, the block's, or what runs around it or in its place in this batch."""
        if self.kernel in ("sequences", "repadded", "varlen"):
            return self
        return function if self.function is None else self.function

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        """The kernel of a packed batch: q, k, v (1, H, T, K) -> (1, T, H, K), and None for the weights."""
        if self.kernel == "sequences":
            return _sequence_by_sequence(self.function, self.packing, module, query, key, value, **kwargs)
        if self.kernel == "repadded":
            return _repadded(self.function, self.padding, module, query, key, value, **kwargs)
        return _varlen(query, key, value, **kwargs)


def _make_mask(convention, config, implementation, hidden, mask, packing):
    """What the function takes for a (B, L) `mask` or a `packing`: a BlockMask, its own, or boolean (B or 1, 1, L or 1, L); 4-D masks as they are."""
    if mask is not None and mask.dim() == 4:
        return mask
    batch, length = hidden.shape[:2]
    sequences = None if packing is None else packing.sequence_ids(length)
    # Rows that are all padding see everything: softmax over nothing is not finite.
    real = None if packing is not None else mask | ~mask.any(dim=-1, keepdim=True)

    def visible(b, h, q, k):
        return real[b, k] if sequences is None else sequences[q] == sequences[k]

    if convention == "own":
        return _own_mask(ALL_MASK_ATTENTION_FUNCTIONS[implementation], visible, real, config, hidden)
    if convention != "flex":
        return real[:, None, None] if sequences is None else (sequences[:, None] == sequences)[None, None]
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled, the mask is made block by block; otherwise B x L x L booleans exist for a moment.
    create = torch.compile(create_block_mask) if hidden.device.type == "cuda" and not _is_tracing() else create_block_mask
    return create(visible, batch, None, length, length, device=hidden.device)


def _own_mask(function, visible, mask, config, hidden):
    """The mask of a function that a user registered with `transformers.AttentionMaskInterface`, called by the names of transformers 4 and 5."""
    batch, length = hidden.shape[:2]
    given = {"batch_size": batch, "q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0, "mask_function": visible}
    given |= {"cache_position": torch.arange(length, device=hidden.device), "attention_mask": mask, "device": hidden.device}
    given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "dtype": hidden.dtype, "config": config}
    names = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    return function(**{name: value for name, value in given.items() if takes_all or name in names})


def eager_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """softmax(q k^T * scaling) v, the reference that can return its weights.

    Args:
        query, key, value: (B, H, L, K).
        attention_mask: boolean, True where attention is allowed, or additive; broadcastable to (B, H, L, L); or None.
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
    """SDPA alone: the library's function around it costs as much as the kernel on a short sequence."""
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2), None


@torch.compiler.disable
def _sequence_by_sequence(function, packing, module, query, key, value, **kwargs):
    """A dense attention function on each sequence of a packed batch; neighbours of one length together."""
    on_cpu_in_training = query.device.type == "cpu" and query.requires_grad
    if on_cpu_in_training and function is _plain_sdpa and query.dtype in _LOW_PRECISION and query.shape[2] < 256 * len(packing.lengths):
        # The backward of torch's CPU kernel in 16 bits takes up to 7 times that of float32 on sequences below 256 tokens.
        with torch.autocast("cpu", enabled=False):
            output, _ = _sequence_by_sequence(function, packing, module, *(x.float() for x in (query, key, value)), **kwargs)
        return output.type_as(query), None
    groups = [(len(list(group)), length) for length, group in groupby(packing.lengths)]
    sizes, outputs = [count * length for count, length in groups], []
    # One split a tensor: the gradient of many slices would be as many tensors of the complete batch.
    for (count, length), *parts in zip(groups, *(x.split(sizes, dim=2) for x in (query, key, value))):
        if count > 1:  # (1, H, count * length, K) -> (count, H, length, K), without a copy
            parts = (x[0].unflatten(1, (count, length)).transpose(0, 1) for x in parts)
        output, _ = function(module, *parts, None, **kwargs)
        outputs.append(output.flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _repadded(function, padding, module, query, key, value, **kwargs):
    """A dense attention function on a packed batch, with q, k and v alone scattered to (N, H, longest, K)."""
    index, mask, places = padding
    q, k, v = (x[0].transpose(0, 1)[index].transpose(1, 2) for x in (query, key, value))
    output, _ = function(module, q, k, v, mask[:, None, None], **kwargs)
    return output.flatten(0, 1)[places][None], None


def _varlen(query, key, value, scaling=None, **kwargs):
    """torch's own variable-length flash kernel (torch >= 2.10, CUDA, float16 or bfloat16), on packed (1, H, T, K)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # torch 2.10 takes no scale; its own is the default here too.
    scale = {} if scaling in (None, query.shape[-1] ** -0.5) else {"scale": scaling}
    return varlen_attn(q, k, v, *(kwargs[name] for name in _PACKING_KWARGS), **scale)[None], None


def _flex_on_cpu(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """flex_attention without compilation: torch's compiled CPU kernel has no backward and does not build for changing shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    if dropout > 0:
        raise ValueError("flex_attention has no dropout; set attention_dropout=0 or choose attn_implementation='sdpa'.")
    return flex_attention(query, key, value, block_mask=attention_mask, scale=scaling).transpose(1, 2), None


# ---------------------------------------------------------------------------------------------------------- published names


# Names of the published code, which old auto_maps and other tools use.
NeoBERT, NeoBERTLMHead = NeoBERTModel, NeoBERTForMaskedLM
__all__ = ["NeoBERT", "NeoBERTLMHead", "NeoBERTPreTrainedModel"]
__all__ += [name.removeprefix("modeling_neobert.") for name in AUTO_MAP.values() if name.startswith("modeling_neobert.")]
