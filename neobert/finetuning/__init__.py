"""GLUE fine-tuning (docs/finetuning.md)."""
