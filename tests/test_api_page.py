"""Test that docs/api.md lists the current fields, arguments and defaults of the package.

tests/test_pages.py runs the examples of the page.
"""

import ast
import inspect
import re

import pytest
from helpers.paths import ROOT

import neobert
from neobert.configuration_neobert import ALIASES, AUTO_MAP
from neobert.embeddings.packed_encoder import load_sentence_transformer


PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
# Model classes by the Auto class that loads them.
MODELS = {
    auto_class: path.rpartition(".")[2]
    for auto_class, path in AUTO_MAP.items()
    if auto_class != "AutoConfig"
}


def section_of(heading):
    """Return the text between a heading of the second level and the next one."""
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(first_column, section=PAGE):
    """Return the rows of the first table whose first column has this header."""
    lines = section[section.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names_in(cell):
    """Return the names in the code of a cell: `max_length`, and `rope` of `rope=False`."""
    return re.findall(r"`(\w+)[^`]*`", cell)


def arguments_of(function):
    """Return the named arguments of a function, {name: parameter}."""
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def type_of(parameter, value):
    """Return the type of a field as the page writes it.

    Args:
        parameter: Argument of the constructor.
        value: Value of the field in the default configuration.
    """
    annotation = parameter.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = text.replace("dict[str, typing.Any]", "dict").replace(" | ", " or ")
    # The default None of an argument may stand for another value.
    if parameter.default is None and value is not None:
        text = text.removesuffix(" or None")
    return text


def test_configuration_table_is_current():
    """The table has all arguments of the constructor, with the types and defaults of the fields."""
    config = neobert.NeoBERTConfig()
    expected = [
        (name, type_of(parameter, getattr(config, name)), getattr(config, name))
        for name, parameter in arguments_of(neobert.NeoBERTConfig.__init__).items()
    ]
    shown = [
        (names_in(row[0])[0], row[1], ast.literal_eval(row[2].strip("`"))) for row in table("Field")
    ]
    assert shown == expected


def test_aliases_are_current():
    """The table has the names of BERT and of the authors' training code."""
    names = [name for row in table("Alias") for name in names_in(row[0])]
    assert sorted(names) == sorted([*neobert.NeoBERTConfig.attribute_map, *ALIASES])


def test_all_models_are_listed():
    """The table has all classes that the Auto classes load."""
    shown = {names_in(row[1])[0]: names_in(row[0])[0] for row in table("Class")}
    assert shown == MODELS


@pytest.mark.parametrize("model", MODELS.values())
def test_arguments_of_forward_are_listed(model):
    """The tables have the arguments of the backbone and those of the heads."""
    section = section_of("Models")
    cells = [row[0] for row in table("Argument", section)]
    cells += [row[1] for row in table("Model", section)]
    names = {name for cell in cells for name in names_in(cell)}
    assert arguments_of(getattr(neobert, model).forward).keys() <= names


@pytest.mark.parametrize(
    "name", ["PackedEncoder", "quantize_int8", "convert_checkpoint", "default_learning_rate"]
)
def test_signature_is_current(name):
    """The section of a function has its current signature and describes its arguments."""
    section = section_of(name)
    call = re.search(rf"^`{name}\((.*)\)", section, flags=re.MULTILINE)[1]
    shown = arguments_of(eval(f"lambda {call.replace(': int', '')}: None"))
    arguments = arguments_of(getattr(neobert, name))
    assert {item: parameter.default for item, parameter in shown.items()} == {
        item: parameter.default for item, parameter in arguments.items()
    }

    # The argument of the last function is described in the text.
    if "| Argument |" not in section:
        assert len(arguments) == 1
        return
    names = {*arguments}
    if name == "PackedEncoder":
        names |= arguments_of(load_sentence_transformer).keys()
    assert {names_in(row[0])[0] for row in table("Argument", section)} == names


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_arguments_of_encode_are_current(method):
    """The second table of `PackedEncoder` has the keyword arguments and their defaults."""
    section = section_of("PackedEncoder").split("keyword arguments:")[1]
    shown = {
        names_in(row[0])[0]: ast.literal_eval(row[1].strip("`"))
        for row in table("Argument", section)
    }
    arguments = arguments_of(getattr(neobert.PackedEncoder, method))
    assert shown == {
        name: parameter.default for name, parameter in arguments.items() if name != "texts"
    }
