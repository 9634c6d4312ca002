"""Evaluation of sentence encoders: `neobert retrieval` and `neobert mteb` (docs/embeddings.md)."""
