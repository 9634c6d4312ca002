"""Test unknown options and `--help` of all commands.

Every command reports unknown options with a suggestion, and prints its help without importing its
dependencies.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neobert import cli


# Arguments that select a command. `export` also needs a target.
WORDS = {
    command: [command, "gguf"] if command == "export" else [command] for command in cli.COMMANDS
}
# Commands that write files.
WRITING = [command for command in cli.COMMANDS if command not in ("retrieval", "serve")]


@pytest.mark.parametrize("command", WRITING)
def test_unknown_option_is_reported_before_any_work(command, capsys, tmp_path, monkeypatch):
    """An unknown option is an error with a suggestion, and no file is written."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*WORDS[command], "--outptu", "x"]) == 2
    message = f"neobert {command}: unknown option '--outptu'. Did you mean --output?\n"
    assert capsys.readouterr().err == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("glue", "--lr", "Did you mean --learning-rate?"),
        ("glue", "--batch_siz", "Did you mean --batch-size?"),
        ("contrastive", "--epochs", "Did you mean --num-train-epochs?"),
        ("contrastive", "--train-file", "Did you mean --pairs?"),
        ("distill", "--batch-size", "Did you mean --per-device-train-batch-size?"),
        ("distill", "--resume", "Run the same command again to resume an interrupted run."),
        ("pretrain", "--validation-file", "Did you mean --validation?"),
        ("pretrain", "--tokens-per-batch", "Did you mean --micro-batch-tokens?"),
        ("pretrain", "--texts-per-step", "Did you mean --global-batch-size?"),
        ("pretrain", "--heldout", "Did you mean --validation?"),
        ("pretrain", "--measure", "Did you mean --evaluate-only?"),
        ("encode", "--output_dir", "Did you mean --output?"),
        ("finetune", "--output-file", "Did you mean --output?"),
        ("finetune", "--column", "Did you mean --text-column?"),
        ("predict", "--column", "Did you mean --text-column?"),
        ("encode", "--column", "Did you mean --text-column?"),
        ("pretrain", "--text-column", "Did you mean --column?"),
        ("tokenizer", "--text-column", "Did you mean --column?"),
        ("pseudo-perplexity", "--text-column", "Did you mean --column?"),
        ("finetune", "--validation", "Did you mean --validation-file?"),
        ("contrastive", "--validation", "Did you mean --validation-file?"),
        ("distill", "--validation", "Did you mean --validation-file?"),
        ("finetune", "--dataset", "Did you mean --train?"),
        ("distill", "--data", "Did you mean --texts?"),
        ("finetune", "--label", "Did you mean --label-column?"),
        ("pretrain", "--model-name", "Did you mean --init-from?"),
        # Trainer's options that the command sets are not suggested.
        ("glue", "--outputs-dir", "Did you mean --output?"),
    ],
)
def test_suggestions_for_options_of_other_libraries(command, option, hint, capsys):
    """The error suggests an option for names of other libraries and of earlier versions."""
    assert cli.main([command, option, "1"]) == 2
    assert hint in capsys.readouterr().err


HELP = """
import sys

blocked = {
    "torch", "transformers", "numpy", "datasets", "accelerate", "sentence_transformers", "mteb",
    "sklearn", "pyarrow", "fastapi",
}


class Blocked:
    def find_spec(name, *_):
        if name.partition(".")[0] in blocked:
            raise ImportError(name)


sys.meta_path.insert(0, Blocked)
from neobert.cli import COMMANDS, main

targets = [["export", target] for target in ("gguf", "onnx", "openvino")]
for words in [[], *([command] for command in COMMANDS), *targets]:
    assert main([*words, "--help"]) == 0, words
"""


def test_help_needs_no_dependency():
    """Every `--help` page prints without importing the dependencies.

    Importing torch and transformers would take seconds.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    run = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    for command in cli.COMMANDS:
        assert f"\nusage: neobert {command} " in run.stdout, command
    # `neobert`, every command and each of the three targets of `export` have one example.
    assert run.stdout.lower().count("\nexample:\n") == len(cli.COMMANDS) + 4
