"""Pins the command line: options from recipes and arguments in their types and ranges, Trainer's
options passed through, typing errors named as such, one sentence and exit code 2 for bad input, and
what --help and --version print.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neobert import cli
from neobert.common.arguments import Arguments, Options, option
from neobert.common.errors import UserError, require


@dataclasses.dataclass
class Model(Arguments):
    hidden_size: int = option(help="width", least=1, most=4096)
    name: str = option("tiny", "what it is called")
    dropout: float | None = option(None, "share of the weights", least=0, below=1)
    model_config: dict | None = option(None, "fields of the configuration")


@dataclasses.dataclass
class Training(Arguments):
    """How it trains."""

    rate: float = option(1e-3, "peak learning rate", above=0)
    seeds: list[int] = option(default_factory=lambda: [1], help="one run each", least=0)
    layout: str = option("packed", "packed or padded", choices=("packed", "padded"))
    lora: bool = option(False, "adapters alone")
    texts: str | list = option("a.txt", "file or files")
    scores: dict[str, list[float]] = option(default_factory=dict, help="of each text")


@dataclasses.dataclass
class Paths(Arguments):
    """Folders."""

    source: str = option(help="what is read", positional=True)
    output: str = option(help="what is written", positional=True)
    length: int = option(8, "tokens", least=1)
    suffix: str = option("", "may be empty")


@dataclasses.dataclass
class Files(Arguments):
    """Texts."""

    texts: list[str] = option(help="what is read", positional=True)
    size: int = option(8, "rows", least=1)


@pytest.fixture
def read(tmp_path):
    """Function (text of a recipe, command line, more) -> what `Options.read` returns."""

    def read(text, argv=(), groups=(Model, Training), trainer=None):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return Options("x", "", groups, trainer=trainer).read([str(path), *argv])

    return read


def test_the_command_line_wins_over_the_recipe_and_later_recipes_over_earlier_ones(read, tmp_path):
    first = tmp_path / "first.yaml"
    first.write_text("hidden_size: 8\nname: first\nlora: true\n")
    recipe = "hidden_size: 64\nrate: 6e-4\nseeds: [1, 2]\n"
    assert read(recipe, ["--hidden-size", "32"]) == [Model(32), Training(6e-4, [1, 2])]
    both = [str(first), str(tmp_path / "recipe.yaml")]
    expected = [Model(64, "first"), Training(6e-4, [1, 2], lora=True)]
    assert Options("x", "", (Model, Training)).read(both) == expected
    assert Options("x", "", (Model,)).read(["--hidden-size=1"]) == [Model(1)], "without a recipe"


@pytest.mark.parametrize(
    "argv, field, value",
    [
        (["--rate", "1e-4"], "rate", 1e-4),
        (["--seeds", "1", "2", "3"], "seeds", [1, 2, 3]),
        (["--seeds", "[1, 2]"], "seeds", [1, 2]),
        (["--seeds=[]"], "seeds", []),
        (["--texts", "[b.txt, 'c d.txt']"], "texts", ["b.txt", "c d.txt"]),
        (["--texts", "2024"], "texts", "2024"),
        (["--texts", "2024", "1e3"], "texts", ["2024", "1e3"]),
        (["--lora"], "lora", True),
        (["--lora", "--layout", "padded"], "lora", True),
        (["--lora", "false"], "lora", False),
        (["--scores", "{a: [1, 2e-1], b: [4]}"], "scores", {"a": [1.0, 0.2], "b": [4.0]}),
        (["--name", "1e-4"], "name", "1e-4"),
        (["--name", "[a]"], "name", "[a]"),
        (["--hidden_size", "7"], "hidden_size", 7),
        (["--dropout", "None"], "dropout", None),
        (["--model-config", "{eps: 1e-6, act: no}"], "model_config", {"eps": 1e-6, "act": "no"}),
    ],
    ids=str,
)
def test_values_of_the_command_line(argv, field, value):
    groups = Options("x", "", (Model, Training)).read(["--hidden-size", "1", *argv])
    (read,) = (vars(group)[field] for group in groups if field in vars(group))
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "recipe, argv, words",
    [
        ("hiden_size: 64", "", "unknown key 'hiden_size' in the recipe RECIPE; did you mean"),
        ("name: a", "", "give --hidden-size; --help lists the options"),
        ("- a", "", "RECIPE must hold 'name: value' lines, but holds ['a']"),
        ("hidden_size: wide", "", "hidden_size in the recipe RECIPE must be int, but 'wide' was"),
        ("scores: {a: [x]}", "", "scores in the recipe RECIPE must be float, but {'a': ['x']}"),
        ("trainer: {seed: 1}", "", "unknown key 'seed' in the recipe RECIPE"),
        ("hidden_size: 0", "", "hidden_size must be at least 1, but 0 was given"),
        ("hidden_size: 4097", "", "hidden_size must be at most 4096, but 4097 was given"),
        ("hidden_size: 1\ndropout: 1.0", "", "dropout must be below 1, but 1.0 was given"),
        ("hidden_size: 1\nrate: 0", "", "rate must be above 0, but 0.0 was given"),
        ("hidden_size: 1\nseeds: [0, -1]", "", "seeds must be at least 0, but -1 was given"),
        ("hidden_size: 1\nlayout: no", "", "layout must be one of packed, padded, but 'no' was"),
        ("name: ''", "", "name is empty, as a variable is that was not set; give it a value"),
        ("", "--texts= --rate=1", "texts is empty"),
        ("", "--hiden-size 1", "unknown argument '--hiden-size'; did you mean --hidden-size?"),
        ("", "--hidden-size", "argument --hidden-size: expected one argument"),
        ("", "--lora a.yml", "lora on the command line must be bool, but 'a.yml'"),
        ("", f"--hidden-size {'9' * 5000}", "hidden_size on the command line must be Integer"),
        ("", "--model-config {a", "model_config on the command line must be object | null, but"),
    ],
    ids=range(19),
)
def test_bad_options_are_one_sentence(read, tmp_path, recipe, argv, words):
    with pytest.raises(UserError) as error:
        read(recipe, argv.split())
    sentence = str(error.value).replace(str(tmp_path / "recipe.yaml"), "RECIPE")
    assert sentence.startswith(words) and "\n" not in sentence


def test_a_recipe_by_config(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.txt"
    first.write_text("hidden_size: 8\nname: first")
    second.write_text("hidden_size: 9")
    options = Options("x", "", (Model,))
    both = ["--config", str(first), f"--config={second}"]
    assert options.read([*both, "--dropout", "0.5"]) == [Model(9, "first", 0.5)]
    third = tmp_path / "third.yml"
    third.write_text("hidden_size: 9")
    assert options.read([str(third), "--config", str(first)]) == [Model(8, "first")]
    assert options.read(["--hidden-size", "7", "--config", str(first)]) == [Model(7, "first")]
    with pytest.raises(UserError, match="argument --config: expected at least one"):
        options.read(["--config"])


@pytest.mark.parametrize(
    "command, argument, words",
    [
        ("glue", "--lr", "Did you mean --learning-rate?"),
        ("glue", "--batch_siz", "Did you mean --batch-size?"),
        ("contrastive", "--epochs", "Did you mean --num-train-epochs?"),
        ("distill", "--batch-size", "Did you mean --per-device-train-batch-size?"),
        ("distill", "--resume", "Run the same command again to resume an interrupted run."),
        ("contrastive", "--train-file", "Did you mean --pairs?"),
        ("pretrain", "--validation-file", "Did you mean --validation?"),
        ("pretrain", "--tokens-per-batch", "Did you mean --micro-batch-tokens?"),
        ("pretrain", "--texts-per-step", "Did you mean --global-batch-size?"),
        ("pretrain", "--heldout", "Did you mean --validation?"),
        ("pretrain", "--measure", "Did you mean --evaluate-only?"),
        ("encode", "--output_dir", "Did you mean --output?"),
    ],
)
def test_the_usual_name_of_an_option_leads_to_the_one_here(command, argument, words, capsys):
    assert cli.main([command, argument, "1"]) == 2
    assert words in capsys.readouterr().err


def test_help_of_a_command_with_trainers_defaults():
    """No list is announced where there is none."""
    text = Options("x", "", (Training,), trainer={}).help()
    assert "A recipe can also be passed as `--config FILE`." in text
    assert "TrainingArguments is accepted." in text and "defaults:" not in text


def test_positional_arguments(tmp_path):
    recipe, options = tmp_path / "short.yml", Options("x", "", (Paths,))
    recipe.write_text("length: 4\nsuffix: ''")
    assert options.read(["a", str(recipe), "b.txt"]) == [Paths("a", "b.txt", 4)]
    assert options.read(["a", "--output", "b"]) == [Paths("a", "b")]
    for argv, words in (
        ([], "give SOURCE, OUTPUT; --help"),
        (["a", ""], "output is empty"),
        (["a", "b", "c"], "unknown argument 'c'"),
        (["a", "--length", "8", "b"], "unknown argument 'b'"),
    ):
        with pytest.raises(UserError, match=words):
            options.read(argv)
    recipe.write_text("size: 3\n")
    argv = ["a.txt", "b.txt", str(recipe), "1e3", "--size", "4"]
    # The last one takes all where it is a list.
    assert Options("x", "", (Files,)).read(argv) == [Files(["a.txt", "b.txt", "1e3"], 4)]


def test_ranges_hold_for_objects_made_in_python():
    with pytest.raises(UserError, match="rate must be above 0, but -1 was given"):
        Training(rate=-1)
    assert Model(1, dropout=None).dropout is None, "None has no range"
    assert (Model(1, dropout=0).dropout, Model(4096).hidden_size) == (0, 4096), "ends belong to it"


# ------------------------------------------------------------------------------------------------
# Trainer's options


def test_trainers_options_go_through(read):
    text = "hidden_size: 1\ntrainer: {learning_rate: 1e-4, eval_strategy: no, max_steps: 7}"
    defaults = {"logging_steps": 5, "max_steps": 3}
    *_, options = read(text, ["--learning-rate", "2e-4", "--bf16"], trainer=defaults)
    assert options == {
        "logging_steps": 5,
        "learning_rate": 2e-4,
        "eval_strategy": "no",
        "max_steps": 7,
        "bf16": True,
    }
    for recipe, argv, words in (
        ("trainer: {learning_rat: 1}", [], "unknown key 'learning_rat' in the recipe .*learning_r"),
        ("trainer: {max_steps: x}", [], "max_steps in the recipe .* must be int, but 'x'"),
        ("", ["--epochs", "1"], "unknown argument '--epochs'; did you mean --num-train-epochs?"),
    ):
        with pytest.raises(UserError, match=words):
            read(recipe, argv, trainer={})


# ------------------------------------------------------------------------------------------------
# printed


def test_help_has_every_option_with_its_range_and_default():
    """By topic: what a base class declares stands under that class's docstring."""
    groups = (Paths, Training)
    example = "neobert x a b"
    printed = Options("neobert x", "50 % of it.", groups, example, {"max_steps": 7}).help()
    assert printed.startswith("usage: neobert x SOURCE OUTPUT [RECIPE.yaml] [--option value")
    words = " ".join(printed.split())
    for line in (
        "50 % of it. example: neobert x a b",
        "Folders: SOURCE what is read OUTPUT what is written",
        "--length VALUE tokens; at least 1 (default: 8)",
        "How it trains: --rate VALUE peak learning rate; above 0 (default: 0.001) --seeds VALUE",
        "one run each; at least 0 (default: [1])",
        "--layout VALUE packed or padded; one of packed, padded (default: packed)",
        "--max-steps (default: 7)",
    ):
        assert line in words, f"the help lacks {line!r}:\n{printed}"


def test_a_recipe_of_the_package_is_found_where_there_is_none_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = Options("x", "", (Model,))
    with pytest.raises(UserError, match="in the recipe recipes/contrastive.yaml"):
        options.read(["recipes/contrastive.yaml"])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "contrastive.yaml").write_text("hidden_size: 5\n")
    assert options.read(["recipes/contrastive.yaml"]) == [Model(5)], "a user's own file comes first"
    with pytest.raises(UserError, match="no file recipes/nothing.yaml"):
        options.read(["recipes/nothing.yaml"])


# ------------------------------------------------------------------------------------------------
# the commands


# The words of a command; export has a target first.
WORDS = {
    command: [command, "gguf"] if command == "export" else [command] for command in cli.COMMANDS
}
WRITING = [command for command in cli.COMMANDS if command != "retrieval"]  # which prints only


@pytest.mark.parametrize("command", WRITING)
def test_a_typing_error_is_named_as_such_by_every_command(command, capsys, tmp_path, monkeypatch):
    """Before any work: nothing is written, and it is not reported as a missing option."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*WORDS[command], "--outptu", "x"]) == 2
    error = capsys.readouterr().err
    expected = r"unknown (argument|option) '--outptu'[.;] [Dd]id you mean --output\?\n"
    assert re.fullmatch(f"neobert {command}: {expected}", error), error
    assert not list(tmp_path.iterdir())


HELP = """
import sys
blocked = {"torch", "transformers", "numpy", "datasets", "accelerate", "sentence_transformers", "mteb", "sklearn", "pyarrow"}
class Blocked:
    def find_spec(name, *_):
        if name.partition(".")[0] in blocked:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked)
from neobert.cli import COMMANDS, main
for words in [[], *([c] for c in COMMANDS), *(["export", target] for target in ("gguf", "onnx", "openvino"))]:
    assert main([*words, "--help"]) == 0, words
"""  # noqa: E501


def test_every_command_explains_itself_without_what_it_needs():
    """In a process without torch, transformers and all extras, whose import takes seconds."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    run = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    for command in cli.COMMANDS:
        assert f"\nusage: neobert {command} " in run.stdout, command
    assert run.stdout.lower().count("\nexample:\n") == len(cli.COMMANDS) + 4, (
        "a command shows no example"
    )


def test_a_missing_extra_names_the_pip_line():
    require("train", "json", "numpy>=1.0")
    for module, name in (
        ("nonexistent_module", "nonexistent-module"),
        ("numpy>=99", "'numpy>=99'"),
    ):
        with pytest.raises(ImportError) as error:
            require("train", "json", module)
        assert str(error.value) == (
            f"a required package is not installed. Run `pip install {name}`, or `pip install -e "
            "'.[train]'` in a clone."
        )
