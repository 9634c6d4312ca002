"""What a student is trained for and how near it came: losses on pooled vectors, agreement with the
teacher."""

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from torch import nn


# Stored vectors that a text is compared with in a step.
NEAREST, SPREAD, RANDOM = 16, 48, 64
HIDDEN = -2  # score of a stored vector that is hidden, below every cosine


def similarity_loss(student, teacher, temperature):
    """KL divergence between rows of similarities within a batch, the teacher's || the student's.

    Row i is softmax over j != i of cos(i, j) / temperature, as in Tung and Mori 2019 with a
    softmax; the mean over rows.

    Args:
        student: (N, D') of length 1.
        teacher: (N, D) of length 1.
    """
    count = len(student)
    others = ~torch.eye(count, dtype=torch.bool, device=student.device)
    rows = []
    for unit in (student, teacher):
        rows.append((unit @ unit.T / temperature)[others].view(count, count - 1).log_softmax(-1))
    return F.kl_div(rows[0], rows[1], log_target=True, reduction="batchmean")


def bank_loss(student, teacher, bank, temperature, hidden):
    """KL divergence between rows of similarities to stored vectors, the teacher's || the student's.

    A row is softmax over `candidates` of cos(i, stored j) / temperature, where both the text's
    vector and the stored ones are the teacher's on one side, and the text's is the student's on the
    other (SEED, arXiv 2101.04731); the mean over rows.

    Args:
        student: (N, D) of length 1.
        teacher: (N, D) of length 1.
        bank: (M, D) of length 1, the teacher's vectors of M texts.
        hidden: (N, M) bool, true where a stored vector is that of the text itself.
    """
    scores = (teacher @ bank.T).masked_fill(hidden, HIDDEN)
    chosen = candidates(scores)
    expected = scores.gather(1, chosen)
    found = (student.unsqueeze(1) @ bank[chosen].mT).squeeze(1)
    own = expected == HIDDEN
    rows = [(x / temperature).masked_fill(own, -1e4).log_softmax(-1) for x in (found, expected)]
    return F.kl_div(*rows, log_target=True, reduction="batchmean")


def candidates(scores):
    """(N, NEAREST + SPREAD + RANDOM) column numbers: the highest scores of each row, some spread
    evenly over the range of scores, and some drawn at random.

    Negatives of all degrees teach more than the nearest or random ones (arXiv 2604.04734).

    Args:
        scores: (N, M).
    """
    ordered, columns = scores.sort(dim=1)
    # A hidden score must not be the lowest level: all levels below the lowest visible score would
    # select the same column.
    lowest = scores.masked_fill(scores == HIDDEN, torch.inf).amin(dim=1, keepdim=True)
    lowest = torch.minimum(lowest, ordered[:, -1:])
    levels = torch.linspace(0, 1, SPREAD, device=scores.device) * (ordered[:, -1:] - lowest)
    levels = lowest + levels
    spread = columns.gather(1, torch.searchsorted(ordered, levels).clamp(max=scores.shape[1] - 1))
    drawn = torch.randint(scores.shape[1], (len(scores), RANDOM), device=scores.device)
    return torch.cat([columns[:, -NEAREST:], spread, drawn], dim=1)


class DistillLoss(nn.Module):
    """The weighted sum of 1 - cos, `similarity_loss` and `bank_loss`, in float32.

    Args:
        model: SentenceTransformer whose vectors are as wide as the teacher's.
        arguments: `DistillArguments` with the weights and the temperature.
        vectors: (N, D), the teacher's vectors of the training texts.
    """

    def __init__(self, model, arguments, vectors):
        super().__init__()
        self.model, self.arguments, self.vectors = model, arguments, vectors
        drawn = np.random.default_rng(0).permutation(len(vectors))[: arguments.bank]
        # Buffers, which are on the model's device once and for all.
        self.register_buffer("stored", torch.from_numpy(drawn), persistent=False)
        self.register_buffer("bank", self.of_teacher(self.stored), persistent=False)

    def of_teacher(self, numbers):
        """The teacher's vectors of texts, (N, D) float32 of length 1."""
        rows = torch.from_numpy(np.float32(self.vectors[numbers.cpu()]))
        return F.normalize(rows.to(numbers.device), dim=-1)

    def forward(self, features, labels):
        """
        Args:
            features: one dictionary of model inputs.
            labels: (N,) numbers of the texts.
        Returns:
            {name: weighted loss}.
        """
        vectors = self.model(dict(next(iter(features))))["sentence_embedding"].float()
        teacher = self.of_teacher(labels)
        weights, temperature = self.arguments, self.arguments.similarity_temperature
        losses = {}
        with torch.autocast(vectors.device.type, enabled=False):
            student = F.normalize(vectors, dim=-1)
            losses["cosine"] = weights.cosine_weight * (1 - (student * teacher).sum(-1)).mean()
            similarity = similarity_loss(student, teacher, temperature)
            losses["similarity"] = weights.similarity_weight * similarity
            if weights.bank_weight:
                own = labels[:, None] == self.stored
                similarity = bank_loss(student, teacher, self.bank, temperature, own)
                losses["bank"] = weights.bank_weight * similarity
        return losses


def agreement(student, teacher, most=1000):
    """How alike two encoders see the same texts.

    Args:
        student: (N, D') array.
        teacher: (N, D) array.
        most: texts whose pairs are compared.
    Returns:
        {"cosine": mean cosine of the two vectors of a text, where they are as wide; "spearman":
        rank correlation between the cosine similarities of all pairs of texts}.
    """
    from scipy.stats import spearmanr

    student, teacher = (
        x / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-12) for x in (student, teacher)
    )
    found = {}
    if student.shape == teacher.shape:
        found["cosine"] = float((student * teacher).sum(1).mean())
    pairs = np.triu_indices(min(len(student), most), 1)
    similarities = [(x[:most] @ x[:most].T)[pairs] for x in (student, teacher)]
    return {**found, "spearman": float(spearmanr(*similarities).statistic)}


class Agreement(SentenceEvaluator):
    """`agreement` on several sets of texts, as the trainer's evaluator.

    Args:
        sets: {name: (texts, teacher's vectors (N, D))}.
    """

    def __init__(self, sets):
        super().__init__()
        self.sets = sets
        self.primary_metric = "held_out_spearman"

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        found = {}
        for name, (texts, vectors) in self.sets.items():
            own = model.encode(texts, batch_size=64, show_progress_bar=False, convert_to_numpy=True)
            found |= {
                f"{name}_{key}": value for key, value in agreement(np.float32(own), vectors).items()
            }
        return found
