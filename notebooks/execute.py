"""Run the notebooks from top to bottom and keep their outputs: `python notebooks/execute.py [name.ipynb ...]`.

What differs from run to run without saying anything (times of execution, versions of the kernel) is removed, so
that a change of a notebook shows what changed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS_DIR = Path(__file__).resolve().parent
CELL_TIMEOUT_S = 300
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def execute(path: Path) -> None:
    """Run one notebook in a folder of its own and write it back with fresh outputs.

    Raises:
        CellExecutionError: when a cell fails; the file is left as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT_S, record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute()
    notebook.metadata = nbformat.from_dict(KERNEL)
    nbformat.write(notebook, path)


def main() -> None:
    """Run the notebooks named on the command line, or all of them."""
    names = sys.argv[1:] or sorted(path.name for path in NOTEBOOKS_DIR.glob("*.ipynb"))
    for name in names:
        execute(NOTEBOOKS_DIR / name)
        print(name)


if __name__ == "__main__":
    main()
