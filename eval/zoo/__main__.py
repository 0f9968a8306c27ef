"""The former spelling of `python -m eval zoo`, for one more version."""

from __future__ import annotations

from eval.zoo.cli import app

if __name__ == "__main__":
    app()
