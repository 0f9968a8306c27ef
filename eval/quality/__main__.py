"""Old spelling of `python -m eval quality`."""

from eval.cli import main

main("quality")
