"""Files of torch.save, read by torch's own reader of weights: no code in them runs, and numbers
stay in the file until they are needed."""

import io
import pickle
import re
import warnings
import zipfile

import torch

from ..common.errors import UserError
from ..common.files import check_file
from .stored import tensors_of, unreadable


class StandIn:
    """Takes the place of an object that says nothing about the weights: keeps what it was made
    with, does nothing.

    Attributes:
        args: arguments of its class.
        state: what the pickle gives it afterwards.
    """

    def __new__(cls, *args):
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state):
        self.state = state


_PATHS = [
    f"{module}.{name}Path"
    for module in ("pathlib", "pathlib._local")
    for name in ("Posix", "Windows")
]
_NUMPY = [
    f"{module}.multiarray.{name}"
    for module in ("numpy.core", "numpy._core")
    for name in ("scalar", "_reconstruct")
]
# What training loops save beside the weights.
_STAND_INS = [
    *(
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    ),
    *(
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ),
    *("argparse.Namespace", "numpy.dtype", "numpy.ndarray", *_NUMPY, *_PATHS),
]


def foreign_class(where, path):
    """The UserError about a pickle that names a class or function which is not taken from it."""
    return UserError(
        f"{where} holds an object of class {path}, which no checkpoint of a NeoBERT needs; nothing "
        "of it was run or loaded."
    )


def _is_archive(file, where):
    """Whether a file has the zip form, of torch 1.6 and later.

    Raises:
        UserError: its numbers are compressed, or do not have the checksums that were saved with
            them.
    """
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        # Memory-mapped, the compressed bytes would be taken for weights.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UserError(
                f"{where} was packed anew with compression, which is not read: save it with "
                "torch.save."
            )
        # torch.serialization.set_crc32_options(False) leaves all checksums zero.
        damaged = archive.testzip() if any(entry.CRC for entry in entries) else None
    if damaged:
        raise UserError(
            f"{where} is damaged: {damaged} in it does not have the checksum that was saved with "
            "it."
        )
    return True


def load_torch_file(path, part=None):
    """The content of a file of torch.save: its tensors are memory-mapped in the zip form, and else
    loaded.

    Args:
        path: the file.
        part: bytes of it, to be read in place of the complete file.
    Raises:
        UserError: truncated, damaged or foreign, or with an object of an unknown class (named).
    """
    check_file(path)
    file = path if part is None else io.BytesIO(part)
    try:
        mapped = _is_archive(file, path) and part is None
        if part is not None:
            file.seek(0)
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals([(StandIn, name) for name in _STAND_INS]),
        ):
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
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
        below = [
            data[key]
            for key in ("state_dict", "model_state_dict", "model", "module")
            if isinstance(data.get(key), dict)
        ]
        if not below and any(isinstance(value, torch.Tensor) for value in data.values()):
            return data
        data = below[0] if below else None
    raise UserError(
        f"{path} holds no state dict: expected a mapping of names to tensors, or one below 'model' "
        "or 'state_dict'."
    )


def torch_tensors(path):
    """All tensors of the state dict in a torch.save file."""
    return tensors_of(_state_dict_of(load_torch_file(path), path), path)
