"""How every rung of the small ladder is measured: a linear probe on sentence sentiment, and
masked-LM quality on held-out text."""

import numpy as np
import torch

from ..common.packing import mean_of_sequences, pack
from .batches import BatchSpec, MicroBatches, SpecialTokens, Windows
from .heldout import evaluate_batches, piece_characters
from .masking import TokenMasking
from .prepared import tokenise_texts


@torch.no_grad()
def features(model, tokenizer, texts, length, batch_size=64):
    """Mean-pooled last hidden states, (texts, D) numpy; special tokens included."""
    special, output = SpecialTokens.of(tokenizer), []
    for start in range(0, len(texts), batch_size):
        ids = tokenizer(
            texts[start : start + batch_size],
            truncation=True,
            max_length=length - 2,
            add_special_tokens=False,
        )["input_ids"]
        packed = pack([special.around(row) for row in ids])
        output.append(
            mean_of_sequences(
                model.model(**packed).last_hidden_state, packed["cu_seq_lens_q"]
            ).numpy()
        )
    return np.concatenate(output)


def probe_accuracy(x, labels):
    """Test accuracy of a logistic regression on standardised features: fitted on three quarters,
    measured on the last."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    split = len(x) * 3 // 4
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500))
    return float(classifier.fit(x[:split], labels[:split]).score(x[split:], labels[split:]))


def majority(labels):
    """Accuracy of the most frequent label on the probe's test sentences."""
    test = labels[len(labels) * 3 // 4 :]
    return max(test.count(0), test.count(1)) / len(test)


def measure(model, tokenizer, heldout, probe, length):
    """The measurements of a rung: masking of the held-out text is 20 % always [MASK], whatever the
    rung was trained with.

    Returns:
        dict: probe_accuracy, masked_accuracy, masked_loss (nats a token), masked_bits_per_character
        (of the hidden text, so that tokenizers compare).
    """
    model.eval()
    spec = BatchSpec(tokens=4096, length=length, seed=1234)
    windows = Windows(tokenise_texts(heldout, tokenizer), SpecialTokens.of(tokenizer), spec)
    batches = MicroBatches(windows, TokenMasking(tokenizer), spec)
    masked = evaluate_batches(model, batches, characters=piece_characters(tokenizer))
    x = features(model, tokenizer, [row["text"] for row in probe], length)
    return {
        "probe_accuracy": probe_accuracy(x, np.array([row["label"] for row in probe])),
        "masked_accuracy": masked["masked_accuracy"],
        "masked_loss": masked["loss"],
        "masked_bits_per_character": masked["bits_per_character"],
    }
