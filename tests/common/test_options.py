"""Tests of nested options: recipes, the command line, bounds, messages and `--help`."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import transformers
from msgspec import Meta

from neobert.common import options
from neobert.common.errors import UserError
from neobert.common.options import OptionGroup, OptionParser, option


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    title = "Data"

    source: str = option(help="Texts to read.", positional=True)
    columns: list[str] = option(default_factory=lambda: ["text"], help="Columns to read.")
    weights: dict[str, float] = option(default_factory=dict, help="Sampling weight per source.")
    for_: str | None = option(None, "Purpose of the data.")
    languages: list[Literal["en", "de"]] = option(
        default_factory=lambda: ["en"], help="Languages of the texts."
    )


@dataclass(frozen=True)
class BatchOptions(OptionGroup):
    title = "Batching"

    max_length: Annotated[int, Meta(ge=3, le=4096)] = option(
        512, "Maximum sequence length in tokens."
    )
    dropout: Annotated[float, Meta(ge=0, lt=1)] | None = option(None, "Dropout, 100 % is 1.0.")
    long_texts: Literal["truncate", "windows"] = option("truncate", "Treatment of long texts.")
    compile: bool = option(False, "Compile the model.", affects_results=False)
    prefix: str = option("", "Text before each sequence.", may_be_empty=True)
    suffix: str = option("", "Text after each sequence.")
    query: str | None = option(None, "Text before each query.", may_be_empty=True)


@dataclass(frozen=True)
class ExampleOptions:
    data: DataOptions
    batch: BatchOptions = BatchOptions()


@dataclass(frozen=True)
class HeadOptions(OptionGroup):
    title = "Head"

    head: Literal[
        "sequence-classification", "token-classification", "question-answering", "multiple-choice"
    ] = option("multiple-choice", "Type of the head.")


@dataclass(frozen=True)
class HeadParserOptions:
    head: HeadOptions = HeadOptions()


@dataclass(frozen=True)
class TrainingOptions(ExampleOptions):
    trainer: dict[str, Any] = field(default_factory=dict)


PARSER = OptionParser("neobert example", "Run an example.", ExampleOptions, "neobert example a.txt")
TRAINING = OptionParser(
    "neobert train",
    "Train.",
    TrainingOptions,
    trainer_defaults={"learning_rate": 1e-3, "save_total_limit": 2},
)


def test_defaults_and_command_line_values():
    """Check the defaults, and values of each type, with `=`, underscores and an empty text."""
    result = PARSER.read(["a.txt"])
    assert result == ExampleOptions(DataOptions(source="a.txt"), BatchOptions())

    words = "a.txt --columns a b --for x --max-length 3 --dropout 0 --weights"
    result = PARSER.read(
        [*words.split(), "{a: 1, b: 2.5}", "--compile", "--long_texts=windows", "--prefix", ""]
    )
    assert result.data == DataOptions("a.txt", ["a", "b"], {"a": 1.0, "b": 2.5}, "x")
    assert result.batch == BatchOptions(3, 0.0, "windows", True, "")


def test_recipes_are_overridden_from_left_to_right(tmp_path):
    """Later recipes override earlier ones, and options of the command line override recipes."""
    first = tmp_path / "first.yaml"
    second = tmp_path / "second.yml"
    first.write_text("source: recipe.txt\nmax_length: 8\ncolumns: title\ndropout: 0.5\n")
    second.write_text("max_length: 16\ndropout: null\n")
    expected = DataOptions("recipe.txt", ["title"])

    result = PARSER.read([str(first), str(second)])
    assert result == ExampleOptions(expected, BatchOptions(max_length=16))
    result = PARSER.read([str(second), "--config", str(first), f"--config={second}"])
    assert result == ExampleOptions(expected, BatchOptions(max_length=16))
    result = PARSER.read(["mine.txt", str(first), "--max-length", "32"])
    assert (result.data.source, result.batch.max_length) == ("mine.txt", 32)


def test_local_recipe_takes_precedence_over_bundled_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="in the recipe recipes/contrastive.yaml"):
        PARSER.read(["recipes/contrastive.yaml"])

    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "contrastive.yaml").write_text("max_length: 5\n")
    result = PARSER.read(["a.txt", "recipes/contrastive.yaml"])
    assert result.batch.max_length == 5

    with pytest.raises(UserError, match="there is no file recipes/nothing.yaml"):
        PARSER.read(["a.txt", "recipes/nothing.yaml"])


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        (["--columns", "1", "1e3"], ["1", "1e3"]),
        (["--columns", "[a, 'b c']"], ["a", "b c"]),
        (["--columns=[]"], []),
        (["--columns", "2024"], ["2024"]),
    ],
)
def test_lists_on_the_command_line(words, columns):
    """Items that look like numbers remain text in a list of texts."""
    assert PARSER.read(["a.txt", *words]).data.columns == columns


@pytest.mark.parametrize(
    "hint",
    [list[str], list[str] | None, Annotated[list[str], Meta(min_length=1)]],
    ids=["list", "optional", "bounded"],
)
def test_numbers_in_a_list_of_texts_are_texts(hint):
    """A recipe may contain numbers in a list of texts, such as the names of columns."""
    for value, expected in (
        ([512, "short"], ["512", "short"]),
        (512, ["512"]),
    ):
        assert options.convert({"names": value}, {"names": hint}) == {"names": expected}
    for item in (True, None, ["a"], {"a": 1}):
        with pytest.raises(UserError, match="`names` must be a list whose items are text, got"):
            options.convert({"names": ["short", item]}, {"names": hint})


def test_numbers_in_other_lists_are_unchanged():
    """Numbers in a list of integers, or of any values, remain numbers."""
    hints = {"sizes": list[int], "values": list[float], "items": list[Any]}
    values = {"sizes": [512, 7], "values": [0.5, 1.5], "items": [1, "a"]}
    assert options.convert(values, hints) == values
    assert options.convert({"sizes": "7"}, hints) == {"sizes": [7]}
    with pytest.raises(UserError, match="`sizes` must be a list whose items are an integer"):
        options.convert({"sizes": [512, "short"]}, hints)


def test_numbers_in_a_recipe_and_on_the_command_line(tmp_path):
    """Numbers and texts may be mixed in the lists of recipes and in brackets."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("source: a.txt\ncolumns: [512, short]\n")
    assert PARSER.read([str(recipe)]).data.columns == ["512", "short"]
    assert PARSER.read(["a.txt", "--columns", "[512, short]"]).data.columns == ["512", "short"]


def test_options_of_trainer_are_passed_on(tmp_path):
    """The command line overrides Trainer's options of a recipe, which overrides the defaults."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("source: a.txt\ntrainer: {learning_rate: 1e-4, seed: 3}\n")
    result = TRAINING.read([str(recipe), "--seed", "4", "--max-length", "9"])
    assert result.trainer == {"learning_rate": 1e-4, "save_total_limit": 2, "seed": 4}
    assert result.batch.max_length == 9


@pytest.mark.parametrize("name", ["compile", "bf16", "fp16", "gradient_checkpointing"])
def test_boolean_options_need_no_value(name):
    """A Boolean option is true without a value, also if Trainer defines it.

    `--help` describes --bf16 and lists --fp16 and --gradient-checkpointing, which may be None.
    """
    option_name = f"--{name.replace('_', '-')}"
    for words, expected in (
        ([option_name], True),
        ([option_name, "--max-length", "9"], True),
        ([option_name, "true"], True),
        ([option_name, "false"], False),
        ([f"{option_name}=false"], False),
    ):
        assert options.flatten(TRAINING.read(["a.txt", *words]))[name] is expected, words
    with pytest.raises(UserError, match=f"^`{option_name}` must be true or false, got 'maybe'.$"):
        TRAINING.read(["a.txt", option_name, "maybe"])


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "missing required options: SOURCE. `neobert example --help` lists all options."),
        (
            "a --max-length 2",
            "`--max-length` must be an integer, at least 3 and at most 4,096, got '2'.",
        ),
        (
            "a --max-length 2.5",
            "`--max-length` must be an integer, at least 3 and at most 4,096, got '2.5'.",
        ),
        ("a --dropout 1", "`--dropout` must be a number, at least 0 and less than 1, got '1'."),
        ("a --dropout nan", "`--dropout` must be a number, at least 0 and less than 1, got 'nan'."),
        ("a --long-texts cut", "`--long-texts` must be one of truncate, windows, got 'cut'."),
        ("a --compile maybe", "`--compile` must be true or false, got 'maybe'."),
        ("a --weights {a:x}", "`--weights` must be a mapping, got {'a:x': None}."),
        ("a --max-lenght 3", "unknown option '--max-lenght'. Did you mean --max-length?"),
        ("a --length 3", "unknown option '--length'. Did you mean --max-length?"),
        ("a --zzz", "unknown option '--zzz'. `--help` lists the options."),
        ("a b", "unknown option 'b'. `--help` lists the options."),
        ("a --config", "`--config` needs a recipe: --config RECIPE.yaml."),
    ],
)
def test_command_line_error_messages(words, message):
    """Check the complete message about each type of invalid command line."""
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        PARSER.read(words.split())


def test_recipe_error_messages(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    cases = {
        "max_length: 2": "`max_length` in the recipe R must be an integer, at least 3",
        "max_lenght: 4": "unknown key 'max_lenght' in the recipe R. Did you mean max_length?",
        "- a": "R must contain 'name: value' lines, got ['a'].",
        "prefix: [a]": "`prefix` in the recipe R must be text, got ['a'].",
        "1: 2": "unknown key 1 in the recipe R.",
        "trainer: 5": "`trainer` in the recipe R must be a mapping, got 5.",
    }
    for text, message in cases.items():
        recipe.write_text(text)
        with pytest.raises(UserError, match=re.escape(message.replace("R", str(recipe)))):
            PARSER.read(["a.txt", str(recipe)])


def test_empty_value_is_rejected():
    """Check that an empty value is rejected, because a variable of the shell may be unset."""
    with pytest.raises(UserError, match="`--for` is empty"):
        PARSER.read(["a.txt", "--for", ""])
    with pytest.raises(UserError, match="`--columns` is empty"):
        PARSER.read(["a.txt", "--columns", "a", ""])


def test_empty_value_is_accepted_if_the_option_allows_it():
    """An empty value depends on `may_be_empty`, and not on the default of the option."""
    batch = PARSER.read(["a.txt", "--prefix", "", "--query", ""]).batch
    assert (batch.prefix, batch.query) == ("", "")
    assert PARSER.read(["a.txt"]).batch.query is None
    with pytest.raises(UserError, match="`--suffix` is empty"):
        PARSER.read(["a.txt", "--suffix", ""])


@pytest.mark.parametrize(
    "name, match",
    [
        ("batch-size", "per-device-train-batch-size"),
        ("lr", "learning-rate"),
        ("epochs", "num-train-epochs"),
    ],
)
def test_option_names_of_other_libraries_get_suggestions(name, match):
    """Check that names of options from other libraries are answered with Trainer's names."""
    with pytest.raises(UserError, match=f"Did you mean --{match}[?]"):
        TRAINING.read(["a.txt", f"--{name}", "1"])


def test_resume_needs_no_option():
    """Check the hint for `--resume`, which is no option."""
    with pytest.raises(UserError, match="Run the same command again to resume"):
        TRAINING.read(["a.txt", "--resume"])


def test_help_has_titles_types_choices_and_defaults():
    text = " ".join(PARSER.help().split())

    for part in (
        "Data: SOURCE Texts to read.",
        "Batching: --max-length INT Maximum sequence length in tokens. (default: 512)",
        "--dropout FLOAT Dropout, 100 % is 1.0.",
        "--long-texts {truncate,windows} Treatment of long texts. (default: truncate)",
        "--compile [{true,false}] Compile the model. (default: false)",
        "--columns TEXT [TEXT ...] Columns to read. (default: text)",
        "--weights MAPPING",
        "--for TEXT",
        # argparse repeats the placeholder of a list, so the choices are part of the help instead.
        "--languages NAME [NAME ...] Languages of the texts. Choices: en, de. (default: en)",
    ):
        assert part in text, text


def test_long_choices_are_listed_in_the_description():
    """Choices that are too long for a placeholder are listed in the help of the option."""
    text = OptionParser("neobert head", "Choose a head.", HeadParserOptions).help()
    choices = "sequence-classification, token-classification, question-answering, multiple-choice"
    assert f"--head NAME Type of the head. Choices: {choices}. (default:" in " ".join(text.split())
    # Names are not broken at their hyphens.
    assert not any(line.endswith("-") for line in text.splitlines())


@pytest.mark.parametrize(
    "hint, rule",
    [
        (Literal["auto"], "auto"),
        (Literal["auto"] | bool, "auto or true or false"),
        (Literal["auto"] | Annotated[int, Meta(ge=1)] | None, "auto or an integer, at least 1"),
        (Literal["mean", "cls"], "one of mean, cls"),
        (list[Literal["mean"]], "a list whose items are mean"),
        (list[Literal["mean", "cls"]], "a list whose items are one of mean, cls"),
        (Annotated[float, Meta(gt=0, lt=1)], "a number, greater than 0 and less than 1"),
        (dict[str, float], "a mapping"),
    ],
)
def test_descriptions_of_types(hint, rule):
    """Check the description of a type in error messages."""
    assert options.rule(hint) == rule


def test_help_describes_common_trainer_options_and_lists_others():
    text = TRAINING.help()
    assert text.index("\nData:") < text.index("\nTraining:") < text.index("\nBatching:")
    assert "--bf16 [{true,false}] Train in bfloat16" in " ".join(text.split())
    assert "--learning-rate FLOAT Peak learning rate. (default: 0.001)" in " ".join(text.split())
    others = text.partition("Other options of transformers.TrainingArguments")[2]
    assert "--save-total-limit=2" in others and "--adam-beta2" in others
    assert "--learning-rate" not in others and "--output-dir" not in others


def test_the_list_of_trainer_options_is_complete():
    """Check the names of Trainer's options, which are listed without an import of transformers."""
    names = set(options._trainer_option_names())
    fields = transformers.TrainingArguments.__dataclass_fields__
    assert names == {name for name, item in fields.items() if item.init and name in names}
    assert len(names) > 0.9 * sum(item.init for item in fields.values())
    assert set(options.TRAINER_HELP) <= set(fields)


def test_identity_excludes_options_that_do_not_affect_results():
    """Options with `affects_results=False` are not part of the identity of a run."""
    result = PARSER.read(["a.txt", "--compile"])
    assert "compile" in options.flatten(result) and "compile" not in options.identity(result)
    assert options.identity(result)["max_length"] == 512


def test_logged_options_contain_no_secret(caplog):
    caplog.set_level("INFO", "neobert.options")
    argv = ["https://user:word@host/a.txt", "--hub-token", "hf_0123", "--seed", "7"]
    options.log_options(TRAINING.read(argv))
    assert "seed=7" in caplog.text and "hub_token=" in caplog.text
    assert "hf_0123" not in caplog.text and "word" not in caplog.text
