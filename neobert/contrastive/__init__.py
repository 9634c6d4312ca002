"""Contrastive fine-tuning: `neobert contrastive` (docs/embeddings.md)."""
