"""What every engine with graphs is given: one function of (input_ids, attention_mask), traced once,
with a dynamic batch and length."""

import contextlib
import copy
import logging
import warnings

import torch
from torch import nn


INPUTS = ("input_ids", "attention_mask")


class Graph(nn.Module):
    """The outputs of a model as a tuple of float32 tensors, in the order of `outputs`.

    Attributes:
        outputs: names: "last_hidden_state", and "sentence_embedding" for a sentence encoder;
            "logits"; "start_logits" and "end_logits".
    """

    def __init__(self, source, dtype=torch.float32):
        super().__init__()
        self.model = (
            source.model if dtype == torch.float32 else copy.deepcopy(source.model).to(dtype)
        )
        # A graph does not know which tokens are a prompt's; readers pool by 1_Pooling then.
        counts_all = source.pooling is not None and (
            source.pooling.include_prompt or not any(source.prompts.values())
        )
        self.pooling = source.pooling if counts_all else None
        self.outputs = [*source.head.outputs, *(["sentence_embedding"] if counts_all else [])]

    def forward(self, input_ids, attention_mask):
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        if self.pooling is None:
            return tuple(found[name].float() for name in self.outputs)
        hidden = found.last_hidden_state.float()
        return hidden, self.pooling(hidden, attention_mask)


def example():
    """({name: (2, 9) int64}, their dynamic shapes), with padding in the second row."""
    ids, mask = torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}
    return {"input_ids": ids, "attention_mask": mask}, {name: axes for name in INPUTS}


@contextlib.contextmanager
def quiet():
    """What exporters have to say to their developers is not printed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
