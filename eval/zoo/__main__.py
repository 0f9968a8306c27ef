"""The former spelling of `python -m eval zoo`, for one more version."""

from eval.cli import main

main("zoo")
