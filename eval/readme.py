"""Old spelling of `python -m eval readme`."""

from eval.cli import main

if __name__ == "__main__":
    main("readme")
