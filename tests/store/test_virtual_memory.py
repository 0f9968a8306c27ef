"""Pools that grow where they lie, over a driver that hands out pages of the host."""

from __future__ import annotations

import ctypes
import gc
import mmap

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedCache
from hf_paged_cache.store.device import virtual_memory
from tests.support.models import shared_model

CHUNK = 4096


class HostDriver(virtual_memory.Driver):
    """Notes what is mapped; `left` chunks are to be had."""

    def __init__(self, left: int = 1 << 20) -> None:
        self.left, self.ranges, self.mapped = left, dict[int, mmap.mmap](), dict[int, int]()

    def granularity(self) -> int:
        return CHUNK

    def total_bytes(self) -> int:
        return 1 << 24

    def reserve(self, size: int) -> int:
        pages = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.ranges[address] = pages
        return address

    def map(self, address: int, size: int) -> int:
        if size > self.left * CHUNK:
            raise RuntimeError("out of memory")
        self.left -= size // CHUNK
        self.mapped[address] = size
        return address

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert self.mapped.pop(address) == size
        assert handle == address
        self.left += size // CHUNK

    def free(self, address: int, size: int) -> None:
        del self.ranges[address]

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        view = (ctypes.c_ubyte * size).from_address(address)
        view.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(view, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    found = HostDriver()
    monkeypatch.setattr(virtual_memory, "_drivers", {torch.device("cpu"): found})
    monkeypatch.setattr("hf_paged_cache.store.capacity._is_taken_at_once", lambda device: True)
    monkeypatch.setattr("hf_paged_cache.store.capacity._RESERVE_TOKENS", 16)
    return found


def fed_alike(cache: PagedCache, chunks: tuple[int, ...]) -> list[int]:
    """Addresses of the pool after each of some forwards, whose logits are those of the default cache."""
    model = shared_model("llama")
    stock, addresses = DynamicCache(config=model.config), []
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tokens in chunks:
            ids = torch.randint(3, 60, (2, tokens), generator=g)
            got, want = (model(ids, past_key_values=c, use_cache=True).logits for c in (cache, stock))
            torch.testing.assert_close(got, want)
            pool = cache._state.groups[0].pools[0]
            addresses.append(pool.keys.data_ptr())
    return addresses


def test_a_pool_grows_in_place_by_the_reserve_and_is_given_back(driver: HostDriver) -> None:
    cache = PagedCache(shared_model("llama"), block_size=16)
    assert len(set(fed_alike(cache, (40, 1, 30, 1, 60)))) == 1
    assert cache.stats().num_blocks == 2 * 9
    held = cache.memory_footprint().pool_bytes
    assert held <= sum(driver.mapped.values()) < held + 2 * CHUNK * 4
    cache.check_integrity()
    del cache
    gc.collect()
    assert (driver.mapped, driver.ranges) == ({}, {})


@pytest.mark.parametrize("left", [0, 1, 12, 40])
def test_where_memory_runs_out_torch_allocates_and_pools_are_copied(driver: HostDriver, left: int) -> None:
    driver.left = left
    cache = PagedCache(shared_model("llama"), block_size=16)
    fed_alike(cache, (40, 1, 30, 60))
    cache.check_integrity()
    del cache
    gc.collect()
    assert (driver.mapped, driver.left) == ({}, left)


def test_a_driver_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostDriver()
    assert virtual_memory.checked(driver) is driver
    gc.collect()
    assert not driver.mapped
    tensor = driver.tensor
    monkeypatch.setattr(driver, "tensor", lambda address, size, owner: tensor(address, size, owner).clone())
    with pytest.raises(RuntimeError, match="lost its content"):
        virtual_memory.checked(driver)


def test_devices_without_such_a_driver_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_memory, "_drivers", {})
    assert virtual_memory.growing_memory(torch.device("cpu")) is None
    monkeypatch.setattr(virtual_memory.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert virtual_memory.growing_memory(torch.device("cuda", 0)) is None


def test_structures_are_laid_out_as_the_driver_reads_them() -> None:
    assert (ctypes.sizeof(virtual_memory._Properties), ctypes.sizeof(virtual_memory._Access)) == (32, 12)


def test_what_is_decided_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may have left it held."""
    device = torch.device("cpu")
    assert virtual_memory.growing_memory(device) is None
    monkeypatch.setattr(virtual_memory, "_lock", None)  # an error for whoever wants it
    assert virtual_memory.growing_memory(device) is None
