"""Masking of tokens for masked-LM training (paper, section 3: 20 % of the tokens, always [MASK];
BERT: 15 %, 80/10/10)."""

import torch

from ..common.errors import UserError


class TokenMasking:
    """Chooses tokens to predict and hides them; special tokens are neither chosen nor put in.

    Args:
        tokenizer: gives the id of [MASK], the special ids and the vocabulary size.
        mlm_probability: share of the real tokens that are predicted.
        mask_replace_prob: share of the predicted tokens that [MASK] replaces.
        random_replace_prob: share of the predicted tokens that a random ordinary token replaces;
            the rest stay as they are.
        schedule: (share at the run's beginning, share at its end) in place of `mlm_probability`, on
            a straight line between them.
    Raises:
        UserError: shares that cannot be, or a tokenizer without a mask token.
    """

    def __init__(
        self,
        tokenizer,
        mlm_probability=0.2,
        mask_replace_prob=1.0,
        random_replace_prob=0.0,
        schedule=None,
    ):
        self.schedule = (
            tuple(schedule) if schedule is not None else (mlm_probability, mlm_probability)
        )
        if len(self.schedule) != 2:
            raise UserError(
                "mask_schedule must be two shares, of the beginning and of the end, but "
                f"{list(self.schedule)} was given"
            )
        if mask_replace_prob + random_replace_prob > 1:
            raise UserError(
                "mask_replace_prob and random_replace_prob must be shares that sum to at most 1, "
                f"but {mask_replace_prob} and {random_replace_prob} were given"
            )
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no mask token; give one with [MASK] "
                "or <mask>"
            )
        self.mask_replace_prob, self.random_replace_prob = mask_replace_prob, random_replace_prob
        self.mask_token_id = tokenizer.mask_token_id
        self.ordinary = torch.ones(len(tokenizer), dtype=torch.bool)
        self.ordinary[torch.tensor(sorted(set(tokenizer.all_special_ids)))] = False
        self.ordinary_ids = self.ordinary.nonzero().squeeze(-1)

    def __call__(self, input_ids, generator, progress=0.0):
        """Hides tokens.

        Args:
            input_ids: int64 of any shape.
            generator: `torch.Generator` that every draw comes from.
            progress: share of the run before this batch, 0 to 1, for the schedule.
        Returns:
            input_ids with masked tokens, and labels: the masked token's own id, -100 elsewhere. A
            batch with a real token has a label.
        """
        begin, end = self.schedule
        probability = begin + (end - begin) * progress
        maskable = self.ordinary[input_ids]
        chosen = (torch.rand(input_ids.shape, generator=generator) < probability) & maskable
        if not chosen.any() and maskable.any():
            places = maskable.flatten().nonzero().squeeze(-1)
            chosen.view(-1)[places[torch.randint(len(places), (1,), generator=generator)]] = True
        labels = torch.where(chosen, input_ids, -100)
        if self.mask_replace_prob == 1:
            return torch.where(chosen, self.mask_token_id, input_ids), labels
        how = torch.rand(input_ids.shape, generator=generator)
        random_ids = self.ordinary_ids[
            torch.randint(len(self.ordinary_ids), input_ids.shape, generator=generator)
        ]
        masked = torch.where(chosen & (how < self.mask_replace_prob), self.mask_token_id, input_ids)
        by_random = (
            chosen
            & (how >= self.mask_replace_prob)
            & (how < self.mask_replace_prob + self.random_replace_prob)
        )
        return torch.where(by_random, random_ids, masked), labels
