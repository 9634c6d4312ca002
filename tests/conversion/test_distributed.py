"""Test the reader of torch.distributed.checkpoint folders.

Every tensor must equal the one that FSDP2 saved, bit for bit. Missing, truncated and damaged parts,
and parts outside of the folder, are rejected.
"""

import dataclasses
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.conversion_helpers import assert_same, write_distributed
from safetensors.torch import load_file

from neobert.common.errors import UserError
from neobert.conversion.locate import open_checkpoint


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """Return a directory with FSDP checkpoints that were written by two processes."""
    return write_distributed(tmp_path_factory.mktemp("distributed"), "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "fsdp_all"])
def test_fsdp(distributed, name):
    """Check that the parts of two processes are assembled to the original tensors."""
    checkpoint = open_checkpoint(distributed / name)
    assert len(list(checkpoint.path.rglob("*.distcp"))) == 2
    assert_same(checkpoint, load_file(distributed / "fsdp.safetensors"))


@pytest.mark.parametrize("part", ["__0_0.distcp", "__1_0.distcp"])
def test_incomplete_or_truncated_fsdp(distributed, tmp_path, part):
    """Check that a truncated or missing file of a process, and truncated metadata, are detected."""
    shutil.copytree(distributed / "fsdp_all", tmp_path / "cut")
    path = tmp_path / "cut" / part
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cut cannot be read: it is truncated"):
        open_checkpoint(tmp_path / "cut")

    path.unlink()
    with pytest.raises(UserError, match=f"{part} is missing"):
        open_checkpoint(tmp_path / "cut")

    (tmp_path / "cut" / ".metadata").write_bytes(
        (distributed / "fsdp_all" / ".metadata").read_bytes()[:500]
    )
    with pytest.raises(UserError, match="cannot be read: it is truncated"):
        open_checkpoint(tmp_path / "cut")


# A tensor that is saved in two parts.
NAME = "model.model.transformer_encoder.0.qkv.weight"


@pytest.fixture
def change(distributed, tmp_path):
    """Return a function that copies a checkpoint, edits its metadata and returns its directory."""

    def changed(edit):
        run = shutil.copytree(distributed / "fsdp_all", tmp_path / "run")
        metadata = pickle.loads((run / ".metadata").read_bytes())
        edit(metadata)
        (run / ".metadata").write_bytes(pickle.dumps(metadata))
        return run

    return changed


def _entry(metadata):
    """Return the metadata of the tensor `NAME`."""
    entry = metadata.state_dict_metadata[NAME]
    assert len(entry.chunks) == 2, "the tensor must have two parts, or the test has no effect"
    return entry


def _placed(**values):
    """Return a function that changes where the metadata locates a part of the tensor `NAME`."""

    def edit(metadata):
        index = next(index for index in metadata.storage_data if index.fqn == NAME)
        metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **values)

    return edit


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            lambda metadata: _entry(metadata).chunks.pop(),
            "lacks values of .*qkv",
        ),
        (_placed(length=300), "cannot be read"),
        (_placed(relative_path="../__0_0.distcp"), "is missing"),
        (_placed(relative_path="/etc/passwd"), "is missing"),
        (lambda metadata: delattr(metadata, "state_dict_metadata"), "cannot be read"),
    ],
    ids=range(5),
)
def test_damaged_metadata(change, edit, message):
    """Check that metadata with missing parts or wrong locations of parts is rejected."""
    run = change(edit)
    with pytest.raises(UserError, match=message):
        open_checkpoint(run)


@pytest.mark.parametrize("has_chunks, length", [(False, 0), (True, 0), (True, 2**50)])
def test_tensor_larger_than_its_files_is_not_allocated(change, monkeypatch, has_chunks, length):
    """Check that no memory is allocated for a tensor that the files do not contain.

    The metadata may claim parts of any size, and any length of the parts in the files.
    """

    def edit(metadata):
        entry = _entry(metadata)
        entry.size = torch.Size([2**24, *entry.size[1:]])
        if has_chunks:
            entry.chunks[0] = dataclasses.replace(entry.chunks[0], sizes=entry.size)
        for index, part in metadata.storage_data.items():
            if index.fqn == NAME and length:
                metadata.storage_data[index] = dataclasses.replace(part, length=length)

    run = change(edit)
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: pytest.fail("memory is allocated"))
    with pytest.raises(UserError, match="lacks values of .*qkv.* Copy all of its files"):
        open_checkpoint(run)


def test_overlapping_parts_leave_a_gap(change):
    """Check that values which no part contains are noticed after reading."""

    def edit(metadata):
        chunks = _entry(metadata).chunks
        chunks[0] = dataclasses.replace(chunks[0], offsets=chunks[1].offsets)

    with pytest.raises(UserError, match="lacks values, or contains NaN, for: .*qkv|cannot be read"):
        open_checkpoint(change(edit))


def test_the_unchanged_metadata_is_read(change, distributed):
    """Check that unchanged metadata is valid, so that the edits above cause the errors."""
    assert_same(
        open_checkpoint(change(lambda metadata: None)), load_file(distributed / "fsdp.safetensors")
    )


def test_flipped_bit_is_detected(distributed, tmp_path):
    """Check that a single flipped bit in the values of a part is detected by its checksum."""
    run = shutil.copytree(distributed / "fsdp_all", tmp_path / "run")
    weight = load_file(distributed / "fsdp.safetensors")[NAME.removeprefix("model.")]
    data = bytearray((run / "__0_0.distcp").read_bytes())
    data[data.index(weight[:3].numpy().tobytes()) + 5] ^= 1
    (run / "__0_0.distcp").write_bytes(data)
    with pytest.raises(UserError, match="__0_0.distcp is damaged"):
        open_checkpoint(run)


def test_unsharded_tensors_of_one_process(tmp_path):
    """Check that unsharded tensors are read, and the optimizer and schedulers are omitted."""
    state = {"model": {"encoder.weight": torch.randn(5, 3), "scalar": torch.tensor(2.0)}}
    rates = {name: {"rate": torch.ones(1)} for name in ("lr_scheduler", "scheduler")}
    training_state = {"optim": {"m": torch.ones(3)}, **rates}
    dcp.save(state | training_state, checkpoint_id=str(tmp_path / "run"))
    tensors = open_checkpoint(tmp_path / "run").tensors
    assert sorted(tensors) == ["model.encoder.weight", "model.scalar"]
    assert torch.equal(tensors["model.encoder.weight"], state["model"]["encoder.weight"])
    assert tensors["model.scalar"].item() == 2

    # `Stateful` wrappers of torch's tutorials add a prefix, also to the optimizer.
    dcp.save({"app": state | training_state}, checkpoint_id=str(tmp_path / "app"))
    names = sorted(open_checkpoint(tmp_path / "app").tensors)
    assert names == ["model.encoder.weight", "model.scalar"]
