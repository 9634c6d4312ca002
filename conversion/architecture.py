"""What is converted to what: the architecture from a configuration and the tensors' shapes, and the
checks of every tensor.

Sizes that a file claims are compared with the tensors before anything of that size is made.
"""

import math
import re
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from ..common.errors import UserError, listed, one_line
from ..common.loading import WEIGHT_DTYPES
from ..common.model_fields import spellings
from ..configuration_neobert import NeoBERTConfig
from .heads import Head, choose_head
from .stored import StoredTensor


_LABEL_FIELDS = ("num_labels", "id2label", "label2id", "problem_type")
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


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
        tensors: {name in the result: StoredTensor}.
        notes: what the user should know, a line each.
    """

    head: Head
    config: NeoBERTConfig
    dtype: torch.dtype
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()

    @property
    def shapes(self):
        return {name: stored.shape for name, stored in self.tensors.items()}

    @property
    def parameters(self):
        """How many numbers are written."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def rounds(self):
        """Whether the weights that are written are not those of the checkpoint, but rounded."""
        return self.dtype != torch.float32 and any(
            stored.dtype != self.dtype for stored in self.tensors.values()
        )

    def build(self):
        """The model, on the meta device."""
        return _on_meta(self.head, self.config)

    def read(self, name, rounded=True):
        """The tensor of this name, rounded to `dtype` as it is written, or as the checkpoint has
        it. A tied decoder is the embedding."""
        stored = self.tensors[
            "model.encoder.weight"
            if name == "decoder.weight" and name not in self.tensors
            else name
        ]
        tensor = stored.read().detach()
        return tensor.to(self.dtype) if rounded else tensor


# ------------------------------------------------------------------------------------------------
# configuration from shapes


def _matrix(tensors, name):
    """(rows, columns) of a tensor that should be a matrix."""
    shape = tuple(tensors[name].shape)
    if len(shape) != 2 or 0 in shape:
        raise UserError(f"{name} should be a matrix, but has the shape {shape}.")
    return shape


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
    vocabulary, hidden = _matrix(tensors, "model.encoder.weight")
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
        fields["max_position_embeddings"] = (
            _matrix(tensors, "model.positional_embedding.weight")[0] - 1
        )
    else:
        fields["position_embedding_type"] = "rope"
    block = f"model.transformer_encoder.{min(layers)}.ffn."
    if f"{block}w12.weight" in tensors:
        rows = _matrix(tensors, f"{block}w12.weight")[0]
        if rows % 16:
            raise UserError(
                f"{block}w12.weight has {rows} rows, but SwiGLU's inner size is a multiple of 8, "
                "so rows of 16."
            )
        fields["hidden_act"] = "swiglu"
        # inner = 8 * ceil(int(2 * intermediate_size / 3) / 8): several sizes give it, this one
        # without rounding.
        fields["intermediate_size"] = 3 * (rows // 2) // 2
    elif f"{block}0.weight" in tensors:
        fields["hidden_act"] = "gelu"
        fields["intermediate_size"] = _matrix(tensors, f"{block}0.weight")[0]
    else:
        raise UserError(
            f"the checkpoint holds no feed-forward of a NeoBERT ({block}w12.weight, or "
            f"{block}0.weight)."
        )
    return fields


def _label_fields(given, tensors):
    """The configuration's fields about labels, compared with the rows of the classifier."""
    rows = _matrix(tensors, "classifier.weight")[0] if "classifier.weight" in tensors else None
    count, names, ids, problem = (given.get(field) for field in _LABEL_FIELDS)
    if names is not None:
        numbers = [str(number) for number in names] if isinstance(names, dict) else None
        if (
            numbers is None
            or not numbers
            or sorted(numbers) != sorted(map(str, range(len(numbers))))
        ):
            raise UserError(
                f"id2label should map the numbers from 0 on to names, but is {names!r:.200}."
            )
        if not all(isinstance(name, str) for name in names.values()):
            raise UserError(
                f"id2label should map numbers to names that are text, but is {names!r:.200}."
            )
        names = {int(number): name for number, name in names.items()}
    if ids is not None and (
        names is None or ids != {name: number for number, name in names.items()}
    ):
        raise UserError(f"label2id should be id2label the other way round, but is {ids!r:.200}.")
    if problem is not None and problem not in _PROBLEM_TYPES:
        raise UserError(
            f"problem_type should be one of {', '.join(_PROBLEM_TYPES)}, but is {problem!r:.80}."
        )
    for said, what in ((count, "num_labels"), (len(names) if names else None, "id2label")):
        if said is not None and said != rows and rows is not None:
            raise UserError(
                f"the configuration has {said!r:.80} labels ({what}), but classifier.weight has "
                f"{rows} rows."
            )
    fields = {
        "id2label": names,
        "label2id": ids,
        "problem_type": problem,
        "num_labels": rows if names is None else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


_LONGEST = 2**24  # tokens of a text


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
    given = {
        name: value
        for name, value in given.items()
        if value is not None and name not in (*_LABEL_FIELDS, "architectures")
    }
    # JSON and YAML may write a whole number as 768.0.
    given = {
        name: int(v) if isinstance(v, float) and v.is_integer() and name != "norm_eps" else v
        for name, v in given.items()
    }
    if "num_attention_heads" not in given and "num_attention_heads" not in derived:
        raise UserError(
            "the number of attention heads does not follow from the shapes (hidden size "
            f"{derived['hidden_size']} is not a multiple of 64): "
            "give it with --config, a file with the line 'num_attention_heads: N'."
        )
    filled = {name: value for name, value in derived.items() if spellings(name).isdisjoint(given)}
    length = given.get("max_position_embeddings", given.get("max_length", 1))
    if isinstance(length, int) and length > _LONGEST:
        raise UserError(
            f"max_position_embeddings of {length:,} is beyond any text: at most {_LONGEST:,} is "
            "allowed."
        )
    notes = []
    if filled:
        notes.append(
            "derived from the tensors: "
            + ", ".join(f"{name} {value}" for name, value in filled.items())
        )
    if "num_attention_heads" in filled:
        notes.append(
            "num_attention_heads is the published head_dim of 64, which shapes cannot prove; "
            "--config overrides it"
        )
    defaults = [
        name
        for name in ("norm_eps", "max_position_embeddings")
        if spellings(name).isdisjoint({*given, *filled})
    ]
    try:
        config = NeoBERTConfig(**filled, **given, **labels)
    except Exception as error:  # values of any type
        raise UserError(
            f"the configuration does not describe a NeoBERT: {one_line(error, 400)}."
        ) from None
    if defaults:
        notes.append(
            "not visible in the tensors, so the default: "
            + ", ".join(f"{name} {getattr(config, name)}" for name in defaults)
        )
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
        return tied, [
            "tied decoder: the checkpoint holds decoder.bias but no decoder.weight"
        ] if tied and not said else []
    if said:
        if decoder.shape != embedding.shape or not torch.equal(decoder.read(), embedding.read()):
            raise UserError(
                "the configuration says tie_word_embeddings, but decoder.weight and "
                "model.encoder.weight differ."
            )
        return True, []
    if said is None and decoder.storage is not None and decoder.storage == embedding.storage:
        return True, [
            "tied decoder: decoder.weight and model.encoder.weight are one tensor in the checkpoint"
        ]
    return False, []


# ------------------------------------------------------------------------------------------------
# checks of the tensors


def expected_shapes(head, config):
    """{name: shape} of a model. UserError for sizes that no tensor has."""
    try:
        return {
            name: tuple(value.shape) for name, value in _on_meta(head, config).state_dict().items()
        }
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"no model can be made of this configuration ({one_line(error)})."
        ) from None


def check_tensors(tensors, expected):
    """Compares names and shapes with those of the model that the configuration describes.

    Args:
        tensors: {name: anything with a `shape` and `dtype`}.
        expected: {name: shape}.
    Raises:
        UserError: missing, unexpected, of a wrong shape or of a dtype that is not converted.
    """
    missing = [n for n in expected if n not in tensors]
    unexpected = [n for n in tensors if n not in expected]
    if missing or unexpected:
        parts = [
            f"{kind} tensors: {listed(names)}"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise UserError(f"the checkpoint does not fit its configuration; {'; '.join(parts)}.")
    shapes = {name: tuple(tensors[name].shape) for name in expected}
    wrong = [
        f"{name} is {shapes[name]} instead of {tuple(expected[name])}"
        for name in expected
        if shapes[name] != tuple(expected[name])
    ]
    if wrong:
        raise UserError(f"tensors of the wrong shape for the configuration: {listed(wrong)}.")
    others = {
        n: tensors[n].dtype
        for n in expected
        if tensors[n].dtype not in (*WEIGHT_DTYPES.values(), torch.float64)
    }
    if others:
        kind = (
            "of a dtype that is not converted"
            if any(d.is_floating_point for d in others.values())
            else "not floating-point numbers"
        )
        raise UserError(
            f"these weights are {kind}: "
            f"{listed(f'{name} ({dtype})' for name, dtype in others.items())}."
        )


def check_values(tensors, dtype):
    """Reads all tensors once, which compares the checksums that their format has; refuses NaN,
    infinity, and what `dtype` cannot hold."""
    broken, too_large = [], []
    for name, tensor in tqdm(tensors.items(), desc="checking tensors", unit="tensor"):
        low, high = (bound.item() for bound in tensor.read().detach().aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            broken.append(name)
        elif max(-low, high) > torch.finfo(dtype).max:
            too_large.append(name)
    if broken:
        raise UserError(f"weights that are NaN or infinite: {listed(broken)}.")
    if too_large:
        raise UserError(
            f"weights beyond the range of {str(dtype).removeprefix('torch.')}: "
            f"{listed(too_large)}; use --dtype bfloat16."
        )


def plan(tensors, given, wanted_head=None, wanted_dtype=None):
    """Works out what a checkpoint becomes; compares every name, shape and dtype, but reads no
    numbers.

    Args:
        tensors: {published masked-LM name: StoredTensor}.
        given: fields of a configuration file.
        wanted_head: value of --head, or None for what the checkpoint has.
        wanted_dtype: value of --dtype, or None for the checkpoint's own; float32 if it mixes
            several.
    Returns:
        Conversion
    Raises:
        UserError: the tensors are not those of a NeoBERT of this configuration.
    """
    said = given.get("architectures")
    said = [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
    head, others = choose_head(tensors, wanted_head, said)
    tensors = {name: stored for name, stored in tensors.items() if name not in set(others)}
    tied, tying = decide_tying(tensors, given, head)
    config, derived = work_out_config(tensors, {**given, "tie_word_embeddings": tied}, head)
    if tied:
        tensors.pop("decoder.weight", None)

    own = {stored.dtype for stored in tensors.values()}
    dtype = (
        WEIGHT_DTYPES[wanted_dtype]
        if wanted_dtype
        else own.pop()
        if len(own) == 1
        else torch.float32
    )
    expected = expected_shapes(head, config)
    if tied:
        expected.pop("decoder.weight", None)
    # NeoBERTModel's own names have no `model.`, those of the checkpoint have one always.
    check_tensors(
        tensors,
        {f"{'' if head.backbone else 'model.'}{name}": shape for name, shape in expected.items()},
    )
    renamed = {name: tensors[f"{'' if head.backbone else 'model.'}{name}"] for name in expected}
    left_out = [f"left out for --head {head.option}: {listed(others)}"] if others else []
    dtype = dtype if dtype in WEIGHT_DTYPES.values() else torch.float32
    return Conversion(head, config, dtype, renamed, (*left_out, *tying, *derived))
