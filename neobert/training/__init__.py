"""What the trainers of pre-training, fine-tuning and embeddings share (docs/development.md)."""
