"""Sentence embeddings: `PackedEncoder`, its fast CPU forward pass, and windows of long texts."""
