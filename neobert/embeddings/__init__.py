"""Sentence encoders: training, evaluation, encoding (docs/embeddings.md)."""
