"""The former spelling of `python -m eval bench`, for one more version."""

from __future__ import annotations

from eval.cli import main

if __name__ == "__main__":
    main("bench")
