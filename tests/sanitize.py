"""The C++ kernels under the sanitizers of addresses and of undefined behaviour: `make sanitize`.

One process for each instruction set that this machine has: it generates in every format, and runs the tests
of the kernels for that set; in the first one also those of interrupts, which take longest. An error ends it
with the sanitizer's report.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from eval.bench.kernel_tests import select
from hf_paged_cache import PagedCache
from hf_paged_cache.config import LAYER_DTYPES
from hf_paged_cache.kernels import cpp
from hf_paged_cache.kernels.cpp import build
from tests.attention.test_parity import MODES, _generate
from tests.support.models import by_name, shared_model

FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
MODELS = (("llama", torch.float32), ("gpt-oss", torch.bfloat16))  # the latter has windows and sinks
WAYS = ("beams", "chunks-of-7-padded")


def main() -> int:
    """Check all instruction sets, each in a process that the sanitizer's runtime is loaded into first."""
    compiler, version = build.find_compiler()
    if "clang" in version:
        print("the runtime library is found through g++: set CXX to it")
        return 2
    asked = [*compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    failed = False
    for isa in build._ISA_NEEDS:
        if not build._ISA_NEEDS[isa] <= build._cpu_flags():
            print(f"{isa}: this machine lacks it")
            continue
        environment = {
            **os.environ,
            "HF_PAGED_CACHE_BACKEND": "",
            "HF_PAGED_CACHE_CPU_ISA": isa,
            "HF_PAGED_CACHE_CXXFLAGS": FLAGS,
            "LD_PRELOAD": runtime,
            "PYTHONMALLOC": "malloc",  # the structs handed to the kernel lie in bytes objects
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        start_s = time.perf_counter()
        status = subprocess.run([sys.executable, "-m", "tests.sanitize", isa], env=environment).returncode
        outcome = "clean" if status == 0 else f"FAILED with status {status}"
        print(f"{isa}: {outcome} after {time.perf_counter() - start_s:.0f} s", flush=True)
        failed |= status != 0
    return int(failed)


def check(isa: str) -> int:
    """Generate in every format and run the tests of one instruction set. Returns pytest's status."""
    del os.environ["LD_PRELOAD"]  # it is loaded; compilers need not have it
    reason = cpp.unavailable_reason()
    assert reason is None, reason
    assert cpp.isa() == isa
    generated = 0
    for model_name, dtype in MODELS:
        model = shared_model(model_name, dtype=dtype)
        for name in LAYER_DTYPES:
            for mode in (mode for mode in MODES if mode.name in WAYS):
                cache = PagedCache(
                    model, kv_cache_dtype=name, block_size=16, group_size=8, key_error_guard="off"
                )
                _generate(by_name(model_name), mode, cache, model)
                cache.check_integrity()
                assert cache.stats().backend == "cpp", cache.stats().backend
                generated += 1
    print(f"{isa}: {generated} generates in {len(LAYER_DTYPES)} formats", flush=True)
    options = ["-s", "-p", "no:cacheprovider"]  # captured output would be lost with the process
    statuses = [
        pytest.main([*options, *select("cpp", isa, quick=True).arguments]),
        pytest.main([*options, "tests/kernels/test_offsets.py", "-k", "cpp"]),
    ]
    if isa == next(name for name, needs in build._ISA_NEEDS.items() if needs <= build._cpu_flags()):
        statuses.append(pytest.main([*options, "tests/forward/test_interrupts.py", "-k", "not anywhere"]))
    return max(int(status) for status in statuses)


if __name__ == "__main__":
    sys.exit(check(sys.argv[1]) if len(sys.argv) > 1 else main())
