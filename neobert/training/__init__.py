"""Code shared by the trainers: runs, checkpoints, Trainer options and LoRA."""
