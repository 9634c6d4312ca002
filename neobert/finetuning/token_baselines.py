"""Baselines for token classification: tags of words without fine-tuning."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, PreTrainedTokenizerBase

from .tagging import OUTSIDE, Bounds, token_positions
from .text_tasks import Examples


Tags = list[list[str]]

# Maximum number of words that a linear model is fitted on: features of words, and hidden states.
MAX_TRAIN_WORDS = 40_000
MAX_EMBEDDED_WORDS = 20_000
# Number of columns that features of words are hashed into.
_NUM_FEATURES = 2**16


@dataclass(frozen=True)
class TokenBaseline:
    """Predictions of a baseline for the words of the test rows.

    Attributes:
        name: Name for a table.
        tags: Tags of the words of each test row.
        train_rows: Number of rows that the baseline was fitted on.
    """

    name: str
    tags: Tags
    train_rows: int


def fit_token_baselines(
    train: Examples,
    test: Examples,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    trust_remote_code: bool = False,
) -> list[TokenBaseline]:
    """Return the baselines: the most frequent tag of every word, and linear models.

    One linear model reads the characters of a word and its neighbors, the other one frozen hidden
    states.

    Args:
        train: Training rows.
        test: Rows to predict.
        model: Directory or Hub name of the encoder before fine-tuning.
        tokenizer: Tokenizer of the encoder.
        max_length: Maximum sequence length in tokens.
        trust_remote_code: Whether to run the Python code in the repository of the model.
    """
    encoder = AutoModel.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=trust_remote_code
    ).eval()
    # Linear models are fitted on a sample of long data.
    words = _sample(train, MAX_TRAIN_WORDS)
    embedded = _sample(train, MAX_EMBEDDED_WORDS)
    return [
        TokenBaseline("most frequent tag of every word", _frequent_tags(train, test), len(train)),
        TokenBaseline(
            "words and characters + logistic regression", _linear_tags(words, test), len(words)
        ),
        TokenBaseline(
            "frozen embeddings + logistic regression",
            _embedding_tags(encoder, tokenizer, embedded, test, max_length),
            len(embedded),
        ),
    ]


def _frequent_tags(train: Examples, test: Examples) -> Tags:
    # Words that the training rows do not contain have the tag `O`, or the most frequent plain tag.
    counts: dict[str, Counter] = defaultdict(Counter)
    every: Counter = Counter()
    for words, tags in zip(_words(train), train.labels):
        for word, tag in zip(words, tags):
            counts[word][tag] += 1
            every[tag] += 1
    default = OUTSIDE if OUTSIDE in every else every.most_common(1)[0][0]
    frequent = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
    return [[frequent.get(word, default) for word in words] for words in _words(test)]


def _linear_tags(train: Examples, test: Examples) -> Tags:
    # Unlike a vocabulary, hashing needs no fit, and the number of columns does not depend on the
    # data.
    hasher = FeatureHasher(_NUM_FEATURES, input_type="string")
    features = [row for words in _words(train) for row in _features(words)]
    labels = [tag for tags in train.labels for tag in tags]
    linear = _fit(hasher.transform(features), labels)

    predicted = []
    for words in _words(test):
        # scikit-learn refuses arrays without rows.
        rows = hasher.transform(_features(words)) if words else None
        predicted.append([] if rows is None else linear.predict(rows).tolist())
    return predicted


def _features(words: Sequence[str]) -> list[list[str]]:
    """Return the features of each word of a text: its characters, its form and its neighbors."""
    # The usual features of taggers. The first and the last word have markers as neighbors.
    padded = ["<s>", *words, "</s>"]
    rows = []
    for index, word in enumerate(words, start=1):
        form = "".join("X" if c.isupper() else "x" if c.islower() else c for c in word)
        row = [f"word={word.lower()}", f"form={form[:8]}", f"title={word[:1].isupper()}"]
        for size in (1, 2, 3, 4):
            row += [f"start={word[:size].lower()}", f"end={word[-size:].lower()}"]
        for distance, name in ((-1, "previous"), (1, "next")):
            neighbor = padded[index + distance]
            row += [f"{name}={neighbor.lower()}", f"{name} title={neighbor[:1].isupper()}"]
        rows.append(row)
    return rows


def _embedding_tags(
    encoder: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    train: Examples,
    test: Examples,
    max_length: int,
) -> Tags:
    # Texts run one by one, without padding.
    features: list[np.ndarray] = []
    labels: list[str] = []
    for (text,), words, tags in zip(train.texts, train.words, train.labels):
        states, kept = _word_states(encoder, tokenizer, text, words, max_length)
        features.append(states)
        labels += [tags[index] for index in kept]
    # Inputs of unit variance, as for the embeddings of texts.
    stacked = np.concatenate(features)
    scale = stacked.std() or 1.0
    linear = _fit(stacked / scale, labels)

    predicted = []
    for (text,), words in zip(test.texts, test.words):
        states, kept = _word_states(encoder, tokenizer, text, words, max_length)
        # Words that are truncated have no hidden state.
        tags = [OUTSIDE] * len(words)
        for index, tag in zip(kept, linear.predict(states / scale) if len(kept) else ()):
            tags[index] = str(tag)
        predicted.append(tags)
    return predicted


@torch.inference_mode()
def _word_states(
    encoder: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    words: Bounds,
    max_length: int,
) -> tuple[np.ndarray, list[int]]:
    """Return the hidden states of the first tokens of words, (W, D), and the indices of the words.

    Words that are truncated are left out.
    """
    encoded = tokenizer(
        text,
        truncation=True,
        max_length=max_length,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    # The encoder does not take the offsets.
    positions = token_positions(words, encoded.pop("offset_mapping")[0].numpy())
    kept = np.flatnonzero(positions >= 0)
    hidden = encoder(**encoded).last_hidden_state[0]
    return hidden[torch.from_numpy(positions[kept])].float().numpy(), kept.tolist()


def _sample(train: Examples, max_words: int) -> Examples:
    """Return random rows with at most `max_words` words in total, and at least one row."""
    counts = np.array([len(words) for words in train.words])
    if counts.sum() <= max_words:
        return train
    # The rows may be sorted, for example texts without entities first.
    order = np.random.default_rng(0).permutation(len(train))
    count = int(np.searchsorted(np.cumsum(counts[order]), max_words, side="right"))
    return train.select(np.sort(order[: max(1, count)]))


def _fit(features: np.ndarray, labels: Sequence[str]) -> LogisticRegression | DummyClassifier:
    """Return a linear model of the tags, or a constant if all words have the same tag."""
    # scikit-learn refuses to fit a linear model on a single label.
    if len(set(labels)) == 1:
        return DummyClassifier(strategy="most_frequent").fit(features, labels)
    return LogisticRegression(C=1.0, max_iter=200).fit(features, labels)


def _words(examples: Examples) -> list[list[str]]:
    return [
        [text[start:end] for start, end in words]
        for (text,), words in zip(examples.texts, examples.words)
    ]
