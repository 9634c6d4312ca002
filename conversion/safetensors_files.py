"""safetensors files, and the index of weights in several files of either format."""

from safetensors import SafetensorError, safe_open

from ..common.errors import UserError, listed
from ..common.files import check_file, read_json
from ..common.loading import SAFETENSORS_DTYPES
from .stored import StoredTensor, is_plain_name, unreadable


def safetensors_tensors(path):
    """All tensors of a safetensors file."""
    check_file(path)
    try:
        handle = safe_open(path, framework="pt", device="cpu")
        parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
        described = {
            name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()
        }
    except (SafetensorError, OSError, UnicodeError) as error:
        raise unreadable(path, error) from None
    tensors = {}
    for name, (shape, dtype) in described.items():
        if dtype not in SAFETENSORS_DTYPES:
            raise UserError(
                f"{path}: tensor {name} is stored as {dtype}, which is not a dtype of training "
                "weights."
            )
        tensors[name] = StoredTensor(
            shape, SAFETENSORS_DTYPES[dtype], lambda name=name: handle.get_tensor(name)
        )
    return tensors


def sharded_tensors(index, read):
    """Tensors of all files that an index names.

    Args:
        index: a file `*.index.json`.
        read: reader of one file, `safetensors_tensors` or `torch_tensors`.
    Raises:
        UserError: a file or tensor that is not there, doubled, or not beside the index.
    """
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise UserError(
            f"{index} has no weight_map, which should map names of tensors to files beside it."
        )
    foreign = [name for name in weight_map.values() if not is_plain_name(name)]
    if foreign:
        raise UserError(
            f"{index} should name files beside it, but names {listed(map(repr, foreign), 5)}."
        )
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (index.parent / name).is_file()]
    if absent:
        raise UserError(f"{index} names files that are not there: {listed(absent)}.")
    tensors = {}
    for name in files:
        part = read(index.parent / name)
        doubled = sorted(tensors.keys() & part.keys())
        if doubled:
            raise UserError(
                f"{index.parent} holds these tensors twice, in several shards: {listed(doubled)}."
            )
        tensors.update(part)
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise UserError(f"the shards of {index} lack tensors that it names: {listed(absent)}.")
    return tensors
