"""What a run was made on."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import torch

from eval.core.device import describe as describe_machine
from eval.gpu.settings import Settings


def describe(settings: Settings) -> dict[str, Any]:
    """Machine, versions, GPU and driver, ready for JSON."""
    described = describe_machine(torch.device("cpu" if settings.dry_run else "cuda"))
    described["cuda"] = torch.version.cuda
    described["driver"] = _driver()
    return described


def headline(described: dict[str, Any]) -> str:
    """One line."""
    versions = described["versions"]
    device = described["gpu"]["name"] if "gpu" in described else f"{described['cpu']} (no GPU)"
    driver = f", driver {described['driver']}" if described.get("driver") else ""
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers"))
    return f"{device}{driver}, Python {described['python']}, {packages}"


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
