"""How long the texts of a throughput batch are: fixed, drawn, of a given fill, or as in a text
file."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F

from ..common.constants import TOKENIZER
from ..common.errors import UserError


def draw_lengths(name, count, seed=0, file_lengths=None):
    """Lengths in tokens of `count` texts.

    Args:
        name: "512" (fixed), "normal-256", "normal-4096", "short" (log-normal, median 48, sigma 0.7,
        4 to 512: about 0.3 of a batch of 32 is real), "fill-30" (one text of 512 and others of
            which the batch has 30 % real tokens), "texts".
        file_lengths: of the texts of a file; drawn from without order, with repetition where it has
            fewer than `count`.
    """
    generator = torch.Generator().manual_seed(seed)
    if name.isdigit():
        return [int(name)] * count
    if name.startswith("normal-"):
        mean = int(name.removeprefix("normal-"))
        lengths = (
            (torch.randn(count, generator=generator) * mean / 4 + mean).round().clamp(16, 2 * mean)
        )
    elif name == "short":
        lengths = (
            torch.exp(torch.randn(count, generator=generator) * 0.7 + math.log(48))
            .round()
            .clamp(4, 512)
        )
    elif name == "texts":
        lengths = torch.tensor(file_lengths)[
            torch.randint(len(file_lengths), (count,), generator=generator)
        ]
    else:
        return _lengths_of_fill(int(name.removeprefix("fill-")) / 100, count, generator)
    return [int(n) for n in lengths]


def _lengths_of_fill(fill, count, generator, longest=512):
    """One text of `longest` tokens, the others spread evenly by up to a half around the length that
    makes the mean fill * longest."""
    rest = max((fill * count - 1) / max(count - 1, 1), 1 / longest) * longest
    spread = min(rest, longest - rest) / 2
    lengths = (
        rest + spread * torch.linspace(-1, 1, max(count - 1, 1)) if count > 1 else torch.empty(0)
    )
    lengths = lengths[torch.randperm(len(lengths), generator=generator)].round().clamp(1, longest)
    return [longest, *(int(n) for n in lengths)]


def lengths_of_file(path, tokenizer=None):
    """Lengths in tokens of the non-empty lines of a text file."""
    from transformers import AutoTokenizer

    folder = tokenizer or TOKENIZER
    lines = [line for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path} holds no text")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [len(ids) for ids in tokenizer(lines, truncation=True, max_length=8192)["input_ids"]]


@dataclass(frozen=True)
class Batch:
    """Texts of known lengths.

    Attributes:
        lengths: of the texts, in tokens; Python numbers, so that nobody waits for the device to
        learn them. input_ids, attention_mask: (B, longest), padded on the right.
    """

    lengths: tuple
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def has_padding(self):
        return min(self.lengths) < max(self.lengths)

    @cached_property
    def packed(self):
        """One row without padding and its packing arguments, as
        `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes them."""
        mask, longest = self.attention_mask.bool(), max(self.lengths)
        bounds = F.pad(mask.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
        positions = (mask.cumsum(dim=1) - 1)[mask][None]
        packing = {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        return {"input_ids": self.input_ids[mask][None], "position_ids": positions, **packing}


def make_batch(lengths, device="cpu", seed=0):
    """A `Batch` of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
    return Batch(tuple(lengths), ids.to(device), mask.to(device))
