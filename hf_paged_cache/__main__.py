"""Entry point of `python -m hf_paged_cache`."""

from __future__ import annotations

from hf_paged_cache.cli import main

if __name__ == "__main__":
    main()
