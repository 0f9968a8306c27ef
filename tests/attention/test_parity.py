"""`generate` gives the same tokens with `PagedCache` as with the cache that `transformers` itself would use.

Every family of models runs through every way of generating. The reference is the unpatched model with its own
cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hf_paged_cache import disable
from hf_paged_cache.kernels import dispatch
from tests.support.models import (
    CASES,
    PAD,
    VOCAB,
    ModelCase,
    assistant_for,
    by_name,
    cache_kwarg,
    cache_kwargs,
    host_cache,
    paged_cache,
    paged_parts,
    shared_model,
)

NEW_TOKENS = 30
PROMPT_TOKENS = 37
SECOND_TURN_TOKENS = 19


def _ids(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _batch(pads: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts, one row per number of pad tokens on its left."""
    ids = _ids(len(pads), PROMPT_TOKENS, seed)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = PAD
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _repetitive() -> dict[str, torch.Tensor]:
    """One prompt that says the same again and again, so that prompt lookup finds drafts."""
    ids = _ids(1, 6, seed=3).repeat(1, 7)[:, :PROMPT_TOKENS]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@dataclass(frozen=True)
class Mode:
    """A way of generating: its inputs and the options of `generate`."""

    name: str
    inputs: Callable[[], dict[str, torch.Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    turns: int = 1
    assistant: bool = False


RAGGED = (0, 5, 18)

MODES = (
    Mode("greedy", lambda: _batch(RAGGED)),
    Mode("greedy-one-row", lambda: _batch((0,))),
    Mode("sampling", lambda: _batch(RAGGED), {"do_sample": True, "top_k": 0}),
    Mode("beams", lambda: _batch((0, 5)), {"num_beams": 4}),
    Mode("prompt-lookup", _repetitive, {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}),
    Mode("assistant", lambda: _batch((0,)), assistant=True),
    Mode("assistant-padded-sampling", lambda: _batch((7,)), {"do_sample": True, "top_k": 0}, assistant=True),
    Mode("chunks-of-7", lambda: _batch((0, 0)), {"prefill_chunk_size": 7}),
    Mode("chunks-of-7-padded", lambda: _batch(RAGGED), {"prefill_chunk_size": 7}),
    Mode("chunks-of-20", lambda: _batch((0, 0)), {"prefill_chunk_size": 20}),
    Mode("chunks-of-20-padded", lambda: _batch(RAGGED), {"prefill_chunk_size": 20}),
    Mode("two-turns", lambda: _batch((0, 0)), turns=2),
    Mode("two-turns-padded", lambda: _batch(RAGGED), turns=2),
)


def _generate(case: ModelCase, mode: Mode, cache: Any, model: Any = None) -> list[torch.Tensor]:
    """The sequences after each turn, of the case's float32 model or another one."""
    model = shared_model(case.name) if model is None else model
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **mode.options, cache_kwarg(): cache}
    if mode.assistant:
        options["assistant_model"] = assistant_for(case.name)
    inputs = mode.inputs()
    outputs: list[torch.Tensor] = []
    torch.manual_seed(1)
    for turn in range(mode.turns):
        if turn:
            inputs = _next_turn(case, inputs, outputs[-1])
        outputs.append(model.generate(**inputs, **options))
    return outputs


def _next_turn(
    case: ModelCase,
    inputs: dict[str, torch.Tensor],
    output: torch.Tensor,
    new_tokens: int = SECOND_TURN_TOKENS,
) -> dict[str, torch.Tensor]:
    """What was said so far, and a new question. An encoder-decoder gets both on the decoder's side."""
    said = torch.cat((output, _ids(len(output), new_tokens, seed=5)), dim=1)
    if case.is_encoder_decoder:
        return inputs | {"decoder_input_ids": said, "decoder_attention_mask": torch.ones_like(said)}
    mask = inputs["attention_mask"]
    return {
        "input_ids": said,
        "attention_mask": torch.nn.functional.pad(mask, (0, said.shape[1] - mask.shape[1]), value=1),
    }


def _assert_sound(cache: Any, expected_cache: Any) -> None:
    assert cache.get_seq_length() == expected_cache.get_seq_length()
    for part in paged_parts(cache):
        part.check_integrity()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_equal_those_of_the_hosts_own_cache(case: ModelCase, mode: Mode) -> None:
    model = shared_model(case.name)
    disable(model)
    expected_cache = host_cache(model)
    expected = _generate(case, mode, expected_cache)

    cache = paged_cache(model)
    got = _generate(case, mode, cache)

    for turn, (want, have) in enumerate(zip(expected, got, strict=True)):
        assert have.tolist() == want.tolist(), f"turn {turn}"
    _assert_sound(cache, expected_cache)


@pytest.mark.parametrize(
    "mode",
    [mode for mode in MODES if mode.name in ("greedy", "beams", "assistant")],
    ids=lambda mode: mode.name,
)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.is_encoder_decoder], ids=lambda case: case.name
)
def test_tokens_are_equal_with_a_paged_decoder_beside_dynamic_cross_attention(
    case: ModelCase, mode: Mode
) -> None:
    model = shared_model(case.name)
    disable(model)
    expected_cache = host_cache(model)
    expected = _generate(case, mode, expected_cache)

    cache = paged_cache(model, cross="dynamic")
    got = _generate(case, mode, cache)

    assert got[0].tolist() == expected[0].tolist()
    _assert_sound(cache, expected_cache)


@pytest.mark.parametrize("name", cache_kwargs())
def test_generate_takes_the_cache_under_every_name_of_the_installed_version(name: str) -> None:
    model = shared_model("llama")
    disable(model)
    inputs = _batch(RAGGED)
    expected = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)

    cache = paged_cache(model)
    got = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **{name: cache})

    assert got.tolist() == expected.tolist()
    assert cache.get_seq_length() == PROMPT_TOKENS + NEW_TOKENS - 1


# --- whether the tests above can fail -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_that_loses_its_history_says_something_else(case: ModelCase) -> None:
    model = shared_model(case.name)
    disable(model)
    kept, damaged = host_cache(model), host_cache(model)
    mode = Mode("", lambda: _batch((0, 0)))
    (first,) = _generate(case, mode, kept)
    _generate(case, mode, damaged)
    for layer in getattr(damaged, "self_attention_cache", damaged).layers:
        layer.values[:, :, :-4] = 0.0

    inputs = _next_turn(case, mode.inputs(), first, new_tokens=2)  # more would leave a window behind
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    right = model.generate(**inputs, **options, **{cache_kwarg(): kept})
    wrong = model.generate(**inputs, **options, **{cache_kwarg(): damaged})

    for row in range(2):
        assert right[row].tolist() != wrong[row].tolist(), f"row {row}"


OWN_ATTENTION = ("falcon", "falcon-alibi")
"""Families whose attention code never asks for an attention function: K and V become dense for them."""


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in OWN_ATTENTION], ids=lambda case: case.name
)
def test_decoding_reads_blocks_and_never_gathers_them(
    case: ModelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(case.name)
    inputs, options = _batch(RAGGED), {"max_new_tokens": 20, "do_sample": False}
    # An eager function is tried against the kernel once, densely.
    model.generate(**inputs, **options, **{cache_kwarg(): paged_cache(model, cross="dynamic")})

    gathered: list[int] = []
    gather = dispatch.gather

    def counted(*args: Any) -> Any:
        gathered.append(1)
        return gather(*args)

    monkeypatch.setattr(dispatch, "gather", counted)
    model.generate(**inputs, **options, **{cache_kwarg(): paged_cache(model, cross="dynamic")})

    assert len(gathered) == 0


# --- bfloat16 -----------------------------------------------------------------------------------------------


def _step_logits(
    model: Any, cache: Any, tokens: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Logits `[rows, NEW_TOKENS, vocabulary]` of a prefill and of one forward per token."""
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW_TOKENS), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits: list[torch.Tensor] = []
    done = 0
    with torch.no_grad():
        for end in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS):
            logits.append(
                model(
                    tokens[:, done:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, done:end],
                    **{cache_kwarg(): cache},
                ).logits[:, -1]
            )
            done = end
    return torch.stack(logits, dim=1).float()


def _rms_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    assert not got.isnan().any()
    return float(((got - want).pow(2).mean() / want.pow(2).mean()).sqrt())


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_tokens_are_equal_up_to_ties_within_the_hosts_own_rounding(seed: int) -> None:
    model = shared_model("llama", dtype=torch.bfloat16)
    disable(model)
    inputs = _batch(RAGGED, seed)
    tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    host = _step_logits(model, host_cache(model), tokens, inputs)
    in_float32 = by_name("llama").build(dtype=torch.bfloat16).float()
    exact = _step_logits(in_float32, host_cache(in_float32), tokens, inputs)

    paged = _step_logits(model, paged_cache(model), tokens, inputs)

    assert _rms_ratio(paged, exact) <= 1.15 * _rms_ratio(host, exact)
    chosen = paged.argmax(-1, keepdim=True)
    given_up = host.max(-1).values - host.gather(-1, chosen)[..., 0]
    assert float(given_up.max()) <= 2 * float((host - exact).abs().max())
    assert int((given_up > 0).sum()) <= 0.05 * given_up.numel()


def _assert_same_bits(cache: Any, expected_cache: Any, layers: list[int], is_real: torch.Tensor) -> None:
    """Of real tokens, a boolean `[rows, tokens]`; others read as zeros."""
    for index in layers:
        for side in ("keys", "values"):
            got = getattr(cache.layers[index], side).clone()
            want = getattr(expected_cache.layers[index], side)
            assert got.dtype == want.dtype == torch.bfloat16
            assert not got.transpose(1, 2)[~is_real].any()
            got, want = (x.transpose(1, 2)[is_real].view(torch.int16) for x in (got, want))
            assert torch.equal(got, want), f"{side} of layer {index}"


def test_bfloat16_keys_and_values_are_stored_to_the_bit() -> None:
    model = shared_model("llama", dtype=torch.bfloat16)
    inputs = _batch(RAGGED)
    is_real = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW_TOKENS - 1), value=1).bool()
    tokens = torch.cat((inputs["input_ids"], _ids(len(RAGGED), NEW_TOKENS, seed=7)), dim=1)
    disable(model)
    expected_cache = host_cache(model)
    _step_logits(model, expected_cache, tokens, inputs)
    every_layer = list(range(model.config.num_hidden_layers))

    cache = paged_cache(model)
    disable(model)  # the host's arithmetic on views of the blocks: storage decides every bit of every layer
    _step_logits(model, cache, tokens, inputs)
    _assert_same_bits(cache, expected_cache, every_layer, torch.ones_like(is_real))  # padding too

    cache = paged_cache(model)
    _step_logits(model, cache, tokens, inputs)
    # Later layers see what paged attention rounded. It is what allows padding not to be stored.
    _assert_same_bits(cache, expected_cache, [0], is_real)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only wait for each other on tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
