"""The former spelling of `python -m eval bench`, for one more version."""

from eval.cli import main

main("bench")
