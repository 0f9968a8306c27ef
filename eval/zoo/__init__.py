"""Model types that `PagedCache` serves, and how: `python -m eval zoo`."""
