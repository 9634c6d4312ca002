"""Masked-LM pre-training, adaptation, and pseudo-perplexity (docs/pretraining.md)."""
