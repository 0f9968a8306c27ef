"""Entry point of `python -m eval.readme`."""

from __future__ import annotations

from eval.readme.cli import main

if __name__ == "__main__":
    main()
