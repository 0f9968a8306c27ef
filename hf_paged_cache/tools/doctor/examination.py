"""The examination: what there is, what runs, whether it is right."""

from __future__ import annotations

import os
import time

import torch

from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.kernels.dispatch import Standing

from . import machine, selftest
from .report import Check, Report


def examine(device: str | torch.device | None = None) -> Report:
    """Look at this machine.

    Args:
        device: Where blocks would lie; the default is the first GPU, else the CPU.

    Returns:
        What was found. The first call on a machine compiles the kernels, which takes seconds.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    described = machine.describe(where)  # compiles what there is to compile
    backends, problems = _backends(where)
    compiler = machine.compiler()
    folder, unusable = machine.cache_folder()
    if unusable is not None:
        problems.append(
            f"{folder} cannot be used ({unusable}), so kernels are compiled anew in every process: "
            "point HF_PAGED_CACHE_DIR to a folder of this user"
        )
    start_s = time.perf_counter()
    checks = _checks(where)
    seconds = time.perf_counter() - start_s
    problems += [f"self-test {check.name}: {check.detail}" for check in checks if not check.is_ok]
    return Report(
        versions=machine.versions(),
        machine=described,
        environment=machine.environment(),
        backends=backends,
        compiler=compiler,
        cache_folder=folder,
        checks=tuple(checks),
        problems=tuple(dict.fromkeys(problems)),
        seconds=seconds,
    )


def _backends(device: torch.device) -> tuple[dict[str, str], list[str]]:
    """Backend -> whether it runs or why not, and what is wrong with that."""
    try:
        explained = dispatch.explain(selftest.blocks_of("auto", device))
    except PagedCacheError as error:
        return {}, [str(error)]
    said = {each.name: each.reason for each in explained}
    if not any(each.standing is Standing.RUNS for each in explained):
        variable = dispatch.ENVIRONMENT_VARIABLE
        name = os.environ[variable].strip().lower()
        return said, [f"{variable} asks for {name!r}, which cannot run here: {said[name]} Unset it"]
    problems = [
        f"the fast backend {each.name!r} does not run here, and a slower one takes over: {each.reason}"
        for each in explained
        if each.standing is Standing.REFUSED
    ]
    return said, problems


def _checks(device: torch.device) -> list[Check]:
    # A refusal by name would be the same for every kernel.
    try:
        dispatch.backend_name(selftest.blocks_of("auto", device))
    except (PagedCacheError, RuntimeError) as error:
        return [Check("kernels", False, str(error))]
    return [*selftest.kernels(device), selftest.generation(device)]
