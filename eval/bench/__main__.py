"""Entry point of `python -m eval.bench`."""

from __future__ import annotations

from eval.bench.cli import main

if __name__ == "__main__":
    main()
