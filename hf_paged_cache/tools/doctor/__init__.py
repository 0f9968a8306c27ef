"""What runs on this machine, why nothing faster does, and whether it computes what it should."""

from __future__ import annotations

from .examination import examine
from .report import Check, Report

__all__ = ["Check", "Report", "examine"]
