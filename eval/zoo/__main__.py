"""Entry point of `python -m eval.zoo`."""

from __future__ import annotations

from eval.zoo.cli import main

if __name__ == "__main__":
    main()
