"""Pins how the step, the format and the tensors' published names are found: steps by number or
`latest`, folders of accelerate and Trainer, prefixes of wrappers; and what is refused there.
"""

import os

import pytest
import torch
from conversion_helpers import assert_same, convert

from neobert.common.errors import UserError
from neobert.conversion.config_files import find_config
from neobert.conversion.locate import find_step, open_checkpoint


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "module.",
        "_orig_mod.",
        "module._orig_mod.",
        "_orig_mod.module.",
        "_orig_mod.module.module.",
    ],
)
def test_prefixes_of_wrappers_come_off(tmp_path, model, prefix):
    torch.save(
        {prefix + name: value for name, value in model.state_dict().items()},
        tmp_path / "state_dict.pt",
    )
    assert_same(open_checkpoint(tmp_path), model.state_dict())


def test_compiled_blocks_inside_the_model(tmp_path, model):
    renamed = {
        name.replace("encoder.0.", "encoder.0._orig_mod."): value
        for name, value in model.state_dict().items()
    }
    assert any("_orig_mod" in name for name in renamed), (
        "no wrapped block, so this test would be vacuous"
    )
    torch.save(renamed, tmp_path / "state_dict.pt")
    assert_same(open_checkpoint(tmp_path / "state_dict.pt"), model.state_dict())


def test_bare_backbone_gets_its_prefix(tmp_path, model):
    torch.save(
        {f"_orig_mod.{name}": value for name, value in model.model.state_dict().items()},
        tmp_path / "state_dict.pt",
    )
    assert_same(
        open_checkpoint(tmp_path),
        {f"model.{name}": value for name, value in model.model.state_dict().items()},
    )


def test_computed_tables_of_old_code_are_not_weights(tmp_path, model):
    computed = {
        "model.freqs_cis": torch.zeros(4, dtype=torch.complex64),
        "model.rope.inv_freq": torch.zeros(4),
        "position_ids": torch.arange(4),
    }
    torch.save({**model.state_dict(), **computed}, tmp_path / "state_dict.pt")
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
    assert checkpoint.path.name == "checkpoint-2", "the latest step was not chosen"
    assert_same(checkpoint, model.state_dict())
    assert find_config(checkpoint.folders)[0].name == "config.json"


def test_doubled_tensors(tmp_path, model):
    torch.save(
        {**model.state_dict(), "module.decoder.bias": torch.zeros(200)}, tmp_path / "state_dict.pt"
    )
    with pytest.raises(UserError, match="holds decoder.bias twice under different names"):
        open_checkpoint(tmp_path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no file "):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "state_dict.pt")
    with pytest.raises(UserError, match="holds no state dict"):
        open_checkpoint(tmp_path)


def value(path, step=None):
    return open_checkpoint(path, step).tensors["model.encoder.weight"].item()


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
    with pytest.raises(UserError, match="11 is not there, or holds no weights"):
        find_step(run)
    (run / "model_checkpoints" / "latest").write_text("../../elsewhere")
    with pytest.raises(UserError, match="should hold the name of a folder beside it"):
        find_step(run)
    (run / "model_checkpoints" / "checkpoint-2").mkdir()
    with pytest.raises(UserError, match="several folders of step 2"):
        find_step(run, "2")


def test_a_step_in_the_folder_of_a_step(run):
    """The folder of a step is that step; with --step, a step inside of it comes first."""
    folder = run / "model_checkpoints" / "9"
    for inner, number in (("global_step9", 90), ("global_step3", 30)):
        (folder / inner).mkdir()
        torch.save(
            {"encoder.weight": torch.full((1,), float(number))}, folder / inner / "state_dict.pt"
        )
    assert value(folder) == 9 and value(folder, "3") == 30 and value(folder, "9") == 90


@pytest.mark.parametrize(
    "content, message",
    [
        *(
            (name, "the name of a folder beside it")
            for name in (b"..", b".", b"9/../..", b"/etc", b"")
        ),
        (b"a\0b", "the name of a folder beside it"),
        (b"\xff", "cannot be read"),
    ],
    ids=range(7),
)
def test_a_pointer_elsewhere_is_not_followed(run, content, message):
    torch.save({"encoder.weight": torch.full((1,), -1.0)}, run / "state_dict.pt")
    (run / "model_checkpoints" / "latest").write_bytes(content)
    with pytest.raises(UserError, match=message):
        find_step(run / "model_checkpoints")


@pytest.mark.parametrize("step", ["²", "-1", "1.0", "9" * 30, " 1", "newest"])
def test_steps_that_are_not_numbers(run, tmp_path, step):
    with pytest.raises(UserError, match="--step takes a number or latest"):
        convert(run, tmp_path / "out", f"--step={step}")


@pytest.mark.parametrize(
    "name", ["checkpoint", "run/state_dict.pt", "run/model.safetensors", "run/latest", "run/1"]
)
def test_pipes_are_not_waited_for(tmp_path, name):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="holds no checkpoint|is not a file"):
        open_checkpoint(tmp_path / name.partition("/")[0])


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/dev/stdin", "/nowhere/at/all"])
def test_checkpoints_that_are_no_files(path):
    with pytest.raises(UserError, match="is not a file|no file "):
        open_checkpoint(path)


def test_a_classifier_beside_a_bare_backbone(tmp_path, model):
    """Names of any head stay as they are; names of the backbone get their prefix."""
    state = {
        **model.model.state_dict(),
        "qa_outputs.weight": torch.ones(2, 64),
        "classifier.bias": torch.ones(2),
    }
    torch.save(state, tmp_path / "state_dict.pt")
    expected = {f"model.{name}": value for name, value in model.model.state_dict().items()}
    assert_same(
        open_checkpoint(tmp_path),
        expected | {name: state[name] for name in ("qa_outputs.weight", "classifier.bias")},
    )


def test_many_strange_entries_of_a_folder(tmp_path, model):
    """Names that are not UTF-8, links in a circle, folders named as files."""
    torch.save(model.state_dict(), tmp_path / "state_dict.pt")
    with open(os.fsencode(tmp_path) + b"/\xff\xfe", "wb"):
        pass
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "config.json").mkdir()
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "100").symlink_to(tmp_path)
    assert_same(open_checkpoint(tmp_path), model.state_dict())
    assert find_config([tmp_path]) == (None, {})
