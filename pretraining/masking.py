"""Masking of tokens for masked-LM training (paper, section 3: 20 % of the tokens, always [MASK]; BERT: 15 %, 80/10/10)."""

import torch

from ..common.errors import UserError


class TokenMasking:
    """Chooses tokens to predict and hides them; special tokens are neither chosen nor put in.

    Args:
        tokenizer: gives the id of [MASK], the special ids and the vocabulary size.
        probability: share of the real tokens that are predicted.
        mask_share: share of the predicted tokens that [MASK] replaces.
        random_share: share of the predicted tokens that a random ordinary token replaces; the rest stay as they are.
    Raises:
        UserError: shares that are no shares, or a tokenizer without a mask token.
    """

    def __init__(self, tokenizer, probability=0.2, mask_share=1.0, random_share=0.0):
        if not 0 < probability < 1:
            raise UserError(f"mask_probability must lie between 0 and 1, but {probability} was given")
        if min(mask_share, random_share) < 0 or mask_share + random_share > 1:
            raise UserError(
                f"mask_share and random_share must be shares that sum to at most 1, but {mask_share}, {random_share} were given"
            )
        if tokenizer.mask_token_id is None:
            raise UserError(f"the tokenizer {tokenizer.name_or_path} has no mask token; give one with [MASK] or <mask>")
        self.probability, self.mask_share, self.random_share = probability, mask_share, random_share
        self.mask_token_id = tokenizer.mask_token_id
        ordinary = torch.ones(len(tokenizer), dtype=torch.bool)
        ordinary[torch.tensor(sorted(set(tokenizer.all_special_ids)))] = False
        self.ordinary = ordinary
        self.ordinary_ids = ordinary.nonzero().squeeze(-1)

    def __call__(self, input_ids, generator):
        """Hides tokens.

        Args:
            input_ids: int64 of any shape.
            generator: `torch.Generator` that every draw comes from.
        Returns:
            input_ids with hidden tokens, and labels: the hidden token's id, -100 elsewhere. A batch with a real token has a label.
        """
        maskable = self.ordinary[input_ids]
        chosen = (torch.rand(input_ids.shape, generator=generator) < self.probability) & maskable
        if not chosen.any() and maskable.any():
            places = maskable.flatten().nonzero().squeeze(-1)
            chosen.view(-1)[places[torch.randint(len(places), (1,), generator=generator)]] = True
        labels = torch.where(chosen, input_ids, -100)
        if self.mask_share == 1:
            return torch.where(chosen, self.mask_token_id, input_ids), labels
        how = torch.rand(input_ids.shape, generator=generator)
        random_ids = self.ordinary_ids[torch.randint(len(self.ordinary_ids), input_ids.shape, generator=generator)]
        hidden = torch.where(chosen & (how < self.mask_share), self.mask_token_id, input_ids)
        by_random = chosen & (how >= self.mask_share) & (how < self.mask_share + self.random_share)
        return torch.where(by_random, random_ids, hidden), labels
