"""Masked-LM pre-training, its ablations, and pseudo-perplexity (docs/pretraining.md)."""
