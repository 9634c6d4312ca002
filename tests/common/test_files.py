"""Test the YAML reader: numbers, booleans and references, and the refusal of damaged and malicious
files with one sentence."""

import os
import signal

import pytest

from neobert.common import files
from neobert.common.errors import UserError
from neobert.common.files import read_brackets, read_yaml
from neobert.common.model_card import read_card
from neobert.conversion.config_files import find_config


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


def _bomb(line):
    """Return YAML text whose nine lines refer to the line before ten times each."""
    names = "abcdefghi"
    pairs = zip(names, names[1:], strict=False)
    return "\n".join(["a: &a {x: 1}", *(line(*pair) for pair in pairs)])


def _ten(item):
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
def test_a_small_file_cannot_expand_to_endless_values(bomb, tmp_path, time_limit):
    """400 bytes of nested aliases stand for 10^8 values. Such a file in a checkpoint is refused."""
    text = f"hidden_size: 64\n{BOMBS[bomb]}\n"
    assert len(text) < 1000
    with pytest.raises(UserError, match="must expand to at most 100,000 values"):
        read(tmp_path, text)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="must expand to at most 100,000 values"):
        find_config([tmp_path])
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n{text}---\nText.\n")
    # A card has no references: this text stays text.
    assert read_card(tmp_path) == ({"license": "mit"} if bomb == "references" else {})


@pytest.mark.parametrize("kind", ("aliases", "references", "written out"))
def test_the_limit_counts_every_expanded_value(kind, tmp_path, monkeypatch):
    """A file within the limit is read, and one with a value more is refused. The root, the two
    keys, a value and the list count too; a key does not count for references."""
    monkeypatch.setattr(files, "MAX_VALUES", 100)
    item = {"aliases": "*a", "references": "'${a}'", "written out": "1"}[kind]

    def text(count):
        return f"a: &a 1\nb: [{', '.join([item] * count)}]"

    # A reference is a value, and the value that it names is another one.
    fits = 48 if kind == "references" else 95
    assert read(tmp_path, text(fits)) == {"a": 1, "b": [1] * fits}
    with pytest.raises(UserError, match="expand to at most 100 values, got more"):
        read(tmp_path, text(fits + 1))


def test_card_metadata(tmp_path):
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
