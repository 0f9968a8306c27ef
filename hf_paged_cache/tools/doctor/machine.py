"""What there is: versions, device, environment, compiler, the folder of compiled kernels."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from hf_paged_cache import __version__
from hf_paged_cache.kernels import cpp
from hf_paged_cache.kernels.cpp import build, library_folder
from hf_paged_cache.store.device.memory import free_memory_bytes

_PACKAGES = ("torch", "transformers", "triton", "numpy")
_VARIABLES = (
    "HF_PAGED_CACHE_BACKEND",
    "HF_PAGED_CACHE_CPU_ISA",
    "HF_PAGED_CACHE_CXXFLAGS",
    "HF_PAGED_CACHE_DIR",
    "XDG_CACHE_HOME",
    "CXX",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
    "CUDA_VISIBLE_DEVICES",
)


def versions() -> dict[str, str | None]:
    """Package -> version, None if it is not installed."""
    found: dict[str, str | None] = {"hf_paged_cache": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = _version_by_module(name)
    return found


def _version_by_module(module: str) -> str | None:
    """Of whatever package brings a module: torch for ROCm or XPU has its Triton under another name."""
    packages = importlib.metadata.packages_distributions().get(module, ())
    return next((f"{importlib.metadata.version(package)} ({package})" for package in packages), None)


def describe(device: torch.device) -> dict[str, str]:
    """The device and the processor."""
    found = {"system": f"{platform.system()} {platform.machine()}", "device": str(device)}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["gpu"] = f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}"
    found["processor"] = f"{processor()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    reason = cpp.unavailable_reason()
    found["CPU kernel"] = reason if reason is not None else f"compiled for {cpp.isa()}"
    found["free memory"] = f"{free_memory_bytes(device) / 2**30:.1f} GiB"
    return found


def environment() -> dict[str, str]:
    """Variables that are set and change what runs."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def compiler() -> str:
    """The compiler with its version, or why there is none."""
    try:
        command, version = build.find_compiler()
    except build.BuildError as error:
        return str(error)
    return f"{' '.join(command)}: {version.splitlines()[0] if version else 'no version'}"


def cache_folder() -> tuple[str, str | None]:
    """Where compiled kernels are kept, and why nothing is kept there (None if it is)."""
    try:
        folder = library_folder.cache_dir()
    except OSError as error:
        return "none", str(error)
    try:
        with library_folder.LibraryFolder(folder) as opened:
            opened.check_writable()
    except OSError as error:
        return str(folder), library_folder.reason_of(error)
    return str(folder), None


def processor() -> str:
    """Its name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
