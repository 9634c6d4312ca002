"""Pins the reader of YAML: what numbers, truths and references become, and that damaged files are
one sentence, and run nothing."""

import os

import pytest

from neobert.common.errors import UserError
from neobert.common.files import read_brackets, read_yaml


def read(tmp_path, text):
    (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(tmp_path / "a.yaml")


def test_numbers_truths_references_and_anchors(tmp_path):
    """YAML 1.1 takes no, off, yes and on for truths, and 1e-4 for text."""
    text = (
        "lr: 1e-4\nbig: 1.0e+5\ntext: '1e-4'\nsize: ${model.size}\nnone: ${model.x}\nmodel: "
        "&m\n  size: 12\nother:\n  <<: *m\n  on: true\n"
        "a: no\nb: off\nc: yes\nd: on\nf: False\nh: Truefalse\n"
    )
    assert read(tmp_path, text) == {
        "lr": 1e-4,
        "big": 1e5,
        "text": "1e-4",
        "size": 12,
        "none": None,
        "model": {"size": 12},
        "other": {"size": 12, "on": True},
        **{"a": "no", "b": "off", "c": "yes", "d": "on", "f": False, "h": "Truefalse"},
    }
    assert read(tmp_path, "") is None and read(tmp_path, "- [1, 2]") == [[1, 2]]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &a\n  b: *a", "recursion"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "single document"),
        (b"\xff\xfea", "cannot be read .*decode"),
    ],
    ids=range(4),
)
def test_refused_with_one_sentence(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as refusal:
        read(tmp_path, text)
    assert len(str(refusal.value)) < 600 and "\n" not in str(refusal.value)


def test_no_file_to_read(tmp_path):
    with pytest.raises(UserError, match="no file .*a.yaml"):
        read_yaml(tmp_path / "a.yaml")
    os.mkfifo(tmp_path / "b.yaml")
    with pytest.raises(UserError, match="b.yaml is not a file"):
        read_yaml(tmp_path / "b.yaml")


def test_a_value_of_the_command_line():
    assert read_brackets("[a, 1e-4]") == ["a", 1e-4] and read_brackets("{a: no}") == {"a": "no"}
    for text in ("[" * 1000, "[ab]*.txt", "{", "2001-99-99", "1", "a: 1"):
        assert read_brackets(text) == text
