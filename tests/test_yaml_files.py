"""Pins the reader of YAML: what numbers and references become, and that damaged files are one
sentence, and run nothing."""

import os

import pytest

from neobert.common.errors import UserError
from neobert.common.yaml_files import read_brackets, read_yaml


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


def test_aliases_are_not_written_out(tmp_path):
    """600 bytes of aliases of aliases are 10^9 values, and a part may hold itself."""
    lines = ["a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    data = read(tmp_path, "\n".join(lines))
    assert data["a8"][0] is data["a8"][9] is data["a7"]
    read(tmp_path, "a: &a\n  b: *a")


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 1000, "recursion"),
        ("a: !!int x", "invalid literal"),
        ("a: 2001-99-99", "month must be in"),
        ("? [a]\n: 1", "unhashable"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: *b", "undefined alias"),
        ("a: 1\n---\nb: 2", "single document"),
        ("a: [", "not valid YAML"),
        ("a: \x07", "special characters are not allowed"),
        (b"\xff\xfea", "cannot be read .*decode"),
    ],
    ids=range(10),
)
def test_refused_with_one_sentence(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as refusal:
        read(tmp_path, text)
    assert len(str(refusal.value)) < 600 and "\n" not in str(refusal.value)


def test_no_file_to_read(tmp_path):
    with pytest.raises(UserError, match="there is no file .*; give the path of a YAML file"):
        read_yaml(tmp_path / "a.yaml")
    os.mkfifo(tmp_path / "b.yaml")
    with pytest.raises(UserError, match="b.yaml is not a file"):
        read_yaml(tmp_path / "b.yaml")


def test_a_value_of_the_command_line():
    assert read_brackets("[a, 1e-4]") == ["a", 1e-4] and read_brackets("{a: no}") == {"a": "no"}
    for text in ("[" * 1000, "[ab]*.txt", "{", "2001-99-99", "1", "a: 1"):
        assert read_brackets(text) == text


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
