"""The former spelling of `python -m eval readme`, for one more version."""

from eval.cli import main

main("readme")
