"""How numbers of the README are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from eval.readme.results import Results


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def times(*seconds: float) -> list[str]:
    """Times that stand side by side: all in µs, or all in ms with as many digits as say something."""
    longest_s = max(seconds)
    if longest_s < 0.01:
        return [f"{1e6 * value:.0f} µs" for value in seconds]
    digits = 1 if longest_s < 0.05 else 0
    return [f"{1e3 * value:.{digits}f} ms" for value in seconds]


def ratio(value: float) -> str:
    """A quotient to two or three digits: 0.68x, 1.50x, 3.5x, 17x."""
    digits = 2 if value < 2 else 1 if value < 9.95 else 0
    return f"{value:.{digits}f}x"


def hardware(results: Results, files: Iterable[str]) -> str:
    """What the numbers of these files were measured on, one sentence for each machine and set of versions."""
    measured: dict[str, list[str]] = {}
    for file in dict.fromkeys(files):
        measured.setdefault(_machine(results.document(file)["environment"]), []).append(f"`{file}`")
    return "\n".join(f"Measured on {machine} ({', '.join(names)})." for machine, names in measured.items())


def _machine(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    packages = [f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)]
    backends = environment.get("backends") or [environment.get("backend")]
    kernels = [f"kernels {', '.join(backends)}"] if backends[0] else []
    gpu = [environment["gpu"]["name"]] if "gpu" in environment else []
    cores = f"{environment['cpu_count']} cores of {environment['cpu']}"
    threads = f"{environment['torch_threads']} threads"
    return ", ".join([*gpu, cores, threads, *packages, *kernels])
