"""Pins the command line (one sentence and exit code 2 for bad input), recipes (YAML below the command line, no unknown keys) and result files."""

import dataclasses
import json

import pytest

from neobert import __main__ as cli
from neobert.common.errors import UserError, require
from neobert.common.files import write_json, write_text
from neobert.common.recipe import read_recipe
from neobert.common.results import environment, markdown_table


@dataclasses.dataclass
class Model:
    hidden_size: int
    name: str = "tiny"


@dataclasses.dataclass
class Optimisation:
    learning_rate: float = 1e-3
    seeds: list[int] = dataclasses.field(default_factory=lambda: [1])

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise UserError(f"learning_rate must be positive, but {self.learning_rate} was given")


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_yaml_then_command_line(tmp_path):
    path = recipe(tmp_path, "hidden_size: 64\nlearning_rate: 6e-4\nseeds: [1, 2]\n")
    model, optimisation = read_recipe((Model, Optimisation), [path, "--hidden_size", "32"])
    assert model == Model(32, "tiny"), "the command line does not win over the file"
    assert optimisation == Optimisation(6e-4, [1, 2]), "YAML 1.1 reads 6e-4 as text; the recipe must not"


@pytest.mark.parametrize(
    "text, arguments, sentence",
    [
        ("hiden_size: 64", [], "did you mean 'hidden_size'"),
        ("hidden_size: 64", ["--learning_rat", "1"], "learning_rat"),
        ("hidden_size: 64", ["--unheard_of", "1"], "unheard_of"),
        ("hidden_size: 64\nlearning_rate: -1", [], "must be positive"),
        ("hidden_size: 64", ["--learning_rate", "fast"], "fast"),
        ("hidden_size: wide", [], "hidden_size in the recipe must be of type int"),
        ("hidden_size: 64.5", [], "hidden_size in the recipe must be of type int"),
        ("name: a", [], "hidden_size"),
        ("- a\n- b", [], "key: value"),
        ("a: [", [], "not valid YAML"),
        ("1: 2", [], "unknown key 1 in the recipe"),
        ("name: 2020-13-45", [], "not valid YAML"),
        ("hidden_size: .inf", [], "hidden_size in the recipe must be of type int"),
        (b"name: caf\xe9", [], "not valid YAML: 'utf-8' codec can't decode"),
        (b"PK\x03\x04\x00", [], "not valid YAML"),
    ],
)
def test_bad_recipes_are_one_sentence(tmp_path, text, arguments, sentence):
    with pytest.raises(UserError) as error:
        read_recipe((Model, Optimisation), [recipe(tmp_path, text), *arguments])
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_missing_recipe():
    with pytest.raises(UserError, match="there is no recipe"):
        read_recipe((Model,), ["nowhere.yaml"])


def test_command_line_prints_one_sentence(capsys, monkeypatch):
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in cli.COMMANDS), "the help does not list every command"

    def fail(error):
        class Module:
            @staticmethod
            def main(argv):
                raise error

        monkeypatch.setattr(cli.importlib, "import_module", lambda *_: Module)
        return cli.main(["glue"])

    assert fail(UserError("no such task")) == 2
    assert capsys.readouterr().err == "neobert glue: no such task\n"
    assert fail(KeyboardInterrupt()) == 130


def test_every_command_has_its_module():
    for command, (module, _, _) in cli.COMMANDS.items():
        assert callable(getattr(cli.importlib.import_module(f"neobert.{module}"), "main", None)), f"{command} has no main"


def test_missing_extra_names_the_pip_line():
    require("train", "json")
    with pytest.raises(ImportError, match=r"nonexistent_module.*pip install -e '\.\[train\]' in the repository's folder"):
        require("train", "json", "nonexistent_module")


def test_result_files_are_whole_and_carry_their_environment(tmp_path):
    write_json(tmp_path / "a" / "result.json", {"environment": environment(dtype="float32"), "value": 1})
    data = json.loads((tmp_path / "a" / "result.json").read_text())["environment"]
    assert {"command", "commit", "date", "hardware", "threads", "python", "versions", "dtype"} <= set(data)
    assert "torch" in data["versions"] and "transformers" in data["versions"]
    with pytest.raises(TypeError):
        write_text(tmp_path / "a" / "result.json", None)
    assert json.loads((tmp_path / "a" / "result.json").read_text())["value"] == 1, "a failed write damaged the file"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["result.json"], "a failed write left a file behind"
    assert markdown_table(["a", "b"], [[1, None]]) == "| a | b |\n| --- | --- |\n| 1 |  |\n"
