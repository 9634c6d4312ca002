"""int8 quantization on the CPU (docs/performance.md)."""
