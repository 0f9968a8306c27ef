"""Scores, schemes, bytes and the run of `python -m eval quality`, on a tiny model with random weights."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache
from transformers.cache_utils import QuantizedLayer

from eval.caches import CacheUnavailable, stock
from eval.core.errors import UsageError
from eval.data import text
from eval.quality import protocol, schemes, storage
from eval.quality.protocol import Comparison, Score
from eval.quality.schemes import SCHEMES, Scheme
from tests.eval.conftest import tiny_tokenizer
from tests.support.models import VOCAB, shared_model

ROWS, TOKENS, CHUNK = 2, 200, 16
LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 3, 2, 16, 64
IN_EVERY_BLOCK = ROWS * LAYERS * KV_HEADS


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def compare(ids: torch.Tensor, *names: str, key_offset: bool = False) -> Comparison:
    selected = [SCHEMES[name] for name in names]
    return protocol.run(shared_model("llama"), ids, selected, chunk=CHUNK, key_offset=key_offset)


# --- scores -------------------------------------------------------------------------------------------------


def test_a_score_is_the_divergence_the_agreement_and_the_perplexity_worked_out_by_hand() -> None:
    full = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()
    scheme = torch.tensor([[[0.25, 0.75], [0.8, 0.2]]]).log()
    score = Score()
    score.add(scheme, full, torch.tensor([[1]]))  # the last token has no successor
    divergences = [
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
        0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2),
    ]
    assert score.kl_nats == pytest.approx(sum(divergences) / 2, rel=1e-6)
    assert score.top1_percent == 50.0  # a tie goes to the first, and the scheme prefers the second
    assert score.perplexity == pytest.approx(1 / 0.75, rel=1e-6)
    assert (score.tokens, score.predicted) == (2, 1)


def test_a_perplexity_beyond_all_floats_is_infinite() -> None:
    assert Score(surprise=1e6, predicted=1).perplexity == math.inf


# --- the run ------------------------------------------------------------------------------------------------


def test_full_precision_has_no_divergence_and_few_bits_have_some(ids: torch.Tensor) -> None:
    dynamic, auto, int8, int4 = compare(ids, "dynamic", "auto", "int8", "int4").outcomes
    assert dynamic.score.kl_nats == 0.0
    assert abs(auto.score.kl_nats) < 1e-9
    assert auto.score.top1_percent == 100.0
    assert 1e-7 < int8.score.kl_nats < int4.score.kl_nats / 5
    assert dynamic.score.tokens == ROWS * TOKENS
    assert dynamic.score.predicted == ROWS * (TOKENS - 1)


def test_the_reference_is_one_forward_over_the_whole_text(ids: torch.Tensor) -> None:
    from transformers import DynamicCache

    model = shared_model("llama")
    perplexity = compare(ids, "dynamic").reference.perplexity
    with torch.inference_mode():
        log_p = model(ids, past_key_values=DynamicCache(config=model.config)).logits.double().log_softmax(-1)
    surprise = -log_p[:, :-1].gather(-1, ids[:, 1:].unsqueeze(-1)).mean()
    assert perplexity == pytest.approx(math.exp(float(surprise)), rel=1e-5)


def test_the_offset_does_not_move_full_precision_and_collapses_what_knows_no_better(
    ids: torch.Tensor,
) -> None:
    names = ("dynamic", "auto", "int8_block", "int4", "int4 no guard")
    dynamic, auto, naive, int4, unguarded = compare(ids, *names, key_offset=True).outcomes
    assert dynamic.score.kl_nats < 1e-6
    assert auto.score.kl_nats < 1e-6
    (naive_before,) = compare(ids, "int8_block").outcomes
    assert naive.score.kl_nats > 20 * naive_before.score.kl_nats
    # K per channel does not see what a channel has in common, so that the guard has nothing to do.
    assert int4.moved == {}
    assert int4.score.kl_nats == unguarded.score.kl_nats


@pytest.mark.parametrize("name", ["dynamic", "auto"])
def test_the_offset_is_in_what_is_stored_and_in_what_attends(name: str) -> None:
    model = shared_model("llama")
    cache = SCHEMES[name].create(model)
    protocol.add_to_keys(cache)
    given = torch.zeros(1, KV_HEADS, 3, HEAD_DIM)
    keys, values = cache.update(given, given, 0)
    wanted = torch.zeros(HEAD_DIM)
    wanted[[7, 15]] = 60.0
    for seen in (keys, cache.layers[0].keys):
        assert torch.equal(seen.clone(), wanted.expand(1, KV_HEADS, 3, HEAD_DIM))
    assert not values.clone().any()
    assert not given.any()


def test_layers_that_the_guard_moves_are_reported(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged_cache.store import key_guard

    monkeypatch.setattr(key_guard, "KEY_ERROR_BOUND", 0.0)
    (outcome,) = compare(ids, "int4").outcomes
    assert outcome.moved == dict.fromkeys(range(LAYERS), "k8v4")


def test_a_scheme_that_cannot_be_had_says_why_and_the_others_run(ids: torch.Tensor) -> None:
    group, auto = compare(ids, "int4_group", "auto").outcomes  # 32 channels do not divide 16
    assert group.problem is not None
    assert "group_size" in group.problem
    assert group.storage is None
    assert auto.problem is None


def test_an_error_in_a_stock_cache_is_its_problem_and_in_ours_is_raised(ids: torch.Tensor) -> None:
    def broken(name: str, model: Any) -> Any:
        cache = SCHEMES[name].create(model)

        def update(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no such kernel")

        cache.update = update
        return cache

    model = shared_model("llama")
    theirs = Scheme("theirs", "", partial(broken, "dynamic"))
    (outcome,) = protocol.run(model, ids, [theirs], chunk=CHUNK).outcomes
    assert outcome.problem == "failed: no such kernel"
    ours = Scheme("ours", "", partial(broken, "auto"))
    with pytest.raises(RuntimeError, match="no such kernel"):
        protocol.run(model, ids, [ours], chunk=CHUNK)


def test_progress_is_told_after_each_chunk(ids: torch.Tensor) -> None:
    told: list[int] = []
    protocol.run(shared_model("llama"), ids, [SCHEMES["dynamic"]], chunk=CHUNK, progress=told.append)
    assert told == [1] * math.ceil(TOKENS / CHUNK)


# --- bytes --------------------------------------------------------------------------------------------------

RECORD_BYTES = {
    # codes of K and of V, then float16 parameters of K and of V
    "int8": BLOCK * 16 + BLOCK * 16 + BLOCK * 2 + BLOCK * 2,
    "k8v4": BLOCK * 16 + BLOCK * 8 + BLOCK * 2 + BLOCK * 4,
    "int4": BLOCK * 8 + BLOCK * 8 + HEAD_DIM * 4 + BLOCK * 4,
}
DENSE_BYTES = BLOCK * 2 * HEAD_DIM * 4


@pytest.mark.parametrize(
    ("name", "blocks", "tokens", "dense_blocks"),
    [("int8", 4, 200, 0), ("k8v4", 4, 200, 0), ("int4", 2, 128, 2)],  # int4: a sink, and the open block
)
def test_bits_are_true_to_the_byte(
    ids: torch.Tensor, name: str, blocks: int, tokens: int, dense_blocks: int
) -> None:
    (outcome,) = compare(ids, name).outcomes
    counted = outcome.storage
    assert counted is not None
    assert counted.stored_bytes == IN_EVERY_BLOCK * blocks * RECORD_BYTES[name]
    assert counted.stored_values == IN_EVERY_BLOCK * tokens * 2 * HEAD_DIM
    assert counted.all_bytes == counted.stored_bytes + IN_EVERY_BLOCK * dense_blocks * DENSE_BYTES
    assert counted.all_values == IN_EVERY_BLOCK * TOKENS * 2 * HEAD_DIM
    assert counted.stored_bits == 8 * counted.stored_bytes / counted.stored_values


def test_full_precision_has_32_bits(ids: torch.Tensor) -> None:
    dynamic, auto = (outcome.storage for outcome in compare(ids, "dynamic", "auto").outcomes)
    assert dynamic is not None
    assert auto is not None
    assert (dynamic.stored_bits, dynamic.all_bits) == (32.0, 32.0)
    assert auto.all_bits == 32 * 256 / 200  # whole blocks


def test_nothing_stored_yet_has_no_bits() -> None:
    assert storage.Storage(0, 0, 128, 32).stored_bits is None


class ByteLayer(QuantizedLayer):  # type: ignore[misc, no-untyped-call]
    """The stock layer over a backend of one line: a byte a value and a scale, as backends keep them."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        scale = tensor.abs().amax() / 127
        return (tensor / scale).round().to(torch.int8), {"scale": scale.reshape(1), "name": "byte"}

    def _dequantize(self, qtensor: Any) -> torch.Tensor:
        codes, meta = qtensor
        return codes.float() * meta["scale"]


def test_a_stock_cache_takes_chunks_and_its_quantized_part_is_counted_apart(ids: torch.Tensor) -> None:
    def create(model: Any) -> Any:
        return Cache(layers=[ByteLayer(residual_length=128) for _ in range(LAYERS)])

    scheme = Scheme("stock byte", "", create)
    (outcome,) = protocol.run(shared_model("llama"), ids, [scheme], chunk=CHUNK).outcomes
    counted = outcome.storage
    assert outcome.problem is None
    assert counted is not None
    # 16 tokens are quantized at once, then all 144 when 128 wait; 56 wait at the end.
    values = IN_EVERY_BLOCK * 2 * HEAD_DIM
    assert counted.stored_values == 144 * values
    assert counted.stored_bytes == 144 * values + LAYERS * 2 * 4
    assert counted.all_bytes == counted.stored_bytes + 56 * values * 4
    assert counted.all_values == 200 * values
    assert 0.0 < outcome.score.kl_nats < 1.0


def test_a_backend_that_is_not_there_is_unavailable_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stock.AXES, "nonsense", {})
    with pytest.raises(CacheUnavailable, match=r"QuantizedCache with nonsense cannot be made: .*nonsense"):
        stock.quantized_cache(shared_model("llama").config, "nonsense")


# --- text and names -----------------------------------------------------------------------------------------


def test_rows_share_no_text_and_are_the_same_at_every_call(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": letter * 4}) + "\n" for letter in "abcdef"), encoding="utf-8")
    tokenizer = tiny_tokenizer()
    got = text.row_ids(tokenizer, 2, 9, file)
    assert [tokenizer.decode(row) for row in got] == ["aaaa\n\nccc", "bbbb\n\nddd"]
    assert torch.equal(got, text.row_ids(tokenizer, 2, 9, file))
    with pytest.raises(
        UsageError, match=r"2 rows of 17 tokens are more than texts\.jsonl holds: .* 16 tokens"
    ):
        text.row_ids(tokenizer, 2, 17, file)


@pytest.mark.parametrize(
    ("only", "quick", "defaults", "names"),
    [
        ("int4, auto", False, False, ["auto", "int4"]),
        (None, True, False, ["dynamic", "auto", "int8", "int4"]),
        ("int4 block 32", True, False, ["int4 block 32"]),
    ],
)
def test_schemes_run_in_the_order_of_the_registry(
    only: str | None, quick: bool, defaults: bool, names: list[str]
) -> None:
    assert [scheme.name for scheme in schemes.chosen(only, quick=quick, defaults=defaults)] == names


def test_sizes_to_choose_defaults_by_are_run_when_asked_for() -> None:
    without = {scheme.name for scheme in schemes.chosen(None, quick=False, defaults=False)}
    added = [s.name for s in schemes.chosen(None, quick=False, defaults=True) if s.name not in without]
    assert added == [f"int4 block {size}" for size in (32, 64, 128)] + [
        f"int4_group {size}" for size in (16, 32, 64)
    ]


@pytest.mark.parametrize(
    ("only", "message"), [("int5", "unknown scheme 'int5'"), (" ,", "at least one name")]
)
def test_an_unknown_scheme_is_refused(only: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schemes.chosen(only, quick=False, defaults=False)
