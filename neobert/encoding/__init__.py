"""Embeddings of a corpus: `neobert encode` (docs/embeddings.md)."""
