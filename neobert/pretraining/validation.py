"""Masked-LM quality on validation texts: masked accuracy, and bits per character.

    bits per character = sum over the masked tokens of -log2 p(token | rest of the text)
                         / sum over the masked tokens of the number of characters of the token

Bits per character are comparable across vocabularies. The masked tokens are a function of the seed,
the masking options and the batches. They are identical at every step of a run, and in all runs with
the same texts, tokenizer, `data_seed` (by default `seed`), masking and batching.

The characters of a token are those of the text that the token stands for, without the marks of
tokenizers (`##`, the space before a word). Special tokens are never masked, so text that a
vocabulary does not cover ([UNK]) is in neither sum. A vocabulary of shorter tokens reveals more of
a word with a masked token, so small differences between two vocabularies mean little.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..common.errors import UserError
from ..common.loading import vocabulary_size
from .batches import MicroBatches
from .sources import Source, normalized_weights, parse_sources


# Metrics of every evaluation that may select the best checkpoint.
METRICS = ("loss", "masked_accuracy", "bits_per_character")

# Bytes of the characters in the alphabet of byte-level tokenizers.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
# Token of a single byte in SentencePiece vocabularies with byte fallback.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


# ------------------------------------------------------------------------------------------------
# validation sets


def parse_validation(
    validation: str | Sequence[str | dict[str, Any]] | dict[str, Any] | None,
    split: str = "train",
    column: str = "text",
) -> dict[str, tuple[Source, ...]]:
    """Return the validation sets of a run, {name: sources}. A set without a name is called "".

    Args:
        validation: Value of `dataset`, or a mapping {name: value of `dataset`}, or None.
        split: Split of sources that do not specify one.
        column: Column of sources that do not specify one.

    Raises:
        UserError: If a source has a sampling weight, or as in `parse_sources`.
    """
    if validation is None:
        return {}
    sets = validation if isinstance(validation, dict) else {"": validation}
    sources = {}
    for name, dataset in sets.items():
        sources[name] = parse_sources(dataset, split, column, "validation")
        # All texts of a validation set are evaluated once, so weights would have no effect.
        if normalized_weights(sources[name]):
            raise UserError(
                "the sources of `validation` must not have weights, because all of their texts are "
                "evaluated. Remove the weights, or name each source as a validation set: {a: "
                "a.jsonl, b: b.jsonl}."
            )
    return sources


def check_validation_sets(
    validation: Mapping[str, Sequence[Source]], train: Sequence[Source]
) -> None:
    """Check that no validation set contains a source of the training texts.

    Args:
        validation: Sources of the validation sets, {name: sources}.
        train: Sources of the training texts.

    Raises:
        UserError: If a validation set and the training texts share a file or a Hub dataset.
    """
    train_keys = {key for source in train for key in _source_keys(source)}
    for name, sources in validation.items():
        for source in sources:
            if train_keys.intersection(_source_keys(source)):
                raise UserError(
                    f"the validation set {name or source.name} must not contain training texts, "
                    f"but {source.name} is also in `dataset`. Use other texts."
                )


def _source_keys(source: Source) -> list[Any]:
    """Return the identifiers of the texts of a source: its files, or its name on the Hub."""
    if source.source_type == "hub":
        return [(source.name, source.subset, source.revision, source.split)]
    if source.source_type == "saved":
        return [os.path.realpath(path) for path in source.paths]

    # Links to one file are one text. The URL of a local file is a path.
    urls = [file.url.removeprefix("file://") for file in source.files]
    return [url if "://" in url else os.path.realpath(url) for url in urls]


# ------------------------------------------------------------------------------------------------
# metrics


@torch.no_grad()
def evaluate_batches(
    model: nn.Module, batches: MicroBatches, characters: torch.Tensor, accelerator: Accelerator
) -> dict[str, float]:
    """Evaluate a masked language model on all micro-batches.

    The model is in evaluation mode afterwards.

    Args:
        model: Masked language model.
        batches: Micro-batches with labels, which are distributed over the processes.
        characters: Result of `token_characters`, (`vocabulary_size(tokenizer)`,).
        accelerator: Accelerator of the run.

    Returns:
        "loss", the mean cross-entropy of the masked tokens in nats; "masked_accuracy";
        "masked_tokens", their number; and "bits_per_character". With several batches also the
        standard errors over the batches, "masked_accuracy_error" and "bits_per_character_error".
    """
    rank = accelerator.process_index
    world_size = accelerator.num_processes
    # Nats, correct tokens, masked tokens and their characters of each batch.
    sums = torch.zeros(len(batches), 4, dtype=torch.float64)
    model.eval()

    # Sharded models need the same number of batches in every process. Repeated batches are not
    # counted.
    for i in range(rank, math.ceil(len(batches) / world_size) * world_size, world_size):
        inputs = batches[min(i, len(batches) - 1)]
        batch = {
            name: value.to(accelerator.device) if torch.is_tensor(value) else value
            for name, value in inputs.items()
        }
        with accelerator.autocast():
            outputs = model(**batch)
        if i < len(batches):
            # The loss is the mean over the masked tokens, and NaN if there are none.
            correct, count = map(int, masked_correct(outputs.logits, batch["labels"]))
            masked_ids = inputs["labels"][inputs["labels"] != -100]
            nats = float(outputs.loss) * count if count else 0.0
            length = int(characters[masked_ids].sum())
            sums[i] = torch.tensor([nats, correct, count, length], dtype=torch.float64)

    # Each process has filled the rows of its batches, and the other rows are 0.
    if world_size > 1:
        sums = accelerator.reduce(sums.to(accelerator.device), reduction="sum")
    return _metrics(sums)


def _metrics(sums: torch.Tensor) -> dict[str, float]:
    """Return the metrics of `evaluate_batches`.

    Args:
        sums: Nats, correct tokens, masked tokens and their characters of each batch, (batches, 4).
    """
    # Sums over all batches give each masked token the same weight. A mean over batches would not.
    nats, correct, masked, length = sums.sum(0).tolist()
    metrics = {
        "loss": nats / masked,
        "masked_accuracy": correct / masked,
        "masked_tokens": int(masked),
        "bits_per_character": nats / math.log(2) / max(1, length),
    }
    if len(sums) > 1:
        metrics["masked_accuracy_error"] = _ratio_error(sums[:, 1], sums[:, 2])
        nats_error = _ratio_error(sums[:, 0], sums[:, 3])
        metrics["bits_per_character_error"] = nats_error / math.log(2)
    return metrics


def _ratio_error(numerators: torch.Tensor, denominators: torch.Tensor) -> float:
    """Return the standard error of sum(numerators) / sum(denominators) over batches.

    By the delta method, this is the standard error of the mean of `numerators - ratio *
    denominators`, divided by the mean of the denominators.
    """
    total = denominators.sum().clamp(min=1)
    residuals = numerators - numerators.sum() / total * denominators
    return float(residuals.std() * math.sqrt(len(denominators)) / total)


def masked_correct(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of masked tokens with the highest logit, and of all masked tokens.

    Args:
        logits: Logits of all tokens, (B, L, V), or of the masked tokens, (N, V).
        labels: Ids of the masked tokens and -100 elsewhere, (B, L).
    """
    is_masked = labels != -100
    with torch.no_grad():
        # With sparse prediction, the logits are those of the masked tokens already.
        predictions = logits.argmax(dim=-1)
        if predictions.dim() > 1:
            predictions = predictions[is_masked]
        return (predictions == labels[is_masked]).sum(), is_masked.sum()


def metric_name(name: str, metric: str, prefix: str = "eval") -> str:
    """Return the key of a metric in the log and in result.json.

    The key is `eval_loss`, or `eval_NAME_loss` for the validation set `name`.

    Args:
        name: Name of the validation set; "" for a set without a name.
        metric: Name of the metric.
        prefix: Prefix of the key.
    """
    return f"{prefix}_{name}_{metric}" if name else f"{prefix}_{metric}"


def most_frequent_token(batches: Sequence[Mapping[str, Any]] | MicroBatches) -> tuple[int, float]:
    """Return the most frequent masked token, and its fraction of the masked tokens.

    The fraction is the accuracy of a model that always predicts this token.
    """
    labels = torch.cat([batches[i]["labels"].flatten() for i in range(len(batches))])
    counts = labels[labels != -100].bincount()
    return int(counts.argmax()), float(counts.max() / counts.sum())


# ------------------------------------------------------------------------------------------------
# characters


def token_characters(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the number of characters that each token of a vocabulary stands for.

    White space and the marks of tokenizers are not counted, and special tokens have no characters.
    A token of a byte-level vocabulary, or a byte of SentencePiece such as <0xF0>, counts the
    characters that start in the token, so the sum over the tokens of a text is the number of
    characters of the text.

    Returns:
        Number of characters, (`vocabulary_size(tokenizer)`,) int64.
    """
    # The serialized tokenizer contains the marks of its tokens. A byte-level tokenizer may use
    # ByteLevel for pre-tokenization, for decoding, or both.
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    prefix = state["model"].get("continuing_subword_prefix") or ""
    is_byte_level = '"ByteLevel"' in json.dumps([state["pre_tokenizer"], state["decoder"]])

    has_byte_tokens = bool(state["model"].get("byte_fallback"))

    counts = torch.zeros(vocabulary_size(tokenizer), dtype=torch.int64)
    for token, token_id in tokenizer.get_vocab().items():
        byte_token = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if is_byte_level:
            counts[token_id] = sum(_starts_character(_BYTES.get(sign, 0)) for sign in token)
        elif byte_token:
            counts[token_id] = _starts_character(int(byte_token[1], 16))
        else:
            # SentencePiece represents a space by U+2581.
            text = token.removeprefix(prefix).replace("\u2581", " ")
            counts[token_id] = len("".join(text.split()))
    counts[torch.tensor(sorted(set(tokenizer.all_special_ids)))] = 0
    return counts


def _starts_character(byte: int) -> bool:
    """Return whether a byte is the first one of a character. White space is not counted."""
    # In UTF-8, the bytes 0x80 to 0xBF continue a character.
    return byte not in b" \n\t\r" and not 0x80 <= byte < 0xC0
