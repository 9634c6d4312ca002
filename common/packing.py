"""Sequences of tokens as one packed row, the input of NeoBERT without padding, and the mean over
each sequence of a packed output."""

import numpy as np
import torch


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
    """Mean over the tokens of each packed sequence, in float32: a sum in bfloat16 stops growing
    after a few hundred tokens.

    Args:
        hidden: (1, T, D).
        cu_seq_lens: (N + 1,) first token of each sequence, then T.
    Returns:
        (N, D) in the dtype of `hidden`; zeros for an empty sequence.
    """
    lengths = cu_seq_lens.diff()
    sequence = torch.repeat_interleave(
        torch.arange(len(lengths), device=hidden.device), lengths, output_size=hidden.shape[1]
    )
    sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device).index_add_(
        0, sequence, hidden[0].float()
    )
    return (sums / lengths[:, None].clamp(min=1)).to(hidden.dtype)
