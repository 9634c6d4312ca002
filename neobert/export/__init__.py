"""Export of Hub folders to other engines, `neobert export` (docs/export.md)."""
