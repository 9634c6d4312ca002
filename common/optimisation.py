"""What the paper's optimisation has beside Trainer's own: which parameters decay, its warm-up; and Muon for the matrices of the blocks."""

import warnings

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from .errors import UserError


OPTIMIZERS = ("muon",)


def decay_parameter_names(model):
    """Names of the parameters that weight decay applies to: the matrices; not norms, not biases."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]


def make_schedule(kind, optimizer, warmup_steps, max_steps, kwargs=None):
    """transformers' schedule, to be stepped once an optimizer step; the warm-up of warmup_stable_decay rises from 0, as the paper's.

    transformers' own rises from `min_lr_ratio`.

    Args:
        kind, kwargs: Trainer's lr_scheduler_type and lr_scheduler_kwargs.
    Raises:
        TypeError, ValueError: what transformers says of kinds and kwargs that it does not take.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Both num_training_steps and num_stable_steps")
        scheduler = get_scheduler(kind, optimizer, warmup_steps, max_steps, dict(kwargs or {}))
    if kind != SchedulerType.WARMUP_STABLE_DECAY:
        return scheduler
    (factor, *_) = scheduler.lr_lambdas
    return LambdaLR(optimizer, lambda step: step / warmup_steps if step < warmup_steps else factor(step))


def with_moments(state, other):
    """An optimizer's state_dict with the moments of another one of the same parameters, and its own learning rates and decay."""
    if "state" in state:
        return {**state, "state": other["state"]}
    return {name: with_moments(value, other[name]) if isinstance(value, dict) else value for name, value in state.items()}


# ---------------------------------------------------------------------------------------------------------------------- Muon


def matrices_of(name, tensor, heads):
    """The matrices (n, rows, columns) that a weight of a block is made of; each is a linear map of its own.

    qkv (3 D, D) has its rows per head, then q, k, v: they are three matrices (D, D). w12 (2 I, D) is both halves of SwiGLU.
    """
    if name.endswith("qkv.weight"):
        return tensor.view(heads, 3, -1, tensor.shape[1]).transpose(0, 1).reshape(3, -1, tensor.shape[1])
    if name.endswith("w12.weight"):
        return tensor.view(2, -1, tensor.shape[1])
    return tensor[None]


def weight_of(name, matrices, heads):
    """The inverse of `matrices_of`."""
    if name.endswith("qkv.weight"):
        return matrices.view(3, heads, -1, matrices.shape[2]).transpose(0, 1).reshape(-1, matrices.shape[2])
    return matrices.reshape(-1, matrices.shape[2])


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for the matrices of the blocks, each of `matrices_of` orthogonalised apart; AdamW for embedding, decoder, norms, biases.

    One learning rate serves both: Muon's updates are scaled to the size of AdamW's ("match_rms_adamw", Liu et al. 2025).

    Args:
        model: NeoBERTForMaskedLM.
        lr, weight_decay, betas, eps: as AdamW's.
        momentum: of Muon.
    Raises:
        UserError: torch has no Muon.
    """

    def __init__(self, model, lr, weight_decay, betas, eps, momentum=0.95):
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"optimizer muon needs torch 2.9 or newer; this is {torch.__version__}")
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.heads = model.config.num_attention_heads
        self.blocks = [(name, parameter) for name, parameter in named if ".transformer_encoder." in name and parameter.dim() == 2]
        mine, decayed = {name for name, _ in self.blocks}, set(decay_parameter_names(model))
        rest = [(name, parameter) for name, parameter in named if name not in mine]
        groups = [
            {"params": [parameter for name, parameter in rest if name in decayed], "weight_decay": weight_decay},
            {"params": [parameter for name, parameter in rest if name not in decayed], "weight_decay": 0.0},
            {"params": [parameter for _, parameter in self.blocks], "weight_decay": weight_decay},
        ]
        super().__init__(groups, {"lr": lr})
        self.adamw = torch.optim.AdamW([dict(group) for group in groups[:2]], lr=lr, betas=betas, eps=eps)
        self.parts = [
            [torch.nn.Parameter(part.clone()) for part in matrices_of(name, parameter.detach(), self.heads)]
            for name, parameter in self.blocks
        ]
        flat = [part for parts in self.parts for part in parts]
        self.muon = torch.optim.Muon(flat, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both; `closure` is not supported."""
        for inner, group in zip((*self.adamw.param_groups, *self.muon.param_groups), self.param_groups):
            inner["lr"] = group["lr"]
        self.adamw.step()
        for (name, parameter), parts in zip(self.blocks, self.parts):
            gradients = matrices_of(name, parameter.grad, self.heads)
            for part, gradient, value in zip(parts, gradients, matrices_of(name, parameter, self.heads)):
                part.copy_(value)
                part.grad = gradient
        self.muon.step()
        for (name, parameter), parts in zip(self.blocks, self.parts):
            parameter.copy_(weight_of(name, torch.stack(list(parts)), self.heads))
            for part in parts:
                part.grad = None

    def state_dict(self):
        """The states of both, and the learning rates."""
        return {"lr": [group["lr"] for group in self.param_groups], "adamw": self.adamw.state_dict(), "muon": self.muon.state_dict()}

    def load_state_dict(self, state_dict):
        """Takes what `state_dict` gave."""
        for group, lr in zip(self.param_groups, state_dict["lr"]):
            group["lr"] = lr
        self.adamw.load_state_dict(state_dict["adamw"])
        self.muon.load_state_dict(state_dict["muon"])
