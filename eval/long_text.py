"""A long real text that every Python has: the reference of the language, as `pydoc` shows it."""

from __future__ import annotations

from typing import Any

import torch


def shipped() -> str:
    """The topics of `pydoc_data`, in the order of their names; some 113 thousand tokens."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def token_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids `[tokens]`, without special tokens."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt")["input_ids"]
    flat: torch.Tensor = ids[0]
    return flat
