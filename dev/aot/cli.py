"""Command line of the compile gate."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from .binary import Binary
from .isolated import compile_isolated
from .table import faults, render, summary
from .targets import TARGETS
from .variants import all_variants

OK, FAULTY, CANNOT_RUN = 0, 1, 2
_ENVIRONMENT = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "0", "TRITON_DEBUG": "0"}
"""What would have Triton compile something else than a device runs, or leave out source lines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate.

    Returns:
        0: all binaries are fine; 1: some are at fault or do not compile; 2: nothing can be compiled.
    """
    options = _parser().parse_args(arguments)
    targets = _chosen(options.targets, list(TARGETS))
    variants = _chosen(options.variants, list(all_variants()))
    if not targets or not variants:
        return _cannot(f"expected names out of {list(TARGETS) if not targets else list(all_variants())}")
    if options.list:
        print("\n".join(variants))
        return OK
    if find_spec("triton") is None:
        return _cannot("triton is not installed: pip install 'hf-paged-cache[triton]'")
    began = time.perf_counter()
    pairs = [(v, t) for v in variants for t in targets if all_variants()[v].is_for(t)]
    binaries, failures = _compile_all(pairs, options.jobs, options.verbose)
    failures += [f"{b.variant}, {b.target}: {reason}" for b in binaries for reason in faults(b)]
    if options.json:
        options.json.write_text(json.dumps([binary.as_json() for binary in binaries], indent=1))
    print(render(binaries))
    for failure in sorted(failures):
        print(f"FAULT: {failure}")
    print(summary(binaries, time.perf_counter() - began))
    return FAULTY if failures else OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dev.aot", description=__doc__)
    parser.add_argument(
        "--targets", nargs="*", metavar="NAME", help=f"out of {', '.join(TARGETS)}; default: all"
    )
    parser.add_argument("--variants", nargs="*", metavar="PATTERN", help="names, with * and ?; default: all")
    parser.add_argument(
        "--list", action="store_true", help="print the names of the variants, compile nothing"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything that was read there")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one per core"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="one line per binary while running")
    return parser


def _chosen(patterns: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """Names that match; none if some pattern matches nothing."""
    if not patterns:
        return list(names)
    if any(not any(fnmatch(name, pattern) for name in names) for pattern in patterns):
        return []
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def _compile_all(
    pairs: Sequence[tuple[str, str]], jobs: int, verbose: bool
) -> tuple[list[Binary], list[str]]:
    """Binaries in the order of the pairs, and what did not compile, in words."""
    results: dict[tuple[str, str], Binary | str] = {}
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(max(1, jobs)) as pool:
        os.environ.update(_ENVIRONMENT, TRITON_CACHE_DIR=cache)
        futures = {pool.submit(compile_isolated, *pair): pair for pair in pairs}
        for done, future in enumerate(as_completed(futures), 1):
            pair = futures[future]
            results[pair] = future.result()
            _report(f"{done}/{len(pairs)} {pair[0]}, {pair[1]}", verbose)
    _report("", verbose)
    binaries = [result for pair in pairs if isinstance(result := results[pair], Binary)]
    failures = [
        f"{variant}, {target}: does not compile: {result}"
        for (variant, target), result in results.items()
        if isinstance(result, str)
    ]
    return binaries, failures


def _report(line: str, verbose: bool) -> None:
    if verbose:
        if line:
            print(line, file=sys.stderr, flush=True)
    elif sys.stderr.isatty():
        print(f"\r{line:<79}", end="" if line else "\r", file=sys.stderr, flush=True)


def _cannot(reason: str) -> int:
    print(f"aot: {reason}", file=sys.stderr)
    return CANNOT_RUN
