"""A process for each binary, because a compiler that fails may end its process."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from .binary import Binary, compile_variant

# Forked from a server that has prepared Triton once: this process may have loaded it as an interpreter.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["dev.aot.preload"])


def compile_isolated(variant_name: str, target_name: str) -> Binary | str:
    """The binary, or in words why there is none."""
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        messages = Path(folder) / "messages"
        process = _PROCESSES.Process(target=_work, args=(sender, variant_name, target_name, str(messages)))
        process.start()
        sender.close()
        try:
            result: Binary | str = receiver.recv()
        except EOFError:
            process.join()
            result = f"the compiler ended with {process.exitcode}: {_reason(messages)}"
        process.join()
    return result


def _work(sender: Connection, variant_name: str, target_name: str, messages: str) -> None:
    descriptor = os.open(messages, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)  # compilers print whole programs there when they fail
    result: Binary | str
    try:
        result = compile_variant(variant_name, target_name)
    except Exception as error:  # whatever a compiler raises is a finding
        result = f"{type(error).__name__}: {str(error)[:500]}"
    sender.send(result)


def _reason(messages: Path) -> str:
    """The first line that speaks of an error, without the path before it."""
    lines = messages.read_text(errors="replace").splitlines() if messages.exists() else []
    errors = [line for line in lines if re.search(r"error|abort|assert", line, re.IGNORECASE)]
    return errors[0].rsplit("/", 1)[-1] if errors else "it says nothing"
