"""Long real texts, the same at every call, as token ids."""

import json
from pathlib import Path
from typing import Any

import torch

from eval.core.errors import UsageError
from eval.data import DATA_DIR

CATALOGUE = DATA_DIR / "catalogue.jsonl"
ROWS_RULE = (
    f"row r is the texts number r, r + rows, r + 2 rows, … of {CATALOGUE.name}, joined by empty lines, "
    "cut to length"
)


def shipped() -> str:
    """The reference of the language, as `pydoc` shows it: every Python has it; some 113 thousand tokens."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def token_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids `[tokens]`, without special tokens."""
    encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"][0]
    return ids


def row_ids(tokenizer: Any, rows: int, tokens: int, path: Path = CATALOGUE) -> torch.Tensor:
    """Token ids `[rows, tokens]` of JSON lines with a field `text`, built as `ROWS_RULE` says."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    encoded = [token_ids(tokenizer, "\n\n".join(texts[row::rows])) for row in range(rows)]
    shortest = min(map(len, encoded))
    if shortest < tokens:
        raise UsageError(
            f"{rows} rows of {tokens} tokens are more than {path.name} holds: in so many rows it gives "
            f"{shortest} tokens each; ask for fewer --tokens or --rows"
        )
    return torch.stack([ids[:tokens] for ids in encoded])
