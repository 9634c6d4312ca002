"""What is converted to what: the architecture from a configuration and the tensors' shapes, and the
checks of every tensor.

Sizes that a file claims are compared with the tensors before a model is made.
"""

import math
import re
from dataclasses import dataclass

import torch

from ..common.errors import UserError, listed, one_line
from ..common.loading import WEIGHT_DTYPES
from ..configuration_neobert import ALIASES, NeoBERTConfig
from .heads import Head, choose_head


_LABEL_FIELDS = ("num_labels", "id2label", "label2id", "problem_type")


def _on_meta(head, config):
    with torch.device("meta"):
        return head.model_class(config)


@dataclass(frozen=True, eq=False)
class Conversion:
    """A checked checkpoint and what it becomes. Nothing has been written yet.

    Attributes:
        head: row of the table of heads.
        config: NeoBERTConfig of the result.
        dtype: of the weights that are written.
        tensors: {name in the result: tensor of the checkpoint}.
        notes: what the user should know, a line each.
    """

    head: Head
    config: NeoBERTConfig
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()

    @property
    def parameters(self):
        """How many numbers are written."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def rounds(self):
        """Whether the weights that are written are not those of the checkpoint, but rounded."""
        return self.dtype != torch.float32 and any(
            tensor.dtype != self.dtype for tensor in self.tensors.values()
        )

    def written(self):
        """{name: tensor} as it is written: each with memory of its own."""
        return {
            name: tensor.to(self.dtype, copy=True).contiguous()
            for name, tensor in self.tensors.items()
        }

    def build(self, tensors):
        """The model, in float32, with the weights `tensors`; a tied decoder is the embedding."""
        state = {name: tensor.float() for name, tensor in tensors.items()}
        if "decoder." in self.head.prefixes and "decoder.weight" not in state:
            state["decoder.weight"] = state["model.encoder.weight"]
        model = _on_meta(self.head, self.config)
        model.load_state_dict(state, assign=True)
        return model.eval()


# ------------------------------------------------------------------------------------------------
# configuration from shapes


def derived_fields(tensors):
    """Configuration fields that follow from the tensors' names and shapes.

    Args:
        tensors: {published masked-LM name: anything with a `shape`}.
    Returns:
        dict of fields; `num_attention_heads` only where the hidden size is a multiple of 64, the
        published head_dim.
    Raises:
        UserError: no token embedding, or a feed-forward that no `intermediate_size` gives.
    """
    if "model.encoder.weight" not in tensors:
        raise UserError(
            "the checkpoint holds no token embedding (model.encoder.weight); it holds "
            f"{listed(tensors, 8)}."
        )
    vocabulary, hidden = tensors["model.encoder.weight"].shape
    layers = {
        int(match.group(1))
        for name in tensors
        if (match := re.match(r"model\.transformer_encoder\.([0-9]{1,9})\.", name))
    }
    if not layers:
        raise UserError(
            "the checkpoint holds no transformer layers (model.transformer_encoder.0...)."
        )
    fields = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": max(layers) + 1}
    if hidden % 64 == 0:
        fields["num_attention_heads"] = hidden // 64
    fields["norm_type"] = "layer" if "model.layer_norm.bias" in tensors else "rms"
    if "model.positional_embedding.weight" in tensors:
        fields["position_embedding_type"] = "learned"
        # Row 0 is padding.
        rows = tensors["model.positional_embedding.weight"].shape[0]
        fields["max_position_embeddings"] = rows - 1
    else:
        fields["position_embedding_type"] = "rope"
    block = f"model.transformer_encoder.{min(layers)}.ffn."
    if f"{block}w12.weight" in tensors:
        rows = tensors[f"{block}w12.weight"].shape[0]
        fields["hidden_act"] = "swiglu"
        # inner = 8 * ceil(int(2 * intermediate_size / 3) / 8): several sizes give it, this one
        # without rounding.
        fields["intermediate_size"] = 3 * (rows // 2) // 2
    elif f"{block}0.weight" in tensors:
        fields["hidden_act"] = "gelu"
        fields["intermediate_size"] = tensors[f"{block}0.weight"].shape[0]
    else:
        raise UserError(
            f"the checkpoint holds no feed-forward of a NeoBERT ({block}w12.weight, or "
            f"{block}0.weight)."
        )
    return fields


def _spellings(field):
    """The set of all names of a field of NeoBERTConfig."""
    return {field, *(alias for alias, fields in ALIASES.items() if field in fields)}


def _label_fields(given, tensors):
    """The configuration's fields about labels, compared with the rows of the classifier."""
    rows = tensors["classifier.weight"].shape[0] if "classifier.weight" in tensors else None
    count, names, _, problem = (given.get(field) for field in _LABEL_FIELDS)
    fields = {} if problem is None else {"problem_type": problem}
    if names is None and rows is not None:
        fields["num_labels"] = rows
    if names is not None:
        numbers = set(map(str, names)) if isinstance(names, dict) else None
        if numbers != {str(number) for number in range(len(numbers or ()))}:
            raise UserError(f"id2label should map the numbers from 0 on to names: {names!r:.200}.")
        fields["id2label"] = {int(number): str(name) for number, name in names.items()}
        fields["label2id"] = {name: number for number, name in fields["id2label"].items()}
    labels = count if names is None else len(names)
    if None not in (labels, rows) and labels != rows:
        raise UserError(
            f"the configuration has {labels!r:.80} labels, but classifier.weight has {rows} rows."
        )
    return fields


def work_out_config(tensors, given, head):
    """The configuration: what a file says, and what it leaves open from the shapes.

    Args:
        tensors: as of `derived_fields`.
        given: fields of a file.
        head: Head.
    Returns:
        NeoBERTConfig, list of notes on what was derived.
    Raises:
        UserError: the attention heads are not given and do not follow; a value that is not allowed.
    """
    derived = derived_fields(tensors)
    labels = _label_fields(given, tensors) if head.has_labels else {}
    others = (*_LABEL_FIELDS, "architectures")
    given = {k: value for k, value in given.items() if value is not None and k not in others}
    filled = {name: value for name, value in derived.items() if _spellings(name).isdisjoint(given)}
    if "num_attention_heads" not in {*given, *filled}:
        raise UserError(
            "the number of attention heads does not follow from the shapes (hidden size "
            f"{derived['hidden_size']} is not a multiple of 64): "
            "give it with --config, a file with the line 'num_attention_heads: N'."
        )
    try:
        config = NeoBERTConfig(**filled, **given, **labels)
    except Exception as error:  # values of any type
        raise UserError(
            f"the configuration does not describe a NeoBERT: {one_line(error, 400)}."
        ) from None
    notes = []
    if filled:
        fields = ", ".join(f"{name} {value}" for name, value in filled.items())
        notes.append(f"derived from the tensors: {fields}")
    if "num_attention_heads" in filled:
        notes.append(
            "num_attention_heads is the published head_dim of 64, which shapes cannot prove; "
            "--config overrides it"
        )
    known = {*given, *filled}
    names = ("norm_eps", "max_position_embeddings")
    defaults = [name for name in names if _spellings(name).isdisjoint(known)]
    if defaults:
        fields = ", ".join(f"{name} {getattr(config, name)}" for name in defaults)
        notes.append(f"not visible in the tensors, so the default: {fields}")
    return config, notes


def decide_tying(tensors, given, head):
    """Whether decoder and embedding are one tensor: (tied, notes); from the configuration, the
    names, and shared memory."""
    said = given.get("tie_word_embeddings")
    decoder, embedding = tensors.get("decoder.weight"), tensors.get("model.encoder.weight")
    if "decoder." not in head.prefixes or embedding is None:
        return False, []
    if decoder is None:
        tied = "decoder.bias" in tensors and said is not False
        note = "tied decoder: the checkpoint holds decoder.bias but no decoder.weight"
        return tied, [note] if tied and not said else []
    if said:
        if decoder.shape != embedding.shape or not torch.equal(decoder, embedding):
            raise UserError(
                "the configuration says tie_word_embeddings, but decoder.weight and "
                "model.encoder.weight differ."
            )
        return True, []
    shared = decoder.data_ptr() == embedding.data_ptr() and decoder.shape == embedding.shape
    if said is None and shared and decoder.stride() == embedding.stride():
        note = "decoder.weight and model.encoder.weight are one tensor in the checkpoint"
        return True, [f"tied decoder: {note}"]
    return False, []


# ------------------------------------------------------------------------------------------------
# checks of the tensors


def check_tensors(tensors, expected):
    """Compares names and shapes with those of the model that the configuration describes.

    Args:
        tensors: {name: tensor}.
        expected: {name: shape}.
    Raises:
        UserError: missing, unexpected, of a wrong shape or of a dtype that is not converted.
    """
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    parts = [f"missing tensors: {listed(missing)}"] if missing else []
    parts += [f"unexpected tensors: {listed(unexpected)}"] if unexpected else []
    if parts:
        raise UserError(f"the checkpoint does not fit its configuration; {'; '.join(parts)}.")
    wrong = [
        f"{name} is {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if tuple(tensors[name].shape) != shape
    ]
    if wrong:
        raise UserError(f"tensors of the wrong shape for the configuration: {listed(wrong)}.")
    dtypes = (*WEIGHT_DTYPES.values(), torch.float64)
    others = [f"{n} ({tensors[n].dtype})" for n in expected if tensors[n].dtype not in dtypes]
    if others:
        raise UserError(f"these weights are of a dtype that is not converted: {listed(others)}.")


def check_values(tensors, dtype):
    """Raises UserError for NaN, infinity, and what `dtype` cannot hold."""
    for name, tensor in tensors.items():
        low, high = (bound.item() for bound in tensor.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UserError(f"{name} holds numbers that are NaN or infinite.")
        if max(-low, high) > torch.finfo(dtype).max:
            raise UserError(
                f"{name} holds numbers beyond the range of {str(dtype).removeprefix('torch.')}; "
                "use --dtype bfloat16."
            )


def plan(tensors, given, wanted_head=None, wanted_dtype=None):
    """Works out what a checkpoint becomes: every name, shape, dtype and number is checked.

    Args:
        tensors: {published masked-LM name: tensor}.
        given: fields of a configuration file.
        wanted_head: value of --head, or None for what the checkpoint has.
        wanted_dtype: value of --dtype, or None for the checkpoint's own; float32 if it mixes
            several.
    Returns:
        Conversion
    Raises:
        UserError: the tensors are not those of a NeoBERT of this configuration.
    """
    head, others = choose_head(tensors, wanted_head, given.get("architectures") or ())
    tensors = {name: tensor for name, tensor in tensors.items() if name not in set(others)}
    tied, tying = decide_tying(tensors, given, head)
    config, derived = work_out_config(tensors, {**given, "tie_word_embeddings": tied}, head)
    state = _on_meta(head, config).state_dict()
    expected = {name: tuple(value.shape) for name, value in state.items()}
    if tied:
        for names in (tensors, expected):
            names.pop("decoder.weight", None)
    # NeoBERTModel's own names have no `model.`, those of the checkpoint have one always.
    prefix = "" if head.backbone else "model."
    check_tensors(tensors, {f"{prefix}{name}": shape for name, shape in expected.items()})
    renamed = {name: tensors[f"{prefix}{name}"] for name in expected}

    own = {tensor.dtype for tensor in renamed.values()}
    dtype = own.pop() if len(own) == 1 else torch.float32
    if wanted_dtype:
        dtype = WEIGHT_DTYPES[wanted_dtype]
    elif dtype == torch.float64:
        dtype = torch.float32
    check_values(renamed, dtype)
    left_out = [f"left out for --head {head.option}: {listed(others)}"] if others else []
    return Conversion(head, config, dtype, renamed, (*left_out, *tying, *derived))
