"""Pins the reader of YAML: what numbers and references become, and that damaged files are one
sentence, and run nothing."""

import os

import pytest

from neobert.common.errors import UserError
from neobert.common.yaml_files import read_collection, read_scalar, read_yaml


def read(tmp_path, text):
    (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(tmp_path / "a.yaml")


def test_numbers_references_and_anchors(tmp_path):
    text = (
        "lr: 1e-4\nbig: 1.0e+5\ntext: '1e-4'\nsize: ${model.size}\nnone: ${model.x}\nmodel: "
        "&m\n  size: 12\nother:\n  <<: *m\n  on: true\n"
    )
    expected = {
        "lr": 1e-4,
        "big": 1e5,
        "text": "1e-4",
        "size": 12,
        "none": None,
        "model": {"size": 12},
        "other": {"size": 12, "on": True},
    }
    assert read(tmp_path, text) == expected
    assert read(tmp_path, "") is None and read(tmp_path, "- [1, 2]") == [[1, 2]]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &a\n  b: *a", "recursion"),
        ("[" * 1000, "recursion"),
        ('a: !!int ""', "'' is not of the type int"),
        ("a: !!int x", "'x' is not of the type int"),
        ('a: !!float ""', "'' is not of the type float"),
        ("a: !!bool maybe", "'maybe' is not of the type bool"),
        ("a: !!timestamp x", "'x' is not of the type timestamp"),
        ("a: 2001-99-99", "'2001-99-99' is not of the type timestamp"),
        ("a: !!binary 1", "base64|binary"),
        ("? [a]\n: 1", "unhashable"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: *b", "undefined alias"),
        ("a: 1\n---\nb: 2", "single document"),
        ("a: [", "not valid YAML"),
        ("a: \x07", "special characters are not allowed"),
        (b"\xff\xfea", "not UTF-8"),
        (" " * 4_000_001, "more than 4,000,000 bytes"),
    ],
    ids=range(17),
)
def test_refused_with_one_sentence(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as refusal:
        read(tmp_path, text)
    assert len(str(refusal.value)) < 600 and "\n" not in str(refusal.value)


def test_no_file_to_read(tmp_path):
    with pytest.raises(UserError, match="there is no file .*; give the path of a YAML file"):
        read_yaml(tmp_path / "a.yaml")
    os.mkfifo(tmp_path / "b.yaml")
    with pytest.raises(UserError, match="b.yaml is not a file, but a pipe"):
        read_yaml(tmp_path / "b.yaml")


@pytest.mark.parametrize("text", ["[" * 1000, '!!int ""', "&a [*a]", "9" * 5000, "2001-99-99", "{"])
def test_a_value_of_the_command_line(text):
    assert read_scalar(text) == text
    with pytest.raises(ValueError):
        read_collection(text, dict)


def test_truths_and_numbers_are_those_of_yaml_1_2(tmp_path):
    """YAML 1.1 takes no, off, yes and on for truths, and 1e-4 for text."""
    (tmp_path / "a.yaml").write_text(
        "a: no\nb: off\nc: yes\nd: on\ne: true\nf: False\ng: 1e-4\nh: Truefalse\n"
    )
    data = read_yaml(tmp_path / "a.yaml")
    assert data == {
        "a": "no",
        "b": "off",
        "c": "yes",
        "d": "on",
        "e": True,
        "f": False,
        "g": 1e-4,
        "h": "Truefalse",
    }
    assert [read_scalar(text) for text in ("no", "true", "FALSE", "3", "1e-4")] == [
        "no",
        True,
        False,
        3,
        1e-4,
    ]
