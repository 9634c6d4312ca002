"""Test words, tags and entities of token classification.

The expected values are written by hand, and entities are compared with those of seqeval.
"""

import random

import numpy as np
import pytest


seqeval = pytest.importorskip("seqeval.metrics.sequence_labeling")

from neobert.finetuning.tagging import (  # noqa: E402
    Entity,
    find_entities,
    is_bio,
    join_words,
    predicted_tags,
    split_words,
    tag_counts,
    tags_from_spans,
    to_bio,
    token_positions,
)


def words_of(text):
    """Return the words of a text as strings."""
    return [text[start:end] for start, end in split_words(text)]


def test_split_words():
    """Check how texts are split into words, also in scripts without spaces."""
    assert words_of("Ada's 3.5 café, no?") == [
        "Ada",
        "'",
        "s",
        "3",
        ".",
        "5",
        "café",
        ",",
        "no",
        "?",
    ]
    # Combining marks are parts of words: vowel signs of Hindi, and accents.
    assert words_of("नरेन्द्र मोदी गए") == ["नरेन्द्र", "मोदी", "गए"]
    joined = "\u0915\u094d\u092f\u093e\u200d\u0924"
    assert words_of(joined) == [joined]
    assert words_of("Jose\u0301 ist") == ["Jose\u0301", "ist"]
    assert words_of("東京 ist 大きい") == ["東", "京", "ist", "大", "き", "い"]
    assert words_of(" \n") == []


def test_join_words_returns_word_bounds():
    text, bounds = join_words(["New", "York", "", "is"])
    assert text == "New York  is"
    assert [text[start:end] for start, end in bounds] == ["New", "York", "", "is"]


def test_schemes_are_converted_to_bio():
    """Tags of the schemes IOBES, BILOU and IOB1 are converted to BIO tags."""
    assert to_bio(["B-X", "E-X", "S-X", "O", "U-Y", "I-Y"]) == [
        "B-X",
        "I-X",
        "B-X",
        "O",
        "B-Y",
        "B-Y",
    ]
    # In IOB1, an entity starts with I-.
    assert to_bio(["I-X", "I-X", "I-Y", "O", "I-Y"]) == ["B-X", "I-X", "B-Y", "O", "B-Y"]
    assert is_bio(["O", "B-X"]) and not is_bio(["O", "NOUN"]) and not is_bio(["B"])


def test_spans_are_converted_to_word_tags():
    """A word belongs to a span that contains one of its characters."""
    text = "Dr. Ada Byron-King of London"
    words = split_words(text)
    spans = [{"start": 4, "end": 18, "label": "PER"}, {"start": 22, "end": 28, "label": "LOC"}]
    tags, lost = tags_from_spans(spans, words)
    assert tags == ["O", "O", "B-PER", "I-PER", "I-PER", "I-PER", "O", "B-LOC"] and lost == 0
    entities = [(entity.start, entity.end, entity.label) for entity in find_entities(tags, words)]
    assert entities == [(4, 18, "PER"), (22, 28, "LOC")]

    # A span inside another one and a span without a word are counted as lost.
    all_spans = [
        *spans,
        {"start": 8, "end": 13, "label": "X"},
        {"start": 3, "end": 4, "label": "X"},
    ]
    assert tags_from_spans(all_spans, words) == (tags, 2)


def brute_force_tags(spans, words):
    """Return the tags and the number of lost spans by a comparison of every span with every word.

    The span that starts first is used first, and the longest of those that start together.
    """
    tags = ["O"] * len(words)
    lost = 0
    for span in sorted(spans, key=lambda span: (span["start"], span["start"] - span["end"])):
        inside = []
        for index, (start, end) in enumerate(words):
            if start < span["end"] and span["start"] < end:
                inside.append(index)
        if inside and {tags[index] for index in inside} == {"O"}:
            for index in inside:
                prefix = "B" if index == inside[0] else "I"
                tags[index] = f"{prefix}-{span['label']}"
        else:
            lost += 1
    return tags, lost


def test_tags_of_random_spans():
    """The tags of overlapping, empty and outside spans are those of a brute-force comparison."""
    generator = random.Random(0)
    total_lost = 0
    for _ in range(300):
        # Words may touch each other, and may be empty.
        words = []
        start = generator.randrange(3)
        for _ in range(generator.randrange(8)):
            end = start + generator.randrange(5)
            words.append((start, end))
            start = end + generator.randrange(3)

        spans = []
        for _ in range(generator.randrange(5)):
            first = generator.randrange(start + 4)
            stop = first + generator.randrange(9)
            spans.append({"start": first, "end": stop, "label": generator.choice("XY")})

        expected = brute_force_tags(spans, words)
        assert tags_from_spans(spans, words) == expected, f"The tags of {spans} in {words} differ."
        total_lost += expected[1]
    assert total_lost > 100


def test_token_positions_of_words():
    """`token_positions` returns the first token of each word, or -1 for a truncated word."""
    words = [(0, 3), (4, 9), (9, 10), (11, 14)]
    # [CLS] and [SEP] have no characters, the second word has two tokens, and the last word was
    # truncated.
    offsets = [(0, 0), (0, 3), (4, 6), (6, 9), (9, 10), (0, 0)]
    assert token_positions(words, offsets).tolist() == [1, 2, 4, -1]
    # The tokens of some tokenizers include the space before the word.
    assert token_positions([(0, 3), (4, 9)], [(0, 3), (3, 9)]).tolist() == [0, 1]
    assert token_positions([(0, 1)], [(0, 0)]).tolist() == [-1]
    assert token_positions([], offsets).tolist() == []
    assert token_positions(words, np.zeros((0, 2))).tolist() == [-1] * 4


def test_plain_tags_make_one_entity_per_word():
    """Without the BIO scheme, each word with a tag other than O is an entity of its own."""
    bounds = [(0, 1), (2, 3), (4, 5)]
    assert find_entities(["NOUN", "NOUN", "O"], bounds, bio=False) == [
        Entity(0, 1, "NOUN", 0, 1),
        Entity(2, 3, "NOUN", 1, 2),
    ]
    assert tag_counts(["NOUN", "VERB"], ["NOUN", "NOUN"], bio=False) == (1, 2, 2)


@pytest.mark.parametrize("labels", [["N", "V"], ["O", "V"]])
def test_truncated_words_are_outside(labels):
    """A word without logits has the tag `O`, which is no entity, even if `O` is no label."""
    tags = predicted_tags(labels, np.array([[0, 1], [0, 0]]), np.array([True, False]))
    assert tags == ["V", "O"]
    assert len(find_entities(tags, [(0, 1), (2, 3)], bio=False)) == 1


def test_entities_match_seqeval():
    """Entities and the F1 score of random tag sequences are those of seqeval."""
    generator = random.Random(0)
    names = ["O", "B-X", "I-X", "B-Y", "I-Y"]
    for _ in range(200):
        truth = generator.choices(names, k=12)
        guess = generator.choices(names, k=12)
        bounds = [(index, index + 1) for index in range(12)]
        expected = {(label, start, stop + 1) for label, start, stop in seqeval.get_entities(truth)}
        entities = {
            (entity.label, entity.first, entity.stop) for entity in find_entities(truth, bounds)
        }
        assert entities == expected, f"The entities of {truth} differ."

        correct, guessed, true = tag_counts(truth, guess, bio=True)
        f1 = 2 * correct / (guessed + true) if guessed + true else 0.0
        assert f1 == pytest.approx(seqeval.f1_score([truth], [guess], zero_division=0))
