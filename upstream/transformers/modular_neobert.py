# Copyright 2026 The HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ruff: noqa: E501
# Lines are of the library's length. Goes to src/transformers/models/neobert/ of the library (docs/native.md).

import torch
from torch import nn

from ... import initialization as init
from ...configuration_utils import PreTrainedConfig, strict
from ...masking_utils import create_bidirectional_mask
from ...modeling_layers import GradientCheckpointingLayer
from ...modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from ...modeling_rope_utils import RopeParameters
from ...processing_utils import Unpack
from ...utils import auto_docstring
from ...utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from ...utils.output_capturing import capture_outputs
from ..eurobert.modeling_eurobert import EuroBertAttention, EuroBertRMSNorm
from ..llama.modeling_llama import LlamaPreTrainedModel, LlamaRotaryEmbedding


@auto_docstring(checkpoint="chandar-lab/NeoBERT")
@strict
class NeoBertConfig(PreTrainedConfig):
    r"""
    norm_eps (`float`, *optional*, defaults to 1e-05):
        The epsilon of the RMS norms.
    classifier_dropout (`float`, *optional*, defaults to 0.1):
        The dropout of the task heads.
    classifier_pooling (`str`, *optional*, defaults to `"cls"`):
        What the sequence heads read: the first real token (`"cls"`) or the mean over real tokens (`"mean"`).
    embedding_init_range (`float`, *optional*, defaults to 0.02):
        Bound of the uniform initialisation of the embedding.
    decoder_init_range (`float`, *optional*, defaults to 0.02):
        Bound of the uniform initialisation of linear layers outside of task heads.
    classifier_init_range (`float`, *optional*, defaults to 0.02):
        Standard deviation of the normal initialisation of the task heads.
    """

    model_type = "neobert"
    attribute_map = {
        "rms_norm_eps": "norm_eps",
        "initializer_range": "classifier_init_range",
        "num_key_value_heads": "num_attention_heads",
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 4096
    norm_eps: float = 1e-5
    hidden_act: str = "swiglu"
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: int | float = 0.0
    attention_bias: bool = False
    classifier_dropout: int | float = 0.1
    classifier_pooling: str = "cls"
    embedding_init_range: float = 0.02
    decoder_init_range: float = 0.02
    classifier_init_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        # The published config.json says `max_length`, and holds arguments of its training code.
        self.max_position_embeddings = (
            kwargs.pop("max_length", None) or self.max_position_embeddings
        )
        for name in ("kwargs", "trust_remote_code", "pretrained_model_name_or_path", "dim_head"):
            kwargs.pop(name, None)
        if not (kwargs.get("rope", True) and kwargs.get("rms_norm", True)):
            raise ValueError(
                "NeoBERT has RoPE and RMS norms; ablations without them are not supported."
            )
        self.hidden_act = self.hidden_act.lower()
        super().__post_init__(**kwargs)

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads

    @property
    def swiglu_size(self):
        """Inner width of the feed-forward: two thirds of `intermediate_size`, rounded up to a multiple of 8."""
        return 8 * ((int(2 * self.intermediate_size / 3) + 7) // 8)

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"The hidden size ({self.hidden_size}) is not a multiple of the number of attention "
                f"heads ({self.num_attention_heads})."
            )
        if self.hidden_act != "swiglu":
            raise ValueError(f"hidden_act must be 'swiglu', but {self.hidden_act!r} was given.")
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(
                f"classifier_pooling must be 'cls' or 'mean', not {self.classifier_pooling!r}."
            )


class NeoBertRMSNorm(EuroBertRMSNorm):
    pass


class NeoBertRotaryEmbedding(LlamaRotaryEmbedding):
    pass


class NeoBertAttention(EuroBertAttention):
    pass


class NeoBertMLP(nn.Module):
    def __init__(self, config: NeoBertConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.swiglu_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.swiglu_size, bias=False)
        self.down_proj = nn.Linear(config.swiglu_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(
            nn.functional.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        )


class NeoBertEncoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: NeoBertConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = NeoBertRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = NeoBertAttention(config, layer_idx)
        self.post_attention_layernorm = NeoBertRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = NeoBertMLP(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        attention_output, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = hidden_states + attention_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@auto_docstring
class NeoBertPreTrainedModel(LlamaPreTrainedModel):
    config: NeoBertConfig
    _no_split_modules = ["NeoBertEncoderLayer"]
    _can_record_outputs = {"hidden_states": NeoBertEncoderLayer, "attentions": NeoBertAttention}

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)  # norms, rotary angles, and linear layers of heads
        if isinstance(module, nn.Embedding):
            bound = self.config.embedding_init_range
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Linear) and isinstance(self, (NeoBertModel, NeoBertForMaskedLM)):
            bound = self.config.decoder_init_range
            init.uniform_(module.weight, -bound, bound)


@auto_docstring
class NeoBertModel(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [
                NeoBertEncoderLayer(config, layer_idx)
                for layer_idx in range(config.num_hidden_layers)
            ]
        )
        self.norm = NeoBertRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.rotary_emb = NeoBertRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | BaseModelOutput:
        r"""
        token_type_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Accepted for BERT's tokenizer, which makes them, and ignored.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(
                inputs_embeds.shape[1], device=inputs_embeds.device
            ).unsqueeze(0)

        bidirectional_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(
                hidden_states,
                attention_mask=bidirectional_mask,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


@auto_docstring
class NeoBertForMaskedLM(NeoBertPreTrainedModel):
    _tied_weights_keys = {"decoder.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self):
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.decoder = new_embeddings

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | MaskedLMOutput:
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.decoder(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class NeoBertPooledHead(nn.Module):
    """One vector a sequence, then dropout -> dense -> tanh -> dropout, as in the published code."""

    def __init__(self, config: NeoBertConfig):
        super().__init__()
        self.pooling = config.classifier_pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if attention_mask is None or attention_mask.dim() != 2:
            attention_mask = torch.ones(hidden_states.shape[:2], device=hidden_states.device)
        if self.pooling == "mean":
            mask = attention_mask.to(hidden_states.device)[..., None]
            pooled = (hidden_states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            pooled = pooled.to(hidden_states.dtype)
        else:
            first = attention_mask.to(hidden_states.device).int().argmax(dim=-1)
            pooled = hidden_states[
                torch.arange(hidden_states.shape[0], device=hidden_states.device), first
            ]
        return self.dropout(torch.tanh(self.dense(self.dropout(pooled))))


@auto_docstring
class NeoBertForSequenceClassification(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NeoBertModel(config)
        self.head = NeoBertPooledHead(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | SequenceClassifierOutput:
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.head(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, **kwargs
            )
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


@auto_docstring
class NeoBertForMultipleChoice(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.head = NeoBertPooledHead(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | MultipleChoiceModelOutput:
        r"""
        input_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`):
            Tokens of the candidate texts; the other inputs have the same first two axes.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            Accepted for BERT's tokenizer, which makes them, and ignored.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Index of the right candidate.
        """
        num_choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        inputs = (input_ids, attention_mask, position_ids, inputs_embeds)
        input_ids, attention_mask, position_ids, inputs_embeds = (
            None if value is None else value.flatten(0, 1) for value in inputs
        )
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.head(outputs.last_hidden_state, attention_mask)).view(
            -1, num_choices
        )
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return MultipleChoiceModelOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


@auto_docstring
class NeoBertForTokenClassification(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NeoBertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | TokenClassifierOutput:
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


@auto_docstring
class NeoBertForQuestionAnswering(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | QuestionAnsweringModelOutput:
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.qa_outputs(outputs.last_hidden_state)
        if attention_mask is not None and attention_mask.dim() == 2:  # no answer is padding
            logits = logits.masked_fill(attention_mask[..., None] == 0, -8192.0)
        start_logits, end_logits = logits.unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(
                start_logits, end_logits, start_positions, end_positions, **kwargs
            )
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = [
    "NeoBertConfig",
    "NeoBertPreTrainedModel",
    "NeoBertModel",
    "NeoBertForMaskedLM",
    "NeoBertForSequenceClassification",
    "NeoBertForMultipleChoice",
    "NeoBertForTokenClassification",
    "NeoBertForQuestionAnswering",
]
