"""Muon for the matrices of the blocks, and AdamW for all other parameters."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..common.environment import processor_units
from ..common.errors import UserError


logger = logging.getLogger("neobert.training")

# Units of a processor that compute in bfloat16.
BF16_UNITS = {"AVX512-BF16", "AMX-BF16", "bf16"}


def check_muon() -> None:
    """Raise UserError if this version of torch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"--muon needs torch 2.9 or newer, got {torch.__version__}. Update torch, or omit "
            "--muon."
        )


def warn_if_muon_is_slow(device: torch.device) -> None:
    """Log a warning if the training device is a processor without bfloat16.

    torch orthogonalizes in bfloat16. Without support by the processor this takes about 15 times as
    long as in float32, and most of the time of a step.
    """
    # The list is empty if the units are unknown.
    units = set(processor_units())
    if device.type == "cpu" and units and not units & BF16_UNITS:
        logger.warning(
            "--muon is slow on this processor, because torch computes it in bfloat16, which the "
            "processor does not support. Omit --muon, or use a GPU or a processor with AVX512-BF16 "
            "or AMX."
        )


def muon_optimizer(
    matrices: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    learning_rate: float,
    weight_decay: float = 0.0,
) -> Any:
    """Return Muon for matrices.

    Muon orthogonalizes the momentum of a matrix, so all singular values of an update are nearly
    equal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon). Its updates are scaled to
    the root mean square of those of AdamW (arXiv 2502.16982), so one learning rate fits both.

    Args:
        matrices: Parameters with two dimensions, or groups of them.
        learning_rate: Learning rate of the parameters, unless their group has another one.
        weight_decay: Weight decay.

    Raises:
        UserError: If torch has no Muon.
    """
    check_muon()
    return torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )


class MuonAdamW(torch.optim.Optimizer):
    """Optimizer that updates some parameters with Muon and the others with AdamW.

    Args:
        matrices: Parameters with two dimensions for Muon.
        others: Parameters for AdamW, without weight decay.
        learning_rate: Learning rate of all parameters.
        weight_decay: Weight decay of the matrices.
        betas: Decay rates of AdamW's moments.
        epsilon: Term that AdamW adds to its denominator.

    Raises:
        UserError: If torch has no Muon.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        learning_rate: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self.parts: list[Any] = [muon_optimizer(matrices, learning_rate, weight_decay)]
        # AdamW refuses an empty list.
        if others:
            self.parts.append(
                torch.optim.AdamW(
                    others, lr=learning_rate, betas=betas, eps=epsilon, weight_decay=0.0
                )
            )

        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts use the groups and the state of this optimizer.

        Schedules change the learning rates of these groups, and checkpoints contain this state.
        """
        for number, part in enumerate(self.parts):
            part.param_groups = [self.param_groups[number]]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as torch does."""
        super().load_state_dict(state_dict)
        # torch has replaced the groups and the state.
        self._share()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Update all parameters, and return the value of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def block_matrices(
    model: nn.Module, blocks: nn.Module
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained matrices of the blocks, and all other trained parameters of the model.

    Args:
        model: Model.
        blocks: Module of the model that contains its transformer blocks.
    """
    matrices = [
        weight for weight in blocks.parameters() if weight.requires_grad and weight.ndim == 2
    ]
    matrix_ids = set(map(id, matrices))
    others = [
        weight
        for weight in model.parameters()
        if weight.requires_grad and id(weight) not in matrix_ids
    ]
    return matrices, others
