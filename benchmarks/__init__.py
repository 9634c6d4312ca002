"""Benchmarks of speed, memory and quality, and scripts that prepare their texts."""
