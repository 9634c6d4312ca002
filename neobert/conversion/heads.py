"""The one table of heads: everything that differs between them from reading a checkpoint to the
model card."""

from dataclasses import dataclass

from ..common.errors import UserError, listed


@dataclass(frozen=True)
class Head:
    """A kind of model that a checkpoint is converted to.

    Attributes:
        option: value of --head.
        auto_class: Auto class of transformers that loads it.
        pipeline_tag: the Hub's name of its task.
        prefixes: how the names of its tensors beside the backbone begin.
        outputs: names of what its forward returns.
        per_token: whether its outputs are (B, L, ...), or one row for each sequence.
        has_labels: whether the rows of `classifier` are labels.
        has_choices: whether its inputs are (B, choices, L).
    """

    option: str
    auto_class: str
    pipeline_tag: str
    prefixes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logits",)
    per_token: bool = True
    has_labels: bool = False
    has_choices: bool = False

    @property
    def class_name(self):
        from ..configuration_neobert import AUTO_MAP

        return AUTO_MAP[self.auto_class].rpartition(".")[2]

    @property
    def architectures(self):
        """What config.json calls the class: the published name, which others match on, and names
        beside it."""
        from ..configuration_neobert import ARCHITECTURES

        return ARCHITECTURES.get(self.class_name, [self.class_name])

    @property
    def model_class(self):
        from .. import modeling_neobert

        return getattr(modeling_neobert, self.class_name)

    @property
    def backbone(self):
        """How the names of the backbone's tensors begin in this model."""
        return "model." if self.prefixes else ""


# Where several have the same tensors, the first one is meant, unless the configuration names
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
HEADS = {head.option: head for head in _TABLE}
# Of all heads; every other tensor belongs to the backbone.
HEAD_PREFIXES = tuple(dict.fromkeys(prefix for head in HEADS.values() for prefix in head.prefixes))


def choose_head(names, wanted=None, architectures=()):
    """The head to convert to.

    Args:
        names: of the checkpoint's tensors.
        wanted: value of --head, or None for what the checkpoint has.
        architectures: class names of its configuration, which decide between heads with the same
            tensors.
    Returns:
        Head, names of the tensors that other heads have and this one has not.
    Raises:
        UserError: the tensors are not those of one head.
    """
    present = [prefix for prefix in HEAD_PREFIXES if any(name.startswith(prefix) for name in names)]
    if wanted is None:
        fitting = [head for head in _TABLE if set(head.prefixes) == set(present)]
        if not fitting:
            possible = [head.option for head in _TABLE if set(head.prefixes) <= set(present)]
            raise UserError(
                f"the checkpoint's tensors ({listed(f'{prefix}*' for prefix in present)}) are not "
                f"those of one head: choose --head {' or '.join(possible)}."
            )
        head = fitting[0]
        for other in fitting:
            if {*other.architectures, other.class_name} & set(architectures):
                head = other
    else:
        head = HEADS[wanted]
    others = tuple(prefix for prefix in present if prefix not in head.prefixes)
    return head, sorted(name for name in names if others and name.startswith(others))
