"""Test `neobert convert` from end to end.

The golden weights must be converted to a model with the reference outputs, and a failed conversion
must not leave any files.
"""

import hashlib
import json
import os
import re
import shutil

import pytest
import torch
from helpers.conversion_helpers import convert, run_script, save
from helpers.paths import ROOT
from safetensors.torch import load_file

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    convert_checkpoint,
)
from neobert.cli import main as command
from neobert.common.errors import UserError


@pytest.mark.slow
def test_convert_end_to_end(tmp_path, golden, tokenizer_dir):
    """Check that convert_checkpoint.py converts the golden weights to a loadable, sharded model.

    PYTHONPATH is not set, as in a clone that is not installed.
    """
    weights = load_file(golden / "neobert_tiny" / "model.safetensors")
    source = tmp_path / "run" / "model_checkpoints" / "100"
    save(source, {f"module._orig_mod.{name}": value for name, value in weights.items()})
    shutil.copyfile(golden / "neobert_tiny" / "config.json", tmp_path / "run" / "config.json")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    options = ("--tokenizer", "none", "--max-shard-size", "300KB")

    process = run_script("run", "out/model", *options, cwd=tmp_path, env=environment)
    assert process.returncode == 0, process.stderr
    output = tmp_path / "out" / "model"
    printed = process.stdout

    # The shards contain the weights of the checkpoint.
    shards = sorted(output.glob("model-*.safetensors"))
    assert len(shards) == 3 and max(shard.stat().st_size for shard in shards) < 310_000
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == 4 * 177_928
    for shard in shards:
        assert hashlib.sha256(shard.read_bytes()).hexdigest() in printed
        for name, value in load_file(shard).items():
            assert torch.equal(value, weights[name]), f"{name} differs from the checkpoint"

    # The report contains the sizes, the result of the verification and code to load the model.
    table = r"tensors\s+28\nparameters\s+177,928\ndtype\s+float32\nbytes\s+\d"
    assert re.search(table, printed), printed
    assert re.search(r"largest difference\s+0.0e\+00 \(largest output [1-9]", printed)
    load = 'AutoModelForMaskedLM.from_pretrained("out/model", trust_remote_code=True)'
    assert load in printed

    # The outputs are those of the reference.
    expected = load_file(golden / "neobert_tiny" / "expected.safetensors")
    reloaded = NeoBERTForMaskedLM.from_pretrained(output).eval()
    with torch.no_grad():
        logits = reloaded(expected["input_ids"], expected["attention_mask"]).logits
    non_padding = expected["attention_mask"].bool()
    assert (logits - expected["logits"])[non_padding].abs().max() < 5e-5
    assert not list(tmp_path.glob("out/.*")), "a temporary file was not removed"


HEADS = "masked-lm, base, sequence-classification, token-classification, question-answering"


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--dtype", "float8"],
            "`--dtype` must be one of float32, bfloat16, float16, got 'float8'.",
        ),
        (["--head", "crf"], f"`--head` must be one of {HEADS}"),
        (["--step", "last"], "`--step` must be an integer, at least 0, got 'last'."),
        (["--sentence-transformers", "--tokenizer", "none"], "needs a tokenizer"),
        (["--config", "/nowhere.yaml"], "no file /nowhere.yaml"),
    ],
)
def test_bad_options(tmp_path, checkpoint, options, message):
    """Check that an invalid option raises an error and nothing is written."""
    with pytest.raises(UserError, match=re.escape(message)):
        convert(checkpoint, tmp_path / "out", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_sentence_transformers_needs_a_backbone(tmp_path, tiny_config):
    """Check that a classifier cannot be converted with `--sentence-transformers`."""
    state = NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config)).state_dict()
    source = save(tmp_path / "run", state, **tiny_config)
    with pytest.raises(UserError, match="needs a checkpoint with the head masked-lm or base, got"):
        convert(source, tmp_path / "out", "--sentence-transformers")


@pytest.mark.parametrize("size", ["abc", "5", "0MB", "1.5GB"])
def test_invalid_shard_size_is_refused_before_reading(tmp_path, capsys, size):
    arguments = [str(tmp_path / "absent"), str(tmp_path / "out"), "--max-shard-size", size]
    assert command(["convert", *arguments]) == 2
    assert f"such as 500MB, got '{size}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "classification"}, "`head` must be one of masked-lm, .*, got 'classification'."),
        ({"dtype": "fp16"}, "`dtype` must be one of float32, bfloat16, float16, got 'fp16'."),
        ({"max_shard_size": 5_000_000}, "`max_shard_size` must be text, got 5000000."),
    ],
)
def test_arguments_of_convert_checkpoint_are_checked(tmp_path, arguments, message):
    """Wrong arguments of the Python function are reported like options of the command."""
    with pytest.raises(UserError, match=message):
        convert_checkpoint(ROOT / "examples" / "checkpoint", tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
