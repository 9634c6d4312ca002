"""Architecture of a checkpoint, and checks of its tensors.

The configuration is read from a file and completed from the shapes of the tensors. Sizes in an
untrusted file are compared with the tensors before memory is allocated for a model.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..common.errors import UserError, listed, one_line
from ..common.loading import WEIGHT_DTYPES, dtype_name
from ..configuration_neobert import ALIASES, NeoBERTConfig
from .heads import Head, choose_head


Tensors = Mapping[str, torch.Tensor]
Fields = Mapping[str, Any]

# Fields that `_label_fields` checks and derives, for heads with labels only.
_LABEL_FIELDS = ("num_labels", "id2label", "label2id", "problem_type")


@dataclass(frozen=True, eq=False)
class Conversion:
    """Checked model that a checkpoint is converted to. Nothing has been written yet.

    Attributes:
        head: Row of the table of heads.
        config: Configuration of the model.
        dtype: Precision of the weights that are written.
        tensors: Tensors of the checkpoint, by their names in the model.
        notes: Sentences for the user about how the model was derived.
    """

    head: Head
    config: NeoBERTConfig
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of values that are written."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def is_rounded(self) -> bool:
        """Whether the weights are rounded to `dtype`."""
        return self.dtype != torch.float32 and any(
            tensor.dtype != self.dtype for tensor in self.tensors.values()
        )

    def output_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to write, as copies in `dtype`."""
        # Copies are needed because safetensors refuses tensors that share memory, and because the
        # tensors of the checkpoint may be memory-mapped.
        return {
            name: tensor.to(self.dtype, copy=True).contiguous()
            for name, tensor in self.tensors.items()
        }

    def build(self, tensors: Tensors) -> PreTrainedModel:
        """Return the model in float32 with these weights, in evaluation mode."""
        state = {name: tensor.float() for name, tensor in tensors.items()}
        if "decoder." in self.head.prefixes and "decoder.weight" not in state:
            # A tied decoder is the embedding.
            state["decoder.weight"] = state["model.encoder.weight"]
        # `assign` replaces the empty weights of the meta device, which cannot be copied to.
        model = _build_on_meta(self.head, self.config)
        model.load_state_dict(state, assign=True)
        return model.eval()


def plan(
    tensors: Tensors, fields: Fields, head_option: str | None = None, dtype: str | None = None
) -> Conversion:
    """Decide which model a checkpoint contains, and check every name, shape, dtype and value.

    Args:
        tensors: Tensors by published name.
        fields: Fields of a configuration file.
        head_option: Value of `--head`, or None for the head of the checkpoint.
        dtype: Value of `--dtype`, or None for that of the checkpoint; float32 if it has several.

    Raises:
        UserError: If the tensors are not those of a NeoBERT with this configuration.
    """
    # The head decides which tensors belong to the model, and tying whether the decoder does.
    head, unused = choose_head(tensors, head_option, fields.get("architectures") or ())
    used = {name: tensor for name, tensor in tensors.items() if name not in set(unused)}
    tied, tying_notes = decide_tying(used, fields, head)
    config, config_notes = build_config(used, {**fields, "tie_word_embeddings": tied}, head)

    # Compare the tensors with those of an empty model, which needs no memory even if an untrusted
    # configuration has huge sizes.
    state = _build_on_meta(head, config).state_dict()
    expected = {name: tuple(value.shape) for name, value in state.items()}
    if tied:
        used.pop("decoder.weight", None)
        expected.pop("decoder.weight", None)
    # The names in NeoBERTModel have no prefix `model.`, those of the checkpoint always have.
    prefix = "" if head.backbone else "model."
    check_tensors(used, {f"{prefix}{name}": shape for name, shape in expected.items()})
    renamed = {name: used[f"{prefix}{name}"] for name in expected}

    # The values are checked against the chosen dtype: float16 ends at 65504.
    weight_dtype = _choose_dtype(renamed, dtype)
    check_values(renamed, weight_dtype)

    notes = [*tying_notes, *config_notes]
    if unused:
        notes.insert(0, f"left out for --head {head.option}: {listed(unused)}")
    return Conversion(head, config, weight_dtype, renamed, tuple(notes))


def _choose_dtype(tensors: Tensors, dtype: str | None) -> torch.dtype:
    """Return the precision of the written weights."""
    if dtype:
        return WEIGHT_DTYPES[dtype]
    # float32 is the most precise type that `--dtype` offers.
    dtypes = {tensor.dtype for tensor in tensors.values()}
    checkpoint_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return torch.float32 if checkpoint_dtype == torch.float64 else checkpoint_dtype


def _build_on_meta(head: Head, config: NeoBERTConfig) -> PreTrainedModel:
    """Return a model whose weights have shapes and dtypes, but no memory."""
    with torch.device("meta"):
        return head.model_class(config)


# ------------------------------------------------------------------------------------------------
# Configuration


def derived_fields(tensors: Tensors) -> dict[str, Any]:
    """Return the configuration fields that follow from the names and shapes of the tensors.

    Args:
        tensors: Tensors by published name. Only their shapes are read.

    Returns:
        Fields by name. `num_attention_heads` is included if the hidden size is a multiple of 64,
        the published size of a head.

    Raises:
        UserError: If there is no token embedding, layer or feed-forward network of a NeoBERT.
    """
    if "model.encoder.weight" not in tensors:
        raise UserError(
            "the checkpoint must contain a token embedding (model.encoder.weight), got "
            f"{listed(tensors, 8)}."
        )

    # The embedding has the shape (vocabulary, hidden size), and the layers are numbered.
    vocab_size, hidden_size = tensors["model.encoder.weight"].shape
    matches = [re.match(r"model\.transformer_encoder\.([0-9]{1,9})\.", name) for name in tensors]
    layers = {int(match[1]) for match in matches if match}
    if not layers:
        raise UserError(
            "the checkpoint must contain transformer layers (model.transformer_encoder.0...), got "
            "none."
        )
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": max(layers) + 1,
    }
    if hidden_size % 64 == 0:
        fields["num_attention_heads"] = hidden_size // 64
    # RMSNorm has no bias.
    fields["norm_type"] = "layer" if "model.layer_norm.bias" in tensors else "rms"

    if "model.positional_embedding.weight" in tensors:
        fields["position_embedding_type"] = "learned"
        # Row 0 is the position of padding tokens.
        rows = tensors["model.positional_embedding.weight"].shape[0]
        fields["max_position_embeddings"] = rows - 1
    else:
        fields["position_embedding_type"] = "rope"

    # SwiGLU stores both input projections in one matrix w12; the GELU network is a Sequential.
    ffn = f"model.transformer_encoder.{min(layers)}.ffn."
    if f"{ffn}w12.weight" in tensors:
        rows = tensors[f"{ffn}w12.weight"].shape[0]
        fields["hidden_act"] = "swiglu"
        # The inner size is 8 * ceil(int(2 * intermediate_size / 3) / 8), which several values of
        # intermediate_size satisfy. This one needs no rounding.
        fields["intermediate_size"] = 3 * (rows // 2) // 2
    elif f"{ffn}0.weight" in tensors:
        fields["hidden_act"] = "gelu"
        fields["intermediate_size"] = tensors[f"{ffn}0.weight"].shape[0]
    else:
        raise UserError(
            "the checkpoint must contain the feed-forward networks of a NeoBERT "
            f"({ffn}w12.weight or {ffn}0.weight), got none."
        )
    return fields


def build_config(tensors: Tensors, fields: Fields, head: Head) -> tuple[NeoBERTConfig, list[str]]:
    """Return the configuration: the fields of a file, completed from the shapes of the tensors.

    Args:
        tensors: Tensors by published name.
        fields: Fields of a configuration file.
        head: Head of the model.

    Returns:
        The configuration, and sentences for the user about what was derived.

    Raises:
        UserError: If a value is invalid, or the number of attention heads does not follow.
    """
    # The file takes precedence: a field is only derived if the file has none of its names.
    derived = derived_fields(tensors)
    labels = _label_fields(fields, tensors) if head.has_labels else {}
    ignored = (*_LABEL_FIELDS, "architectures")
    fields = {
        name: value for name, value in fields.items() if value is not None and name not in ignored
    }
    _check_embedding_size(tensors, fields)
    added = {name: value for name, value in derived.items() if _aliases(name).isdisjoint(fields)}
    if "num_attention_heads" not in {*fields, *added}:
        raise UserError(
            "the number of attention heads does not follow from the shapes (hidden size "
            f"{derived['hidden_size']} is not a multiple of 64). Pass `--config` with a file that "
            "has the line 'num_attention_heads: N'."
        )
    try:
        config = NeoBERTConfig(**added, **fields, **labels)
    except Exception as error:  # Untrusted values have any type.
        raise UserError(
            f"the configuration is not that of a NeoBERT: {one_line(error, 400)}."
        ) from None

    # The user should know which values are guesses.
    notes = []
    if added:
        values = ", ".join(f"{name} {value}" for name, value in added.items())
        notes.append(f"derived from the tensors: {values}")
    if "num_attention_heads" in added:
        notes.append(
            "num_attention_heads assumes the published head_dim of 64, which shapes do not show; "
            "--config overrides it"
        )
    # These fields change the outputs, but not the shape of any tensor.
    known = {*fields, *added}
    optional = ("norm_eps", "max_position_embeddings")
    defaults = [name for name in optional if _aliases(name).isdisjoint(known)]
    if defaults:
        values = ", ".join(f"{name} {getattr(config, name)}" for name in defaults)
        notes.append(f"not visible in the tensors, so the default: {values}")
    return config, notes


def _check_embedding_size(tensors: Tensors, fields: Fields) -> None:
    """Check that the sizes of a configuration file are those of the token embedding.

    Other fields are derived from the shapes, so a wrong size would be reported as their error.

    Raises:
        UserError: If a size differs. The message names the field, the tensor and both shapes.
    """
    name = "model.encoder.weight"
    shape = tuple(tensors[name].shape)
    for index, field in enumerate(("vocab_size", "hidden_size")):
        value = fields.get(field, shape[index])
        # NeoBERTConfig refuses values that are not positive integers.
        if not isinstance(value, int) or value < 1 or value == shape[index]:
            continue
        expected = tuple(value if i == index else size for i, size in enumerate(shape))
        raise UserError(
            f"`{field}` in the configuration must be {shape[index]}, got {value}: {name} has the "
            f"shape {shape} instead of {expected}. Correct or remove the field."
        )


def _aliases(field: str) -> set[str]:
    """Return all names of a field of NeoBERTConfig."""
    names = {alias for alias, fields in ALIASES.items() if field in fields}
    names |= {alias for alias, target in NeoBERTConfig.attribute_map.items() if target == field}
    return {field, *names}


def _label_fields(fields: Fields, tensors: Tensors) -> dict[str, Any]:
    """Return the fields about labels, after comparing them with the rows of the classifier.

    Raises:
        UserError: If `id2label` is invalid, or the number of labels is not that of the rows.
    """
    rows = None
    if "classifier.weight" in tensors:
        rows = tensors["classifier.weight"].shape[0]
    num_labels = fields.get("num_labels")
    id2label = fields.get("id2label")

    labels: dict[str, Any] = {}
    if fields.get("problem_type") is not None:
        labels["problem_type"] = fields["problem_type"]
    # JSON has only text keys, YAML also integers.
    if id2label is not None:
        keys = set(map(str, id2label)) if isinstance(id2label, dict) else None
        if keys is None or keys != {str(number) for number in range(len(keys))}:
            raise UserError(
                f"id2label must map the numbers from 0 on to names, got {id2label!r:.200}."
            )
        labels["id2label"] = {int(number): str(name) for number, name in id2label.items()}
        labels["label2id"] = {name: number for number, name in labels["id2label"].items()}
        num_labels = len(id2label)
    elif rows is not None:
        labels["num_labels"] = rows

    if num_labels is not None and rows is not None and num_labels != rows:
        raise UserError(
            f"the configuration must have one label for each of the {rows} rows of "
            f"classifier.weight, got {num_labels!r:.80} labels."
        )
    return labels


def decide_tying(tensors: Tensors, fields: Fields, head: Head) -> tuple[bool, list[str]]:
    """Decide whether decoder and embedding are one tensor.

    The configuration decides; without its field, a missing decoder or shared memory does.

    Returns:
        Whether the decoder is tied, and sentences for the user.

    Raises:
        UserError: If the decoder is tied according to the configuration, but the tensors differ.
    """
    option = fields.get("tie_word_embeddings")
    decoder = tensors.get("decoder.weight")
    embedding = tensors.get("model.encoder.weight")
    if "decoder." not in head.prefixes or embedding is None:
        return False, []

    # The head has a bias even if its matrix is the embedding.
    if decoder is None:
        tied = "decoder.bias" in tensors and option is not False
        note = "tied decoder: the checkpoint contains decoder.bias but no decoder.weight"
        return tied, [note] if tied and not option else []

    if option:
        if decoder.shape != embedding.shape or not torch.equal(decoder, embedding):
            raise UserError(
                "decoder.weight and model.encoder.weight must be equal with tie_word_embeddings, "
                "but they differ."
            )
        return True, []

    # torch.save preserves shared memory. Equal values alone do not show that the weights were tied.
    shared = decoder.data_ptr() == embedding.data_ptr() and decoder.shape == embedding.shape
    if option is None and shared and decoder.stride() == embedding.stride():
        note = "decoder.weight and model.encoder.weight are one tensor in the checkpoint"
        return True, [f"tied decoder: {note}"]
    return False, []


# ------------------------------------------------------------------------------------------------
# Checks of the tensors


def check_tensors(tensors: Tensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names, shapes and dtypes with those of the model.

    Args:
        tensors: Tensors by name.
        expected: Shapes by name.

    Raises:
        UserError: If tensors are missing or unexpected, or have another shape or dtype.
    """
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    problems = []
    if missing:
        problems.append(f"missing tensors: {listed(missing)}")
    if unexpected:
        problems.append(f"unexpected tensors: {listed(unexpected)}")
    if problems:
        raise UserError(f"the checkpoint does not fit its configuration; {'; '.join(problems)}.")

    wrong = [
        f"{name} is {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if tuple(tensors[name].shape) != shape
    ]
    if wrong:
        raise UserError(f"tensors of the wrong shape for the configuration: {listed(wrong)}.")

    # float64 is converted. Integers and 8-bit floats would be quantized with unknown scales.
    dtypes: Collection[torch.dtype] = (*WEIGHT_DTYPES.values(), torch.float64)
    others = [f"{n} ({tensors[n].dtype})" for n in expected if tensors[n].dtype not in dtypes]
    if others:
        names = ", ".join(dtype_name(dtype) for dtype in dtypes)
        raise UserError(f"the dtype of weights must be one of {names}, got {listed(others)}.")


def check_values(tensors: Tensors, dtype: torch.dtype) -> None:
    """Check that all values are finite and in the range of a dtype.

    Raises:
        UserError: If a value is NaN, infinite or too large.
    """
    for name, tensor in tensors.items():
        # NaN propagates to both bounds, so two numbers are enough to check all values.
        low, high = (bound.item() for bound in tensor.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UserError(f"{name} contains values that are NaN or infinite.")
        if max(-low, high) > torch.finfo(dtype).max:
            raise UserError(
                f"{name} contains values beyond the range of {dtype_name(dtype)}. Use --dtype "
                "bfloat16."
            )
