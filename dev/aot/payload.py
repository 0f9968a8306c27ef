"""Source lines of the kernels that move K and V."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from hf_paged_cache.kernels import triton

from .read import Place

KERNEL_FOLDER = Path(triton.__file__).parent
PAYLOAD_POINTERS = frozenset({"codes_ptr", "new_ptr", "pool_ptr"})
"""Names that kernels have for pointers to K and V; scales, tables and masks have others."""


def payload_lines(source: str, file_name: str) -> frozenset[Place]:
    """Lines of `tl.load` and `tl.store` through a pointer to K or V."""
    return frozenset(
        (file_name, line)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("tl.load", "tl.store")
        and _moves_payload(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )


@cache
def payload_places() -> frozenset[Place]:
    """Those lines in all kernels."""
    files = sorted(KERNEL_FOLDER.glob("*.py"))
    return frozenset().union(*(payload_lines(file.read_text(), file.name) for file in files))


def _moves_payload(call: ast.Call) -> bool:
    names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
    return bool(names & PAYLOAD_POINTERS)
