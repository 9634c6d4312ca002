"""Pins the readers of torch.save and safetensors files, one or several with an index: every tensor
bit for bit; no code in a file runs; damage is one sentence.
"""

import argparse
import collections
import io
import json
import os
import pickle
import random
import re
import tarfile
import zipfile

import numpy
import pytest
import torch
from conversion_helpers import assert_same
from safetensors.torch import load_file, save_file

from neobert.common.errors import UserError
from neobert.conversion.locate import open_checkpoint
from neobert.conversion.weight_files import StandIn, load_torch_file, read_file


def torch_tensors(path):
    return read_file(path)[0]


@pytest.fixture
def state():
    """Every layout that a plain tensor may have."""
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
def test_every_tensor_bit_for_bit(tmp_path, state, form):
    if form == "old":
        del state["unsigned"]  # torch itself does not read it from there without code
    torch.serialization.set_crc32_options(form != "without checksums")
    try:
        torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=form != "old")
    finally:
        torch.serialization.set_crc32_options(True)
    tensors = torch_tensors(tmp_path / "a.pt")
    assert tensors.keys() == state.keys()
    for name, expected in state.items():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected), f"{name} is not what was saved"


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_state_dict_below_a_key(tmp_path, state, key):
    torch.save(
        {
            key: {"model": state} if key == "state_dict" else state,
            "epoch": 3,
            "optimizer": {"state": {}},
        },
        tmp_path / "a.pt",
    )
    assert torch_tensors(tmp_path / "a.pt").keys() == state.keys()


def test_what_training_loops_save_beside_the_weights_is_no_reason_to_refuse(tmp_path):
    """None of these classes is made: stand-ins take their places by name."""
    extra = {"args": argparse.Namespace(lr=1e-4, path=tmp_path)}
    extra |= {
        "loss": numpy.float64(0.5),
        "random": numpy.arange(3),
        "dtype": numpy.dtype("float32"),
    }
    torch.save({"model": {"w": torch.ones(2)}, **extra}, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch_tensors(tmp_path / "a.pt")["w"].tolist() == [1, 1]
    assert type(load_torch_file(tmp_path / "a.pt")["args"]) is not argparse.Namespace
    assert (StandIn, "argparse.Namespace") not in torch.serialization.get_safe_globals(), (
        "it stays allowed for others"
    )


# ------------------------------------------------------------------------------------------------
# damage


@pytest.mark.parametrize("form", ["zip", "old"])
def test_truncated_anywhere(tmp_path, state, form):
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=form == "zip")
    data = (tmp_path / "a.pt").read_bytes()
    for length in {*range(0, len(data), max(1, len(data) // 40)), len(data) - 1}:
        (tmp_path / "a.pt").write_bytes(data[:length])
        with pytest.raises(
            UserError, match="is truncated|holds an object of class"
        ):  # in the middle of a name
            torch_tensors(tmp_path / "a.pt")


def test_one_flipped_bit_of_the_numbers_is_found(tmp_path):
    weight = torch.randn(100)
    torch.save({"a": weight, "b": torch.ones(3)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(weight.numpy().tobytes()) + 101] ^= 4
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(
        UserError, match="a.pt is damaged: a/data/0 in it does not have the checksum"
    ):
        torch_tensors(tmp_path / "a.pt")


def _repack(path, change):
    """Packs an archive anew, with right checksums; `change` maps {name: content} to what is packed
    and its compression."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    records, compression = change(records)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def test_settings_below_the_name_of_a_model_are_not_its_weights(tmp_path):
    torch.save(
        {"model": {"hidden_size": 64}, "state_dict": {"a": torch.ones(2)}}, tmp_path / "a.pt"
    )
    assert list(torch_tensors(tmp_path / "a.pt")) == ["a"]


def test_packed_anew_with_compression_is_refused(tmp_path):
    """Mapped raw, the compressed bytes would be taken for weights."""
    torch.save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    _repack(tmp_path / "a.pt", lambda records: (records, zipfile.ZIP_DEFLATED))
    with pytest.raises(UserError, match="packed anew with compression"):
        torch_tensors(tmp_path / "a.pt")


def test_packed_anew_without_compression_is_read(tmp_path):
    torch.save({"a": torch.arange(5.0)}, tmp_path / "a.pt")
    _repack(tmp_path / "a.pt", lambda records: (records, zipfile.ZIP_STORED))
    assert torch_tensors(tmp_path / "a.pt")["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.empty(2, 2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        lambda: torch.zeros(1).expand(10**9, 64),
    ],
    ids=["sparse", "csr", "nested", "meta", "quantised", "a small file as a large tensor"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_numbers(tmp_path, tensor):
    torch.save({"a": torch.ones(2), "model.x\x1b": tensor()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"model.x\\x1b is no plain tensor .*; save it as one"):
        torch_tensors(tmp_path / "a.pt")


def test_not_a_file_of_weights(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, message in (
        ("pipe", "is not a file"),
        ("folder", "is not a file"),
        ("none", "no file "),
        ("empty", "cannot be read"),
        ("text", "cannot be read"),
        ("list", "holds no state dict"),
    ):
        with pytest.raises(UserError, match=message):
            torch_tensors(tmp_path / f"{name}.pt")


# ------------------------------------------------------------------------------------------------
# no code runs


class _Touch:
    """Runs a command when a plain unpickler loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class _Evaluate(_Touch):
    def __reduce__(self):
        return eval, (f"open({str(self.path)!r}, 'w')",)


def _tar(path, evil):
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(evil)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("evil_class", [_Touch, _Evaluate])
@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "tar", "deepspeed", "dcp", "bare zip"])
def test_malicious_pickle_does_not_run(tmp_path, evil_class, kind):
    proof, evil = tmp_path / "proof", evil_class(tmp_path / "proof")
    path = tmp_path / "run" / "state_dict.pt"
    path.parent.mkdir()
    if kind in ("zip", "legacy"):
        torch.save(
            {"a": torch.zeros(2), "b": evil}, path, _use_new_zipfile_serialization=kind == "zip"
        )
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(evil))
    elif kind == "tar":
        _tar(path, evil)
    elif kind == "bare zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(evil, protocol=2))
            archive.writestr("archive/version", "3\n")
    elif kind == "deepspeed":
        torch.save(
            {"module": {"a": torch.zeros(2)}, "param_shapes": evil},
            path.with_name("mp_rank_00_model_states.pt"),
        )
    else:
        path.with_name(".metadata").write_bytes(pickle.dumps(evil))
    with pytest.raises(UserError) as refusal:
        open_checkpoint(path.parent)
    assert not proof.exists(), "code in the checkpoint was run"
    if kind in ("zip", "legacy", "deepspeed", "dcp"):
        name = "system" if evil_class is _Touch else "eval"
        assert re.search(rf"class [\w.]*\b{name}, which no checkpoint", str(refusal.value)), (
            f"the refusal does not name the class: {refusal.value}"
        )
    assert len(str(refusal.value).splitlines()) == 1, "more than one sentence"


def test_the_malicious_pickle_would_run(tmp_path):
    """Guards the test above against being vacuous."""
    torch.save({"b": _Touch(tmp_path / "proof")}, tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "proof").exists()


def test_an_unknown_class_is_named(tmp_path):
    torch.save(
        {"a": torch.zeros(2), "args": pytest.Mark("a", (), {}, _ispytest=True)},
        tmp_path / "state_dict.pt",
    )
    with pytest.raises(UserError, match=r"class _pytest\.mark\.structures\.Mark"):
        open_checkpoint(tmp_path)


def _flipped(data, most, count, generator):
    """`data` with `count` of its first `most` bytes replaced."""
    data = bytearray(data)
    for _ in range(count):
        data[generator.randrange(most)] = generator.randrange(256)
    return bytes(data)


def test_random_damage_never_ends_otherwise_than_in_a_sentence(tmp_path, state):
    """Flipped bytes of the description, with its checksum made right again, so that all of it is
    parsed."""
    generator, outcomes = random.Random(0), collections.Counter()
    torch.save(state, tmp_path / "good.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    good, old = ((tmp_path / name).read_bytes() for name in ("good.pt", "old.pt"))
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        description = archive.read("good/data.pkl")
    for number in range(120):
        if number % 2:
            damaged = _flipped(description, len(description), 1 + number % 3, generator)
            (tmp_path / "a.pt").write_bytes(good)
            _repack(
                tmp_path / "a.pt",
                lambda records, damaged=damaged: (
                    {**records, "good/data.pkl": damaged},
                    zipfile.ZIP_STORED,
                ),
            )
        else:
            (tmp_path / "a.pt").write_bytes(_flipped(old, 1500, 1 + number % 3, generator))
        try:
            for stored in torch_tensors(tmp_path / "a.pt").values():
                stored.clone()
            outcomes["read"] += 1
        except UserError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20, outcomes


# ------------------------------------------------------------------------------------------------
# safetensors, and weights in several files


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_hub_folder(tmp_path, model, shard_size):
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "100KB"), (
        "not the layout that this test is about"
    )
    assert_same(open_checkpoint(tmp_path), model.state_dict())


def test_sharded_torch_files(tmp_path, model):
    names = list(model.state_dict())
    parts = {
        "pytorch_model-00001-of-00002.bin": names[:9],
        "pytorch_model-00002-of-00002.bin": names[9:],
    }
    for file, part in parts.items():
        torch.save({name: model.state_dict()[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(open_checkpoint(tmp_path), model.state_dict())


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_truncated(tmp_path, model, kept):
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(UserError, match="cannot be read, it is truncated or not a file of weights"):
        open_checkpoint(tmp_path)


def test_damaged_header_never_ends_otherwise_than_in_a_sentence(tmp_path):
    generator, path = random.Random(0), tmp_path / "model.safetensors"
    save_file({"encoder.weight": torch.ones(4, 6), "b": torch.ones(3).half()}, path)
    data, refused = path.read_bytes(), 0
    for _ in range(150):
        damaged = bytearray(data)
        damaged[generator.randrange(160)] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            read_file(path)
        except UserError:
            refused += 1
    assert refused > 50


def test_shards_missing_doubled_or_lacking_a_tensor(tmp_path, model):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    content = load_file(shards[0])
    save_file(content | load_file(shards[1]), shards[1])
    with pytest.raises(UserError, match=f"in several shards: .*{min(content)}"):
        open_checkpoint(tmp_path)
    dropped = sorted(load_file(shards[1]).keys() - content.keys())
    save_file({"other": torch.zeros(1)}, shards[1])
    with pytest.raises(UserError, match=f"lack tensors .*{dropped[0]}"):
        open_checkpoint(tmp_path)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"files that are not beside it: '{shards[1].name}'"):
        open_checkpoint(tmp_path)
    os.mkfifo(shards[1])
    with pytest.raises(UserError, match=f"files that are not beside it: '{shards[1].name}'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"weight_map": {"a": 5}}, "names files that are not beside it: 5"),
        ({"weight_map": {"a": None}}, "not beside it: None"),
        ({"weight_map": {"a": ["x"]}}, "not beside it: \\['x'\\]"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not beside it: '/etc/passwd'"),
        ({"weight_map": {"a": "../run/x.safetensors"}}, "not beside it: '../run/x.safetensors'"),
        ({"weight_map": {"a": ".."}}, "not beside it: '..'"),
        ({"weight_map": {"a": "x\0y"}}, r"not beside it: 'x\\x00y'"),
        ({"weight_map": {"a": "x\x1b[2J"}}, r"not beside it: 'x\\x1b\[2J"),
        ({"weight_map": {"a": "x" * 300}}, "not beside it: 'x"),
        ({"weight_map": {"a": "device"}}, "not beside it: 'device'"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ([1], "has no weight_map"),
        ("{", "not valid JSON"),
        (b"\xff", "cannot be read"),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_index_files(tmp_path, name, content, message):
    (tmp_path / "device").symlink_to("/dev/zero")
    data = content if isinstance(content, (str, bytes)) else json.dumps(content)
    (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(UserError, match=message) as refusal:
        open_checkpoint(tmp_path)
    assert len(str(refusal.value)) < 1000 and str(refusal.value).isprintable()
