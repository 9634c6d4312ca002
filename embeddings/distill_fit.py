"""The linear map that brings a student's vectors nearest to the teacher's, taken into its weights:
it costs nothing afterwards.

With g the weights of the final norm, a pooled vector is the mean of x * g over the tokens, x of
length sqrt(D). The map W turns it into the mean of x diag(g) W, and diag(g) W = U S V (singular
values). RMSNorm commutes with rotations: the hidden states are rotated by U, and S becomes the
weights of the final norm. V, a rotation of the result, is left out. It changes no cosine between
two vectors, but the vectors are no longer the teacher's own.
"""

import numpy as np
import torch
import torch.nn.functional as F

from ..common.errors import UserError
from ..common.outliers import linear_layers


RIDGE = 0.05  # of the mean square of a direction: how much the map is held to the identity


def check_fit(student):
    """Raises UserError unless a linear map can be taken into the weights of this student."""
    from sentence_transformers import models as modules

    config = student[0].auto_model.config
    kinds = [type(module).__name__ for module in student.children()]
    if (
        config.norm_type != "rms"
        or config.position_embedding_type != "rope"
        or "max" in str(student[1].pooling_mode)
        or any(isinstance(module, modules.Dense) for module in student.children())
        or not isinstance(list(student.children())[-1], modules.Normalize)
    ):
        raise UserError(
            "fit_texts is for a student with RMSNorm, RoPE, the teacher's width, and vectors of "
            f"length 1 that are no maxima, but this one has {config.norm_type} norms, "
            f"{config.position_embedding_type} positions, and the modules {', '.join(kinds)}"
        )


def fit(own, teacher):
    """(D, D) float64: argmin over W of |own W - teacher|² + r |W - 1|² (ridge regression).

    Args:
        own, teacher: (N, D) arrays of unit vectors.
    """
    own, teacher = (torch.as_tensor(vectors).double() for vectors in (own, teacher))
    squares = own.T @ own
    held = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
    return torch.linalg.solve(squares + held, own.T @ teacher + held)


@torch.no_grad()
def absorb(model, matrix):
    """Takes `matrix`, (D, D), behind the final hidden states of a `NeoBERTModel` into its weights,
    up to a rotation."""
    final = model.layer_norm.weight
    rotation, scale, _ = torch.linalg.svd(final.double()[:, None] * matrix.to(final.device))
    model.encoder.weight.copy_(model.encoder.weight.double() @ rotation)
    for block in model.transformer_encoder:
        qkv, wo, up, down = linear_layers(block)
        for norm, layer in ((block.attention_norm, qkv), (block.ffn_norm, up)):
            layer.weight.copy_((layer.weight.double() * norm.weight.double()) @ rotation)
            norm.weight.fill_(1)
        for layer in (wo, down):
            layer.weight.copy_(rotation.T @ layer.weight.double())
    final.copy_(scale)


def fit_student(student, texts, vectors, count):
    """Fits the map on `count` of N texts, drawn, and takes it into the student.

    Args:
        texts: list of N strings.
        vectors: their `TeacherVectors`.
    """
    chosen = np.random.default_rng(0).permutation(len(texts))[:count]
    own = student.encode([texts[i] for i in chosen], batch_size=64, show_progress_bar=True)
    teacher = F.normalize(torch.from_numpy(vectors.rows(chosen)), dim=-1)
    absorb(student[0].auto_model, fit(own, teacher))
