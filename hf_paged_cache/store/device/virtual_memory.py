"""Memory of a CUDA device that grows where it lies, so that a pool grows without a copy.

The driver hands out addresses and memory apart (its virtual memory management): a range of addresses as
large as the device is reserved, which costs nothing, and memory is put behind its beginning chunk by chunk.
Where the driver lacks it, or anything goes wrong, pools are allocated by torch and grow by copying.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import torch

logger = logging.getLogger("hf_paged_cache")

_PINNED = _ON_DEVICE = 1
_READ_AND_WRITE = 3


class _Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver:
    """The driver of NVIDIA, for one device. OSError if there is none, RuntimeError where a call fails."""

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._location = _Location(_ON_DEVICE, device.index)
        self._properties = _Properties(type=_PINNED, location=self._location)

    def granularity(self) -> int:
        """Bytes that every chunk is a multiple of."""
        found = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._properties), 0)
        return found.value

    def reserve(self, size: int) -> int:
        """Addresses without memory; the first of them."""
        found = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(found), size, 0, 0, 0)
        return found.value

    def map(self, address: int, size: int) -> int:
        """Put new memory behind addresses; its handle."""
        handle, access = ctypes.c_uint64(), _Access(self._location, _READ_AND_WRITE)
        wanted = ctypes.byref(handle), size, ctypes.byref(self._properties), 0
        try:
            self._call("cuMemCreate", *wanted)
        except RuntimeError:
            torch.cuda.empty_cache()  # what torch keeps for later
            self._call("cuMemCreate", *wanted)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except RuntimeError:
            self._call("cuMemRelease", handle)
            raise
        try:
            self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        except RuntimeError:
            self.unmap(address, size, handle.value)
            raise
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Take memory back."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def free(self, address: int, size: int) -> None:
        """Give addresses back."""
        self._call("cuMemAddressFree", address, size)

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """uint8 `[size]` at an address; keeps its owner alive."""
        at = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2}
        array = SimpleNamespace(owner=owner, __cuda_array_interface__=at)
        return torch.as_tensor(array, device=self._device)

    def synchronize(self) -> None:
        """Wait until nothing uses memory that is about to be taken back."""
        torch.cuda.synchronize(self._device)

    def total_bytes(self) -> int:
        """Memory of the device."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def _call(self, name: str, *arguments: Any) -> None:
        # Addresses, sizes, handles and flags; ctypes would pass an int as 32 bits.
        wide = [ctypes.c_uint64(each) if isinstance(each, int) else each for each in arguments]
        with torch.cuda.device(self._device):
            code = getattr(self._library, name)(*wide)
        if code:
            raise RuntimeError(f"{name} failed with {code}")


class GrowingMemory:
    """A range of addresses with memory behind its beginning, given back when the last tensor is gone."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._chunk_bytes = driver.granularity()
        self._size = self._rounded(driver.total_bytes())
        self._address = driver.reserve(self._size)
        self._chunks: list[tuple[int, int, int]] = []
        weakref.finalize(self, _give_back, driver, self._address, self._size, self._chunks).atexit = False

    def tensor(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The range from its beginning on, as a tensor; more memory is put behind it where it is missing.

        Raises RuntimeError if there is none left; tensors of before are as they were.
        """
        nbytes = math.prod(sizes) * dtype.itemsize
        held = sum(size for _, size, _ in self._chunks)
        missing = self._rounded(nbytes) - held
        if missing > 0:
            if held + missing > self._size:
                raise RuntimeError("more than the device has")
            at = self._address + held
            self._chunks.append((at, missing, self._driver.map(at, missing)))
        return self._driver.tensor(self._address, nbytes, self).view(dtype).view(sizes)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._chunk_bytes) * self._chunk_bytes


def _give_back(driver: Driver, address: int, size: int, chunks: list[tuple[int, int, int]]) -> None:
    try:
        driver.synchronize()
        for chunk in chunks:
            driver.unmap(*chunk)
        driver.free(address, size)
    except RuntimeError as error:  # the device is lost, and its memory with it
        logger.debug("memory of a pool was not given back: %s", error)


_drivers: dict[torch.device, Driver | None] = {}
_lock = threading.Lock()


def growing_memory(device: torch.device) -> GrowingMemory | None:
    """Memory that grows in place; None where there is no such thing."""
    if device not in _drivers:  # once that is decided, nobody waits for a lock
        with _lock:
            if device not in _drivers:
                _drivers[device] = _checked_driver(device)
    driver = _drivers[device]
    try:
        return None if driver is None else GrowingMemory(driver)
    except RuntimeError as error:
        logger.debug("pools on %s grow by copying: %s", device, error)
        return None


def _checked_driver(device: torch.device) -> Driver | None:
    """The driver of a device, if a tensor keeps its content while its memory grows."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return checked(Driver(device))
    except Exception as error:  # no library, another version of it, memory of another kind
        logger.debug("pools on %s grow by copying: %s", device, error)
        return None


def checked(driver: Driver) -> Driver:
    """The driver, after a try; RuntimeError if it fails, or a tensor loses its content."""
    memory, step = GrowingMemory(driver), driver.granularity()
    memory.tensor((step,), torch.uint8).fill_(7)
    grown = memory.tensor((2 * step,), torch.uint8)
    grown[step:] = 9
    if (int(grown[0]), int(grown[step - 1]), int(grown[-1])) != (7, 7, 9):
        raise RuntimeError("a tensor lost its content when its memory grew")
    return driver
