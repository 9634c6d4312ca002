"""Pins the reader of safetensors files and of weights in several files: bit for bit, or refused
with what is wrong."""

import json
import os
import random

import pytest
import torch
from conversion_helpers import assert_same
from safetensors.torch import load_file, save_file

from neobert.common.errors import UserError
from neobert.conversion.locate import open_checkpoint
from neobert.conversion.safetensors_files import safetensors_tensors


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
            for stored in safetensors_tensors(path).values():
                stored.read()
        except UserError:
            refused += 1
    assert refused > 50


def test_a_dtype_that_is_not_of_weights(tmp_path):
    save_file(
        {"encoder.weight": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        UserError,
        match="encoder.weight is stored as F8_E4M3, which is not a dtype of training weights",
    ):
        open_checkpoint(tmp_path)


def test_shards_missing_doubled_or_lacking_a_tensor(tmp_path, model):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    content = load_file(shards[0])
    save_file(content | load_file(shards[1]), shards[1])
    with pytest.raises(UserError, match=f"twice, in several shards: .*{min(content)}"):
        open_checkpoint(tmp_path)
    dropped = sorted(load_file(shards[1]).keys() - content.keys())
    save_file({"other": torch.zeros(1)}, shards[1])
    with pytest.raises(UserError, match=f"lack tensors .*{dropped[0]}"):
        open_checkpoint(tmp_path)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"files that are not there: {shards[1].name}"):
        open_checkpoint(tmp_path)
    os.mkfifo(shards[1])
    with pytest.raises(UserError, match=f"files that are not there: {shards[1].name}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"weight_map": {"a": 5}}, "should name files beside it, but names 5"),
        ({"weight_map": {"a": None}}, "names None"),
        ({"weight_map": {"a": ["x"]}}, "names \\['x'\\]"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names '/etc/passwd'"),
        ({"weight_map": {"a": "../run/x.safetensors"}}, "names '../run/x.safetensors'"),
        ({"weight_map": {"a": ".."}}, "names '..'"),
        ({"weight_map": {"a": "."}}, "names '.'"),
        ({"weight_map": {"a": ""}}, "names ''"),
        ({"weight_map": {"a": "x\0y"}}, r"names 'x\\x00y'"),
        ({"weight_map": {"a": "x\x1b[2J"}}, r"files that are not there: x\\x1b\[2J"),
        ({"weight_map": {"a": "x" * 300}}, "should name files beside it"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": None}, "has no weight_map"),
        ([1], "has no weight_map"),
        (None, "has no weight_map"),
        ("{", "not valid JSON"),
        ('{"weight_map": NaN}', "NaN is not a finite number"),
        ("[" * 10**5, "not valid JSON"),
        (b"\xff", "not UTF-8"),
        (" " * 4_000_001, "more than 4,000,000 bytes"),
    ],
    ids=range(20),
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_index_files(tmp_path, name, content, message):
    data = content if isinstance(content, (str, bytes)) else json.dumps(content)
    (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(UserError, match=message) as refusal:
        open_checkpoint(tmp_path)
    assert len(str(refusal.value)) < 1000 and str(refusal.value).isprintable()


def test_one_file_of_several_that_is_named_by_a_device(tmp_path):
    """A link is followed, as clusters need it, but not to a device."""
    (tmp_path / "shard.safetensors").symlink_to("/dev/zero")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "shard.safetensors"}}'
    )
    with pytest.raises(UserError, match="files that are not there: shard.safetensors"):
        open_checkpoint(tmp_path)
