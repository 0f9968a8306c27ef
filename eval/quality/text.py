"""Rows of real text, the same at every call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from eval.errors import UsageError

DATA = Path(__file__).resolve().parent.parent / "data" / "catalogue.jsonl"

HOW = "row r is the texts number r, r + rows, r + 2 rows, … of {name}, joined by empty lines, cut to length"


def token_ids(tokenizer: Any, rows: int, tokens: int, path: Path = DATA) -> torch.Tensor:
    """Token ids `[rows, tokens]`, built as `HOW` says, without special tokens.

    Args:
        tokenizer: of the model.
        rows: rows that share no text.
        tokens: of each row.
        path: JSON lines with a field `text`.

    Raises:
        UsageError: there is not so much text.
    """
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    encoded = [
        tokenizer("\n\n".join(texts[row::rows]), add_special_tokens=False, verbose=False)["input_ids"]
        for row in range(rows)
    ]
    shortest = min(map(len, encoded))
    if shortest < tokens:
        raise UsageError(
            f"{rows} rows of {tokens} tokens are more than {path.name} holds: in so many rows it gives "
            f"{shortest} tokens each; ask for fewer --tokens or --rows"
        )
    return torch.tensor([ids[:tokens] for ids in encoded])
