"""Fine-tuning on your own data and on GLUE (docs/finetuning.md, docs/glue.md)."""
