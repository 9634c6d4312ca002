"""Distillation of sentence encoders: `neobert distill` (docs/distillation.md)."""
