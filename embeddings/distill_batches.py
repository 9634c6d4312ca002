"""Which texts of a distillation share a batch: those that belong together, or are alike.

The similarity loss learns only from pairs of texts within a batch. Of random texts nearly all pairs
are far apart; retrieval is decided between near ones.
"""

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers.base.sampler import DefaultBatchSampler


PART = 32_768  # units among which neighbours are searched


class NearTexts(DefaultBatchSampler):
    """Batches of bundles: a unit (texts that belong together) and the units that the teacher finds
    nearest to it and that no bundle before has.

    Each epoch makes other bundles, cuts their texts in batches of `batch_size`, and shuffles these;
    its order is a function of the seed and the epoch.

    Args:
        dataset: of N texts.
        units: list of lists of text numbers; every text is in one.
        near: (U, K) numbers of the units nearest to each, nearest first, as of `nearest_units`.
        neighbours: most units of a bundle beside its first.
    """

    def __init__(
        self,
        dataset,
        batch_size,
        drop_last=True,
        valid_label_columns=None,
        generator=None,
        seed=0,
        *,
        units,
        near,
        neighbours=0,
    ):
        super().__init__(range(len(dataset)), batch_size=batch_size, drop_last=True, seed=seed)
        self.count = len(dataset)
        self.units, self.near, self.neighbours = units, near, neighbours

    def __len__(self):
        return max(1, self.count // self.batch_size)

    def bundles(self, generator):
        """Lists of unit numbers; each unit is in one."""
        used = np.zeros(len(self.units), dtype=bool)
        for first in torch.randperm(len(self.units), generator=generator).tolist():
            if not used[first]:
                near = self.near[first]
                found = [first, *near[~used[near]][: self.neighbours].tolist()]
                used[found] = True
                yield found

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = [text for units in self.bundles(generator) for u in units for text in self.units[u]]
        for index in torch.randperm(len(self), generator=generator).tolist():
            yield order[index * self.batch_size : (index + 1) * self.batch_size]


def nearest_units(vectors, units, count, seed=0):
    """The nearest other units of each by cosine, (U, K) int64, nearest first.

    Units are searched in random parts of `PART`, so that the work grows as the number of texts.
    K is `count`, or less where the smallest part has fewer others.

    Args:
        vectors: (N, D), the teacher's vectors of all texts.
        units: list of lists of text numbers; the mean of their unit vectors stands for a unit.
    """
    order = np.random.default_rng(seed).permutation(len(units))
    parts = np.array_split(order, -(-len(units) // PART))
    count = min(count, min(map(len, parts)) - 1)
    near = np.empty((len(units), count), dtype=np.int64)
    for part in parts:
        sizes = torch.tensor([len(units[u]) for u in part])
        rows = np.float32(vectors[[t for u in part for t in units[u]]])
        found = F.normalize(torch.from_numpy(rows), dim=-1)
        owner = torch.repeat_interleave(torch.arange(len(part)), sizes)
        means = torch.zeros(len(part), found.shape[1]).index_add_(0, owner, found)
        means = F.normalize(means, dim=-1)
        for start in range(0, len(part), 1024):
            scores = means[start : start + 1024] @ means.T
            own = torch.arange(len(scores))
            scores[own, start + own] = -2
            near[part[start : start + 1024]] = part[scores.topk(count).indices.numpy()]
    return near
