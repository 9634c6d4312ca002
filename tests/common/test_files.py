"""Tests of the YAML reader.

Covers numbers, booleans and references, and the rejection of damaged and malicious files with an
error of one line.
"""

import os
import signal

import pytest

from neobert.common import files
from neobert.common.errors import UserError
from neobert.common.files import (
    parse_yaml,
    read_brackets,
    read_json,
    read_yaml,
    write_json,
    write_record,
)
from neobert.common.model_card import read_card
from neobert.conversion.config_files import find_config


def read(tmp_path, text):
    """Return the content of a YAML file with this text."""
    (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(tmp_path / "a.yaml")


def test_numbers_booleans_references_and_anchors(tmp_path):
    """Check that numbers and booleans are those of YAML 1.2.

    YAML 1.1 reads no, off, yes and on as booleans, and 1e-4 as text.
    """
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
    ("scalar", "value"),
    [
        ("7e90230a92c1", "7e90230a92c1"),
        ("1e-4/run", "1e-4/run"),
        ("3e-4_b32", "3e-4_b32"),
        ("1e-4", 0.0001),
        ("1.0e+5", 100_000.0),
        (".5e3", 500.0),
        ("1e5", 100_000.0),
    ],
)
def test_only_a_complete_scalar_is_a_float(tmp_path, scalar, value):
    """A scalar that only begins like a float, such as a commit hash, is text."""
    for data in (parse_yaml(f"a: {scalar}\n"), read(tmp_path, f"a: {scalar}\n")):
        assert data == {"a": value} and type(data["a"]) is type(value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &a\n  b: *a", "recursion"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "single document"),
        (b"\xff\xfea", "cannot be read .*decode"),
        ("b: 1\na: {x: 1,\n  x: 2}", "must be unique, got 'x' again in line 3"),
    ],
    ids=range(5),
)
def test_invalid_file_is_reported(tmp_path, text, message):
    """Check that an invalid or malicious file raises a short error of one line."""
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, text)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


def _bomb(line):
    """Return YAML text of nine lines, each of which refers to the previous line ten times.

    Args:
        line: Function that returns a line, given the name of the previous line and its own name.
    """
    names = "abcdefghi"
    pairs = zip(names, names[1:], strict=False)
    return "\n".join(["a: &a {x: 1}", *(line(*pair) for pair in pairs)])


def _ten(item):
    """Return an item ten times, separated by commas."""
    return ", ".join([item] * 10)


REFERENCE = "'${%s}'"
BOMBS = {
    "aliases": _bomb(lambda before, name: f"{name}: &{name} [{_ten('*' + before)}]"),
    "merge keys": _bomb(lambda before, name: f"{name}: &{name} {{<<: [{_ten('*' + before)}]}}"),
    "references": _bomb(lambda before, name: f"{name}: [{_ten(REFERENCE % before)}]"),
}


@pytest.fixture
def time_limit():
    """Fail a test that takes more than ten seconds."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("took more than 10 seconds"))
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_bombs_are_rejected(bomb, tmp_path, time_limit):
    """Check that a file of less than 1,000 bytes that expands to 10^8 values is rejected.

    Such a configuration in a checkpoint raises an error, and such a model card is ignored.
    """
    text = f"hidden_size: 64\n{BOMBS[bomb]}\n"
    assert len(text) < 1000

    with pytest.raises(UserError, match="must expand to at most 100,000 values"):
        read(tmp_path, text)

    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="must expand to at most 100,000 values"):
        find_config([tmp_path])

    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{text}---\nText.\n")
    # References in a model card are not resolved, so they remain text.
    assert read_card(tmp_path) == ({"license": "mit"} if bomb == "references" else {})


@pytest.mark.parametrize("kind", ("aliases", "references", "written out"))
def test_the_limit_counts_every_expanded_value(kind, tmp_path, monkeypatch):
    """Check that a file with as many values as the limit is read, and one more is rejected.

    The root, the two keys, the value of `a` and the list count as values. If references are
    resolved, the keys do not count.
    """
    monkeypatch.setattr(files, "MAX_VALUES", 100)
    item = {"aliases": "*a", "references": "'${a}'", "written out": "1"}[kind]

    def text(count):
        return f"a: &a 1\nb: [{', '.join([item] * count)}]"

    # A reference counts as two values: itself and its target.
    fits = 48 if kind == "references" else 95
    assert read(tmp_path, text(fits)) == {"a": 1, "b": [1] * fits}
    with pytest.raises(UserError, match="expand to at most 100 values, got more"):
        read(tmp_path, text(fits + 1))


def test_card_metadata(tmp_path):
    """Check the license and base model that are read from the front matter of a model card.

    A list of base models and damaged front matter are ignored.
    """
    card = tmp_path / "README.md"
    assert read_card(tmp_path) == {}
    card.write_bytes(
        b"---\r\nlicense: mit\r\nbase_model: [a, b]\r\ntags: [x]\r\n---\r\n# Title\r\n"
    )
    assert read_card(tmp_path) == {"license": "mit"}

    for text in ("no front matter\n", "---\n- a\n---\n", "---\na: [\n---\n", "---\n\n---\n"):
        card.write_text(text)
        assert read_card(tmp_path) == {}, text

    card.write_text(
        "---\nlicense: other\nlicense_name: mine\nbase_model: a/b\n---\n---\nx: y\n---\n"
    )
    expected = {"license": "other", "license_name": "mine", "base_model": "a/b"}
    assert read_card(tmp_path) == expected


def test_card_with_a_revision_that_begins_like_a_float(tmp_path):
    """The license is read from a card that also contains a commit hash with digits and an e."""
    revision = "7e90230a92c190f1bf69ae9002b8cea547a64cca"
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nrevision: {revision}\n---\n# Title\n")
    assert read_card(tmp_path) == {"license": "mit"}


def test_missing_file_and_pipe_are_rejected(tmp_path):
    """Check the errors about a missing file and about a pipe, which would block the reader."""
    with pytest.raises(UserError, match="no file .*a.yaml"):
        read_yaml(tmp_path / "a.yaml")
    os.mkfifo(tmp_path / "b.yaml")
    with pytest.raises(UserError, match="b.yaml is not a file"):
        read_yaml(tmp_path / "b.yaml")


def test_only_records_hide_secrets(tmp_path):
    """A prompt of a model may be called "token", and must not be hidden."""
    path = tmp_path / "data.json"
    content = {"prompts": {"token": "Find: "}}
    write_json(path, content)
    assert read_json(path) == content
    write_record(path, content)
    assert read_json(path) == {"prompts": {"token": "<hidden>"}}


def test_read_brackets():
    """Check that text in brackets is parsed, and invalid or other text is returned unchanged."""
    assert read_brackets("[a, 1e-4]") == ["a", 1e-4] and read_brackets("{a: no}") == {"a": "no"}
    for text in ("[" * 1000, "[ab]*.txt", "{", "2001-99-99", "1", "a: 1"):
        assert read_brackets(text) == text
