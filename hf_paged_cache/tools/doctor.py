"""An examination of this machine: what runs, why nothing faster does, whether it computes what it should."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_paged_cache
from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.config import LAYER_DTYPES
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.formats import kv_format
from hf_paged_cache.host import compat
from hf_paged_cache.kernels import cpp, dispatch, reference
from hf_paged_cache.kernels.call import Attention, LayerBlocks
from hf_paged_cache.kernels.cpp import build, library_folder
from hf_paged_cache.kernels.dispatch import Standing
from hf_paged_cache.store.device.memory import free_memory_bytes

from .columns import aligned

_PACKAGES = ("torch", "transformers", "triton", "numpy")
# What changes what runs, beside variables of the package.
_VARIABLES = ("XDG_CACHE_HOME", "CXX", "OMP_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
_BATCH, _KV_HEADS, _GROUP, _BLOCK, _DIM, _BLOCKS = 2, 2, 2, 16, 64, 2
_DECODE_TOLERANCE = 2e-3  # RMS ratio of answers in float32 from the same bytes; GPUs may use fewer bits
_WRITE_TOLERANCE = 1e-2  # of what two encoders have stored: a rounding tie may fall to either side


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried, and how it went."""

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """The state of a machine."""

    versions: dict[str, str | None]  # package -> version, None if it is not installed
    machine: dict[str, str]
    environment: dict[str, str]  # variables that are set and change what runs
    backends: dict[str, str]  # backend -> whether it runs on this device, or why not; fastest first
    compiler: str
    cache_folder: str
    checks: tuple[Check, ...]
    problems: tuple[str, ...]  # what is wrong, with ways out; healthy if there is nothing
    seconds: float  # that the checks took, without compiling

    @property
    def is_healthy(self) -> bool:
        """Whether the fastest backend of this device runs, and computes what it should."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, numbers and strings."""
        return {**asdict(self), "is_healthy": self.is_healthy}

    def __str__(self) -> str:
        checks = {check.name: f"{'ok' if check.is_ok else 'FAILED'}: {check.detail}" for check in self.checks}
        parts = [
            ("versions", {name: version or "not installed" for name, version in self.versions.items()}),
            ("machine", self.machine),
            ("environment", self.environment or {"(nothing set)": ""}),
            ("backends, fastest first", self.backends),
            ("kernels", {"compiler": self.compiler, "cache folder": self.cache_folder}),
            (f"self-test, {self.seconds:.1f} s", checks),
        ]
        lines = []
        for title, facts in parts:
            lines += [title, *(f"  {line}" for line in aligned(list(facts.items()), left=2)), ""]
        end = ["NOT HEALTHY", *(f"  - {problem}" for problem in self.problems)]
        return "\n".join([*lines, *(["healthy"] if self.is_healthy else end)])


def examine(device: str | torch.device | None = None) -> Report:
    """Look at this machine, for blocks on a device (the first GPU, else the CPU).

    The first call on a machine compiles the kernels, which takes seconds.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    machine = _describe(where)  # compiles what there is to compile
    backends, problems = _backends(where)
    folder, unusable = _cache_folder()
    if unusable is not None:
        problems.append(
            f"{folder} cannot be used ({unusable}), so kernels are compiled anew in every process: "
            "point HF_PAGED_CACHE_DIR to a folder of this user"
        )
    start_s = time.perf_counter()
    try:
        dispatch.backend_name(_blocks_of("auto", where))
        checks = list(_checks(where))
    except (PagedCacheError, RuntimeError) as error:  # it would be the same for every kernel
        checks = [Check("kernels", False, str(error))]
    seconds = time.perf_counter() - start_s
    problems += [f"self-test {check.name}: {check.detail}" for check in checks if not check.is_ok]
    variables = [*(name for name in sorted(os.environ) if name.startswith("HF_PAGED_CACHE_")), *_VARIABLES]
    own = {"hf_paged_cache": hf_paged_cache.__version__, "python": platform.python_version()}
    return Report(
        versions={**own, **{name: _version_of(name) for name in _PACKAGES}},
        machine=machine,
        environment={name: os.environ[name] for name in variables if name in os.environ},
        backends=backends,
        compiler=_compiler(),
        cache_folder=folder,
        checks=tuple(checks),
        problems=tuple(dict.fromkeys(problems)),
        seconds=seconds,
    )


def _version_of(module: str) -> str | None:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        # torch for ROCm or XPU has its Triton under another name.
        packages = importlib.metadata.packages_distributions().get(module, ())
        return next((f"{importlib.metadata.version(package)} ({package})" for package in packages), None)


def _describe(device: torch.device) -> dict[str, str]:
    """The device and the processor."""
    found = {"system": f"{platform.system()} {platform.machine()}", "device": str(device)}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["gpu"] = f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}"
    found["processor"] = f"{processor()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    reason = cpp.unavailable_reason()
    found["CPU kernel"] = reason if reason is not None else f"compiled for {cpp.isa()}"
    found["free memory"] = f"{free_memory_bytes(device) / 2**30:.1f} GiB"
    return found


def processor() -> str:
    """Its name, as the system tells it."""
    unknown = platform.processor() or "unknown"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return unknown
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), unknown)


def _compiler() -> str:
    """The compiler with its version, or why there is none."""
    try:
        command, version = build.find_compiler()
    except build.BuildError as error:
        return str(error)
    return f"{' '.join(command)}: {version.splitlines()[0] if version else 'no version'}"


def _cache_folder() -> tuple[str, str | None]:
    """Where compiled kernels are kept, and why nothing is kept there (None if it is)."""
    folder: Path | str = "none"
    try:
        folder = library_folder.cache_dir()
        with library_folder.LibraryFolder(folder), tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return str(folder), library_folder.reason_of(error)
    return str(folder), None


def _backends(device: torch.device) -> tuple[dict[str, str], list[str]]:
    """Backend -> whether it runs or why not, and what is wrong with that."""
    try:
        explained = dispatch.explain(_blocks_of("auto", device))
    except PagedCacheError as error:
        return {}, [str(error)]
    reasons = {each.name: each.reason for each in explained}
    if not any(each.standing is Standing.RUNS for each in explained):
        variable = dispatch.ENVIRONMENT_VARIABLE
        name = os.environ[variable].strip().lower()
        return reasons, [f"{variable} asks for {name!r}, which cannot run here: {reasons[name]} Unset it"]
    problems = [
        f"the fast backend {each.name!r} does not run here, and a slower one takes over: {each.reason}"
        for each in explained
        if each.standing is Standing.REFUSED
    ]
    return reasons, problems


def _checks(device: torch.device) -> Iterator[Check]:
    """The self-test, against plain loops and the default cache."""
    for name in (*LAYER_DTYPES, "generate"):
        try:
            outcome = _generate(device) if name == "generate" else _write_and_attend(name, device)
        except Exception as error:  # whatever it is, it is what there is to report
            outcome = False, f"{type(error).__name__}: {error}"
        yield Check(name, *outcome)


def _write_and_attend(name: str, device: torch.device) -> tuple[bool, str]:
    """Two blocks a row in a format."""
    g = torch.Generator().manual_seed(0)
    tokens = _BLOCKS * _BLOCK
    keys, values = (torch.randn(_BATCH, _KV_HEADS, tokens, _DIM, generator=g) for _ in range(2))
    query = torch.randn(_BATCH, _KV_HEADS * _GROUP, 1, _DIM, generator=g)
    blocks, plain = _blocks_of(name, device), _blocks_of(name, torch.device("cpu"))
    backend = dispatch.backend_name(blocks)
    dispatch.write(blocks, keys.to(device), values.to(device), 0)
    reference.write(plain, keys, values, 0)
    got = dispatch.decode(blocks, Attention(query.to(device), 0, tokens, _DIM**-0.5))[0].cpu()
    records = None if blocks.records is None else blocks.records.cpu()
    cells = blocks.keys.cpu(), blocks.values.cpu(), blocks.table.cpu()
    written = LayerBlocks(*cells, None, records, blocks.layout)
    write_error = max(_rms_ratio(*pair) for pair in zip(_stored(written), _stored(plain), strict=True))
    want = reference.decode(written, Attention(query, 0, tokens, _DIM**-0.5))[0]
    decode_error = _rms_ratio(got, want)
    is_ok = write_error <= _WRITE_TOLERANCE and decode_error <= _DECODE_TOLERANCE
    return is_ok, f"{backend}, error of write {write_error:.1e}, of attention {decode_error:.1e}"


def _blocks_of(name: str, device: torch.device) -> LayerBlocks:
    """Empty blocks of one layer in a format."""
    num_blocks, kv = _BATCH * _BLOCKS, kv_format(name)
    shape = (num_blocks if kv is None else 0, _KV_HEADS, _BLOCK, _DIM)
    keys, values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).view(_BATCH, _BLOCKS)
    if kv is None:
        return LayerBlocks(keys, values, table)
    bound = kv.bind(_BLOCK, _DIM, _DIM)
    records = torch.zeros(num_blocks, _KV_HEADS, bound.nbytes, dtype=torch.uint8, device=device)
    return LayerBlocks(keys, values, table, None, records, bound, ())


def _stored(blocks: LayerBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    if blocks.layout is None or blocks.records is None:
        return blocks.keys, blocks.values
    return blocks.layout.decode(blocks.records)


def _rms_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of the difference over RMS of what it should be; infinite if anything is NaN."""
    return float(((got - want).norm() / want.norm()).nan_to_num(nan=float("inf")))


def _generate(device: torch.device) -> tuple[bool, str]:
    """With a tiny random model, with this cache and with the default one."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    config = LlamaConfig(pad_token_id=0, eos_token_id=None, **sizes, **heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    model = model.to(device).eval()
    ids = torch.arange(3, 43, device=device).view(2, 20)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    want, got = (
        model.generate(ids, **{compat.cache_argument(model): cache}, **options, max_new_tokens=8)
        for cache in (DynamicCache(config=config), PagedCache(model))
    )
    if torch.equal(want, got):
        return True, "same tokens as the default cache"
    return False, "other tokens than the default cache gives"
