"""The tables of the README: templates that look up rows of results, and how their numbers are written."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from eval import report
from eval.core import results
from eval.core.errors import UsageError
from eval.report.render import templates
from eval.run.rows import DEFAULT_CACHE, MIB, Metric, problems

# A new one is a name here, `NAME.md.j2` beside this file, and a pair of markers in the README.
NAMES = ("caches", "speed", "quality", "formats")
_NOTHING = 1e-6


def tables(folder: Path = results.FOLDER) -> Mapping[str, Callable[[], str]]:
    """Name -> makes that table from a folder of results, or `UsageError`; each file is read once."""
    read = cache(lambda file: results.read(folder / file))
    environment = templates(Path(__file__).parent)
    environment.filters |= {"ratio": ratio, "times": times, "metric": metric, "perplexity": perplexity}
    environment.globals |= {
        "row": partial(row, read),
        "run": lambda file: report.read(folder / file),
        "hardware": partial(hardware, read),
        "problems": problems,
        "DEFAULT": DEFAULT_CACHE,
        "MIB": MIB,
        "NOTHING": _NOTHING,
    }

    def made(name: str) -> str:
        return environment.get_template(f"{name}.md.j2").render().strip()

    return {name: partial(made, name) for name in NAMES}


def row(read: Callable[[str], Mapping[str, Any]], file: str, bench: str, **cells: object) -> dict[str, Any]:
    """The one row of a table in a file that has these cells; a `UsageError` if none or several have them."""
    found = results.rows(read(file), bench, **cells)
    if len(found) != 1:
        asked = ", ".join(f"{key}={value!r}" for key, value in cells.items())
        raise UsageError(f"{file}: {len(found)} rows of {bench!r} with {asked}, instead of one")
    return found[0]


def hardware(read: Callable[[str], Mapping[str, Any]], *files: str) -> str:
    """What the numbers of these files were measured on, one sentence for each machine and set of versions."""
    measured: dict[str, list[str]] = {}
    for file in files:
        measured.setdefault(_machine(read(file)["environment"]), []).append(f"`{file}`")
    return "\n".join(f"Measured on {machine} ({', '.join(names)})." for machine, names in measured.items())


def _machine(environment: Mapping[str, Any]) -> str:
    versions = environment["versions"]
    packages = [f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)]
    backends = environment.get("backends") or [environment.get("backend")]
    kernels = [f"kernels {', '.join(backends)}"] if backends[0] else []
    gpu = [environment["gpu"]["name"]] if "gpu" in environment else []
    cores = f"{environment['cpu_count']} cores of {environment['cpu']}"
    threads = f"{environment['torch_threads']} threads"
    return ", ".join([*gpu, cores, threads, *packages, *kernels])


def times(seconds: Iterable[float]) -> list[str]:
    """Times that stand side by side: all in µs, or all in ms with as many digits as say something."""
    seconds = list(seconds)
    if max(seconds) < 0.01:
        return [f"{1e6 * value:.0f} µs" for value in seconds]
    digits = 1 if max(seconds) < 0.05 else 0
    return [f"{1e3 * value:.{digits}f} ms" for value in seconds]


def ratio(value: float) -> str:
    """A quotient to two or three digits: 0.68x, 1.50x, 3.5x, 17x."""
    digits = 2 if value < 2 else 1 if value < 9.95 else 0
    return f"{value:.{digits}f}x"


def metric(metrics: Iterable[Metric], key: str, spec: str) -> str:
    """One of the metrics of a row; bold where it differs from the default cache's by more than noise."""
    for found in (each for each in metrics if each.key == key):
        text = "0" if abs(found.value) < _NOTHING else format(found.value, spec)
        return f"**{text}**" if found.verdict in ("better", "worse") else text
    return "failed"


def perplexity(cells: Mapping[str, Any]) -> str:
    """Perplexity over that of full precision, and what is to be said of it."""
    value = cells["perplexity_ratio"]
    text = "1" if abs(value - 1) < _NOTHING else f"{value:.{4 if value < 2 else 2}f}"
    return f"{text} ({cells['note']})" if cells["note"] else text
