"""Losses of a distillation on embeddings and hidden states, and the agreement with the teacher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from torch import nn

from .options import LossOptions


# Number of stored texts that a text is compared with in a step: the nearest ones, those at evenly
# spaced similarities, and random ones.
NEAREST = 16
SPREAD = 48
RANDOM = 64
# Numbers of texts that are padded together. A GPU computes the padding of larger groups faster than
# it launches the kernels of more groups.
CPU_GROUP_SIZE = 16
GPU_GROUP_SIZE = 128
# Features of a batch that a transformer reads.
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Score of a text for itself in the memory bank. It is lower than every cosine.
SELF_SCORE = -2


def similarity_loss(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the KL divergence between the similarities of teacher and student within a batch.

    Row i is the softmax over j != i of cos(i, j) / temperature, as in Tung and Mori 2019 with a
    softmax. The loss is the mean over the rows of KL(teacher || student).

    Args:
        student: Embeddings of length 1, (N, D').
        teacher: Embeddings of length 1, (N, D).
        temperature: Temperature by which cosines are divided.
    """
    count = len(student)
    # The similarity of a text to itself is 1 in both models, and would dominate the softmax.
    others = ~torch.eye(count, dtype=torch.bool, device=student.device)
    rows = []
    for unit in (student, teacher):
        rows.append((unit @ unit.T / temperature)[others].view(count, count - 1).log_softmax(-1))
    return F.kl_div(rows[0], rows[1], log_target=True, reduction="batchmean")


def memory_bank_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    bank: torch.Tensor,
    temperature: float,
    is_self: torch.Tensor,
) -> torch.Tensor:
    """Return the KL divergence between the similarities to stored embeddings of the teacher.

    For each text, compute the softmax of its cosine similarities / temperature to the stored
    embeddings that `candidates` selects, once with the student's and once with the teacher's
    embedding of the text (SEED, arXiv 2101.04731). The loss is the mean of KL(teacher || student)
    over the texts.

    Args:
        student: Embeddings of length 1, (N, D).
        teacher: Embeddings of length 1, (N, D).
        bank: Stored embeddings of the teacher of length 1, (M, D).
        temperature: Temperature by which cosines are divided.
        is_self: True where the stored embedding is that of the text itself, (N, M) bool.
    """
    # The teacher selects the stored texts, and both models are compared on them.
    scores = (teacher @ bank.T).masked_fill(is_self, SELF_SCORE)
    columns = candidates(scores)
    teacher_scores = scores.gather(1, columns)
    student_scores = (student.unsqueeze(1) @ bank[columns].mT).squeeze(1)

    # The text itself can be among the random candidates. Its probability becomes 0 in both models.
    is_text_itself = teacher_scores == SELF_SCORE
    rows = []
    for row in (student_scores, teacher_scores):
        rows.append((row / temperature).masked_fill(is_text_itself, -1e4).log_softmax(-1))
    return F.kl_div(rows[0], rows[1], log_target=True, reduction="batchmean")


def candidates(scores: torch.Tensor) -> torch.Tensor:
    """Return the columns that each row is compared on, (N, NEAREST + SPREAD + RANDOM).

    The columns have the highest scores of a row, scores spread evenly over the range of its scores,
    or are random. Negatives of all difficulties train better than only the nearest or only random
    ones (arXiv 2604.04734).

    Args:
        scores: Cosines, (N, M), or `SELF_SCORE` for the text itself.
    """
    ordered, columns = scores.sort(dim=1)
    # The score of the text itself must not be the lowest level: all levels below the lowest score
    # of another text would select the same column.
    lowest = scores.masked_fill(scores == SELF_SCORE, torch.inf).amin(dim=1, keepdim=True)
    lowest = torch.minimum(lowest, ordered[:, -1:])
    levels = torch.linspace(0, 1, SPREAD, device=scores.device) * (ordered[:, -1:] - lowest)
    levels = lowest + levels

    # The first stored text whose score is at least a level. Rounding may place the last level above
    # the highest score.
    spread = columns.gather(1, torch.searchsorted(ordered, levels).clamp(max=scores.shape[1] - 1))
    sampled = torch.randint(scores.shape[1], (len(scores), RANDOM), device=scores.device)
    return torch.cat([columns[:, -NEAREST:], spread, sampled], dim=1)


def hidden_state_loss(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the squared error of hidden states relative to those of the teacher.

    This is the sum over all tokens k of |h_k - g_k|^2, divided by the sum of |g_k|^2, where h_k and
    g_k are the hidden states of student and teacher. Long states count more, as in the mean over
    the tokens of a text.

    Args:
        student: Last hidden states of the student, (N, T, D).
        teacher: Last hidden states of the teacher, (N, T, D).
        mask: 1 at tokens and 0 at padding, (N, T).
    """
    tokens = mask.bool()
    target = teacher.float()[tokens]
    error = student.float()[tokens] - target
    return error.square().sum() / target.square().sum()


def forward_in_groups(
    forward: Callable[..., Mapping[str, Any]], features: Mapping[str, Any], **kwargs: Any
) -> dict[str, Any]:
    """Run a transformer on texts of similar length at a time.

    A batch of random texts is padded to its longest text, so most tokens are padding. Groups
    of similar lengths have little padding, and their outputs do not depend on it.

    Args:
        forward: Method `forward` of the transformer module.
        features: Tokens of N texts with padding on the right, (N, T) each.
        **kwargs: Other arguments of the method.

    Returns:
        The features with "token_embeddings", (N, T, D), which are 0 at the padding.
    """
    mask = features["attention_mask"]
    lengths = mask.sum(1)
    group_size = CPU_GROUP_SIZE if mask.device.type == "cpu" else GPU_GROUP_SIZE
    groups = lengths.argsort().split(group_size)

    outputs = []
    for rows in groups:
        longest = int(lengths[rows].max())
        group = {name: features[name][rows, :longest] for name in INPUTS if name in features}
        output = forward(group, **kwargs)["token_embeddings"]
        outputs.append(F.pad(output, (0, 0, 0, mask.shape[1] - longest)))

    # The inverse permutation restores the order of the texts.
    order = torch.cat(groups).argsort()
    return {**features, "token_embeddings": torch.cat(outputs)[order]}


class DistillLoss(nn.Module):
    """Weighted sum of 1 - cosine, `similarity_loss`, `memory_bank_loss` and `hidden_state_loss`.

    All of them are computed in float32.

    Args:
        model: Student whose embeddings have the dimension of the teacher's.
        options: Weights, temperature and size of the memory bank.
        embeddings: Embeddings of the training texts by the teacher, (N, D).
        teacher: Transformer module of the teacher, which `hidden_state_loss` runs on each batch.
    """

    bank: torch.Tensor
    bank_indices: torch.Tensor

    def __init__(
        self,
        model: SentenceTransformer,
        options: LossOptions,
        embeddings: np.ndarray,
        teacher: nn.Module | None = None,
    ) -> None:
        super().__init__()
        # Only the method: a module would be registered as a submodule, and saved with the student.
        self.teacher_forward = None if teacher is None else teacher.forward
        self.model = model
        self.options = options
        self.embeddings = embeddings
        # The memory bank is a fixed random sample of the training texts.
        permutation = np.random.default_rng(0).permutation(len(embeddings))
        bank_indices = torch.from_numpy(permutation[: options.memory_bank_size])
        # Buffers are moved to the device of the model.
        self.register_buffer("bank_indices", bank_indices, persistent=False)
        self.register_buffer("bank", self.teacher_embeddings(bank_indices), persistent=False)

    def teacher_embeddings(self, text_indices: torch.Tensor) -> torch.Tensor:
        """Return the teacher's embeddings of texts, (N, D) float32 of length 1."""
        # NumPy reads a tensor of one index as an integer, which would remove the first axis.
        rows = torch.from_numpy(np.float32(self.embeddings[text_indices.cpu().numpy()]))
        return F.normalize(rows.to(text_indices.device), dim=-1)

    def forward(
        self, features: Sequence[Mapping[str, torch.Tensor]], labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the weighted losses, {name: loss}.

        Args:
            features: Inputs of the model, a list of one dictionary.
            labels: Indices of the texts, (N,).
        """
        # The model adds its outputs to the dictionary, which is copied so that the batch is
        # unchanged.
        inputs = next(iter(features))
        outputs = self.model(dict(inputs))
        embeddings = outputs["sentence_embedding"].float()
        teacher = self.teacher_embeddings(labels)
        options = self.options
        temperature = options.similarity_temperature

        losses = {}
        with torch.autocast(embeddings.device.type, enabled=False):
            # Differences of similarities at a temperature of 0.05 need more than the 8 bits of
            # bfloat16.
            student = F.normalize(embeddings, dim=-1)
            losses["cosine"] = options.cosine_weight * (1 - (student * teacher).sum(-1)).mean()
            similarity = similarity_loss(student, teacher, temperature)
            losses["similarity"] = options.similarity_weight * similarity
            if options.memory_bank_weight:
                is_self = labels[:, None] == self.bank_indices
                similarity = memory_bank_loss(student, teacher, self.bank, temperature, is_self)
                losses["memory_bank"] = options.memory_bank_weight * similarity

        if self.teacher_forward is not None:
            with torch.no_grad():
                states = forward_in_groups(self.teacher_forward, inputs)["token_embeddings"]
            loss = hidden_state_loss(outputs["token_embeddings"], states, inputs["attention_mask"])
            losses["hidden_states"] = options.hidden_state_weight * loss
        return losses


def agreement(student: np.ndarray, teacher: np.ndarray, max_texts: int = 1000) -> dict[str, float]:
    """Return how similar the embeddings of two encoders are.

    Args:
        student: Embeddings, (N, D').
        teacher: Embeddings of the same texts, (N, D).
        max_texts: Number of texts whose pairs are compared.

    Returns:
        "cosine", the mean cosine of the two embeddings of a text if D' = D; and "spearman", the
        rank correlation between the cosine similarities of all pairs of texts.
    """
    from scipy.stats import spearmanr

    student = student / np.linalg.norm(student, axis=1, keepdims=True).clip(1e-12)
    teacher = teacher / np.linalg.norm(teacher, axis=1, keepdims=True).clip(1e-12)
    metrics = {}
    if student.shape == teacher.shape:
        metrics["cosine"] = float((student * teacher).sum(1).mean())

    # Every pair of different texts once. The number of pairs is quadratic in the number of texts.
    pairs = np.triu_indices(min(len(student), max_texts), 1)
    similarities = [(x[:max_texts] @ x[:max_texts].T)[pairs] for x in (student, teacher)]
    return {**metrics, "spearman": float(spearmanr(*similarities).statistic)}


@dataclass(frozen=True)
class EvaluatedTexts:
    """Texts on which the agreement with the teacher is evaluated.

    Attributes:
        texts: N texts.
        embeddings: The teacher's embeddings of the texts, (N, D) float32.
    """

    texts: list[str]
    embeddings: np.ndarray


class Agreement(SentenceEvaluator):
    """Evaluator of the trainer: `agreement` with the teacher on texts of several types.

    Args:
        evaluated: Texts by name, such as "validation".
    """

    def __init__(self, evaluated: Mapping[str, EvaluatedTexts]) -> None:
        super().__init__()
        self.evaluated = evaluated
        self.primary_metric = "validation_spearman"

    @property
    def names(self) -> list[str]:
        """Names of the metrics."""
        return [f"{name}_{metric}" for name in self.evaluated for metric in ("cosine", "spearman")]

    def __call__(  # type: ignore[override]
        self,
        model: SentenceTransformer,
        output_path: str | None = None,
        epoch: int = -1,
        steps: int = -1,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Return the metrics, {"validation_cosine": ..., "validation_spearman": ..., ...}."""
        metrics = {}
        for name, evaluated in self.evaluated.items():
            student = model.encode(
                evaluated.texts, batch_size=64, show_progress_bar=False, convert_to_numpy=True
            )
            for metric, value in agreement(np.float32(student), evaluated.embeddings).items():
                metrics[f"{name}_{metric}"] = value
        return metrics
