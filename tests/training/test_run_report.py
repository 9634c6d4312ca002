"""Tests of neobert/training/run_report.py.

The report logs the size of a run and an estimate of its duration, and must not change the run.
"""

import logging

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from neobert.common.commands import setup_logging
from neobert.training.run_report import RunReport, format_duration


class Points(Dataset):
    """70 points of the line y = 2x."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([index / 70])
        return {"x": x, "labels": 2 * x}


class Line(torch.nn.Module):
    """A linear layer with dropout, which depends on the state of the random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.dropout(self.layer(x)) - labels).square().mean()}


def train(tmp_path, report=None, **options):
    """Train a linear layer, with the report as a callback, and return its weight."""
    set_seed(0)
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=8,
        learning_rate=0.5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        **options,
    )

    trainer = Trainer(Line(), arguments, train_dataset=Points())
    if report is not None:
        trainer.add_callback(report)
    trainer.train()
    return trainer.model.layer.weight.detach()


def test_the_size_of_the_run_and_its_time_are_logged(tmp_path, caplog):
    """Check the two lines about a run with gradient accumulation and warmup."""
    caplog.set_level(logging.INFO, "neobert")

    # 70 rows in batches of 8 are 9 batches per epoch. With two batches per step, these are 5 steps.
    train(tmp_path, RunReport(), num_train_epochs=3, gradient_accumulation_steps=2, warmup_steps=2)

    messages = [record.getMessage() for record in caplog.records if record.name == "neobert"]
    assert messages[0] == (
        "Training: 15 steps, 3 epochs, 70 sequences, learning rate 0.5, warmup 2 steps"
    )
    # Steps 2 to 11 are timed. The first step is not, and 4 steps remain.
    assert messages[1].startswith("Estimated time for the remaining 4 steps: ")
    assert len(messages) == 2


@pytest.mark.parametrize(("epochs", "expected"), [(1, "1 epoch,"), (1.5, "1.5 epochs,")])
def test_one_epoch_is_singular(tmp_path, caplog, epochs, expected):
    caplog.set_level(logging.INFO, "neobert")
    train(tmp_path, RunReport(epochs=epochs), max_steps=2)
    assert f"Training: 2 steps, {expected}" in caplog.text


def test_a_number_of_sequences_replaces_the_length_of_the_dataset(tmp_path, caplog):
    caplog.set_level(logging.INFO, "neobert")
    train(tmp_path, RunReport(sequences=1234567), max_steps=3)
    assert "3 steps, 0.333 epochs, 1,234,567 sequences" in caplog.text
    # The run is too short for an estimate.
    assert "Estimated" not in caplog.text


def test_estimate_uses_the_mean_step_time(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "neobert")
    times = iter([100.0, 130.0])
    monkeypatch.setattr("neobert.training.run_report.time.monotonic", lambda: next(times))
    train(tmp_path, RunReport(measured_steps=5), max_steps=100)
    # 30 seconds for 5 steps; 94 steps remain after step 6.
    assert "for the remaining 94 steps: 9 min 24 s" in caplog.text


def test_the_report_does_not_change_the_run(tmp_path):
    """A run with the report ends with the same weight. The default number of epochs is 3."""
    assert torch.equal(train(tmp_path, num_train_epochs=3), train(tmp_path, RunReport()))


@pytest.mark.parametrize(
    ("seconds", "text"), [(44.6, "45 s"), (200, "3 min 20 s"), (7512, "2 h 5 min"), (0.2, "0 s")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("rank", "level"), [("0", logging.INFO), ("1", logging.ERROR)])
def test_only_the_main_process_logs_progress(rank, level, monkeypatch):
    """Check the log level of the main process, and of the other processes of a run."""
    logger = logging.getLogger("neobert")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setenv("RANK", rank)
    setup_logging()
    assert logger.level == level
