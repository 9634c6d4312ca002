"""Test the readers of torch.save and safetensors files, single or sharded.

Every tensor must equal the saved one bit for bit. Code in a file is not executed, and a damaged
file raises an error of one line.
"""

import argparse
import io
import json
import os
import pickle
import re
import tarfile
import zipfile

import numpy
import pytest
import torch
from helpers.conversion_helpers import assert_same
from safetensors.torch import load_file, save_file

from neobert.common.errors import UserError
from neobert.conversion.locate import open_checkpoint
from neobert.conversion.weight_files import StandIn, load_torch_file, read_file


def torch_tensors(path):
    """Return the tensors of a file by name."""
    return read_file(path)[0]


@pytest.fixture
def state():
    """Return a state dict with every dtype and memory layout that a plain tensor can have."""
    shared = torch.randn(4, 6)
    return {
        "a": torch.randn(3, 5),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "transposed": torch.randn(4, 5).t(),
        "slice": torch.arange(10.0)[3:9:2],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5),
        "half": torch.randn(3).half(),
        "bfloat": torch.randn(7).bfloat16(),
        "double": torch.randn(3).double(),
        "long": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "unsigned": torch.tensor([1, 2], dtype=torch.uint16),
        "whole": shared,
        "row": shared[2],
    }


@pytest.mark.parametrize("form", ["zip", "old", "without checksums"])
def test_tensors_are_read_bit_for_bit(tmp_path, state, form):
    """Check all tensors in the zip format, in the older format, and without checksums."""
    if form == "old":
        # With `weights_only=True`, torch cannot load uint16 from the old format.
        del state["unsigned"]
    torch.serialization.set_crc32_options(form != "without checksums")
    try:
        torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=form != "old")
    finally:
        torch.serialization.set_crc32_options(True)

    tensors = torch_tensors(tmp_path / "a.pt")
    assert tensors.keys() == state.keys()
    for name, expected in state.items():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected), f"{name} differs from the saved tensor"


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_state_dict_below_a_key(tmp_path, state, key):
    """Check that a state dict is found below the usual keys, and other values are ignored."""
    below = {"model": state} if key == "state_dict" else state
    torch.save({key: below, "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "a.pt")
    assert torch_tensors(tmp_path / "a.pt").keys() == state.keys()


def test_settings_under_the_model_key_are_not_weights(tmp_path):
    """Settings below the key `model` do not hide the weights below `state_dict`."""
    content = {"model": {"hidden_size": 64}, "state_dict": {"a": torch.ones(2)}}
    torch.save(content, tmp_path / "a.pt")
    assert list(torch_tensors(tmp_path / "a.pt")) == ["a"]


def test_other_objects_next_to_weights_are_accepted(tmp_path):
    """Check that arguments, random states and other objects beside the weights are accepted.

    No object of their classes is created. The reader replaces them by `StandIn`.
    """
    extra = {"args": argparse.Namespace(lr=1e-4, path=tmp_path), "loss": numpy.float64(0.5)}
    extra |= {"random": numpy.arange(3), "dtype": numpy.dtype("float32")}
    torch.save({"model": {"w": torch.ones(2)}, **extra}, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch_tensors(tmp_path / "a.pt")["w"].tolist() == [1, 1]
    assert type(load_torch_file(tmp_path / "a.pt")["args"]) is not argparse.Namespace
    # The classes are not added to the safe globals of the process.
    assert (StandIn, "argparse.Namespace") not in torch.serialization.get_safe_globals()


# ------------------------------------------------------------------------------------------------
# Damaged files


@pytest.mark.parametrize("form", ["zip", "old"])
def test_truncated_torch_file(tmp_path, state, form):
    """Check that a file that is truncated at any position raises a `UserError`."""
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=form == "zip")
    data = (tmp_path / "a.pt").read_bytes()
    for length in {*range(0, len(data), max(1, len(data) // 40)), len(data) - 1}:
        (tmp_path / "a.pt").write_bytes(data[:length])
        # If the file ends within the name of a class, the shorter name is that of another class.
        with pytest.raises(UserError, match="is truncated|contains an object of class"):
            torch_tensors(tmp_path / "a.pt")


def test_flipped_bit_is_detected(tmp_path):
    """Check that a flipped bit in a weight is detected, which torch does not do."""
    weight = torch.randn(100)
    torch.save({"a": weight, "b": torch.ones(3)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(weight.numpy().tobytes()) + 101] ^= 4
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(UserError, match="a.pt is damaged: the checksum of a/data/0 differs"):
        torch_tensors(tmp_path / "a.pt")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_repacked_archive(tmp_path, compression):
    """Check that a repacked archive is read without compression, and rejected with compression.

    torch would memory-map the compressed bytes as weights.
    """
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)

    if compression == zipfile.ZIP_STORED:
        assert torch.equal(torch_tensors(path)["a"], torch.arange(1000.0))
    else:
        with pytest.raises(UserError, match="must be an uncompressed archive"):
            torch_tensors(path)


TENSORS = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "a small file as a large tensor": lambda: torch.zeros(1).expand(10**9, 64),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_sparse_and_expanded_tensors_are_rejected(tmp_path, tensor):
    """Check that sparse and expanded tensors are rejected, and their names are escaped."""
    torch.save({"a": torch.ones(2), "model.x\x1b": tensor()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"model.x\\x1b in .* must be a plain tensor, got"):
        torch_tensors(tmp_path / "a.pt")


def test_not_a_file_of_weights(tmp_path):
    """Check the errors about a directory, a missing file, a text file, and a list."""
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "text.pt").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, message in (
        ("folder", "cannot be read"),
        ("none", "cannot be read"),
        ("text", "cannot be read"),
        ("list", "must contain a state dict"),
    ):
        with pytest.raises(UserError, match=message):
            torch_tensors(tmp_path / f"{name}.pt")


# ------------------------------------------------------------------------------------------------
# Malicious pickles


class _Touch:
    """Object that creates a file when it is unpickled without restrictions."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def _tar(path, evil):
    """Write an object in the tar format of the first versions of torch."""
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(evil)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "tar", "deepspeed", "dcp", "bare zip"])
def test_malicious_pickle_does_not_run(tmp_path, kind):
    """Check that no format of a checkpoint executes code in a pickle.

    For most formats, the message contains the function that the pickle would call.
    """
    evil = _Touch(tmp_path / "proof")
    path = tmp_path / "run" / "state_dict.pt"
    path.parent.mkdir()

    if kind in ("zip", "legacy"):
        content = {"a": torch.zeros(2), "b": evil}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(evil))
    elif kind == "tar":
        _tar(path, evil)
    elif kind == "bare zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(evil, protocol=2))
            archive.writestr("archive/version", "3\n")
    elif kind == "deepspeed":
        content = {"module": {"a": torch.zeros(2)}, "param_shapes": evil}
        torch.save(content, path.with_name("mp_rank_00_model_states.pt"))
    else:
        path.with_name(".metadata").write_bytes(pickle.dumps(evil))

    with pytest.raises(UserError) as error:
        open_checkpoint(path.parent)

    assert not (tmp_path / "proof").exists(), "code in the checkpoint was executed"
    if kind in ("zip", "legacy", "deepspeed", "dcp"):
        assert re.search(r"class [\w.]*\bsystem, which is not allowed", str(error.value))
    assert len(str(error.value).splitlines()) == 1, "the message has more than one line"


def test_malicious_pickle_runs_without_weights_only(tmp_path):
    """Check that the pickle executes code without `weights_only`, so the test above is valid."""
    torch.save({"b": _Touch(tmp_path / "proof")}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "proof").exists()


# ------------------------------------------------------------------------------------------------
# safetensors and sharded files


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_hub_folder(tmp_path, model, shard_size):
    """Check that a folder of `save_pretrained` is read with one file and with shards."""
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "100KB")
    assert_same(open_checkpoint(tmp_path), model.state_dict())


def test_sharded_torch_files(tmp_path, model):
    state = model.state_dict()
    index = {}
    for number, names in ((1, list(state)[:9]), (2, list(state)[9:])):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: state[name] for name in names}, tmp_path / file)
        index |= dict.fromkeys(names, file)
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    assert_same(open_checkpoint(tmp_path), state)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_truncated_safetensors_file(tmp_path, model, kept):
    """Check that a safetensors file is rejected if only a fraction of its bytes remains."""
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(UserError, match="cannot be read: it is truncated or not a file of weights"):
        open_checkpoint(tmp_path)


def test_missing_duplicate_and_incomplete_shards(tmp_path, model):
    """Check the errors about a duplicate tensor, a missing tensor and a missing shard."""
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    content = load_file(shards[0])

    save_file(content | load_file(shards[1]), shards[1])
    with pytest.raises(UserError, match=f"in several shards: .*{min(content)}"):
        open_checkpoint(tmp_path)

    dropped = sorted(load_file(shards[1]).keys() - content.keys())
    save_file({"other": torch.zeros(1)}, shards[1])
    with pytest.raises(UserError, match=f"lack tensors that it lists: .*{dropped[0]}"):
        open_checkpoint(tmp_path)

    shards[1].unlink()
    with pytest.raises(
        UserError, match=f"must be beside it, and these are not: '{shards[1].name}'"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"weight_map": {"a": "/etc/passwd"}}, "these are not: '/etc/passwd'"),
        ({"weight_map": {"a": "../run/x.safetensors"}}, "these are not: '../run/x.safetensors'"),
        ({"weight_map": {"a": "x\x1b[2J"}}, r"these are not: 'x\\x1b\[2J"),
        ("{", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_invalid_index_files(tmp_path, name, content, message):
    """Check that an invalid index, or one with files outside its directory, is rejected."""
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        open_checkpoint(tmp_path)
    assert str(error.value).isprintable()
