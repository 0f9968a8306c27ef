"""The machine, the device and the versions that numbers were measured with."""

import importlib.metadata
import os
import platform
from typing import Any

import torch

import hf_paged_cache
from eval.core.errors import UsageError
from hf_paged_cache.tools.doctor import processor

_PACKAGES = ("torch", "transformers", "triton", "numpy", "datasets", "evaluate", "rouge_score", "sacrebleu")


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine, the device, the versions and the load at this moment, ready for JSON."""
    has_pages = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
    described: dict[str, Any] = {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": processor(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if has_pages else None,
        "load_average_1_min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": str(device),
        "python": platform.python_version(),
        "versions": {
            "hf-paged-cache": hf_paged_cache.__version__,
            **{name: package_version(name) for name in _PACKAGES},
        },
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory}
    return described


def package_version(package: str) -> str | None:
    """What is installed, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def resolve_device(name: str) -> torch.device:
    """The torch device called `name`, or a `UsageError`; "auto" is CUDA where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = f"cannot be used here ({str(error).splitlines()[0]})"
        raise UsageError(f"device {name!r} {why}; choose from: auto, cpu, cuda") from error
    return device
