"""Export of Hub folders to other engines, `neobert export` (docs/serving.md)."""
