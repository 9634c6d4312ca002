"""Predictions for files: `neobert predict` (docs/finetuning.md)."""
