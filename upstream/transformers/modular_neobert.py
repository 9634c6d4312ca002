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

from typing import Literal

import torch
from torch import nn

from ... import initialization as init
from ...configuration_utils import PreTrainedConfig, strict
from ...modeling_layers import GenericForQuestionAnswering, GenericForTokenClassification
from ...modeling_outputs import (
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)
from ...modeling_rope_utils import RopeParameters
from ...modeling_utils import PreTrainedModel
from ...processing_utils import Unpack
from ...utils import TransformersKwargs, auto_docstring
from ...utils.generic import can_return_tuple
from ..eurobert.modeling_eurobert import (
    EuroBertAttention,
    EuroBertDecoderLayer,
    EuroBertMLP,
    EuroBertModel,
    EuroBertPreTrainedModel,
    EuroBertRMSNorm,
    EuroBertRotaryEmbedding,
)


@auto_docstring(checkpoint="chandar-lab/NeoBERT")
@strict
class NeoBertConfig(PreTrainedConfig):
    r"""
    norm_eps (`float`, *optional*, defaults to 1e-05):
        The epsilon of the RMS norms.
    classifier_dropout (`float`, *optional*, defaults to 0.1):
        The dropout of the task heads.
    classifier_pooling (`str`, *optional*, defaults to `"cls"`):
        The pooling of the sequence heads: the first non-padding token (`"cls"`) or the mean over non-padding
        tokens (`"mean"`).
    embedding_init_range (`float`, *optional*, defaults to 0.02):
        The bound of the uniform initialization of the embedding.
    decoder_init_range (`float`, *optional*, defaults to 0.02):
        The bound of the uniform initialization of the linear layers outside the task heads.
    classifier_init_range (`float`, *optional*, defaults to 0.02):
        The standard deviation of the normal initialization of the task heads.
    """

    model_type = "neobert"
    attribute_map = {
        "num_key_value_heads": "num_attention_heads",
        "initializer_range": "classifier_init_range",
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 4096
    norm_eps: float = 1e-5
    hidden_act: Literal["swiglu", "SwiGLU"] = "swiglu"
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: int | float = 0.0
    attention_bias: bool = False
    classifier_dropout: int | float = 0.1
    classifier_pooling: Literal["cls", "mean"] = "cls"
    embedding_init_range: float = 0.02
    decoder_init_range: float = 0.02
    classifier_init_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        # The published config.json uses `max_length`, which in other models is an argument of generation
        self.max_position_embeddings = kwargs.pop("max_length", self.max_position_embeddings)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"The hidden size ({self.hidden_size}) is not a multiple of the number of attention "
                f"heads ({self.num_attention_heads})."
            )


class NeoBertRMSNorm(EuroBertRMSNorm):
    pass


class NeoBertRotaryEmbedding(EuroBertRotaryEmbedding):
    pass


class NeoBertAttention(EuroBertAttention):
    pass


class NeoBertMLP(EuroBertMLP):
    def __init__(self, config: NeoBertConfig):
        nn.Module.__init__(self)
        # Two thirds of `intermediate_size`, rounded up to a multiple of 8
        inner_size = 8 * ((int(2 * config.intermediate_size / 3) + 7) // 8)
        self.gate_proj = nn.Linear(config.hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()


class NeoBertLayer(EuroBertDecoderLayer):
    def __init__(self, config: NeoBertConfig, layer_idx: int):
        nn.Module.__init__(self)
        self.self_attn = NeoBertAttention(config, layer_idx)
        self.mlp = NeoBertMLP(config)
        self.input_layernorm = NeoBertRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = NeoBertRMSNorm(config.hidden_size, eps=config.norm_eps)


@auto_docstring
class NeoBertPreTrainedModel(EuroBertPreTrainedModel):
    config: NeoBertConfig
    _no_split_modules = ["NeoBertLayer"]
    _can_record_outputs = {"hidden_states": NeoBertLayer, "attentions": NeoBertAttention}

    @torch.no_grad()
    def _init_weights(self, module):
        # Initialize norms, rotary embeddings, and the linear layers of task heads
        PreTrainedModel._init_weights(self, module)
        if isinstance(module, nn.Embedding):
            bound = self.config.embedding_init_range
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Linear) and isinstance(self, (NeoBertModel, NeoBertForMaskedLM)):
            bound = self.config.decoder_init_range
            init.uniform_(module.weight, -bound, bound)


@auto_docstring
class NeoBertModel(NeoBertPreTrainedModel, EuroBertModel):
    def __init__(self, config: NeoBertConfig):
        NeoBertPreTrainedModel.__init__(self, config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([NeoBertLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = NeoBertRMSNorm(config.hidden_size, eps=config.norm_eps)
        self.rotary_emb = NeoBertRotaryEmbedding(config)
        self.gradient_checkpointing = False

        # Initialize weights and apply final processing
        self.post_init()


@auto_docstring
class NeoBertForMaskedLM(NeoBertPreTrainedModel):
    _tied_weights_keys = {"decoder.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

        # Initialize weights and apply final processing
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
    ) -> tuple[torch.Tensor] | MaskedLMOutput:
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits = self.decoder(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def pool_hidden_states(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """Return one vector per sequence: the first non-padding token (`"cls"`), or the mean over them (`"mean"`)."""
    if attention_mask is None:
        return hidden_states.mean(dim=1) if pooling == "mean" else hidden_states[:, 0]
    mask = attention_mask.to(hidden_states.device).int()
    if pooling == "mean":
        summed = (hidden_states * mask.unsqueeze(-1)).sum(dim=1)
        return summed / mask.sum(dim=1, keepdim=True).clamp(min=1)
    rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
    return hidden_states[rows, mask.argmax(dim=-1)]


@auto_docstring
class NeoBertForSequenceClassification(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NeoBertModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

        # Initialize weights and apply final processing
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
    ) -> tuple[torch.Tensor] | SequenceClassifierOutput:
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        pooled = pool_hidden_states(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling)
        pooled = torch.tanh(self.dense(self.dropout(pooled)))
        logits = self.classifier(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)

        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@auto_docstring
class NeoBertForMultipleChoice(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, 1)

        # Initialize weights and apply final processing
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
    ) -> tuple[torch.Tensor] | MultipleChoiceModelOutput:
        r"""
        input_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`):
            Indices of the tokens of the candidate texts. The other inputs have the same first two dimensions.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Index of the correct candidate.
        """
        num_choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        input_ids, attention_mask, position_ids, inputs_embeds = (
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, position_ids, inputs_embeds)
        )
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        pooled = pool_hidden_states(outputs.last_hidden_state, attention_mask, self.config.classifier_pooling)
        pooled = torch.tanh(self.dense(self.dropout(pooled)))
        logits = self.classifier(self.dropout(pooled)).view(-1, num_choices)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels)

        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class NeoBertForTokenClassification(GenericForTokenClassification, NeoBertPreTrainedModel):
    pass


class NeoBertForQuestionAnswering(GenericForQuestionAnswering, NeoBertPreTrainedModel):
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
    ) -> tuple[torch.Tensor] | QuestionAnsweringModelOutput:
        kwargs["return_dict"] = True
        outputs = super().forward(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        # Exclude padding tokens from the answers
        if attention_mask is not None:
            for name in ("start_logits", "end_logits"):
                outputs[name] = outputs[name].masked_fill(attention_mask == 0, -8192.0)
        if start_positions is not None and end_positions is not None:
            outputs["loss"] = self.loss_function(
                outputs.start_logits, outputs.end_logits, start_positions, end_positions, **kwargs
            )
        return outputs


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
