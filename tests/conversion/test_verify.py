"""Test the verification of a conversion.

The converted folder is loaded in a new process, and its outputs must equal those of the source. A
folder that does not load or has other outputs is removed.
"""

import json
import re

import pytest
import torch
from helpers.conversion_helpers import convert, save
from safetensors.torch import load_file, save_file

from neobert import NeoBERTForSequenceClassification, NeoBERTModel
from neobert.common.errors import UserError
from neobert.conversion import hub_folder, verify
from neobert.conversion.architecture import plan


@pytest.mark.parametrize(
    "spoil",
    [lambda x: x * float("nan"), lambda x: x[..., :-1], lambda x: x[:, :-1], lambda x: x + 1e-3],
)
def test_differing_outputs_are_detected(tmp_path, model, tiny_config, monkeypatch, spoil):
    """Check that NaN, missing outputs and a difference of 0.001 are detected."""
    conversion = plan(model.state_dict(), tiny_config)
    logits = model(**verify.random_inputs(conversion)).logits.detach()

    def reload(folder, auto_class, inputs, outputs, scratch):
        save_file({"logits": transform(logits).contiguous()}, outputs)

    monkeypatch.setattr(verify, "_reload", reload)
    expected = verify.source_outputs(conversion, conversion.tensors)

    transform = torch.clone
    verified_outputs = verify.verify(tmp_path, conversion, expected, tmp_path)
    assert torch.allclose(verified_outputs, expected, atol=1e-5)

    transform = spoil
    with pytest.raises(
        UserError,
        match="folder differ from those of the source by .* was discarded",
    ):
        verify.verify(tmp_path, conversion, expected, tmp_path)


@pytest.mark.parametrize(
    "head, auto",
    [("base", "AutoModel"), ("sequence-classification", "AutoModelForSequenceClassification")],
)
def test_ablation_m0_heads_are_verified_in_bfloat16(tmp_path, golden, capsys, caplog, head, auto):
    """Check the conversion and verification of ablation M0 in bfloat16.

    The model has learned positions, LayerNorm and GELU, which are derived from the tensors. The
    number of heads is set by `--config`, because the heads do not have the size 64.
    """
    folder = golden / "ablation_m0"
    state = load_file(folder / "model.safetensors")
    state = {name: value for name, value in state.items() if name.startswith("model.")}
    if head == "base":
        state = {name.removeprefix("model."): value for name, value in state.items()}
    else:
        state |= load_file(folder / "sequence_classification_head.safetensors")
    (tmp_path / "heads.yaml").write_text("num_attention_heads: 4\n")
    source = save(tmp_path / "run", state)

    caplog.set_level("INFO", "neobert")
    options = ("--tokenizer", "none", "--dtype", "bfloat16", "--config", tmp_path / "heads.yaml")
    assert convert(source, tmp_path / "out", *options) == 0

    printed = capsys.readouterr().out
    derived = ("position_embedding_type learned", "norm_type layer", "hidden_act gelu")
    assert all(words in caplog.text for words in derived)
    assert f"{auto}.from_pretrained" in printed
    rounding = float(re.search(r"with rounding\s+(\S+)", printed).group(1))
    assert 1e-4 < rounding < 1, "bfloat16 must differ from float32 by its rounding"
    assert re.search(r"largest difference\s+0.0e\+00", printed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["max_position_embeddings"] == 64

    expected = load_file(folder / "expected.safetensors")
    model_class = NeoBERTModel if head == "base" else NeoBERTForSequenceClassification
    model = model_class.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        if head == "base":
            output = model(expected["unpadded_input_ids"]).last_hidden_state
            expected_output = expected["unpadded_last_hidden_state"]
        else:
            output = model(expected["input_ids"], expected["attention_mask"]).logits
            expected_output = expected["sequence_classification_logits"]
    # The tolerance is larger than the rounding of bfloat16.
    assert (output - expected_output).abs().max() < 0.05 * expected_output.abs().max()


def test_folder_that_fails_verification_is_removed(tmp_path, checkpoint, monkeypatch):
    """Check that a folder with a wrong weight, or with code that fails to import, is removed."""
    original = hub_folder.write_weights
    name = "model.transformer_encoder.1.wo.weight"

    def spoiled(folder, state, size):
        return original(folder, {**state, name: state[name] * 1.01}, size)

    # The first folder has one wrong weight.
    monkeypatch.setattr(hub_folder, "write_weights", spoiled)
    with pytest.raises(UserError, match="differ from those of the source"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")

    def without_code(folder, *arguments):
        (folder / "modeling_neobert.py").write_text("import nothing_at_all\n")
        return original(folder, *arguments)

    # The code of the second folder imports a missing module.
    monkeypatch.setattr(hub_folder, "write_weights", without_code)
    with pytest.raises(UserError, match="does not load, so it was discarded: .*nothing_at_all"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], (
        "the wrong folder was not removed"
    )


# A script that fails with its working directory and its directory of temporary files.
FOLDER = "import os, sys; sys.exit(f'in {os.getcwd()} and {os.environ[\"TMPDIR\"]}')"


@pytest.mark.parametrize(
    "code, message",
    [
        ("import os; os.kill(os.getpid(), 9)", "its process ended with -9"),
        ("raise ValueError('a\\nb\\x1b[2J')", r"b\\x1b\[2J"),
        (FOLDER, r"in (\S+) and \1"),
    ],
    ids=["killed", "error", "folder"],
)
def test_failed_verification_process_is_reported(
    tmp_path, monkeypatch, reload_in_a_process, code, message
):
    """Check the message about a process that is killed or raises an error.

    The process runs in the scratch directory, so that no files are left elsewhere.
    """
    monkeypatch.setattr(verify, "__file__", str(tmp_path / "verify.py"))
    (tmp_path / "fresh_model.py").write_text(code)
    with pytest.raises(UserError, match=f"does not load, so it was discarded: {message}"):
        reload_in_a_process("folder", "AutoModel", "inputs", "outputs", tmp_path)
