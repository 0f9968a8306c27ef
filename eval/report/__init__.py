"""Reports of a run: the table in the terminal, and the files of its folder."""

from __future__ import annotations

from eval.report.files import read, results_json, write
from eval.report.terminal import table

__all__ = ["read", "results_json", "table", "write"]
