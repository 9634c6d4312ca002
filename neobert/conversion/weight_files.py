"""Files of torch.save and safetensors, single or sharded with an index.

torch's reader of weights (`weights_only=True`) reads them: no code in a file is executed, and the
values stay memory-mapped where the format allows it.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors.torch import load_file

from ..common.errors import UserError, listed, one_line
from ..common.files import read_json


class Weights(NamedTuple):
    """Content of a checkpoint.

    Attributes:
        tensors: Tensors by the names in the checkpoint.
        format: Format of the checkpoint, in words.
        notes: Sentences for the user about how the checkpoint was read.
    """

    tensors: dict[str, torch.Tensor]
    format: str
    notes: list[str]


class StandIn:
    """Replacement for an object that contains no weights. Its methods have no effect.

    Attributes:
        args: Arguments that the object was pickled with.
    """

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> "StandIn":
        """Store the arguments."""
        stand_in = super().__new__(cls)
        stand_in.args = args
        return stand_in

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""


# Classes and functions that training loops save beside the weights. torch refuses unknown ones, so
# they are replaced by `StandIn`, which executes nothing.
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


def read_file(path: Path) -> Weights:
    """Read a file of weights, or all files that an index lists.

    Raises:
        UserError: If a file is missing or damaged, or contains anything but plain tensors.
    """
    if path.name.endswith(".index.json"):
        file_format = "safetensors" if "safetensors" in path.name else "torch.save"
        return Weights(_read_shards(path), f"sharded {file_format}", [])

    is_safetensors = path.suffix == ".safetensors"
    file_format = "safetensors" if is_safetensors else f"torch.save ({path.name})"
    return Weights(_read_tensors(path), file_format, [])


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one file."""
    if path.suffix != ".safetensors":
        return plain_tensors(_find_state_dict(load_torch_file(path), path), path)
    try:
        return load_file(path)
    except Exception as error:  # A damaged file can raise any exception.
        raise unreadable(path, error) from None


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files that an index lists."""
    # The index maps the names of the tensors to those of the files.
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise UserError(
            f"{index} must map the names of tensors to files under the key weight_map. Use a "
            "complete checkpoint."
        )
    files = weight_map.values()
    # The names are untrusted: a path such as ../other/model.bin must not be read.
    missing_files = {repr(name) for name in files if not is_file_in(index.parent, name)}
    if missing_files:
        raise UserError(
            f"the files that {index} lists must be beside it, and these are not: "
            f"{listed(sorted(missing_files), 5)}."
        )

    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(files)):
        shard = _read_tensors(index.parent / name)
        # Which of two tensors belongs to the model cannot be decided.
        duplicates = sorted(tensors.keys() & shard.keys())
        if duplicates:
            raise UserError(
                f"{index.parent} contains tensors in several shards: {listed(duplicates)}."
            )
        tensors |= shard

    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise UserError(f"the shards of {index} lack tensors that it lists: {listed(missing)}.")
    return tensors


def is_file_in(folder: Path, name: object) -> bool:
    """Return whether a name from an untrusted checkpoint is that of a file in its directory."""
    is_name = isinstance(name, str) and len(name) < 256 and not set(name) & set("/\\\0")
    return is_name and (folder / str(name)).is_file()


def unreadable(path: Path, error: object) -> UserError:
    """Return the error about a file that cannot be parsed."""
    return UserError(
        f"{path} cannot be read: it is truncated or not a file of weights ({one_line(error)})."
    )


def foreign_class(path: str | Path, name: str) -> UserError:
    """Return the error about a pickle that refers to a class or function that is not allowed."""
    return UserError(
        f"{path} contains an object of class {name}, which is not allowed in a checkpoint. No code "
        "of the file was executed."
    )


def check_archive(file: Path | IO[bytes], path: str | Path) -> None:
    """Check the zip archive of torch.save for damage that torch does not notice.

    torch would map compressed values as weights, and it does not compare the checksums.

    Args:
        file: Path of the archive, or an open binary file.
        path: Path for messages.

    Raises:
        UserError: If the archive is compressed, or a checksum differs.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UserError(
                f"{path} must be an uncompressed archive, got a compressed one. Save it with "
                "torch.save."
            )
        # torch.serialization.set_crc32_options(False) sets all checksums to zero.
        damaged = archive.testzip() if any(entry.CRC for entry in entries) else None
    if damaged:
        raise UserError(f"{path} is damaged: the checksum of {damaged} differs from the saved one.")


def load_torch_file(path: Path) -> Any:
    """Load a file of torch.save without executing code.

    The tensors are memory-mapped if the file has the zip format of torch 1.6 and later.

    Raises:
        UserError: If the file is truncated or damaged, or contains an object of a class that is
            not allowed, which the message names.
    """
    # safe_globals also accepts pairs of a replacement and the pickled name.
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (StandIn, name) for name in _STAND_INS
    ]

    try:
        # The format before torch 1.6 is a plain pickle, which torch cannot map.
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            check_archive(path, path)
        # torch warns about deprecated types of storage in older files.
        with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except UserError:
        raise
    except Exception as error:  # A damaged file can raise any exception.
        cause: BaseException = error
        if isinstance(error, pickle.UnpicklingError) and error.__context__:
            # torch's message advises to load the file with code; its cause does not.
            cause = error.__context__
        # The message names the class only in this form.
        class_name = re.search(r"GLOBAL (\S+)", str(cause))
        if class_name:
            raise foreign_class(path, class_name[1]) from None
        raise unreadable(path, cause) from None


def _find_state_dict(data: Any, path: Path) -> dict[Any, Any]:
    """Return the state dict in a loaded file: the data, or a value below a usual key."""
    # State dicts may be nested, as in {"model": {"module": {...}}}. The limit ends the cycles that
    # an untrusted file can contain.
    for _ in range(4):
        if not isinstance(data, dict):
            break
        keys = ("state_dict", "model_state_dict", "model", "module")
        children = [data[key] for key in keys if isinstance(data.get(key), dict)]
        if not children and any(isinstance(value, torch.Tensor) for value in data.values()):
            return data
        data = children[0] if children else None
    raise UserError(
        f"{path} must contain a state dict, that is a mapping of names to tensors, or one below "
        "the key 'model' or 'state_dict'."
    )


def plain_tensors(mapping: Mapping[Any, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a mapping by name, without its other values.

    Raises:
        UserError: If a tensor is not plain, or has more elements than the file has values.
    """
    tensors = {
        name: value.detach()
        for name, value in mapping.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    for name, tensor in tensors.items():
        if not _is_plain(tensor):
            raise UserError(
                f"{name} in {path} must be a plain tensor, got a sparse, nested, quantized, meta "
                "or expanded one. Save it as a plain tensor."
            )
    return tensors


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense and its storage contains every element."""
    if type(tensor) is not torch.Tensor or tensor.is_nested or tensor.layout != torch.strided:
        return False
    # `expand` repeats values: a small file must not become a large model.
    is_complete = tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()
    return is_complete and not (tensor.is_meta or tensor.is_quantized)
