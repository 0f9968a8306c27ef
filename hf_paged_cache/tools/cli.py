"""The command line of `python -m hf_paged_cache`: what fits, and whether this machine is healthy."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_paged_cache.errors import PagedCacheError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A paged KV cache for transformers: plan its memory, look at this machine.",
)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A hub id, a folder with a config.json, or such a file.")],
    context: Annotated[str | None, typer.Option(help="Tokens of every request, prompt and answer.")] = None,
    batch: Annotated[str, typer.Option(help="Requests at one time.")] = "1",
    memory: Annotated[str | None, typer.Option(help="Of the device, e.g. 24GiB or 24GB.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, int8, fp8, k8v4, int4, …")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Of the model; default: what its config says.")] = None,
    weights: Annotated[str | None, typer.Option(help="Of the model, e.g. 4GB, or a dtype.")] = None,
    block_size: Annotated[str, typer.Option(help="Tokens of a block.")] = "64",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a cache of a model takes in every format, and what fits. Reads the config, never the weights.

    The exit code is 2 if something is wrong with the request, or if nothing fits.
    """
    try:
        if context is None:
            raise PagedCacheError("--context is missing: the tokens of every request, prompt and answer")
        numbers = (("context", context), ("batch", batch), ("block_size", block_size))
        asked: dict[str, Any] = {name: _count(name, text) for name, text in numbers}
        asked |= {"kv_cache_dtype": kv_cache_dtype, "memory": _amount(memory), "weights": _amount(weights)}
        config = _config_of(model)
        from .planner import plan_memory

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            found = plan_memory(config, **asked, dtype=dtype)
    except PagedCacheError as error:
        raise _refused(error) from error
    for warning in caught:
        typer.echo(f"warning: {_one_line(warning.message)}", err=True)
    typer.echo(found.to_json() if as_json else str(found))
    if found.memory_bytes is not None and not any(one.fits for one in found.formats):
        raise _refused(found.verdict())


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What runs on this machine, and why nothing faster does; tries every kernel. Exit code 0 if healthy."""
    from .doctor import examine

    report = examine()
    typer.echo(json.dumps(report.to_dict(), indent=1) if as_json else str(report))
    if not report.is_healthy:
        raise typer.Exit(1)


def _config_of(model: str) -> PreTrainedConfig:
    """The config of a hub id, a folder or a file."""
    import transformers
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoConfig

    # They tell of every try, and of fields that are said again when the model is loaded.
    for log in (transformers.logging, hub_logging):
        log.set_verbosity_error()
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
        return config
    except Exception as error:  # whatever the hub, the disk or the config may raise
        raise PagedCacheError(
            f"no config of {model!r}: {_one_line(error)} Expected a hub id (with a network, or in the local "
            "cache), a folder with a config.json, or such a file"
        ) from error


def _count(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        option = f"--{name.replace('_', '-')}"
        raise PagedCacheError(f"{option} must be a whole number, got {text!r}") from error


def _amount(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _refused(message: object) -> typer.Exit:
    typer.echo(f"error: {_one_line(message)}", err=True)
    return typer.Exit(2)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
