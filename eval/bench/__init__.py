"""Speed and memory of `PagedCache` beside the caches of transformers: `python -m eval bench`."""
