"""Run notebooks from top to bottom and keep their outputs: `python notebooks/execute.py [name.ipynb ...]`.

Times of execution, versions of the kernel and warnings are left out, so that a diff shows what changed.
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
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat is partly typed
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            coalesce_streams=True,  # lines that were printed slowly are one output all the same
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # Warnings name folders of the machine they were seen on.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = nbformat.from_dict(KERNEL)  # type: ignore[no-untyped-call]
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


def main() -> None:
    """Run the notebooks named on the command line, or all of them."""
    names = sys.argv[1:] or sorted(path.name for path in NOTEBOOKS_DIR.glob("*.ipynb"))
    for name in names:
        execute(NOTEBOOKS_DIR / name)
        print(name)


if __name__ == "__main__":
    main()
