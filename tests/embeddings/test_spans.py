"""Tests of the division of a long text into windows."""

import random
import re
import time

import pytest

from neobert.embeddings.spans import _BREAKS, Span, spans


def words(text):
    """Return the offsets of words and of other characters, like a tokenizer."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def characters(text):
    """Return the offsets of all characters except white space."""
    return [(index, index + 1) for index, char in enumerate(text) if not char.isspace()]


def divided(text, window, overlap, offsets=words):
    """Return the texts of the windows."""
    return [text[span.start : span.end] for span in spans(text, offsets(text), window, overlap)]


# {name: ((text, window, overlap), windows)}. A word is a token, and so is a full stop.
CASES = {
    "one sentence each": (("A b c. D e f. G h i.", 5, 0), ["A b c.", "D e f.", "G h i."]),
    "as many sentences as fit": (("A b. C d. E f. G h.", 7, 0), ["A b. C d.", "E f. G h."]),
    "neighbors share complete sentences": (
        ("A b. C d. E f. G h.", 6, 3),
        ["A b. C d.", "C d. E f.", "E f. G h."],
    ),
    "a sentence that does not fit in the overlap is not shared": (
        ("A b c d. E f g h.", 6, 3),
        ["A b c d.", "E f g h."],
    ),
    "no sentence end at all": (("a b c d e f g h", 3, 1), ["a b c", "c d e", "e f g", "g h"]),
    "a sentence longer than the window": (
        ("A b. C d e f g h. I j.", 4, 1),
        ["A b.", "C d e f", "f g h.", "I j."],
    ),
    "an abbreviation before a small letter is no end": (
        ("Birds, e.g. a wren. Wrens, etc. sing.", 12, 0),
        ["Birds, e.g. a wren.", "Wrens, etc. sing."],
    ),
    "before a small letter no sentence ends": (
        ("A b c. D e! f g. H", 8, 0),
        ["A b c.", "D e! f g. H"],
    ),
    "quotes and brackets belong to the sentence": (
        ('He said "Go." She (it is told.) went.', 7, 0),
        ['He said "Go."', "She (it is told.)", "went."],
    ),
    "a blank line ends a paragraph": (
        ("Title one\n\na b c\nd e", 6, 0),
        ["Title one", "a b c\nd e"],
    ),
    "a line end, where no sentence ends": (("a b\nc d e\nf g", 6, 0), ["a b\nc d e", "f g"]),
    "no letter follows": (("A b! 12 c? - d", 4, 0), ["A b!", "12 c?", "- d"]),
    "an empty text": (("", 6, 2), [""]),
    "white space alone": ((" \n ", 6, 2), [""]),
}


@pytest.mark.parametrize("name", CASES)
def test_window_boundaries(name):
    """Check the windows of a text."""
    arguments, expected = CASES[name]
    assert divided(*arguments) == expected


def test_chinese_and_japanese():
    """Check texts without white space.

    Windows end at the marks that end a sentence. A longer sentence is divided after any character.
    """
    text = "我爱你。他说「走吧。」她走了！今天天气很好非常好"
    expected = ["我爱你。", "他说「走吧。", "」她走了！", "今天天气很好", "非常好"]
    assert divided(text, 6, 0, characters) == expected
    expected = ["我爱你。", "他说「走吧。」", "她走了！", "今天天气很好非常", "好"]
    assert divided(text, 8, 0, characters) == expected


def test_a_character_of_several_tokens_is_not_divided():
    """The four tokens of an emoji, which have the same offsets, stay in one window.

    Byte-level tokenizers divide a character into several tokens.
    """
    text = "ab 🦉🦉 c"
    offsets = [(0, 2), (3, 4), (3, 4), (3, 4), (3, 4), (4, 5), (4, 5), (4, 5), (4, 5), (6, 7)]
    windows = spans(text, offsets, 6, 0)
    assert [(s.first, s.stop, text[s.start : s.end]) for s in windows] == [
        (0, 1, "ab"),
        (1, 5, "🦉"),
        (5, 10, "🦉 c"),
    ]

    small_windows = spans("🦉", [(0, 1)] * 4, 3, 1)
    assert [(s.first, s.stop) for s in small_windows] == [(0, 3), (2, 4)], (
        "a character with more tokens than a window must be divided"
    )


def test_windows_do_not_start_with_white_space():
    """Windows have no white space at their start if the offsets of a word include it."""
    text = "Ab cd. Ef gh."
    offsets = [(0, 2), (2, 5), (5, 6), (6, 9), (9, 12), (12, 13)]
    windows = spans(text, offsets, 4, 0)
    assert [text[s.start : s.end] for s in windows] == ["Ab cd.", "Ef gh."]


def test_every_token_is_in_a_window_and_offsets_increase():
    """Check the guarantees of `spans` on random texts."""
    generator = random.Random(0)
    parts_of_text = [*'a .。é🦉中)"', "bc", "def", "  ", "\n", "\n\n", "! ", "? A"]
    for trial in range(400):
        text = "".join(generator.choices(parts_of_text, k=generator.randrange(60)))
        offsets = (characters if trial % 2 else words)(text)
        window = generator.randrange(1, 12)
        overlap = generator.randrange(window)

        windows = spans(text, offsets, window, overlap)
        case = repr((text, window, overlap, windows))

        if not offsets:
            assert windows == [Span(0, 0, 0, 0)], case
            continue

        assert {i for s in windows for i in range(s.first, s.stop)} == {*range(len(offsets))}, case
        assert all(0 < s.stop - s.first <= window for s in windows), case
        assert all(0 <= s.start < s.end <= len(text) for s in windows), case
        assert all(
            (s.start, s.end) == (offsets[s.first][0], offsets[s.stop - 1][1]) for s in windows
        )

        for current, following in zip(windows, windows[1:]):
            assert current.start < following.start and current.end < following.end, case
            assert current.first < following.first <= current.stop < following.stop, case
            assert current.stop - following.first <= overlap, case


@pytest.mark.parametrize("text", [" ", "\t", ".", "\n ", ". ", '."', "\u3002", "\r\n"])
def test_long_runs_take_linear_time(text):
    """Runs of spaces or dots, as in a table of contents, take milliseconds and not minutes."""
    text = f"a{text * 200_000}"
    start = time.perf_counter()
    spans(text, [(0, 1), (len(text) - 1, len(text))], 1, 0)
    assert time.perf_counter() - start < 2


def test_ends_of_lines_and_sentences_are_those_of_simple_expressions():
    """The expressions that take linear time have the same ends as simple ones."""
    simple_line = re.compile(r"[ \t]*[\n\u2028]\s*")
    simple_sentence = re.compile(_BREAKS[2].pattern.replace(r"(?<![.!?\u2026\u061f\u06d4])", ""))
    assert simple_sentence.pattern != _BREAKS[2].pattern

    generator = random.Random(0)
    for _ in range(20_000):
        text = "".join(generator.choices(" \t\n\r\u2028\u2029..!?\u2026\"')\u3002\u300daA1", k=12))
        for pattern, simple in ((_BREAKS[1], simple_line), (_BREAKS[2], simple_sentence)):
            ends = [match.end() for match in pattern.finditer(text)]
            assert ends == [match.end() for match in simple.finditer(text)], repr(text)
