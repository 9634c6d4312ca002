"""`neobert throughput`: tokens per second of NeoBERT and other encoders on this machine."""
