"""Masking of tokens for masked language modeling.

NeoBERT masks 20 % of the tokens, always by [MASK] (paper, section 3). BERT masks 15 %: 80 % of them
by [MASK], 10 % by random tokens, and 10 % remain unchanged.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from ..common.loading import vocabulary_size


class TokenMasking:
    """Random selection and masking of the tokens to predict.

    Special tokens are never selected, and are never used as random tokens.

    Args:
        tokenizer: Tokenizer with a mask token.
        mlm_probability: Fraction of the tokens that are predicted, without special tokens.
        mask_replace_prob: Fraction of the predicted tokens that are replaced by the mask token.
        random_replace_prob: Fraction of the predicted tokens that are replaced by a random token.
            The others remain unchanged.
        schedule: Value of `mlm_probability` at the start and at the end of the run, with linear
            interpolation. Overrides `mlm_probability`.

    Raises:
        UserError: If the fractions are invalid, or the tokenizer has no mask token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        mlm_probability: float = 0.2,
        mask_replace_prob: float = 1.0,
        random_replace_prob: float = 0.0,
        schedule: Sequence[float] | None = None,
    ) -> None:
        # A constant fraction is a schedule with equal ends.
        self.schedule = tuple((mlm_probability, mlm_probability) if schedule is None else schedule)
        if len(self.schedule) != 2:
            raise UserError(
                "`mask_schedule` must contain two fractions, for the start and the end of the run, "
                f"got {list(self.schedule)}."
            )
        if mask_replace_prob + random_replace_prob > 1:
            raise UserError(
                "the sum of `mask_replace_prob` and `random_replace_prob` must be at most 1, got "
                f"{mask_replace_prob} and {random_replace_prob}."
            )
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no mask token. Use a tokenizer with "
                "[MASK] or <mask>."
            )

        self.mask_replace_prob = mask_replace_prob
        self.random_replace_prob = random_replace_prob
        self.mask_token_id = tokenizer.mask_token_id

        # Lookup table of the tokens that may be selected, (vocabulary size,). Ids in a gap of the
        # vocabulary are no tokens.
        self.is_ordinary = torch.zeros(vocabulary_size(tokenizer), dtype=torch.bool)
        self.is_ordinary[torch.tensor(sorted(tokenizer.get_vocab().values()))] = True
        self.is_ordinary[torch.tensor(sorted(set(tokenizer.all_special_ids)))] = False
        self.ordinary_ids = self.is_ordinary.nonzero().squeeze(-1)

    def __call__(
        self, input_ids: torch.Tensor, generator: torch.Generator, progress: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask tokens.

        Args:
            input_ids: Token ids of any shape, int64.
            generator: Generator of all random numbers.
            progress: Fraction of the run before this batch, for the schedule.

        Returns:
            Masked token ids, and the labels, which are the original ids of the predicted tokens and
            -100 elsewhere. At least one token is predicted if the batch contains a token that is
            not a special token.
        """
        # Each token is selected independently, so the number of predicted tokens varies between
        # batches.
        start, end = self.schedule
        probability = start + (end - start) * progress
        maskable = self.is_ordinary[input_ids]
        selected = (torch.rand(input_ids.shape, generator=generator) < probability) & maskable
        if not selected.any() and maskable.any():
            # The loss of a batch without labels would be NaN.
            positions = maskable.flatten().nonzero().squeeze(-1)
            sample = torch.randint(len(positions), (1,), generator=generator)
            selected.view(-1)[positions[sample]] = True

        labels = torch.where(selected, input_ids, -100)
        if self.mask_replace_prob == 1:
            return torch.where(selected, self.mask_token_id, input_ids), labels

        # One random number per token decides between the mask token, a random token, and the token
        # itself.
        sample = torch.rand(input_ids.shape, generator=generator)
        random_index = torch.randint(len(self.ordinary_ids), input_ids.shape, generator=generator)
        random_ids = self.ordinary_ids[random_index]
        by_mask = selected & (sample < self.mask_replace_prob)
        by_random = (
            selected
            & (sample >= self.mask_replace_prob)
            & (sample < self.mask_replace_prob + self.random_replace_prob)
        )
        masked_ids = torch.where(by_mask, self.mask_token_id, input_ids)
        return torch.where(by_random, random_ids, masked_ids), labels
