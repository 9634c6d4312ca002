"""Raw training checkpoint to a Hub folder (docs/conversion.md)."""
