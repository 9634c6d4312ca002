"""Measurements: MTEB, pseudo-perplexity, throughput, encoding, and the report made from their result files."""
