"""The former spelling of `python -m eval bench`, for one more version."""

from __future__ import annotations

from eval.bench.cli import app

if __name__ == "__main__":
    app()
