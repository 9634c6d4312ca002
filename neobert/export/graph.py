"""Model as a function of input_ids and attention_mask, for engines that trace a graph.

The batch size and the sequence length are dynamic.
"""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .source import SourceModel


INPUTS = ("input_ids", "attention_mask")


class Graph(nn.Module):
    """Model that returns a tuple of float32 tensors, in the order of `outputs`.

    Attributes:
        outputs: Names of the outputs: "last_hidden_state", with "sentence_embedding" for a sentence
            encoder; "logits"; or "start_logits" and "end_logits".
    """

    def __init__(self, source: SourceModel, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        # The model of the source stays in float32: other precisions are traced from it, too.
        self.model = source.model
        if dtype != torch.float32:
            self.model = copy.deepcopy(source.model).to(dtype)

        # A graph cannot tell which tokens belong to a prompt. If the pooling excludes prompts, the
        # program that reads the folder pools, as 1_Pooling specifies.
        pools_all_tokens = source.pooling is not None and (
            source.pooling.include_prompt or not any(source.prompts.values())
        )
        self.pooling = source.pooling if pools_all_tokens else None
        self.outputs = list(source.head.outputs)
        if pools_all_tokens:
            self.outputs.append("sentence_embedding")

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs for input_ids and attention_mask of shape (B, L)."""
        # Exporters support tuples of tensors only, and every engine has float32 outputs.
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        if self.pooling is None:
            return tuple(outputs[name].float() for name in self.outputs)
        hidden = outputs.last_hidden_state.float()
        return hidden, self.pooling(hidden, attention_mask)


def example_inputs() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the inputs to trace a graph with, and their dynamic dimensions.

    Returns:
        int64 tensors of shape (2, 9) by name, with padding in the second row, and the dimensions
        {name: {axis: dimension}}.
    """
    # A size of 1 would be traced as a constant. Padding keeps the mask in the graph.
    input_ids = torch.ones(2, 9, dtype=torch.long)
    attention_mask = torch.ones(2, 9, dtype=torch.long)
    attention_mask[1, 5:] = 0
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    return inputs, {name: axes for name in INPUTS}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and logs of exporters, which address their developers."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
