"""What a student is trained for and how near it came: losses on pooled vectors, agreement with the
teacher."""

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from torch import nn


def similarity_loss(student, teacher, temperature):
    """KL divergence between rows of similarities within a batch, the teacher's || the student's.

    Row i is softmax over j != i of cos(i, j) / temperature, as in Tung and Mori 2019 with a
    softmax; the mean over rows.

    Args:
        student: (N, D').
        teacher: (N, D).
    """
    count = len(student)
    others = ~torch.eye(count, dtype=torch.bool, device=student.device)
    rows = []
    for vectors in (student, teacher):
        unit = F.normalize(vectors, dim=-1)
        rows.append((unit @ unit.T / temperature)[others].view(count, count - 1).log_softmax(-1))
    return F.kl_div(rows[0], rows[1], log_target=True, reduction="batchmean")


class DistillLoss(nn.Module):
    """cosine_weight * (1 - cos) + similarity_weight * `similarity_loss`, each in float32.

    Args:
        model: SentenceTransformer whose vectors are as wide as the teacher's.
        arguments: `DistillArguments` with the weights and the temperature.
    """

    def __init__(self, model, arguments):
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, features, labels):
        """
        Args:
            features: one dictionary of model inputs.
            labels: (N, D), the teacher's vectors.
        Returns:
            {name: weighted loss}.
        """
        vectors = self.model(dict(next(iter(features))))["sentence_embedding"].float()
        with torch.autocast(vectors.device.type, enabled=False):
            cosine = F.cosine_similarity(vectors, labels.float(), dim=-1)
            similarity = similarity_loss(
                vectors, labels.float(), self.arguments.similarity_temperature
            )
        return {
            "cosine": self.arguments.cosine_weight * (1 - cosine).mean(),
            "similarity": self.arguments.similarity_weight * similarity,
        }


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
        self.primary_metric = f"{next(iter(sets))}_spearman"

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        found = {}
        for name, (texts, vectors) in self.sets.items():
            own = model.encode(texts, batch_size=64, show_progress_bar=False, convert_to_numpy=True)
            found |= {
                f"{name}_{key}": value for key, value in agreement(np.float32(own), vectors).items()
            }
        return found
