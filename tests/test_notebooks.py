from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 600
# A folder that only one machine has, on Linux, macOS or Windows.
LOCAL_PATH = re.compile(
    r"(?:/(?:home|root|Users|tmp|work|opt|usr|var|mnt|private|workspace)/|\b[A-Za-z]:\\|site-packages|ipykernel_\d)"
)
# What a notebook prints when all went well, where that is not that tokens are the same.
CLAIMS = {"05_evaluate_your_model": "exit code 0"}
SMALLER = {
    "01_quickstart": {
        "max_new_tokens=200": "max_new_tokens=20",
        "min_new_tokens=200": "min_new_tokens=20",
        "(256, 512, 1024, 2048), 8": "(128, 256), 2",
        "max_new_tokens=32": "max_new_tokens=12",
    },
    "02_formats": {"TOKENS, CHUNK = 512, 32": "TOKENS, CHUNK = 192, 64"},
    "03_blocks": {
        "_new_tokens=100": "_new_tokens=50",
        '_new_tokens": 60': '_new_tokens": 12',
        "] * 12)": "] * 4)",
    },
    "05_evaluate_your_model": {
        '"512,1024", "--limit", "8"': '"512,640", "--limit", "3"',
        "texts[:4]": "texts[:2]",
        '"--limit", "4"': '"--limit", "2"',
    },
}
"""Changes that let all of a notebook's code run in less time. The committed one has its own numbers."""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert {"01_quickstart", "02_formats", "03_blocks"} <= {path.stem for path in NOTEBOOKS}


def test_the_notebook_of_blocks_draws_them_after_every_step() -> None:
    cells = _code_cells(ROOT / "notebooks" / "03_blocks.ipynb")
    pages = [
        "".join(output["data"]["text/html"])
        for cell in cells
        for output in cell["outputs"]
        if "text/html" in output.get("data", {})
    ]
    assert len(pages) >= 8
    assert all("<b>PagedCache</b>" in page for page in pages)
    assert sum("held 2 times" in page for page in pages) >= 1


@every_notebook
def test_what_a_notebook_imports_is_there(path: Path) -> None:
    """Of this project; running the notebooks takes minutes."""
    lines = "".join(line for cell in _code_cells(path) for line in [*cell["source"], "\n"])
    found = [
        (module, name.strip())
        for module, names in re.findall(
            r"^from ((?:eval|hf_paged_cache)[\w.]*) import ([\w, ]+)$", lines, re.M
        )
        for name in names.split(",")
    ]
    assert found
    for module, name in found:
        assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")


@every_notebook
def test_a_committed_notebook_was_run_once_from_top_to_bottom(path: Path) -> None:
    cells = _code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in cells)
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs)


@every_notebook
def test_a_committed_notebook_names_no_folder_of_a_machine(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)
    found = LOCAL_PATH.findall(json.dumps(notebook, ensure_ascii=False).replace("\\\\", "\\"))
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("/home/me/model.gguf", True),
        ("/tmp/x/lib", True),
        (r"C:\Users\me", True),
        ("lib/python3.11/site-packages/tqdm", True),
        ("DATA_DIR / 'catalogue.jsonl'", False),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", False),
        ("https://example.org/home", False),
    ],
)
def test_the_pattern_tells_local_paths_from_others(text: str, is_local: bool) -> None:
    assert bool(LOCAL_PATH.search(text)) is is_local


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for much, less in SMALLER.get(path.stem, {}).items():
        assert any(much in cell.source for cell in code), f"{path.stem} no longer says {much}"
        for cell in code:
            cell.source = cell.source.replace(much, less)
    for cell in code:
        cell.outputs = []
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources).execute()
    printed = "".join(
        o.text for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == "stdout"
    )
    assert "same tokens as the default cache: False" not in printed
    assert CLAIMS.get(path.stem, "same tokens as the default cache: True") in printed
