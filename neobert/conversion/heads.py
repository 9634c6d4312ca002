"""Table of the model heads with the properties that differ, and the choice of a head."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..common.errors import UserError, listed


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Values of `--head`, in the order of the table.
HeadName: TypeAlias = Literal[
    "masked-lm",
    "base",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
]


@dataclass(frozen=True)
class Head:
    """Type of model that a checkpoint is converted to.

    Attributes:
        option: Value of `--head`.
        auto_class: Auto class of transformers that loads the model.
        pipeline_tag: Name of the task on the Hub.
        prefixes: Prefixes of the names of the tensors outside the backbone.
        outputs: Names of the tensors that `forward` returns.
        per_token: Whether the outputs have the shape (B, L, ...) and not one row per sequence.
        has_labels: Whether each row of `classifier` is a label.
        has_choices: Whether the inputs have the shape (B, choices, L).
    """

    option: HeadName
    auto_class: str
    pipeline_tag: str
    prefixes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logits",)
    per_token: bool = True
    has_labels: bool = False
    has_choices: bool = False

    # The table is also read by `neobert --help`, so these properties import the configuration and
    # the model, and with them torch, only when they are used.

    @property
    def class_name(self) -> str:
        """Name of the model class."""
        from ..configuration_neobert import AUTO_MAP

        return AUTO_MAP[self.auto_class].rpartition(".")[2]

    @property
    def architectures(self) -> list[str]:
        """Value of `architectures` in config.json.

        The published name of the class comes first, because other software matches on it.
        """
        from ..configuration_neobert import ARCHITECTURES

        return ARCHITECTURES.get(self.class_name, [self.class_name])

    @property
    def model_class(self) -> "type[PreTrainedModel]":
        """Model class."""
        from .. import modeling_neobert

        return getattr(modeling_neobert, self.class_name)

    @property
    def backbone(self) -> str:
        """Prefix of the names of the backbone's tensors in this model."""
        return "model." if self.prefixes else ""


# If several heads have the same tensors, the first one is chosen, unless the configuration names
# another.
_TABLE = [
    Head(
        option="masked-lm",
        auto_class="AutoModelForMaskedLM",
        pipeline_tag="fill-mask",
        prefixes=("decoder.",),
    ),
    Head(
        option="base",
        auto_class="AutoModel",
        pipeline_tag="feature-extraction",
        outputs=("last_hidden_state",),
    ),
    Head(
        option="sequence-classification",
        auto_class="AutoModelForSequenceClassification",
        pipeline_tag="text-classification",
        prefixes=("dense.", "classifier."),
        per_token=False,
        has_labels=True,
    ),
    Head(
        option="token-classification",
        auto_class="AutoModelForTokenClassification",
        pipeline_tag="token-classification",
        prefixes=("classifier.",),
        has_labels=True,
    ),
    Head(
        option="question-answering",
        auto_class="AutoModelForQuestionAnswering",
        pipeline_tag="question-answering",
        prefixes=("qa_outputs.",),
        outputs=("start_logits", "end_logits"),
    ),
    Head(
        option="multiple-choice",
        auto_class="AutoModelForMultipleChoice",
        pipeline_tag="multiple-choice",
        prefixes=("dense.", "classifier."),
        per_token=False,
        has_choices=True,
    ),
]
HEADS: dict[str, Head] = {head.option: head for head in _TABLE}

# Prefixes of all heads. Every other tensor belongs to the backbone.
HEAD_PREFIXES = tuple(dict.fromkeys(prefix for head in HEADS.values() for prefix in head.prefixes))


def choose_head(
    names: Iterable[str], option: str | None = None, architectures: Iterable[str] = ()
) -> tuple[Head, list[str]]:
    """Choose the head to convert to.

    Args:
        names: Names of the checkpoint's tensors.
        option: Value of `--head`, or None for the head of the checkpoint.
        architectures: Class names in the configuration, which decide between heads with the same
            tensors.

    Returns:
        The head, and the names of the tensors that belong to other heads only.

    Raises:
        UserError: If the tensors are not those of one head.
    """
    # Only tensors outside the backbone distinguish the heads.
    names = list(names)
    present = [prefix for prefix in HEAD_PREFIXES if any(name.startswith(prefix) for name in names)]
    head = _head_of(present, architectures) if option is None else HEADS[option]

    # With `--head`, a checkpoint may contain tensors of other heads: these are left out.
    others = tuple(prefix for prefix in present if prefix not in head.prefixes)
    return head, sorted(name for name in names if others and name.startswith(others))


def _head_of(prefixes: list[str], architectures: Iterable[str]) -> Head:
    """Return the head whose tensors have exactly these prefixes.

    Raises:
        UserError: If there is no such head.
    """
    candidates = [head for head in _TABLE if set(head.prefixes) == set(prefixes)]
    if not candidates:
        # Suggest the heads whose tensors are all there, beside those of others.
        options = [head.option for head in _TABLE if set(head.prefixes) <= set(prefixes)]
        raise UserError(
            "the checkpoint must have the tensors of one head, got "
            f"{listed(f'{prefix}*' for prefix in prefixes)}. Choose --head {' or '.join(options)}."
        )

    # Sequence classification and multiple choice have the same tensors; the class name decides.
    head = candidates[0]
    for other in candidates:
        if {*other.architectures, other.class_name} & set(architectures):
            head = other
    return head
