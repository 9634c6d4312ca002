"""Which texts of a distillation share a batch: those of one length, or those that are alike.

The similarity loss learns only from pairs of texts within a batch. Of random texts nearly all pairs
are far apart; retrieval is decided between near ones.
"""

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers.base.sampler import DefaultBatchSampler


PART = 32_768  # units among which neighbours are searched


class _SteppedBatches(DefaultBatchSampler):
    """Batches of `batch_size` texts, as many for each of the `group` processes of a step; the order
    of an epoch is a function of the seed and the epoch.

    Args:
        dataset: of N texts.
        group: batches of a step, one a process.
    """

    def __init__(
        self,
        dataset,
        batch_size,
        drop_last=True,
        valid_label_columns=None,
        generator=None,
        seed=0,
        group=1,
    ):
        super().__init__(range(len(dataset)), batch_size=batch_size, drop_last=True, seed=seed)
        self.count = len(dataset)
        self.group = group

    def __len__(self):
        return max(1, self.count // (self.batch_size * self.group)) * self.group

    def epoch_generator(self):
        """Of the numbers that this epoch draws."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)


class SimilarLengths(_SteppedBatches):
    """Batches of texts of nearly one length: attention on the CPU runs once a length.

    Each epoch shuffles all texts, sorts every `pool` batches of them by length, and shuffles the
    batches. `group` neighbouring batches hold texts of one length: those of the processes of a
    step, which wait for each other.

    Args:
        lengths: (N,) tokens of each text.
        others: as of `_SteppedBatches`.
    """

    pool = 64

    def __init__(self, dataset, *args, lengths, **others):
        super().__init__(dataset, *args, **others)
        self.lengths = torch.from_numpy(np.asarray(lengths))

    def __iter__(self):
        generator = self.epoch_generator()
        order = torch.randperm(self.count, generator=generator)
        together = self.batch_size * self.group
        groups = []
        for part in order.split(self.pool * together):
            part = part[self.lengths[part].argsort(stable=True)]
            groups += [rows for rows in part.split(together) if len(rows) == together]
        groups = groups or [order]  # fewer texts than one step takes
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield from (
                rows.tolist() for rows in groups[index].split(-(-len(groups[index]) // self.group))
            )


class NearTexts(_SteppedBatches):
    """Batches of bundles: a unit (texts that belong together) and the units that the teacher finds
    nearest to it and that no bundle before has.

    Each epoch makes other bundles, cuts their texts in batches of `batch_size`, and shuffles these.

    Args:
        units: list of lists of text numbers; every text is in one.
        near: (U, K) numbers of the units nearest to each, nearest first, as of `nearest_units`.
        neighbours: most units of a bundle beside its first.
        others: as of `_SteppedBatches`.
    """

    def __init__(self, dataset, *args, units, near, neighbours=0, **others):
        super().__init__(dataset, *args, **others)
        self.units = units
        self.near = near
        self.neighbours = neighbours

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
        generator = self.epoch_generator()
        order = [text for units in self.bundles(generator) for u in units for text in self.units[u]]
        size = min(self.batch_size, max(1, len(order) // self.group))
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        batches = [rows for rows in batches if len(rows) == size][: len(self)]
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


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
