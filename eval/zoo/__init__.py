"""Which model types `PagedCache` serves, and how: `python -m eval zoo`."""
