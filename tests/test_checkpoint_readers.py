"""Checkpoint formats: every tensor comes back bit for bit, from files that the real writers made (DeepSpeed ZeRO 1 to 3, FSDP2 with
torch.distributed.checkpoint, accelerate, Trainer, torch.save, safetensors); a checkpoint never runs code; damaged or incomplete ones are
refused with a sentence that names what is wrong; the right step and configuration are found.
"""

import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.errors import UserError
from neobert.conversion.formats import load_torch_file
from neobert.conversion.locate import find_config, find_step, open_checkpoint, read_config
from neobert.convert_checkpoint import CONFIG_FIELDS


HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed, which writes these checkpoints")
WRITER = Path(__file__).with_name("write_distributed_checkpoints.py")


@pytest.fixture
def model(tiny_config):
    return NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config))


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """ZeRO and FSDP checkpoints, written by two processes."""
    folder = tmp_path_factory.mktemp("distributed")
    engines = ["fsdp"] + (["deepspeed"] if HAS_DEEPSPEED else [])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(WRITER), str(folder), *engines]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, f"writing the distributed checkpoints failed: {process.stderr[-3000:]}"
    return folder


def assert_same(checkpoint, reference):
    assert checkpoint.tensors.keys() == reference.keys(), "the tensors' names are not those that were saved"
    for name, expected in reference.items():
        stored = checkpoint.tensors[name]
        assert stored.shape == tuple(expected.shape), f"{name} announces another shape than the saved one"
        assert stored.dtype == stored.read().dtype, f"{name} announces another dtype than it has"
        assert torch.equal(stored.read().to(expected.dtype), expected), f"{name} is not what was saved"


# ----------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_orig_mod.module.module."])
def test_prefixes_of_wrappers_come_off(tmp_path, model, prefix):
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "state_dict.pt")
    assert_same(open_checkpoint(tmp_path), model.state_dict())


def test_compiled_blocks_inside_the_model(tmp_path, model):
    renamed = {name.replace("encoder.0.", "encoder.0._orig_mod."): value for name, value in model.state_dict().items()}
    assert any("_orig_mod" in name for name in renamed), "no wrapped block, so this test would be vacuous"
    torch.save(renamed, tmp_path / "state_dict.pt")
    assert_same(open_checkpoint(tmp_path / "state_dict.pt"), model.state_dict())


def test_bare_backbone_gets_its_prefix(tmp_path, model):
    torch.save({f"_orig_mod.{name}": value for name, value in model.model.state_dict().items()}, tmp_path / "state_dict.pt")
    assert_same(open_checkpoint(tmp_path), {f"model.{name}": value for name, value in model.model.state_dict().items()})


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_state_dict_below_a_key(tmp_path, model, key):
    torch.save({key: model.state_dict(), "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "last.pt")
    assert_same(open_checkpoint(tmp_path / "last.pt"), model.state_dict())


def test_old_torch_format_without_zip(tmp_path, model):
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(open_checkpoint(tmp_path), model.state_dict())


def test_computed_tables_of_old_code_are_no_weights(tmp_path, model):
    torch.save({**model.state_dict(), "model.freqs_cis": torch.zeros(4, dtype=torch.complex64)}, tmp_path / "state_dict.pt")
    assert_same(open_checkpoint(tmp_path), model.state_dict())


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_hub_folder(tmp_path, model, shard_size):
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "100KB"), "not the layout that this test is about"
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, model.state_dict())
    assert find_config(checkpoint.folders, CONFIG_FIELDS)[1]["num_hidden_layers"] == 3


def test_sharded_torch_files(tmp_path, model):
    names = list(model.state_dict())
    parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, part in parts.items():
        torch.save({name: model.state_dict()[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(open_checkpoint(tmp_path), model.state_dict())


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_save_state(tmp_path, model, safe):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    engine = accelerate.Accelerator(cpu=True, project_dir=str(tmp_path))
    prepared = engine.prepare(model)
    engine.save_state(str(tmp_path / "checkpoints" / "checkpoint_7"), safe_serialization=safe)
    expected = dict(model.state_dict())
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path.name == "checkpoint_7"
    assert_same(checkpoint, expected)
    assert prepared is not None


def test_trainer_checkpoint(tmp_path, model):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, save_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=data).train()
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.path.name == "checkpoint-2", "the latest step was not chosen"
    assert_same(checkpoint, model.state_dict())
    assert find_config(checkpoint.folders, CONFIG_FIELDS)[0].name == "config.json"


@needs_deepspeed
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_master_weights(distributed, name):
    """Two processes, two parameter groups, odd sizes, a frozen weight, a buffer; stage 2 with reordered (round-robin) groups."""
    checkpoint = open_checkpoint(distributed / name)
    assert checkpoint.format == f"DeepSpeed ZeRO {name[-1]}, 2 shards"
    reference = load_file(distributed / f"{name}.safetensors")
    assert reference.pop("model.freqs_cis") is not None, "the buffer is not in the reference, so it was not tested"
    frozen = "model.transformer_encoder.0.wo.weight"
    # DeepSpeed's own tool loses frozen weights of stage 1.
    reference.setdefault(frozen, checkpoint.tensors[frozen].read().float())
    assert_same(checkpoint, reference)
    trained = [stored for key, stored in checkpoint.tensors.items() if key != frozen]
    assert all(stored.dtype == torch.float32 for stored in trained), "not the float32 master weights"
    assert reference[frozen].abs().sum() > 0


@needs_deepspeed
def test_zero_1_frozen_weight_is_the_one_of_the_model(distributed):
    frozen = "model.transformer_encoder.0.wo.weight"
    expected = load_file(distributed / "zero2.safetensors")[frozen].to(torch.bfloat16)
    assert torch.equal(open_checkpoint(distributed / "zero1").tensors[frozen].read(), expected)


@needs_deepspeed
def test_accelerate_and_trainer_layouts_of_deepspeed(distributed, tmp_path):
    reference = load_file(distributed / "zero3.safetensors")
    reference.pop("model.freqs_cis")
    shutil.copytree(distributed / "zero3" / "10", tmp_path / "accelerate" / "checkpoints" / "checkpoint_4" / "pytorch_model")
    shutil.copytree(distributed / "zero3" / "10", tmp_path / "trainer" / "checkpoint-10" / "global_step10")
    (tmp_path / "trainer" / "checkpoint-10" / "latest").write_text("global_step10")
    save_file({"decoder.bias": torch.zeros(3)}, tmp_path / "trainer" / "checkpoint-10" / "model.safetensors")
    for run in ("accelerate", "trainer"):
        assert_same(open_checkpoint(tmp_path / run), reference)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_all"])
def test_fsdp(distributed, name):
    checkpoint = open_checkpoint(distributed / name)
    assert len(list(checkpoint.path.rglob("*.distcp"))) == 2, "one process wrote it all, so this test would be vacuous"
    assert_same(checkpoint, load_file(distributed / "fsdp.safetensors"))


# ----------------------------------------------------------------------------------------------------- damaged and incomplete


@needs_deepspeed
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_missing_zero_shard(distributed, tmp_path, name):
    shutil.copytree(distributed / name, tmp_path / name)
    next((tmp_path / name / "10").glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    with pytest.raises(UserError, match="has 1 of 2 ZeRO optimizer shards; those of rank 1 are missing"):
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
    data = load_torch_file(path)
    for replaced in (100, 80000):
        state = dict(data["optimizer_state_dict"], loss_scaler=None, zero_stage=1, param_slice_mappings=None)
        state["single_partition_of_fp32_groups"] = [torch.zeros(replaced)] + state["single_partition_of_fp32_groups"][1:]
        # `data` is mapped from the file that is replaced here.
        torch.save({"optimizer_state_dict": state}, tmp_path / "new.pt")
        os.replace(tmp_path / "new.pt", path)
        with pytest.raises(UserError, match="ZeRO shards hold"):
            open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("part", ["__0_0.distcp", "__1_0.distcp"])
def test_incomplete_or_truncated_fsdp(distributed, tmp_path, part):
    shutil.copytree(distributed / "fsdp_all", tmp_path / "cut")
    path = tmp_path / "cut" / part
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=f"{part} is truncated"):
        open_checkpoint(tmp_path / "cut")
    path.unlink()
    with pytest.raises(UserError, match=f"{part} is missing"):
        open_checkpoint(tmp_path / "cut")
    (tmp_path / "cut" / ".metadata").write_bytes((distributed / "fsdp_all" / ".metadata").read_bytes()[:500])
    with pytest.raises(UserError, match="cannot be read, it is truncated"):
        open_checkpoint(tmp_path / "cut")


@pytest.mark.parametrize("file", ["model.safetensors", "state_dict.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_truncated_files(tmp_path, model, file, kept):
    path = tmp_path / file
    if file.endswith("safetensors"):
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=file == "state_dict.pt")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(UserError, match="cannot be read, it is truncated or not a file of weights"):
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


def test_doubled_tensors(tmp_path, model):
    torch.save({**model.state_dict(), "module.decoder.bias": torch.zeros(200)}, tmp_path / "state_dict.pt")
    with pytest.raises(UserError, match="twice under different names: decoder.bias, module.decoder.bias"):
        open_checkpoint(tmp_path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "state_dict.pt")
    with pytest.raises(UserError, match="holds no state dict"):
        open_checkpoint(tmp_path)


# -------------------------------------------------------------------------------------------------------------------- safety


class _Touch:
    """Runs a command when a plain unpickler loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class _Evaluate(_Touch):
    def __reduce__(self):
        return eval, (f"open({str(self.path)!r}, 'w')",)


def _legacy_tar(path, evil):
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
        torch.save({"a": torch.zeros(2), "b": evil}, path, _use_new_zipfile_serialization=kind == "zip")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(evil))
    elif kind == "tar":
        _legacy_tar(path, evil)
    elif kind == "bare zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(evil, protocol=2))
            archive.writestr("archive/version", "3\n")
    elif kind == "deepspeed":
        torch.save({"module": {"a": torch.zeros(2)}, "param_shapes": evil}, path.with_name("mp_rank_00_model_states.pt"))
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
    torch.save({"a": torch.zeros(2), "args": pytest.Mark("a", (), {}, _ispytest=True)}, tmp_path / "state_dict.pt")
    with pytest.raises(UserError, match=r"class _pytest\.mark\.structures\.Mark"):
        open_checkpoint(tmp_path)


def test_metadata_may_not_point_outside(distributed, tmp_path):
    shutil.copytree(distributed / "fsdp_all", tmp_path / "run")
    data = (tmp_path / "run" / ".metadata").read_bytes()
    assert b"__1_0.distcp" in data
    (tmp_path / "run" / ".metadata").write_bytes(data.replace(b"__1_0.distcp", b"../_0.distcp"))
    shutil.copyfile(distributed / "fsdp_all" / "__1_0.distcp", tmp_path / "_0.distcp")
    with pytest.raises(UserError, match="missing"):
        open_checkpoint(tmp_path / "run")


# ------------------------------------------------------------------------------------------------------------ step and config


@pytest.fixture
def run(tmp_path):
    """model_checkpoints/{2,10,9} with a Hydra configuration above."""
    for step in (2, 10, 9):
        folder = tmp_path / "run" / "model_checkpoints" / str(step)
        folder.mkdir(parents=True)
        torch.save({"encoder.weight": torch.full((1,), float(step))}, folder / "state_dict.pt")
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text(
        "seed: 1\nmodel:\n  hidden_size: 64\n  norm_eps: 1e-6\n  rope: true\n  vocab_size: ${tokenizer.vocab_size}\n"
        "tokenizer:\n  pretrained_model_name_or_path: google-bert/bert-base-uncased\n  max_length: 128\n  vocab_size: 200\n"
    )
    return tmp_path / "run"


def value(path, step=None):
    return open_checkpoint(path, step).tensors["model.encoder.weight"].read().item()


def test_steps(run):
    assert value(run) == 10, "without a file `latest` the highest number counts, as a number"
    assert value(run, "2") == 2
    assert value(run / "model_checkpoints", "latest") == 10
    assert value(run / "model_checkpoints" / "9") == 9
    assert value(run / "model_checkpoints" / "9", "9") == 9
    (run / "model_checkpoints" / "latest").write_text("9\n")
    assert value(run) == 9, "`latest` was not followed"
    assert value(run, "10") == 10
    with pytest.raises(UserError, match="has no step 3; it has 2, 9, 10"):
        find_step(run, "3")
    (run / "model_checkpoints" / "latest").write_text("11")
    with pytest.raises(UserError, match="names 11, which is not there"):
        find_step(run)
    (run / "model_checkpoints" / "latest").write_text("../../elsewhere")
    with pytest.raises(UserError, match="should hold the name of a folder beside it"):
        find_step(run)
    (run / "model_checkpoints" / "checkpoint-2").mkdir()
    with pytest.raises(UserError, match="several folders of step 2"):
        find_step(run, "2")


def test_hydra_configuration(run):
    path, fields = find_config(open_checkpoint(run, "9").folders, CONFIG_FIELDS)
    assert path == run / ".hydra" / "config.yaml"
    assert fields == {"hidden_size": 64, "norm_eps": 1e-6, "rope": True, "vocab_size": 200, "max_length": 128}
    assert NeoBERTConfig(num_attention_heads=4, **fields).max_position_embeddings == 128


def test_configurations_of_strangers_are_not_taken(run, tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    assert find_config(open_checkpoint(run, "9").folders, CONFIG_FIELDS)[1]["hidden_size"] == 64, "a file outside of the run was read"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.yaml", "- 1", "should be a mapping"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "cannot be read"),
        ("a.json", '{"model_type": "bert", "hidden_size": 2}', "configuration of a bert model"),
        ("a.json", '{"colour": 2}', "no field of a NeoBERT configuration"),
    ],
)
def test_bad_configurations(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path / name, CONFIG_FIELDS)
