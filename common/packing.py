"""Sequences of tokens as one packed row, the input of NeoBERT without padding, and the mean over
each sequence of a packed output."""

import numpy as np
import torch

from ..attention_neobert import Packing


def pack(sequences, device="cpu"):
    """Token sequences one after another, as the keyword arguments of a NeoBERT forward.

    Args:
        sequences: N lists or integer arrays of token ids, T tokens together.
    Returns:
        {input_ids (1, T) int64, cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32, max_length_q and
        max_length_k: the longest sequence}.
    """
    lengths = [len(sequence) for sequence in sequences]
    tokens = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    packing = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return {"input_ids": torch.from_numpy(tokens).to(device)[None], **packing}


def mean_of_sequences(hidden, cu_seq_lens):
    """Mean over the tokens of each packed sequence, summed in float32.

    Args:
        hidden: (1, T, D).
        cu_seq_lens: (N + 1,) first token of each sequence, then T.
    Returns:
        (N, D) in the dtype of `hidden`; zeros for an empty sequence.
    """
    return Packing(cu_seq_lens, None).means(hidden)
