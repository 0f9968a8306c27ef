"""The former spelling of `python -m eval quality`, for one more version."""

from eval.cli import main

main("quality")
