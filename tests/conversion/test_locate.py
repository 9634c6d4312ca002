"""Test the detection of a checkpoint's step, format and tensor names.

Covers steps by number and by the file `latest`, the directories of accelerate and Trainer, and the
prefixes of wrappers such as DDP and torch.compile.
"""

import pytest
import torch
from helpers.conversion_helpers import assert_same

from neobert.common.errors import UserError
from neobert.conversion.config_files import find_config
from neobert.conversion.locate import find_step, open_checkpoint


def saved(folder, state):
    """Save a state dict in a directory, and return the opened checkpoint."""
    torch.save(dict(state), folder / "state_dict.pt")
    return open_checkpoint(folder)


WRAPPERS = "", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrapper_prefixes_are_removed(tmp_path, model, prefix):
    """Check that the prefixes of DDP and torch.compile are removed from the names."""
    state = model.state_dict()
    assert_same(saved(tmp_path, {prefix + name: state[name] for name in state}), state)


def test_prefix_of_a_compiled_layer_is_removed(tmp_path, model):
    """Check that the prefix of a compiled layer is removed within a name."""
    state = model.state_dict()
    renamed = {name.replace("encoder.0.", "encoder.0._orig_mod."): state[name] for name in state}
    assert any("_orig_mod" in name for name in renamed)
    assert_same(saved(tmp_path, renamed), state)


def test_model_prefix_is_added_to_a_backbone(tmp_path, model):
    """Check that `model.` is added to the names of a backbone, but not to those of a head."""
    state = model.model.state_dict()
    expected = {f"model.{name}": state[name] for name in state}
    heads = {"qa_outputs.weight": torch.ones(2, 64), "classifier.bias": torch.ones(2)}
    assert_same(saved(tmp_path, {f"_orig_mod.{name}": state[name] for name in state}), expected)
    assert_same(saved(tmp_path, {**state, **heads}), expected | heads)


def test_computed_buffers_are_omitted(tmp_path, model):
    """Check that buffers with computed tables, which older code saved, are omitted."""
    computed = {
        "model.freqs_cis": torch.zeros(4, dtype=torch.complex64),
        "model.rope.inv_freq": torch.zeros(4),
        "position_ids": torch.arange(4),
    }
    assert_same(saved(tmp_path, {**model.state_dict(), **computed}), model.state_dict())


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_save_state(tmp_path, model, safe):
    """Check that a checkpoint of accelerate is found below the directory of the project."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    engine = accelerate.Accelerator(cpu=True, project_dir=str(tmp_path))
    prepared = engine.prepare(model)
    engine.save_state(str(tmp_path / "checkpoints" / "checkpoint_7"), safe_serialization=safe)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path.name == "checkpoint_7" and prepared is not None
    assert_same(checkpoint, model.state_dict())


def test_trainer_checkpoint(tmp_path, model):
    """Check that the latest checkpoint of Trainer is found with its configuration."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )

    Trainer(model, arguments, train_dataset=data).train()

    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.path.name == "checkpoint-2", "the latest step was not selected"
    assert_same(checkpoint, model.state_dict())
    assert find_config(checkpoint.folders)[0].name == "config.json"


def test_no_checkpoint(tmp_path):
    for path, words in (("nowhere", "no file "), ("", "must contain a checkpoint")):
        with pytest.raises(UserError, match=words):
            open_checkpoint(tmp_path / path)


def value(path, step=None):
    """Return the weight of a checkpoint of the fixture `run`, which is the number of the step."""
    return open_checkpoint(path, step).tensors["model.encoder.weight"].item()


def test_step_selection(run):
    """Check that a run is opened at a step, at the step in `latest`, or at the highest one."""
    assert value(run) == 10, "without the file `latest`, the highest step must be selected"
    assert value(run, 2) == 2
    assert value(run / "model_checkpoints") == 10
    assert value(run / "model_checkpoints" / "9") == 9
    assert value(run / "model_checkpoints" / "9", 9) == 9

    (run / "model_checkpoints" / "latest").write_text("9\n")
    assert value(run) == 9, "`latest` was not followed"
    assert value(run, 10) == 10

    with pytest.raises(UserError, match="must be one of 2, 9, 10 in .*, got 3"):
        find_step(run, 3)
    (run / "model_checkpoints" / "latest").write_text("11")
    with pytest.raises(UserError, match="11 must be a directory with weights"):
        find_step(run)
    (run / "model_checkpoints" / "checkpoint-2").mkdir()
    with pytest.raises(UserError, match="one directory of step 2, got"):
        find_step(run, 2)


def test_links_to_a_step(run, tmp_path):
    """Check that links to a step are followed, and that the configuration of its run is found."""
    (run / "config.yaml").write_text("num_attention_heads: 7\n")
    latest = run / "model_checkpoints" / "latest"
    latest.symlink_to("9")
    assert value(run) == 9, "the link `latest` was not followed"
    assert value(run, 10) == 10

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "best").symlink_to(run / "model_checkpoints" / "9")
    for link in (latest, elsewhere / "best"):
        checkpoint = open_checkpoint(link)
        assert checkpoint.folders[0] == link
        path, _ = find_config(checkpoint.folders)
        assert path is not None and path.name == "config.yaml", "the configuration was not found"

    # A link to another run is ignored.
    latest.unlink()
    latest.symlink_to(elsewhere)
    assert value(run) == 10


def test_nested_step_directories(run):
    """Check the selection between a step and the steps inside its directory.

    Without `--step`, the directory itself is read. With `--step`, a step inside takes precedence.
    """
    folder = run / "model_checkpoints" / "9"
    for inner, number in (("global_step9", 90), ("global_step3", 30)):
        (folder / inner).mkdir()
        torch.save(
            {"encoder.weight": torch.full((1,), float(number))}, folder / inner / "state_dict.pt"
        )
    assert value(folder) == 9 and value(folder, 3) == 30 and value(folder, 9) == 90


@pytest.mark.parametrize("content", ["..", "9/../..", "/etc", ""])
def test_latest_cannot_refer_outside_its_directory(run, content):
    """Check that the file `latest` cannot refer to a path outside its directory."""
    torch.save({"encoder.weight": torch.full((1,), -1.0)}, run / "state_dict.pt")
    (run / "model_checkpoints" / "latest").write_text(content)
    with pytest.raises(UserError, match="the name of a directory beside it"):
        find_step(run / "model_checkpoints")
