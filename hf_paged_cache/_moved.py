"""Old names of modules and of what is in them, which work for one version and warn with the new name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "hf_paged_cache.planner": "hf_paged_cache.tools.planner",
    "hf_paged_cache.profiler": "hf_paged_cache.tools.profiler",
    "hf_paged_cache.timeline": "hf_paged_cache.tools.timeline",
    "hf_paged_cache.stats": "hf_paged_cache.display.stats",
    "hf_paged_cache.guard": "hf_paged_cache.store.key_guard",
    "hf_paged_cache.kernels.problem": "hf_paged_cache.kernels.call",
    "hf_paged_cache.kernels.cpu": "hf_paged_cache.kernels.cpp",
}
"""Old name -> new name. What lies in a folder has moved with it."""


class _Finder(Loader):
    """Finds modules by their old names; what is imported is the module of the new name itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        moved = (
            new + name.removeprefix(old) for old, new in MODULES.items() if f"{name}.".startswith(f"{old}.")
        )
        return next((ModuleSpec(name, self, loader_state=new) for new in moved), None)

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        _warn(spec.name, spec.loader_state)
        sys.modules[spec.name] = import_module(spec.loader_state)


def find_modules() -> None:
    """Let imports find old modules, before what lies at the new place of their folder is loaded once more."""
    sys.meta_path.insert(0, _Finder())


def names_in(module: str, home: str, *names: str) -> Callable[[str], Any]:
    """A `__getattr__` for a folder that was a module, whose names are in a file of it now."""

    def moved(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{module}.{home}.{name}")
        return getattr(import_module(f"{module}.{home}"), name)

    return moved


def _warn(old: str, new: str) -> None:
    message = f"{old} is {new} now; the old name goes with the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
