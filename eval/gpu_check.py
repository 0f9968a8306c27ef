"""Are the kernels right on this GPU, and how fast: `python eval/gpu_check.py`.

Needs only torch, numpy, triton and transformers beside this project, and no downloads. `--dry-run` takes the
same paths at toy sizes on a CPU, with Triton's interpreter. `eval.gpu` holds the parts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--dry-run" in given:
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it once, when it is imported
    from eval.gpu.cli import run

    return run(given)


if __name__ == "__main__":
    if not __package__:
        # Started as a file: look for modules in the project, not among the files beside this one.
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
