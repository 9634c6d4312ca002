"""Pins the reader of torch.save files: every tensor bit for bit, in both forms that torch writes;
no code in a file runs; damage is found by checksum and is one sentence.
"""

import argparse
import collections
import io
import os
import pickle
import random
import re
import tarfile
import zipfile

import numpy
import pytest
import torch

from neobert.common.errors import UserError
from neobert.conversion.locate import open_checkpoint
from neobert.conversion.torch_files import StandIn, load_torch_file, torch_tensors


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
        stored, expected = tensors[name], expected.detach()
        assert (stored.shape, stored.dtype) == (tuple(expected.shape), expected.dtype), name
        assert torch.equal(stored.read(), expected), f"{name} is not what was saved"
        assert stored.read().dtype == expected.dtype
    assert (
        tensors["whole"].storage == torch_tensors(tmp_path / "a.pt")["whole"].storage
        or tensors["whole"].storage != tensors["row"].storage
    )


def test_shared_memory_is_known(tmp_path):
    weight = torch.randn(2, 3)
    torch.save({"a": weight, "b": weight, "c": weight.t(), "d": weight.clone()}, tmp_path / "a.pt")
    storages = {name: stored.storage for name, stored in torch_tensors(tmp_path / "a.pt").items()}
    assert storages["a"] == storages["b"] and storages["a"] not in (storages["c"], storages["d"])


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


def test_what_torch_loads_without_code_is_loaded(tmp_path):
    """Things beside the tensors that torch.load(weights_only=True) takes; they are of no use, but
    no reason to refuse."""
    extra = {
        "set": {1, 2},
        "counter": collections.Counter("ab"),
        "complex": 1j,
        "bytes": b"\xff",
        "array": bytearray(b"ab"),
        "none": None,
    }
    extra |= {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "size": torch.Size([2]),
        "ordered": collections.OrderedDict(x=1),
    }
    extra |= {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "long": 1 << 70,
        "nested": [{"a": (1, [2])}],
    }
    attributed = torch.nn.Parameter(torch.ones(2))
    attributed.kept = 3
    for form in (True, False):
        torch.save(
            {"model": {"w": torch.ones(2), "p": attributed}, **extra},
            tmp_path / "a.pt",
            _use_new_zipfile_serialization=form,
        )
        torch.load(tmp_path / "a.pt", weights_only=True)
        assert torch_tensors(tmp_path / "a.pt")["p"].read().tolist() == [1, 1]


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
    assert torch_tensors(tmp_path / "a.pt")["w"].read().tolist() == [1, 1]
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


def test_one_flipped_bit_of_the_description_is_found(tmp_path):
    torch.save({"weight": torch.ones(3)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data.replace(b"weight", b"wdight"))
    with pytest.raises(UserError, match="damaged"):
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
    assert torch_tensors(tmp_path / "a.pt")["a"].read().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "tensor, kind",
    [
        (lambda: torch.eye(2).to_sparse(), "a sparse tensor"),
        (lambda: torch.eye(2).to_sparse_csr(), "a sparse tensor"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested tensor"),
        (lambda: torch.empty(2, 2, device="meta"), "a tensor of the meta device"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
            "a quantised tensor",
        ),
    ],
    ids=["sparse", "csr", "nested", "meta", "quantised"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_numbers(tmp_path, tensor, kind):
    torch.save({"a": torch.ones(2), "model.x": tensor()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=f"model.x is {kind}.*; save it as a plain tensor"):
        torch_tensors(tmp_path / "a.pt")


def test_a_small_file_is_not_a_large_tensor(tmp_path):
    torch.save({"a": torch.zeros(1).expand(10**9, 64)}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 5000
    with pytest.raises(UserError, match="a is a tensor that repeats its numbers"):
        torch_tensors(tmp_path / "a.pt")


@pytest.mark.parametrize("name", [5, None, ("a", "b"), b"a"])
def test_names_that_are_not_text(tmp_path, name):
    torch.save({"a": torch.ones(2), name: torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="whose name is not text"):
        open_checkpoint(tmp_path / "a.pt")


def test_names_of_strangers_are_escaped(tmp_path):
    name = "model.\x1b]0;owned\x07"
    torch.save({"encoder.weight": torch.ones(2), name: torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(UserError) as refusal:
        torch_tensors(tmp_path / "a.pt")
    assert "\\x1b]0;owned\\x07" in str(refusal.value) and "\x1b" not in str(refusal.value)


def test_not_a_file_of_weights(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, message in (
        *(
            ("pipe", "not a file, but a pipe"),
            ("folder", "not a file, but a folder"),
            ("none", "does not exist"),
        ),
        *(("empty", "cannot be read"), ("text", "cannot be read"), ("list", "holds no state dict")),
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
                stored.read().clone()
            outcomes["read"] += 1
        except UserError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20, outcomes


def test_the_content_of_any_file_is_loaded_once(tmp_path):
    torch.save({"step": torch.tensor(7), "list": [torch.ones(1)]}, tmp_path / "a.pt")
    content = load_torch_file(tmp_path / "a.pt")
    assert content["step"].item() == 7 and content["list"][0].item() == 1
