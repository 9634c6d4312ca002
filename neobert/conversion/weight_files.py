"""Files of torch.save and safetensors, one or several with an index. torch's own reader of weights
reads them: no code in them runs, and numbers are mapped."""

import pickle
import re
import warnings
import zipfile

import torch
from safetensors.torch import load_file

from ..common.errors import UserError, listed, one_line
from ..common.files import read_json


class StandIn:
    """Takes the place of an object that says nothing about the weights: keeps what it was made
    with in `args`, does nothing."""

    def __new__(cls, *args):
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state):
        pass


# What training loops save beside the weights.
_STAND_INS = """
    argparse.Namespace
    builtins.getattr
    deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
    deepspeed.runtime.fp16.loss_scaler.LossScaler
    deepspeed.runtime.zero.config.ZeroStageEnum
    deepspeed.utils.tensor_fragment.fragment_address
    numpy.dtype
    numpy.ndarray
    numpy.core.multiarray._reconstruct
    numpy.core.multiarray.scalar
    numpy._core.multiarray._reconstruct
    numpy._core.multiarray.scalar
    pathlib.PosixPath
    pathlib.WindowsPath
    pathlib._local.PosixPath
    pathlib._local.WindowsPath
""".split()


def read_file(path):
    """(tensors, format in words, notes) of a file of weights, or of an index of several."""
    if path.name.endswith(".index.json"):
        kind = "safetensors" if "safetensors" in path.name else "torch.save"
        return _sharded(path), f"sharded {kind}", []
    kind = "safetensors" if path.suffix == ".safetensors" else f"torch.save ({path.name})"
    return _tensors(path), kind, []


def _tensors(path):
    if path.suffix != ".safetensors":
        return plain_tensors(_state_dict_of(load_torch_file(path), path), path)
    try:
        return load_file(path)
    except Exception as error:  # whatever a damaged file leads to
        raise unreadable(path, error) from None


def _sharded(index):
    """Tensors of all files that an index names."""
    weight_map = read_json(index)["weight_map"]
    files = weight_map.values()
    absent = {repr(name) for name in files if not is_file_in(index.parent, name)}
    if absent:
        raise UserError(f"{index} names files that are not beside it: {listed(sorted(absent), 5)}.")
    tensors = {}
    for name in sorted(set(files)):
        part = _tensors(index.parent / name)
        if doubled := sorted(tensors.keys() & part.keys()):
            raise UserError(f"{index.parent} holds tensors in several shards: {listed(doubled)}.")
        tensors |= part
    if absent := sorted(weight_map.keys() - tensors.keys()):
        raise UserError(f"the shards of {index} lack tensors that it names: {listed(absent)}.")
    return tensors


def is_file_in(folder, name):
    """Whether a name that a checkpoint gives is that of a file in its own folder."""
    is_text = isinstance(name, str) and len(name) < 256 and not set(name) & set("/\\\0")
    return is_text and (folder / name).is_file()


def unreadable(path, error):
    """The UserError about a file that its reader could not make sense of."""
    return UserError(
        f"{path} cannot be read, it is truncated or not a file of weights ({one_line(error)})."
    )


def foreign_class(where, name):
    """The UserError about a pickle that names a class or function which is not taken from it."""
    return UserError(
        f"{where} holds an object of class {name}, which no checkpoint of a NeoBERT needs; nothing "
        "of it was run or loaded."
    )


def check_archive(file, path):
    """Raises UserError for what torch does not look for in the zip form of torch.save: compressed
    numbers where they are mapped, and numbers without the checksum that was saved with them.

    Args:
        file: its path, or an open binary file.
        path: for messages.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UserError(
                f"{path} was packed anew with compression, which is not read: save it with "
                "torch.save."
            )
        # torch.serialization.set_crc32_options(False) leaves all checksums zero.
        damaged = archive.testzip() if any(entry.CRC for entry in entries) else None
    if damaged:
        raise UserError(
            f"{path} is damaged: {damaged} in it does not have the checksum that was saved with it."
        )


def load_torch_file(path):
    """The content of a file of torch.save; its tensors are mapped in the zip form of torch 1.6 and
    later, and else loaded.

    Raises:
        UserError: truncated, damaged or foreign, or with an object of an unknown class (named).
    """
    stand_ins = [(StandIn, name) for name in _STAND_INS]
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            check_archive(path, path)
        with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file leads to
        if isinstance(error, pickle.UnpicklingError):
            error = error.__context__ or error  # without torch's advice to read it with code
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise foreign_class(path, named[1]) if named else unreadable(path, error) from None


def _state_dict_of(data, path):
    """The state dict in what a torch file holds: itself, or below a key that training loops use."""
    for _ in range(4):
        if not isinstance(data, dict):
            break
        keys = ("state_dict", "model_state_dict", "model", "module")
        below = [data[key] for key in keys if isinstance(data.get(key), dict)]
        if not below and any(isinstance(value, torch.Tensor) for value in data.values()):
            return data
        data = below[0] if below else None
    raise UserError(
        f"{path} holds no state dict: expected a mapping of names to tensors, or one below 'model' "
        "or 'state_dict'."
    )


def plain_tensors(mapping, path):
    """{name: tensor} of what a file maps names to, without its other values.

    Raises:
        UserError: a tensor that is not plain numbers, as many as the file holds.
    """
    tensors = {
        name: value.detach()
        for name, value in mapping.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    for name, tensor in tensors.items():
        if not _is_plain(tensor):
            raise UserError(
                f"{path}: {name} is no plain tensor (sparse, nested, quantized, without numbers, "
                "or with repeated ones); save it as one."
            )
    return tensors


def _is_plain(tensor):
    if type(tensor) is not torch.Tensor or tensor.is_nested or tensor.layout != torch.strided:
        return False
    # A small file must not become a large one: `expand` repeats numbers.
    is_whole = tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
    return is_whole and not (tensor.is_meta or tensor.is_quantized)
