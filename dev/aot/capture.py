"""Arguments of Triton's compiler for a launch, caught before it compiles.

A launch on tensors without data goes through Triton's own specialisation of arguments (types, alignment,
values of 1), so that what is compiled here is what a device would run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hf_paged_cache.kernels.triton import launch, variants
from hf_paged_cache.kernels.triton.attend import attend_kernel, merge_kernel
from hf_paged_cache.kernels.triton.move import copy_kernel, encode_kernel, write_kernel

from .targets import Target
from .variants import Variant

KERNELS = {
    kernel.fn.__name__: kernel
    for kernel in (attend_kernel, merge_kernel, write_kernel, encode_kernel, copy_kernel)
}


@dataclass(frozen=True, slots=True)
class Specialised:
    """Arguments of Triton's compiler, as its launcher derives them: see `triton.compiler.ASTSource`."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def named_constants(self) -> dict[str, Any]:
        """Compile-time arguments by name."""
        names = [param.name for param in self.kernel.params]
        return {names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}


def gpu_target(target: Target) -> GPUTarget:
    """Triton's description of a target."""
    return GPUTarget(target.backend, target.arch, target.warp_size)


def specialise(variant: Variant, target: Target) -> Specialised:
    """Launch the variant as if the target's device were there.

    No real launch is possible in this process afterwards.

    Raises:
        AssertionError: The launch does not start the kernel that the variant names.
    """
    for function in (variants.attend_constants, variants.write_constants):
        function.cache_clear()  # they depend on the device, and no process has two kinds
    driver.set_active(_Device(target))
    with _caught() as caught:
        variant.launch(launch)
    found = [special for special in caught if special.kernel is KERNELS[variant.kernel]]
    if variant.kernel == "attend_kernel":
        found = [special for special in found if special.named_constants()["COLUMNS"] == variant.over_dense]
    names = sorted({special.kernel.fn.__name__ for special in caught})
    assert found, f"'{variant.name}' starts {names}, not {variant.kernel}"
    return found[-1]  # what is only compiled ahead comes first


class _Device:
    """As much of a Triton driver as a launch asks for before it compiles."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return gpu_target(self._target)

    def get_current_device(self) -> str:
        return self._target.name  # Triton keeps what it knows by device, which must not outlive a target

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": self._target.shared_bytes}

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _caught() -> Iterator[list[Specialised]]:
    caught: list[Specialised] = []
    for kernel in KERNELS.values():

        def catch(
            key: Any,
            signature: dict[str, Any],
            device: Any,
            constexprs: dict[tuple[int, ...], Any],
            options: Any,
            attrs: dict[tuple[int, ...], Any],
            warmup: bool,
            kernel: Any = kernel,
        ) -> None:
            caught.append(Specialised(kernel, signature, constexprs, attrs, dict(options.__dict__)))

        kernel._do_compile = catch
    try:
        yield caught
    finally:
        for kernel in KERNELS.values():
            del kernel._do_compile
