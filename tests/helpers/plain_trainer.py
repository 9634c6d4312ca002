"""A trainer of a model with three parameters, for the tests of checkpoints and runs."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from neobert.training.checkpoints import RunTrainer


class PlainTrainer(RunTrainer, Trainer):
    """Trainer with the mixin that the commands use."""


class Points(Dataset):
    """Data set of 64 points on a line in the plane, with targets."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([i / 64, 1 - i / 64])
        return {"x": x, "y": x.sum() + i % 3}


class Line(torch.nn.Module):
    """Linear model with dropout, so that the result depends on the state of the random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(2, 1)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.linear(self.dropout(x))[:, 0]
        return {"loss": ((prediction - y) ** 2).mean(), "logits": prediction}


class At(TrainerCallback):
    """Callback that calls a function at the end of a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step = step
        self.action = action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def trainer(
    folder: Path, *callbacks: TrainerCallback, model: torch.nn.Module | None = None, **options: Any
) -> PlainTrainer:
    """Return a trainer of 12 steps that saves a checkpoint every 2 steps."""
    settings = {
        "max_steps": 12,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
        "remove_unused_columns": False,
        **options,
    }
    plain_trainer = PlainTrainer(
        model=model or Line(),
        args=TrainingArguments(output_dir=str(folder), label_names=["y"], **settings),
        train_dataset=Points(),
        eval_dataset=Points(),
        callbacks=list(callbacks),
    )
    # The score is best at step 4.
    plain_trainer.compute_metrics = lambda output: {
        "score": -abs(plain_trainer.state.global_step - 4)
    }
    return plain_trainer


def sigterm() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of the model's weights."""
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether two models have identical weights."""
    return all(torch.equal(first[name], second[name]) for name in first)
