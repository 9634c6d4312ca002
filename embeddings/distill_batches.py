"""Which texts of a distillation share a batch: those that belong together, and others at random."""

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler


class UnitBatches(DefaultBatchSampler):
    """Batches of `batch_size` texts, in which the texts of a unit stand together, but for a unit
    that a batch's end cuts. The order is a function of the seed and the epoch.

    Args:
        dataset: of N texts.
        units: list of lists of text numbers that belong together; every text is in one.
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
    ):
        super().__init__(range(len(dataset)), batch_size=batch_size, drop_last=True, seed=seed)
        self.count, self.units = len(dataset), units

    def __len__(self):
        return max(1, self.count // self.batch_size)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        shuffled = torch.randperm(len(self.units), generator=generator).tolist()
        order = [text for unit in shuffled for text in self.units[unit]]
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size]
