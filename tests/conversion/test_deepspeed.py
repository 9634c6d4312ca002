"""Pins the reader of DeepSpeed folders: master weights bit for bit from files that DeepSpeed wrote
(ZeRO 1 to 3); files of different steps, stages or runs, missing or damaged ones are refused with
what is wrong.
"""

import importlib.util
import os
import shutil

import pytest
import torch
from conversion_helpers import assert_same, write_distributed
from safetensors.torch import load_file, save_file

from neobert.common.errors import UserError
from neobert.conversion.locate import open_checkpoint


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed, which writes these checkpoints",
)


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """ZeRO checkpoints, written by two processes."""
    return write_distributed(tmp_path_factory.mktemp("distributed"), "deepspeed")


@needs_deepspeed
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_master_weights(distributed, name):
    """Two processes, two parameter groups, odd sizes, a frozen weight, a buffer; stage 2 with
    reordered (round-robin) groups."""
    checkpoint = open_checkpoint(distributed / name)
    assert checkpoint.format == f"DeepSpeed ZeRO {name[-1]}, 2 shards"
    reference = load_file(distributed / f"{name}.safetensors")
    assert reference.pop("model.freqs_cis") is not None, (
        "the buffer is not in the reference, so it was not tested"
    )
    frozen = "model.transformer_encoder.0.wo.weight"
    # DeepSpeed's own tool loses frozen weights of stage 1.
    reference.setdefault(frozen, checkpoint.tensors[frozen].float())
    assert_same(checkpoint, reference)
    trained = [tensor for key, tensor in checkpoint.tensors.items() if key != frozen]
    assert all(tensor.dtype == torch.float32 for tensor in trained), (
        "not the float32 master weights"
    )
    assert reference[frozen].abs().sum() > 0


@needs_deepspeed
def test_zero_1_frozen_weight_is_the_one_of_the_model(distributed):
    frozen = "model.transformer_encoder.0.wo.weight"
    expected = load_file(distributed / "zero2.safetensors")[frozen].to(torch.bfloat16)
    assert torch.equal(open_checkpoint(distributed / "zero1").tensors[frozen], expected)


@needs_deepspeed
def test_accelerate_and_trainer_layouts_of_deepspeed(distributed, tmp_path):
    reference = load_file(distributed / "zero3.safetensors")
    reference.pop("model.freqs_cis")
    shutil.copytree(
        distributed / "zero3" / "10",
        tmp_path / "accelerate" / "checkpoints" / "checkpoint_4" / "pytorch_model",
    )
    shutil.copytree(
        distributed / "zero3" / "10", tmp_path / "trainer" / "checkpoint-10" / "global_step10"
    )
    (tmp_path / "trainer" / "checkpoint-10" / "latest").write_text("global_step10")
    save_file(
        {"decoder.bias": torch.zeros(3)},
        tmp_path / "trainer" / "checkpoint-10" / "model.safetensors",
    )
    for run in ("accelerate", "trainer"):
        assert_same(open_checkpoint(tmp_path / run), reference)


@needs_deepspeed
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_missing_zero_shard(distributed, tmp_path, name):
    shutil.copytree(distributed / name, tmp_path / name)
    next((tmp_path / name / "10").glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    with pytest.raises(UserError, match="has the ZeRO optimizer shards of rank 0, of 2 ranks"):
        open_checkpoint(tmp_path / name)


@needs_deepspeed
def test_all_zero_shards_or_the_model_states_missing(distributed, tmp_path):
    for name, pattern, message in (
        ("zero1", "*optim*", "ZeRO shards .* are missing"),
        ("zero3", "*rank_0*model_states*", "model_states.pt .*missing"),
    ):
        shutil.copytree(distributed / name, tmp_path / name)
        for path in (tmp_path / name / "10").glob(pattern):
            path.unlink()
        with pytest.raises(UserError, match=message):
            open_checkpoint(tmp_path / name)
    shutil.copytree(distributed / "zero3", tmp_path / "one")
    (tmp_path / "one" / "10" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(UserError, match="1 of 2 model-states files"):
        open_checkpoint(tmp_path / "one")


@needs_deepspeed
@pytest.mark.parametrize("pattern", ["*rank_1*optim*", "*rank_00_model_states*"])
def test_truncated_zero_file(distributed, tmp_path, pattern):
    shutil.copytree(distributed / "zero2", tmp_path / "run")
    path = next((tmp_path / "run" / "10").glob(pattern))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=f"{path.name} cannot be read, it is truncated"):
        open_checkpoint(tmp_path / "run")


@needs_deepspeed
def test_shards_of_another_run(distributed, tmp_path):
    """A shard with fewer numbers than the parameters need."""
    shutil.copytree(distributed / "zero1", tmp_path / "run")
    path = next((tmp_path / "run" / "10").glob("*rank_1*optim*"))
    data = torch.load(path, weights_only=False)
    for replaced in (100, 80000):
        state = dict(
            data["optimizer_state_dict"], loss_scaler=None, zero_stage=1, param_slice_mappings=None
        )
        state["single_partition_of_fp32_groups"] = [torch.zeros(replaced)] + state[
            "single_partition_of_fp32_groups"
        ][1:]
        torch.save({"optimizer_state_dict": state}, path)
        with pytest.raises(UserError, match="ZeRO shards hold"):
            open_checkpoint(tmp_path / "run")


@pytest.fixture
def run(distributed, tmp_path):
    """A copy of a stage's folder whose files can be changed: `run("zero1").change("*rank_1*optim*",
    function of the content)`."""

    class Run:
        def __init__(self, name):
            self.path = shutil.copytree(distributed / name, tmp_path / name)

        def change(self, pattern, change):
            path = next((self.path / "10").glob(pattern))
            data = torch.load(path, weights_only=False)
            change(data)
            torch.save(data, path)
            return self.path

    return Run


def _optimizer(**values):
    return lambda data: data["optimizer_state_dict"].update(values)


def _shape(name, shape):
    return lambda data: data["param_shapes"][0].update({name: shape})


def _later(data):
    state = data["optimizer_state_dict"]
    state = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    state["state"][0]["step"] += 1


def _longer(data):
    groups = data["optimizer_state_dict"]["fp32_flat_groups"]
    groups[1] = torch.cat([groups[1].data, torch.zeros(1)])


SHARD, OTHER_SHARD, MODEL = "*pp_rank_0_*optim*", "*rank_1*optim*", "*model_states*"


@needs_deepspeed
@pytest.mark.parametrize(
    "names, pattern, change, message",
    [
        (
            "123",
            OTHER_SHARD,
            _later,
            r"step is \[1\.0.* on rank 0 and \[2\.0",
        ),
        ("123", OTHER_SHARD, _optimizer(zero_stage=4), "zero_stage is [123] on rank 0 and 4 on"),
        ("1", OTHER_SHARD, _optimizer(partition_count=[2, 3]), "partition_count is .* on rank 0"),
        (
            "3",
            "*rank_1*model_states*",
            lambda data: data.update(global_steps=9),
            "global_steps is 1",
        ),
        ("3", OTHER_SHARD, _longer, "hold 39878, 39879 numbers each where 39878 belong"),
        ("3", SHARD, _optimizer(partition_count=10**9), "shards of rank 0, 1, of 1000000000 ranks"),
        ("3", SHARD, _optimizer(partition_count="two"), "of 'two' ranks"),
        ("1", MODEL, _shape("model.encoder.weight", (203,)), "ZeRO shards hold|cannot be read"),
        ("1", MODEL, _shape("model.encoder.weight", (-1, 64)), "cannot be read|ZeRO shards"),
        ("1", MODEL, _shape("model.encoder.weight", (1 << 60, 64)), "ZeRO shards hold"),
        ("1", MODEL, _shape("model.encoder.weight", (1.5, "a")), "cannot be read"),
        ("1", MODEL, lambda data: data.update(param_shapes=7), "cannot be read"),
        ("1", MODEL, lambda data: data.update(module=None), "cannot be read"),
        ("1", MODEL, lambda data: data.pop("module"), "cannot be read"),
        ("1", SHARD, _optimizer(param_alignment_paddings=[[0, 0]] * 2), "cannot be read"),
        ("1", SHARD, _optimizer(single_partition_of_fp32_groups=[1, 2]), "cannot be read"),
        ("1", SHARD, _optimizer(base_optimizer_state=3), "step is .. on rank 0"),
        ("1", SHARD, lambda data: data.pop("optimizer_state_dict"), "cannot be read"),
    ],
    ids=range(18),
)
def test_shards_that_do_not_belong_together_or_are_damaged(run, names, pattern, change, message):
    for name in names:
        path = run(f"zero{name}").change(pattern, change)
        with pytest.raises(UserError, match=message):
            open_checkpoint(path)


@needs_deepspeed
def test_shards_of_stage_1_and_stage_2(distributed, tmp_path):
    """Both hold flat groups of the same sizes."""
    shutil.copytree(distributed / "zero1", tmp_path / "run")
    theirs = distributed / "zero2" / "10" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copyfile(
        theirs, tmp_path / "run" / "10" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(UserError, match="zero_stage is 1 on rank 0 and 2 on rank 1"):
        open_checkpoint(tmp_path / "run")


@needs_deepspeed
def test_padding_between_the_parameters(distributed, run):
    """Some optimizers align every parameter: the padding is in the flat group behind each."""
    run, padding = run("zero1"), 6
    shapes = torch.load(next((run.path / "10").glob("*model_states*")), weights_only=False)[
        "param_shapes"
    ]
    ranks = [f"*rank_{rank}_mp*optim*" for rank in range(2)]
    shards = [
        torch.load(next((run.path / "10").glob(rank)), weights_only=False)["optimizer_state_dict"]
        for rank in ranks
    ]
    halves = []
    for number, group in enumerate(shapes):
        flat = torch.cat(
            [shard["single_partition_of_fp32_groups"][number].data for shard in shards]
        )
        pieces = flat[: sum(shape.numel() for shape in group.values())].split(
            [shape.numel() for shape in group.values()]
        )
        aligned = torch.cat([torch.cat([piece, torch.full((padding,), 9.0)]) for piece in pieces])
        halves.append(torch.cat([aligned, torch.zeros(len(aligned) % 2)]).chunk(2))
    paddings = [[padding] * len(group) for group in shapes]
    for rank, pattern in enumerate(ranks):
        groups = [half[rank].clone() for half in halves]
        run.change(
            pattern,
            lambda data, groups=groups: data["optimizer_state_dict"].update(
                single_partition_of_fp32_groups=groups, param_alignment_paddings=paddings
            ),
        )
    expected = open_checkpoint(distributed / "zero1").tensors
    assert_same(open_checkpoint(run.path), expected)


@needs_deepspeed
def test_a_parameter_under_two_names_is_one_tensor(run):
    shared = {"decoder.second": "model.encoder.weight"}
    tensors = open_checkpoint(
        run("zero1").change("*model_states*", lambda data: data.update(shared_params=shared))
    ).tensors
    one, other = tensors["decoder.second"], tensors["model.encoder.weight"]
    assert one is other


@needs_deepspeed
def test_two_files_of_one_rank_and_tensor_parallelism(run):
    folder = run("zero1").path / "10"
    for name, copy, message in (
        (
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "holds two files of rank 1: .*keep those",
        ),
        (
            "mp_rank_00_model_states.pt",
            "mp_rank_01_model_states.pt",
            r"tensor parallelism \(mp_rank_01_model_states.pt\)",
        ),
    ):
        shutil.copyfile(folder / name, folder / copy)
        with pytest.raises(UserError, match=message):
            open_checkpoint(folder)
        (folder / copy).unlink()


@needs_deepspeed
def test_files_that_are_pipes_or_folders(run):
    run = run("zero1").path / "10"
    path = next(run.glob("*rank_1*optim*"))
    for make in (os.mkfifo, os.mkdir):
        path.unlink()
        make(path)
        with pytest.raises(UserError, match="is not a file"):
            open_checkpoint(run)
        path.rmdir() if path.is_dir() else None
