"""The former spelling of `python -m eval gpu`, for one more version; also `python eval/gpu_check.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:
        # Started as a file: look for modules in the project, not among the files beside this one.
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from eval.cli import main

    main("gpu")
