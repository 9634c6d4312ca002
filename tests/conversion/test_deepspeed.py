"""Test the reader of DeepSpeed checkpoints.

The master weights of ZeRO 1, 2 and 3 must equal those that DeepSpeed's own tool extracts, bit for
bit. Missing and damaged files, and files of different steps, stages or runs, are rejected.
"""

import argparse
import importlib.util
import shutil

import pytest
import torch
from helpers.conversion_helpers import assert_same, write_distributed
from safetensors.torch import load_file, save_file

from neobert.common.errors import UserError
from neobert.conversion.deepspeed import _plain
from neobert.conversion.locate import open_checkpoint
from neobert.conversion.weight_files import load_torch_file


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="requires deepspeed, which writes the checkpoints",
)


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """Return a directory with ZeRO checkpoints that were written by two processes."""
    return write_distributed(tmp_path_factory.mktemp("distributed"), "deepspeed")


@needs_deepspeed
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_master_weights(distributed, name):
    """Check the master weights of each ZeRO stage.

    The checkpoints have two parameter groups, parameters whose size is odd, a frozen weight and a
    buffer. Stage 2 stores the parameters of a group in another order (`round_robin_gradients`).
    """
    checkpoint = open_checkpoint(distributed / name)
    assert checkpoint.format == f"DeepSpeed ZeRO {name[-1]}, 2 shards"
    reference = load_file(distributed / f"{name}.safetensors")
    assert reference.pop("model.freqs_cis") is not None
    frozen = "model.transformer_encoder.0.wo.weight"
    # DeepSpeed's own tool omits the frozen weights of stage 1.
    reference.setdefault(frozen, checkpoint.tensors[frozen].float())

    assert_same(checkpoint, reference)
    trained = [tensor for key, tensor in checkpoint.tensors.items() if key != frozen]
    assert all(tensor.dtype == torch.float32 for tensor in trained)
    assert reference[frozen].abs().sum() > 0


@needs_deepspeed
def test_zero_1_frozen_weight_is_read_in_bfloat16(distributed):
    """Check the frozen weight of stage 1, for which the test above has no reference.

    The weight is stored in bfloat16, because it has no master weight in the optimizer.
    """
    frozen = "model.transformer_encoder.0.wo.weight"
    expected = load_file(distributed / "zero2.safetensors")[frozen].to(torch.bfloat16)
    assert torch.equal(open_checkpoint(distributed / "zero1").tensors[frozen], expected)


@needs_deepspeed
def test_accelerate_and_trainer_layouts_of_deepspeed(distributed, tmp_path):
    """Check that DeepSpeed checkpoints are found in the directories of accelerate and Trainer.

    The master weights take precedence over Trainer's model.safetensors.
    """
    reference = load_file(distributed / "zero3.safetensors")
    reference.pop("model.freqs_cis")
    source = distributed / "zero3" / "10"

    shutil.copytree(source, tmp_path / "accelerate/checkpoints/checkpoint_4/pytorch_model")
    trainer = tmp_path / "trainer" / "checkpoint-10"
    shutil.copytree(source, trainer / "global_step10")
    (trainer / "latest").write_text("global_step10")
    save_file({"decoder.bias": torch.zeros(3)}, trainer / "model.safetensors")

    for run in ("accelerate", "trainer"):
        assert_same(open_checkpoint(tmp_path / run), reference)


@needs_deepspeed
@pytest.mark.parametrize(
    "name, pattern, message",
    [
        ("zero1", "*rank_1_*optim*", "optimizer shards of 2 ranks, got those of rank 0"),
        ("zero3", "*rank_1_*optim*", "optimizer shards of 2 ranks, got those of rank 0"),
        ("zero1", "*optim*", "ZeRO shards .* are missing"),
        ("zero3", "*model_states*", "model_states.pt .*missing"),
        ("zero3", "*rank_1*model_states*", "1 of 2 model-states files"),
    ],
)
def test_missing_files(distributed, tmp_path, name, pattern, message):
    """Check that missing optimizer shards and model states raise an error with their ranks."""
    shutil.copytree(distributed / name, tmp_path / name)
    for path in (tmp_path / name / "10").glob(pattern):
        path.unlink()
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path / name)


@pytest.fixture
def run(distributed, tmp_path):
    """Return a class that copies the checkpoint of a ZeRO stage and changes its files.

    `run("zero1").change("*rank_1*optim*", change)` applies the function `change` to the content of
    the first file that matches the pattern, and returns the directory of the copy.
    """

    class Run:
        """Copy of a checkpoint."""

        def __init__(self, name):
            self.path = shutil.copytree(distributed / name, tmp_path / name)

        def change(self, pattern, change):
            """Change the content of the first file that matches the pattern."""
            path = next((self.path / "10").glob(pattern))
            data = torch.load(path, weights_only=False)
            change(data)
            torch.save(data, path)
            return self.path

    return Run


def _optimizer(**values):
    """Return a function that sets values in the optimizer state of a shard."""
    return lambda data: data["optimizer_state_dict"].update(values)


def _fewer(data):
    """Truncate the first parameter group of a ZeRO 1 shard."""
    groups = data["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = torch.zeros(100)


def _later(data):
    """Increase the step of the optimizer by one."""
    state = data["optimizer_state_dict"]
    state = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    state["state"][0]["step"] += 1


def _longer(data):
    """Append a value to the second parameter group of a ZeRO 3 shard."""
    groups = data["optimizer_state_dict"]["fp32_flat_groups"]
    groups[1] = torch.cat([groups[1].data, torch.zeros(1)])


SHARD = "*pp_rank_0_*optim*"
OTHER_SHARD = "*rank_1*optim*"
MODEL = "*model_states*"


@needs_deepspeed
@pytest.mark.parametrize(
    "names, pattern, change, message",
    [
        ("123", OTHER_SHARD, _later, r"step is \[1\.0.* on rank 0 and \[2\.0"),
        ("123", OTHER_SHARD, _optimizer(zero_stage=4), "zero_stage is [123] on rank 0 and 4 on"),
        ("1", OTHER_SHARD, _optimizer(partition_count=[2, 3]), "partition_count is .* on rank 0"),
        ("3", MODEL, lambda data: data.update(global_steps=9), "global_steps is"),
        ("1", OTHER_SHARD, _fewer, "ZeRO shards in .* have"),
        ("3", OTHER_SHARD, _longer, "must have 39878 values, got 39878, 39879"),
        (
            "3",
            SHARD,
            _optimizer(partition_count=10**9),
            "shards of 1000000000 ranks, got those of rank 0, 1",
        ),
        ("1", SHARD, lambda data: data.pop("optimizer_state_dict"), "cannot be read"),
    ],
    ids=range(8),
)
def test_inconsistent_or_damaged_shards_are_rejected(run, names, pattern, change, message):
    """Check that shards of different steps, stages or sizes are not combined.

    `names` contains the ZeRO stages whose checkpoints are changed.
    """
    for name in names:
        path = run(f"zero{name}").change(pattern, change)
        with pytest.raises(UserError, match=message):
            open_checkpoint(path)


@needs_deepspeed
def test_padding_between_the_parameters(distributed, run):
    """Check that padding between the parameters of a flat group is skipped.

    Some optimizers align every parameter and store padding after each of them. The shards of a
    checkpoint without padding are rewritten with it.
    """
    run = run("zero1")
    padding = 6
    halves = []

    def content(pattern):
        """Return the content of the first file that matches the pattern."""
        return torch.load(next((run.path / "10").glob(pattern)), weights_only=False)

    shapes = content(MODEL)["param_shapes"]
    ranks = [f"*rank_{rank}_mp*optim*" for rank in range(2)]
    name = "single_partition_of_fp32_groups"
    shards = [content(rank)["optimizer_state_dict"][name] for rank in ranks]

    # Insert padding after every parameter, and split each group between the two ranks.
    for number, group in enumerate(shapes):
        sizes = [shape.numel() for shape in group.values()]
        flat = torch.cat([shard[number].data for shard in shards])
        parameters = flat[: sum(sizes)].split(sizes)
        aligned = [x for parameter in parameters for x in (parameter, torch.full((padding,), 9.0))]
        aligned = torch.cat(aligned)
        halves.append(torch.cat([aligned, torch.zeros(len(aligned) % 2)]).chunk(2))

    paddings = [[padding] * len(group) for group in shapes]
    for rank, pattern in enumerate(ranks):
        groups = {name: [half[rank].clone() for half in halves]}
        run.change(pattern, _optimizer(param_alignment_paddings=paddings, **groups))

    assert_same(open_checkpoint(run.path), open_checkpoint(distributed / "zero1").tensors)


@needs_deepspeed
def test_a_parameter_under_two_names_is_one_tensor(run):
    """Check that an alias in `shared_params` refers to the tensor of the original name."""
    shared = {"decoder.second": "model.encoder.weight"}
    path = run("zero1").change(MODEL, lambda data: data.update(shared_params=shared))
    tensors = open_checkpoint(path).tensors
    assert tensors["decoder.second"] is tensors["model.encoder.weight"]


@needs_deepspeed
def test_duplicate_ranks_and_tensor_parallelism_are_rejected(run):
    """Check that two files of one rank, and files of tensor parallelism, are rejected."""
    folder = run("zero1").path / "10"
    shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = "mp_rank_00_model_states.pt"
    for name, copy, message in (
        (f"bf16_{shard}", shard, "must have one file of each rank, got .* of rank 1"),
        (states, states.replace("00", "01"), r"tensor parallelism \(mp_rank_01_model_states.pt\)"),
    ):
        shutil.copyfile(folder / name, folder / copy)
        with pytest.raises(UserError, match=message):
            open_checkpoint(folder)
        (folder / copy).unlink()


class _Member:
    """Object that is pickled like an enum member in Python before 3.11.4."""

    def __reduce__(self):
        return getattr, (argparse.Namespace, "gradients")


def test_zero_stage_pickled_by_an_older_python(tmp_path):
    """Check that the ZeRO stage is read from a pickled call of `getattr`, without the call.

    The call would fail, because the class in the pickle has no attribute `gradients`.
    """
    torch.save({"zero_stage": _Member()}, tmp_path / "shard.pt")
    assert _plain(load_torch_file(tmp_path / "shard.pt")["zero_stage"]) == 2
