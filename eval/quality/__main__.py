"""Entry point of `python -m eval.quality`."""

from __future__ import annotations

from eval.quality.cli import main

if __name__ == "__main__":
    main()
