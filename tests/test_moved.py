"""Names of the version before: they lead to what they name now, and say so."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

import pytest

from hf_paged_cache import _moved

NAMES = {
    "hf_paged_cache.planner.FormatPlan": "hf_paged_cache.tools.planner.FormatPlan",
    "hf_paged_cache.planner.MemoryPlan": "hf_paged_cache.tools.planner.MemoryPlan",
    "hf_paged_cache.profiler.CacheProfile": "hf_paged_cache.tools.profiler.CacheProfile",
    "hf_paged_cache.profiler.Errors": "hf_paged_cache.tools.profiler.Errors",
    "hf_paged_cache.profiler.LayerErrors": "hf_paged_cache.tools.profiler.LayerErrors",
    "hf_paged_cache.profiler.StepErrors": "hf_paged_cache.tools.profiler.StepErrors",
    "hf_paged_cache.profiler.Suggestion": "hf_paged_cache.tools.profiler.Suggestion",
    "hf_paged_cache.timeline.Moment": "hf_paged_cache.tools.timeline.Moment",
    "hf_paged_cache.stats.GroupStats": "hf_paged_cache.display.stats.GroupStats",
    "hf_paged_cache.guard.key_error": "hf_paged_cache.store.key_guard.key_error",
    "hf_paged_cache.kernels.problem.Attention": "hf_paged_cache.kernels.call.Attention",
    "hf_paged_cache.kernels.problem.LayerBlocks": "hf_paged_cache.kernels.call.LayerBlocks",
    "hf_paged_cache.kernels.cpu.isa": "hf_paged_cache.kernels.cpp.isa",
    "hf_paged_cache.kernels.cpu.build.BuildError": "hf_paged_cache.kernels.cpp.build.BuildError",
    "hf_paged_cache.cache.PagedCache": "hf_paged_cache.cache.paged_cache.PagedCache",
    "hf_paged_cache.attention.activate": "hf_paged_cache.attention.paged_attention.activate",
    "hf_paged_cache.attention.deactivate": "hf_paged_cache.attention.paged_attention.deactivate",
    "hf_paged_cache.errors.QuantisationError": "hf_paged_cache.errors.QuantizationError",
}


def look_up(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


@pytest.fixture
def _not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: a module warns when it is first imported."""
    for name in list(sys.modules):
        if any(f"{name}.".startswith(f"{old}.") for old in _moved.MODULES):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("_not_imported")
@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_leads_to_the_new_one_and_names_it(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = look_up(name)
    messages = {str(each.message) for each in caught if each.category is DeprecationWarning}
    module, _, attribute = NAMES[name].rpartition(".")
    assert [m for m in messages if (f" is {module}" in m or f"{attribute} now" in m) and "next version" in m]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found is look_up(NAMES[name])


@pytest.mark.usefixtures("_not_imported")
@pytest.mark.parametrize("name", ["hf_paged_cache.planner.MemoryPlan", "hf_paged_cache.cache.PagedCache"])
def test_a_warning_points_to_the_statement_that_imports_an_old_name(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{module}.* is hf_paged_cache") as caught:
        exec(compile(f"from {module} import {attribute}", "a statement", "exec"))
    assert {each.filename for each in caught} == {"a statement"}


def test_every_module_that_moved_is_tried() -> None:
    assert {name.rpartition(".")[0] for name in NAMES} >= set(_moved.MODULES)


@pytest.mark.parametrize(
    "module", ["hf_paged_cache.attention", "hf_paged_cache.cache", "hf_paged_cache.errors"]
)
def test_other_names_are_as_unknown_as_before(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        import_module(module).nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        import_module("hf_paged_cache.nothing")
