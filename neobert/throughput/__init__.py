"""`neobert throughput`: real tokens a second of NeoBERT and other encoders on this machine."""
