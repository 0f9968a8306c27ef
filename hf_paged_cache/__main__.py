"""Entry point of `python -m hf_paged_cache`."""

from __future__ import annotations

from .tools.cli import app

if __name__ == "__main__":
    app()
