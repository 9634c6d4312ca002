"""GLUE fine-tuning (docs/finetuning.md, docs/glue.md)."""
