"""Configuration of NeoBERT (arXiv 2502.19587, section 3).

One class covers the published model and every step of the ablations of the paper. It reads the
published `config.json` (`max_length`, a nested `kwargs`, ...) and the fields of the authors'
training configurations, and stores them under one set of names.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from transformers.configuration_utils import PretrainedConfig


if TYPE_CHECKING:
    # Never runs. transformers 4 and 5.0 copy the files that a file names, here with the
    # configuration. Without this line, a user's class beside the modeling file would miss the
    # attention file.
    from .attention_neobert import VERSION  # noqa: F401

# Fields of published configs that do not describe the model.
_IGNORED_FIELDS = ("kwargs", "trust_remote_code", "pretrained_model_name_or_path", "dim_head")

# Names of the authors' training code, and the fields that they set unless a field is passed itself.
ALIASES = {
    "dropout": ("attention_dropout", "hidden_dropout"),
    "dropout_prob": ("attention_dropout", "hidden_dropout"),
    "rope": ("position_embedding_type",),
    "rms_norm": ("norm_type",),
    "max_length": ("max_position_embeddings",),
}
# Values of fields whose alias is False. True selects the default.
_FALSE = {"rope": "learned", "rms_norm": "layer"}

# `architectures` of config.json. llama.cpp and transformers.js match the published name, which is
# first; sentence-transformers takes a name that ends in ForMaskedLM for a masked LM.
ARCHITECTURES = {
    "NeoBERTModel": ["NeoBERT"],
    "NeoBERTForMaskedLM": ["NeoBERTLMHead", "NeoBERTForMaskedLM"],
}

# Classes that `AutoModel...from_pretrained(folder, trust_remote_code=True)` loads. Written to every
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
# Names of the classes of this repository, published ones included.
_CLASSES = {name.rpartition(".")[2] for name in AUTO_MAP.values()}
_CLASSES |= {name for names in ARCHITECTURES.values() for name in names}


# ------------------------------------------------------------------------------------------- rules

# Values of `problem_type`, the loss of sequence classification.
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
PROBLEM_TYPES: tuple[str, ...] = get_args(ProblemType)

# A predicate of a value, and the description of the values that pass.
_Rule = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < float("inf")


def _is_whole(value: Any, minimum: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _one_of(*names: str) -> _Rule:
    return lambda value: value in names, f"one of {', '.join(names)}"


_POSITIVE: _Rule = (_is_whole, "a positive integer")
_POSITIVE_NUMBER: _Rule = (lambda value: _is_number(value) and value > 0, "a positive number")
_PROBABILITY: _Rule = (
    lambda value: _is_number(value) and 0 <= value < 1,
    "a probability, at least 0 and less than 1",
)
_AT_LEAST_0: _Rule = (lambda value: _is_number(value) and value >= 0, "a number, at least 0")
_SWITCH: _Rule = (lambda value: isinstance(value, bool), "True or False")

_RULES = {
    "vocab_size": _POSITIVE,
    "hidden_size": _POSITIVE,
    # Reject absurd values from corrupted files, which would take hours.
    "num_hidden_layers": (
        lambda value: _is_whole(value) and value <= 1000,
        "a positive integer of at most 1,000",
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
    "problem_type": (
        lambda value: value is None or value in PROBLEM_TYPES,
        f"None or one of {', '.join(PROBLEM_TYPES)}",
    ),
    "unpad_inputs": _SWITCH,
    "sparse_prediction": _SWITCH,
}
_ROPE_RULES = {
    "rope_type": _one_of("default", "linear", "dynamic", "yarn"),
    "rope_theta": _POSITIVE_NUMBER,
    # Reject absurd values from corrupted files, which would exhaust the memory.
    "factor": (
        lambda value: _is_number(value) and 1 <= value <= 1e6,
        "a number from 1 to 1,000,000",
    ),
    "original_max_position_embeddings": _POSITIVE,
}


def _check_fields(values: dict[str, Any], rules: dict[str, _Rule]) -> None:
    """Raise ValueError for the first field whose value its rule does not allow."""
    for field, (is_allowed, description) in rules.items():
        if field in values and not is_allowed(values[field]):
            raise ValueError(f"`{field}` must be {description}, got {values[field]!r}.")


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _migrate(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of the authors' and of older configurations from `kwargs`.

    Returns:
        The values under their current names; None for fields that were not passed.

    Raises:
        ValueError: If they select a normalized transformer.
    """
    if kwargs.pop("ngpt", False):
        raise ValueError(
            "`ngpt` must be False, got True. Normalized transformers (nGPT) are not implemented."
        )
    for name in _IGNORED_FIELDS:
        kwargs.pop(name, None)

    fields: dict[str, Any] = {}
    for alias, targets in ALIASES.items():
        value = kwargs.pop(alias, None)
        if alias in _FALSE:
            value = _FALSE[alias] if value is False else None
        for target in targets:
            # Of two aliases of one field, the first wins.
            if fields.get(target) is None:
                fields[target] = value

    logits = kwargs.pop("masked_lm_logits", None)
    fields["sparse_prediction"] = {"all": False, "masked": True}.get(logits, logits)
    return fields


# ----------------------------------------------------------------------------------- configuration


class NeoBERTConfig(PretrainedConfig):
    """Architecture and behavior of a NeoBERT model.

    The defaults are those of the published model with 245M parameters.

    Args:
        vocab_size: Number of tokens V of the embedding and of the masked-LM decoder.
        hidden_size: Hidden size D.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of heads H. `head_dim` K is `hidden_size / num_attention_heads`
            and must be even for RoPE.
        intermediate_size: Nominal inner size of the feed-forward. GELU uses this size, SwiGLU two
            thirds of it (`ffn_inner_size`).
        max_position_embeddings: Context length in tokens. `max_length` of published configs is an
            alias.
        norm_eps: Epsilon of the norms.
        hidden_act: "swiglu", or "gelu" as in the BERT-like baseline of the paper (M0).
        norm_type: "rms", or "layer" (LayerNorm) as in this baseline.
        position_embedding_type: "rope", or "learned" as in this baseline.
        rope_theta: Base of the rotary angles.
        rope_scaling: Context extension as transformers 4 writes it, next to `rope_theta`, such as
            `{"rope_type": "yarn", "factor": 2.0}`. Types: default, linear, dynamic, yarn.
        rope_parameters: Context extension as transformers 5 writes it, with `rope_theta` inside.
        attention_dropout: Dropout probability of the attention weights. `dropout` and
            `dropout_prob` of training configs set both dropouts.
        hidden_dropout: Dropout probability of the embedding and of the residual branches.
        classifier_dropout: Dropout probability of the task heads. None, as in BERT's
            configurations, is the value of `hidden_dropout`.
        classifier_pooling: Pooling of the sequence heads: "cls" (the first token) or "mean" (over
            non-padding tokens).
        sparse_prediction: Whether, with labels, the masked LM computes the logits of labeled tokens
            only, (labeled, V), as in ModernBERT.
        unpad_inputs: Whether the model packs padded batches, so no layer computes on padding.
        embedding_init_range: Bound of the uniform initialization of embeddings.
        decoder_init_range: Bound of the uniform initialization of linear layers.
        classifier_init_range: Standard deviation of the normal initialization of the task heads.
        pad_token_id: ID of the padding token, or None.
        tie_word_embeddings: Whether the decoder shares the weight of the embedding. The published
            model does not.
        **kwargs: Fields of `PretrainedConfig`, and other names of the fields above.

    Raises:
        ValueError: If a value is not allowed.
    """

    model_type = "neobert"
    # BERT's names, which code for any encoder reads and sets.
    attribute_map = {
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "norm_eps",
        "initializer_range": "classifier_init_range",
    }
    bos_token_id = None
    eos_token_id = None

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
        rope_scaling: dict[str, Any] | None = None,
        rope_parameters: dict[str, Any] | None = None,
        attention_dropout: float | None = None,
        hidden_dropout: float | None = None,
        classifier_dropout: float | None = 0.1,
        classifier_pooling: str = "cls",
        sparse_prediction: bool = False,
        unpad_inputs: bool = True,
        embedding_init_range: float = 0.02,
        decoder_init_range: float = 0.02,
        classifier_init_range: float = 0.02,
        pad_token_id: int | None = 0,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        older = _migrate(kwargs)
        head_dim = kwargs.pop("head_dim", None)
        # BERT's names win, as in every configuration with an attribute map.
        hidden_dropout = kwargs.pop("hidden_dropout_prob", hidden_dropout)
        attention_dropout = kwargs.pop("attention_probs_dropout_prob", attention_dropout)
        norm_eps = kwargs.pop("layer_norm_eps", norm_eps)
        classifier_init_range = kwargs.pop("initializer_range", classifier_init_range)

        # Sizes.
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = _first(
            max_position_embeddings, older["max_position_embeddings"], 4096
        )

        # Architecture.
        self.norm_eps = norm_eps
        self.hidden_act = hidden_act.lower() if isinstance(hidden_act, str) else hidden_act
        self.norm_type = _first(norm_type, older["norm_type"], "rms")
        self.position_embedding_type = _first(
            position_embedding_type, older["position_embedding_type"], "rope"
        )

        # Training and heads.
        self.attention_dropout = _first(attention_dropout, older["attention_dropout"], 0.0)
        self.hidden_dropout = _first(hidden_dropout, older["hidden_dropout"], 0.0)
        self.classifier_dropout = _first(classifier_dropout, self.hidden_dropout)
        self.classifier_pooling = classifier_pooling
        self.sparse_prediction = _first(older["sparse_prediction"], sparse_prediction)
        self.unpad_inputs = unpad_inputs
        self.embedding_init_range = embedding_init_range
        self.decoder_init_range = decoder_init_range
        self.classifier_init_range = classifier_init_range
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings

        # The length that YaRN extends, in whatever order fields are set afterwards.
        self._trained_length = self.max_position_embeddings
        self.__dict__["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        if rope_theta is not None:
            self.rope_theta = rope_theta
        if rope_scaling is not None:
            self.rope_scaling = rope_scaling
        if rope_parameters is not None:
            self.rope_parameters = rope_parameters
        # A saved configuration has the extended length, and the trained one among its parameters.
        trained_length = self.rope_parameters.get("original_max_position_embeddings")
        if trained_length is not None:
            self._trained_length = trained_length

        self.check()
        if head_dim not in (None, self.head_dim):
            raise ValueError(
                f"`head_dim` must be hidden_size / num_attention_heads = {self.head_dim}, got "
                f"{head_dim}."
            )
        super().__init__(
            pad_token_id=pad_token_id,  # type: ignore[call-arg]
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        # transformers 5 does not keep these two on every configuration.
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings

    @property
    def head_dim(self) -> int:
        """Size of a head, K = hidden_size / num_attention_heads."""
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_inner_size(self) -> int:
        """Number of neurons of the feed-forward.

        For SwiGLU, two thirds of `intermediate_size`, rounded up to a multiple of 8: 3072 -> 2048.
        """
        if self.hidden_act == "gelu":
            return self.intermediate_size
        return 8 * ((int(2 * self.intermediate_size / 3) + 7) // 8)

    @property
    def context_length(self) -> int:
        """Maximum sequence length, `max_position_embeddings` or its extension by RoPE scaling."""
        rope = self.rope_parameters
        length = self.max_position_embeddings
        if rope["rope_type"] == "default" or self.position_embedding_type == "learned":
            return length
        trained = rope.get("original_max_position_embeddings") or length
        return max(length, int(trained * rope.get("factor", 1)))

    # `rope_parameters` is stored. `rope_scaling` and `rope_theta` are views of it, so a value
    # set after construction (`from_pretrained(..., rope_scaling={...})`) counts in either form.
    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Type, base and scaling of RoPE."""
        return self.__dict__.get("rope_parameters", {})

    @rope_parameters.setter
    def rope_parameters(self, value: dict[str, Any] | None) -> None:
        self.__dict__["rope_parameters"] = self._normalize_rope(value)

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """Context extension without `rope_theta`, or None."""
        parameters = self.rope_parameters
        if parameters["rope_type"] == "default":
            return None
        return {name: value for name, value in parameters.items() if name != "rope_theta"}

    @rope_scaling.setter
    def rope_scaling(self, value: dict[str, Any] | None) -> None:
        self.rope_parameters = value

    @property
    def rope_theta(self) -> float:
        """Base of the rotary angles."""
        return self.rope_parameters["rope_theta"]

    @rope_theta.setter
    def rope_theta(self, value: float) -> None:
        self.rope_parameters = {**self.rope_parameters, "rope_theta": value}

    def _normalize_rope(self, value: dict[str, Any] | None) -> dict[str, Any]:
        """Return `rope_type`, `rope_theta` and the scaling of either form. None is no scaling."""
        if not isinstance(value, dict | None):
            raise ValueError(
                f"`rope_parameters` and `rope_scaling` must be a dictionary or None, got {value!r}."
            )

        parameters = dict(value or {})
        old_name = parameters.pop("type", None)
        parameters["rope_type"] = parameters.get("rope_type") or old_name or "default"
        if parameters.get("rope_theta") is None:
            parameters["rope_theta"] = self.rope_theta
        if parameters["rope_type"] != "default":
            parameters.setdefault("factor", None)
        elif parameters.get("factor") not in (None, 1):
            raise ValueError(
                "`rope_scaling` with a `factor` must have a `rope_type` of linear, dynamic or "
                f"yarn, got {value}."
            )

        if parameters["rope_type"] == "yarn":
            if parameters.get("original_max_position_embeddings") is None:
                parameters["original_max_position_embeddings"] = self._trained_length
            fast = parameters.get("beta_fast", 32)
            slow = parameters.get("beta_slow", 1)
            if not (_is_number(fast) and _is_number(slow) and fast > slow > 0):
                raise ValueError(
                    "`beta_fast` must be above `beta_slow` above 0 for YaRN, "
                    f"got {fast!r} and {slow!r}."
                )

        _check_fields(parameters, _ROPE_RULES)
        parameters["rope_theta"] = float(parameters["rope_theta"])
        return parameters

    def check(self) -> None:
        """Raise ValueError for values that are not allowed, or do not fit together.

        The constructor and the models call this method: `from_pretrained(folder, name=value)` sets
        fields after the configuration was created.
        """
        _check_fields(vars(self), _RULES)
        padding = self.pad_token_id
        if padding is not None and not (_is_whole(padding, 0) and padding < self.vocab_size):
            raise ValueError(
                f"`pad_token_id` must be None or from 0 to {self.vocab_size - 1}, got {padding!r}."
            )
        if self.ffn_inner_size == 0:
            raise ValueError(
                "`intermediate_size` must be at least 2 for SwiGLU, which uses two thirds of it, "
                f"got {self.intermediate_size}."
            )

        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                "`hidden_size` must be a multiple of `num_attention_heads`, "
                f"got {self.hidden_size} and {self.num_attention_heads}."
            )
        if self.position_embedding_type == "rope" and self.head_dim % 2:
            raise ValueError(
                "`hidden_size / num_attention_heads` must be even for RoPE, "
                f"got {self.hidden_size} / {self.num_attention_heads} = {self.head_dim}."
            )
        if self.rope_parameters["rope_type"] == "dynamic" and self.head_dim == 2:
            raise ValueError(
                "`hidden_size / num_attention_heads` must be at least 4 for the rope_type "
                "'dynamic', whose formula divides by head_dim - 2, got 2."
            )

    # transformers 5 turns every configuration into a dataclass, whose generated comparison would
    # ignore all fields of this class.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PretrainedConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Return the serialized form, with the published class names and the complete auto_map.

        Classes that a user registered stay in the auto_map.
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


NeoBERTConfig.register_for_auto_class()
