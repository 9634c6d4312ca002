"""Code that the trainers share: the life of a run, checkpoints, Trainer options and LoRA."""
