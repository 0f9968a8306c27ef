"""The Python of the README and of the guides runs as it stands, and warns of nothing that goes."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

import hf_paged_cache
from eval.core.models import load

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.stem: path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs/pages").glob("*.md")))
    if "```python" in path.read_text(encoding="utf-8")
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ONLY_WITHOUT_POSITIONS = "(ALiBi, T5)"  # a comment on what a model with rotary positions refuses

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        "cache" not in inspect.signature(transformers.LlamaForCausalLM.forward).parameters,
        reason="the pages are written for `cache=`",
    ),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which the id that the pages name is found without a network."""
    loaded = load("smollm2")
    folder = tmp_path_factory.mktemp("hub")
    for part in (loaded.model, loaded.tokenizer):
        part.save_pretrained(folder / MODEL)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_runs(page: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hub)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    ids = torch.arange(100, 240)[None]
    dynamic_cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=dynamic_cache)
    names: dict[str, Any] = {
        "torch": torch,
        "hf_paged_cache": hf_paged_cache,
        "ids": ids,
        "input_ids": ids,
        "edited_ids": torch.cat([ids[:, :60], ids[:, :20]], dim=1),
        "candidate": ids[:, :5],
        "dynamic_cache": dynamic_cache,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        for block in BLOCK.findall(PAGES[page].read_text(encoding="utf-8")):
            runs = "".join(line for line in block.splitlines(True) if ONLY_WITHOUT_POSITIONS not in line)
            exec(compile(runs, page, "exec"), names)
