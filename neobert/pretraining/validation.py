"""Masked-LM quality on held-out text: masked accuracy, and bits a character, in which vocabularies
compare.

    bits a character = sum over the masked tokens of -log2 p(token | rest of the text)
                       / sum over the masked tokens of the characters of the token's text

Which tokens are masked follows from the data's seed, the shares of the recipe and the batches: it
is the same at every step of a run, and in every run with the same `seed`, `mlm_probability`,
`max_length` and size of a batch. The characters of a token are those of the text that it stands
for: the marks of tokenizers (`##`, the space before a word) are none. Special tokens are never
masked, so what a vocabulary has no piece for ([UNK]) is left out of both sums; `unknown_tokens` is
their share. A vocabulary of smaller pieces shows more of a word whose piece is hidden, so a small
difference between two vocabularies says little.
"""

import json
import math
import os

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..common.errors import UserError
from .sources import parse_sources


_BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}  # of byte-level tokenizers


def parse_heldout(heldout, split="train", column="text"):
    """The held-out sets of a recipe: {name: sources}; of text without a name {"": sources}.

    Args:
        heldout: as `dataset`, or {name: as `dataset`}, or None.
    Raises:
        UserError: as of `parse_sources`.
    """
    sets = heldout if isinstance(heldout, dict) else {"": heldout}
    if heldout is None:
        return {}
    return {str(name): parse_sources(each, split, column) for name, each in sets.items()}


def check_held_out(heldout, train):
    """Raises UserError when a held-out set has text of `train`, a tuple of `Source`, by its
    files."""
    trained = {place: source for source in train for place in _places(source)}
    for name, sources in heldout.items():
        for source in sources:
            if trained.keys() & set(_places(source)):
                raise UserError(
                    f"heldout {name or source.name}: {source.name} is trained on too, so that it "
                    "would measure what was learned by heart; give other text"
                )


def _places(source):
    """What tells a source's text apart: its files, or its name on the Hub."""
    if source.kind == "hub":
        return [(source.name, source.subset, source.revision, source.split)]
    return [os.path.realpath(path) for path in source.paths]


def piece_characters(tokenizer):
    """Characters of the text that each piece of a vocabulary stands for, (len(tokenizer),) int64.

    White space and a tokenizer's marks are not counted, special tokens have none. A piece of a
    byte-level vocabulary counts the characters that begin in it, so that the sum over pieces is
    that of the text.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    prefix = state["model"].get("continuing_subword_prefix") or ""
    byte_level = '"ByteLevel"' in json.dumps([state["pre_tokenizer"], state["decoder"]])
    counts = torch.zeros(len(tokenizer), dtype=torch.int64)
    for piece, number in tokenizer.get_vocab().items():
        if byte_level:
            counts[number] = sum(map(_begins_character, piece))
        else:
            text = piece.removeprefix(prefix).replace("\u2581", " ")
            counts[number] = len("".join(text.split()))
    counts[torch.tensor(sorted(set(tokenizer.all_special_ids)))] = 0
    return counts


def _begins_character(sign):
    """Whether a sign of the byte-level alphabet is a byte that begins a character other than white
    space."""
    byte = _BYTES.get(sign, 0)
    return byte not in b" \n\t\r" and not 0x80 <= byte < 0xC0


def masked_correct(logits, labels):
    """How many labelled tokens have the highest logit, and how many there are, as tensors; logits
    (B, L, V) or (labelled, V)."""
    chosen = labels != -100
    with torch.no_grad():
        best = logits.argmax(dim=-1)
        best = best if best.dim() == 1 else best[chosen]
        return (best == labels[chosen]).sum(), chosen.sum()


@torch.no_grad()
def evaluate_batches(model, batches, characters, accelerator):
    """Masked-LM quality over all of `batches` (`MicroBatches`); the model is in evaluation mode
    then.

    Args:
        characters: as `piece_characters` returns them.
        accelerator: of the run, whose processes share the batches.
    Returns:
        dict: loss (mean cross-entropy over masked tokens, nats), masked_accuracy, masked_tokens,
        bits_per_character; where there are several batches the standard errors over them,
        masked_accuracy_error and bits_per_character_error.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    # Of each batch nats, right ones, masked tokens, their characters.
    sums = torch.zeros(len(batches), 4, dtype=torch.float64)
    model.eval()
    # Every process computes the same number of batches, as sharded models need; repeated ones do
    # not count.
    for i in range(rank, math.ceil(len(batches) / world) * world, world):
        inputs = batches[min(i, len(batches) - 1)]
        batch = {
            name: value.to(accelerator.device) if torch.is_tensor(value) else value
            for name, value in inputs.items()
        }
        with accelerator.autocast():
            outputs = model(**batch)
        if i < len(batches):
            right, count = map(int, masked_correct(outputs.logits, batch["labels"]))
            hidden = inputs["labels"][inputs["labels"] != -100]
            nats = float(outputs.loss) * count if count else 0.0
            length = int(characters[hidden].sum())
            sums[i] = torch.tensor([nats, right, count, length], dtype=torch.float64)
    if world > 1:
        sums = accelerator.reduce(sums.to(accelerator.device), reduction="sum")
    nats, correct, masked, length = sums.sum(0).tolist()
    metrics = {
        "loss": nats / masked,
        "masked_accuracy": correct / masked,
        "masked_tokens": int(masked),
        "bits_per_character": nats / math.log(2) / max(1, length),
    }
    if len(batches) > 1:
        metrics["masked_accuracy_error"] = _ratio_error(sums[:, 1], sums[:, 2])
        error = _ratio_error(sums[:, 0], sums[:, 3])
        metrics["bits_per_character_error"] = error / math.log(2)
    return metrics


def _ratio_error(above, below):
    """Standard error of sum(above) / sum(below) over batches: that of the mean of above - ratio *
    below, by the mean of below."""
    total = below.sum().clamp(min=1)
    residuals = above - above.sum() / total * below
    return float(residuals.std() * math.sqrt(len(below)) / total)


def metric_name(name: str, metric: str, prefix: str = "eval") -> str:
    """Return the key of a metric in the log and in result.json.

    The key is `eval_loss`, or `eval_NAME_loss` for the validation set `name`.
    """
    return f"{prefix}_{name}_{metric}" if name else f"{prefix}_{metric}"


def most_frequent(batches):
    """(token, its share) among the tokens that `batches` mask: what a model without context would
    reach by always saying it."""
    labels = torch.cat([batches[i]["labels"].flatten() for i in range(len(batches))])
    counts = labels[labels != -100].bincount()
    return int(counts.argmax()), float(counts.max() / counts.sum())
