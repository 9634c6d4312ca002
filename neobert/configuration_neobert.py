"""Configuration of NeoBERT (arXiv 2502.19587, section 3).

One class describes the published model and every rung of the paper's ablation ladder. It reads the
published `config.json` (`max_length`, a nested `kwargs`, ...) and the fields of the authors'
training configurations, and stores them under one set of names.
"""

import inspect
from typing import TYPE_CHECKING

from transformers.configuration_utils import PretrainedConfig


if TYPE_CHECKING:
    # Never runs. transformers 4 and 5.0 copy the files that a file names, here with the
    # configuration: a user's own class beside the modeling file would miss the attention file.
    from .attention_neobert import VERSION  # noqa: F401

# Fields of published configs that say nothing about the model.
_IGNORED_FIELDS = ("kwargs", "trust_remote_code", "pretrained_model_name_or_path", "dim_head")

# Names of the authors' training code, and the fields that they set where those are not given.
ALIASES = {
    "dropout": ("attention_dropout", "hidden_dropout"),
    "dropout_prob": ("attention_dropout", "hidden_dropout"),
    "rope": ("position_embedding_type",),
    "rms_norm": ("norm_type",),
    "max_length": ("max_position_embeddings",),
}
# What False means there.
_FALSE = {"rope": "learned", "rms_norm": "layer"}
# Of the fields that an alias may set.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "norm_type": "rms",
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}

# What `architectures` says for a class. llama.cpp and transformers.js match on the published name,
# which comes first; sentence-transformers takes a name that ends in ForMaskedLM for a masked LM.
ARCHITECTURES = {
    "NeoBERTModel": ["NeoBERT"],
    "NeoBERTForMaskedLM": ["NeoBERTLMHead", "NeoBERTForMaskedLM"],
}

# What `AutoModel...from_pretrained(folder, trust_remote_code=True)` resolves to. Written to every
# config.json.
AUTO_MAP = {
    "AutoConfig": "configuration_neobert.NeoBERTConfig",
    "AutoModel": "modeling_neobert.NeoBERTModel",
    "AutoModelForMaskedLM": "modeling_neobert.NeoBERTForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_neobert.NeoBERTForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_neobert.NeoBERTForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_neobert.NeoBERTForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_neobert.NeoBERTForMultipleChoice",
}
# Names of this repository's classes, published ones included.
_CLASSES = {name.rpartition(".")[2] for name in AUTO_MAP.values()}
_CLASSES |= {name for names in ARCHITECTURES.values() for name in names}


def _is_number(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < float("inf")


def _is_whole(value, lowest=1):
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _one_of(*names):
    return lambda value: value in names, f"one of {', '.join(names)}"


# What values may be: a question to a value, and the words for those that pass.
_POSITIVE = _is_whole, "a positive whole number"
_POSITIVE_NUMBER = (lambda value: _is_number(value) and value > 0), "a positive number"
_PROBABILITY = (
    (lambda value: _is_number(value) and 0 <= value < 1),
    "a probability from 0 to below 1",
)
_AT_LEAST_0 = (lambda value: _is_number(value) and value >= 0), "a number of at least 0"
_SWITCH = (lambda value: isinstance(value, bool)), "True or False"

_RULES = {
    "vocab_size": _POSITIVE,
    "hidden_size": _POSITIVE,
    # More layers in a file are damage, and would take all time.
    "num_hidden_layers": (
        (lambda value: _is_whole(value) and value <= 1000),
        "a positive whole number of at most 1,000",
    ),
    "num_attention_heads": _POSITIVE,
    "intermediate_size": _POSITIVE,
    "max_position_embeddings": _POSITIVE,
    "hidden_act": _one_of("swiglu", "gelu"),
    "norm_type": _one_of("rms", "layer"),
    "position_embedding_type": _one_of("rope", "learned"),
    "classifier_pooling": _one_of("cls", "mean"),
    "attention_dropout": _PROBABILITY,
    "hidden_dropout": _PROBABILITY,
    "classifier_dropout": _PROBABILITY,
    "embedding_init_range": _AT_LEAST_0,
    "decoder_init_range": _AT_LEAST_0,
    "classifier_init_range": _AT_LEAST_0,
    "norm_eps": _AT_LEAST_0,
    "unpad_inputs": _SWITCH,
    "sparse_prediction": _SWITCH,
}
_ROPE_RULES = {
    "rope_type": _one_of("default", "linear", "dynamic", "yarn"),
    "rope_theta": _POSITIVE_NUMBER,
    # A larger factor in a file is damage, and would take all memory.
    "factor": (
        (lambda value: _is_number(value) and 1 <= value <= 1e6),
        "a number from 1 to 1,000,000",
    ),
    "original_max_position_embeddings": _POSITIVE,
}


def _check_fields(values, rules):
    """Raises ValueError for the first of `values`, {field: value}, that its rule does not allow."""
    for field, (is_allowed, words) in rules.items():
        if field in values and not is_allowed(values[field]):
            raise ValueError(f"{field} must be {words}, but {values[field]!r} was given.")


class NeoBERTConfig(PretrainedConfig):
    """Architecture and behaviour of a NeoBERT model. The defaults are the published 250M model.

    Args:
        vocab_size: rows V of the token embedding and of the masked-LM decoder.
        hidden_size: width D of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads H; `head_dim` K is `hidden_size / num_attention_heads` and must
            be even for RoPE.
        intermediate_size: feed-forward width. SwiGLU uses 8 * ceil(int(2 * intermediate_size / 3) /
            8) of it (`ffn_inner_size`).
        max_position_embeddings: context length in tokens. `max_length` of published configs is read
            as this.
        norm_eps: epsilon of the norms.
        hidden_act: "swiglu" or "gelu" (ablation M0).
        norm_type: "rms" or "layer" (ablation M0).
        position_embedding_type: "rope" or "learned" (ablation M0).
        rope_theta: base of the rotary angles.
        rope_scaling, rope_parameters: context extension, `{"rope_type": "yarn", "factor": 2.0}` for
            example, as transformers 4 (`rope_scaling` beside `rope_theta`) and 5 (`rope_parameters`
            with `rope_theta` inside) write it. Types: default, linear, dynamic, yarn.
        attention_dropout, hidden_dropout: probabilities; `dropout` / `dropout_prob` of training
            configs set both.
        classifier_dropout: dropout of the task heads.
        classifier_pooling: what the sequence heads read, "cls" (the first token) or "mean" (over
            real tokens).
        sparse_prediction: with labels, the masked LM computes logits for labelled tokens only,
            (labelled, V), as in ModernBERT.
        unpad_inputs: pack padded batches inside the model, so that no layer computes on padding.
        embedding_init_range, decoder_init_range: bounds of the uniform initialisation of embeddings
            and linear layers.
        classifier_init_range: standard deviation of the normal initialisation of the task heads.
        pad_token_id: id of the padding token, or None.
        tie_word_embeddings: share the decoder's weight with the embedding. The published model does
            not.

    Raises:
        ValueError: a value is not allowed; the message says what was given and what is allowed.
    """

    model_type = "neobert"
    # BERT's names, which code for any encoder reads and sets.
    attribute_map = {
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "norm_eps",
        "initializer_range": "classifier_init_range",
    }
    bos_token_id = eos_token_id = None

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 768,
        num_hidden_layers: int = 28,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        max_position_embeddings: int | None = None,
        norm_eps: float = 1e-5,
        hidden_act: str = "swiglu",
        norm_type: str | None = None,
        position_embedding_type: str | None = None,
        rope_theta: float | None = None,
        rope_scaling: dict | None = None,
        rope_parameters: dict | None = None,
        attention_dropout: float | None = None,
        hidden_dropout: float | None = None,
        classifier_dropout: float = 0.1,
        classifier_pooling: str = "cls",
        sparse_prediction: bool = False,
        unpad_inputs: bool = True,
        embedding_init_range: float = 0.02,
        decoder_init_range: float = 0.02,
        classifier_init_range: float = 0.02,
        pad_token_id: int | None = 0,
        tie_word_embeddings: bool = False,
        **kwargs,
    ):
        fields = {name: value for name, value in locals().items() if name in _FIELDS}
        if kwargs.pop("ngpt", False):
            raise ValueError(
                "ngpt=True was given, but normalised transformers are not supported; "
                "train with ngpt=False."
            )
        for name in _IGNORED_FIELDS:
            kwargs.pop(name, None)
        for name, field in self.attribute_map.items():
            fields[field] = kwargs.pop(name, fields[field])
        for alias, names in ALIASES.items():
            value = kwargs.pop(alias, None)
            if alias in _FALSE:
                value = _FALSE[alias] if value is False else None
            for name in names:
                fields[name] = value if fields[name] is None else fields[name]
        for name, default in _DEFAULTS.items():
            fields[name] = default if fields[name] is None else fields[name]
        # What older folders call `sparse_prediction`.
        logits = kwargs.pop("masked_lm_logits", None)
        if logits is not None:
            fields["sparse_prediction"] = {"all": False, "masked": True}.get(logits, logits)
        if isinstance(hidden_act, str):
            fields["hidden_act"] = hidden_act.lower()
        for name, value in fields.items():
            setattr(self, name, value)
        # What YaRN extends, whatever order the fields are set in afterwards.
        self._trained_length = self.max_position_embeddings
        self.__dict__["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        if rope_theta is not None:
            self.rope_theta = rope_theta
        for parameters in (rope_scaling, rope_parameters):
            if parameters is not None:
                self.rope_parameters = parameters
        self._check()
        super().__init__(
            pad_token_id=pad_token_id, tie_word_embeddings=tie_word_embeddings, **kwargs
        )
        # transformers 5 no longer keeps these on every config.
        self.pad_token_id, self.tie_word_embeddings = pad_token_id, tie_word_embeddings

    @property
    def head_dim(self) -> int:
        """K = hidden_size / num_attention_heads."""
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_inner_size(self) -> int:
        """Inner width of the feed-forward.

        2/3 of `intermediate_size`, rounded up to a multiple of 8, for SwiGLU: 3072 -> 2048.
        """
        if self.hidden_act == "gelu":
            return self.intermediate_size
        return 8 * ((int(2 * self.intermediate_size / 3) + 7) // 8)

    # `rope_parameters` is the stored form. The other two names are views of it, so that a value set
    # after construction (`from_pretrained(..., rope_scaling={...})`) counts, whichever form it has.
    @property
    def rope_parameters(self) -> dict:
        return self.__dict__.get("rope_parameters")

    @rope_parameters.setter
    def rope_parameters(self, value: dict | None) -> None:
        self.__dict__["rope_parameters"] = self._normalised_rope(value)

    @property
    def context_length(self) -> int:
        """Longest text: `max_position_embeddings`, or what RoPE scaling extends it to."""
        rope, length = self.rope_parameters, self.max_position_embeddings
        if rope["rope_type"] == "default":
            return length
        trained = rope.get("original_max_position_embeddings") or length
        return max(length, int(trained * rope.get("factor", 1)))

    @property
    def rope_scaling(self) -> dict | None:
        parameters = self.rope_parameters
        if parameters["rope_type"] == "default":
            return None
        return {name: value for name, value in parameters.items() if name != "rope_theta"}

    @rope_scaling.setter
    def rope_scaling(self, value: dict | None) -> None:
        self.rope_parameters = value

    @property
    def rope_theta(self) -> float:
        return self.rope_parameters["rope_theta"]

    @rope_theta.setter
    def rope_theta(self, value: float) -> None:
        self.rope_parameters = {**self.rope_parameters, "rope_theta": value}

    def _normalised_rope(self, value):
        """`rope_type`, `rope_theta` and the rest of either library's form; None is the default."""
        if not isinstance(value, dict | None):
            raise ValueError(
                "rope_parameters / rope_scaling must be a dictionary or None, "
                f"but {value!r} was given."
            )
        parameters = dict(value or {})
        old_name = parameters.pop("type", None)
        parameters["rope_type"] = parameters.get("rope_type") or old_name or "default"
        if parameters.get("rope_theta") is None:
            parameters["rope_theta"] = self.rope_theta
        if parameters["rope_type"] != "default":
            parameters.setdefault("factor", None)
        if parameters["rope_type"] == "yarn":
            if parameters.get("original_max_position_embeddings") is None:
                parameters["original_max_position_embeddings"] = self._trained_length
            fast, slow = parameters.get("beta_fast", 32), parameters.get("beta_slow", 1)
            if not (_is_number(fast) and _is_number(slow) and fast > slow > 0):
                raise ValueError(
                    "YaRN needs beta_fast above beta_slow above 0, "
                    f"but {fast!r} and {slow!r} were given."
                )
        _check_fields(parameters, _ROPE_RULES)
        parameters["rope_theta"] = float(parameters["rope_theta"])
        return parameters

    def _check(self):
        _check_fields(vars(self), _RULES)
        padding = self.pad_token_id
        if padding is not None and not (_is_whole(padding, 0) and padding < self.vocab_size):
            raise ValueError(
                f"pad_token_id must be None or lie between 0 and {self.vocab_size - 1}, "
                f"but {padding!r} was given."
            )
        if self.ffn_inner_size == 0:
            raise ValueError(
                "intermediate_size must be at least 2 for SwiGLU, which uses two thirds of it, "
                "but 1 was given."
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                "hidden_size must be a multiple of num_attention_heads, "
                f"but {self.hidden_size} and {self.num_attention_heads} were given."
            )
        if self.position_embedding_type == "rope" and self.head_dim % 2:
            raise ValueError(
                "RoPE needs an even head_dim (hidden_size / num_attention_heads), "
                f"but {self.hidden_size} / {self.num_attention_heads} = {self.head_dim} was given."
            )
        if self.rope_parameters["rope_type"] == "dynamic" and self.head_dim == 2:
            raise ValueError(
                "rope_type 'dynamic' needs a head_dim of at least 4, "
                "since its formula divides by head_dim - 2; 2 was given."
            )

    # transformers 5 makes every config class a dataclass, whose generated comparison would see none
    # of our fields.
    def __eq__(self, other):
        return isinstance(other, PretrainedConfig) and self.to_dict() == other.to_dict()

    __hash__ = None

    def to_dict(self) -> dict:
        """Serialised form: the published class names, and the complete auto_map.

        A user's own classes stay in it.
        """
        output = super().to_dict()
        output.pop("_trained_length", None)
        names = output.get("architectures") or []
        if names:
            names = [published for name in names for published in ARCHITECTURES.get(name, [name])]
            output["architectures"] = list(dict.fromkeys(names))
        users = {
            key: name
            for key, name in (output.get("auto_map") or {}).items()
            if str(name).rpartition(".")[2] not in _CLASSES
        }
        output["auto_map"] = {**AUTO_MAP, **users}
        return output


# The fields that `__init__` stores as they are.
_FIELDS = set(inspect.signature(NeoBERTConfig.__init__).parameters)
_FIELDS -= {"self", "kwargs", "rope_theta", "rope_scaling", "rope_parameters"}

NeoBERTConfig.register_for_auto_class()
