"""Imported once by the server that compilers are forked from: what each of them would do again."""

from __future__ import annotations

from triton.experimental import gluon
from triton.runtime.cache import triton_key

from . import capture
from .payload import payload_places

__all__ = ["capture", "gluon"]

triton_key()  # a hash over the files of Triton takes half a second, and is kept
payload_places()
