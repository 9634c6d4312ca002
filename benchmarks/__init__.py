"""What measures speed and memory, and the report (docs/performance.md)."""
