"""K and V are read by the weights that computed them, those of the whole model, and by no others."""

from __future__ import annotations

import ast
import copy
import gc
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from torch import nn
from transformers import DynamicCache

from hf_paged_cache import CacheMismatchError, PagedCache, PagedCacheError
from hf_paged_cache.forward import ownership, weights
from tests.support.models import ModelCase, by_name, cache_kwarg, paged_cache
from tests.support.quantized import NAMES, cache_of, feed, ids
from tests.support.tensor_parallel import generate

FORMATS = ("auto", "int8")


class Adapted(nn.Module):
    """A layer with low-rank adapters, under the names that `peft` has for its parts."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({n: nn.Linear(base.in_features, 2, bias=False) for n in "ab"})
        self.lora_B = nn.ModuleDict({n: nn.Linear(2, base.out_features, bias=False) for n in "ab"})
        self.scaling = {"a": 1.0, "b": 1.0}
        self.active_adapters = ["a"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        for name in self.active_adapters if not (self.disable_adapters or self.merged_adapters) else ():
            out = out + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return out

    def merge(self) -> None:
        self.before = self.base_layer.weight.data.clone()
        for name in self.active_adapters:
            self.base_layer.weight.data += self.lora_B[name].weight.data @ self.lora_A[name].weight.data
        self.merged_adapters = list(self.active_adapters)

    def unmerge(self) -> None:
        self.base_layer.weight.data.copy_(self.before)
        self.merged_adapters = []


class InBuffers(nn.Module):
    """A layer whose weight is stored in integers, in buffers, as GPTQ's is. It counts its calls."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scales = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (base.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x @ (self.qweight * self.scales).T


class Observed(nn.Linear):
    """A layer that keeps statistics of its inputs where a checkpoint has them too."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.register_buffer("largest", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest[0] = torch.maximum(self.largest[0], x.abs().max())
            self.mean = self.mean * 0.9 + x.mean() * 0.1
        return super().forward(x)


class Opaque(torch.Tensor):
    """A weight of some library: it can be multiplied by and written to, and nothing else."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in ("t", "mm", "detach", "mul_"):
            raise NotImplementedError(f"Opaque: unimplemented {name}")
        result = func(*[each.inner if isinstance(each, Opaque) else each for each in args], **(kwargs or {}))
        return args[0] if name == "mul_" else result if name == "mm" else Opaque(result)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


class Wrapped(nn.Module):
    """As what a compiler puts around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def llama() -> Any:
    return by_name("llama").build()


def noisy() -> Any:
    return by_name("llama").build(noise=0.5)


def adapted() -> Any:
    model = llama()
    for layer in model.model.layers:
        torch.manual_seed(0)
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model.eval()


def in_buffers() -> Any:
    model = llama()
    mlp(model).up_proj = InBuffers(mlp(model).up_proj)
    return model.eval()


def observed() -> Any:
    """In the first projection before a cache is written, and in the last layer of all."""
    model = llama()
    for part, name in ((model.model.layers[0].self_attn, "q_proj"), (model, "lm_head")):
        setattr(part, name, Observed(getattr(part, name)))
    return model.eval()


def opaque() -> Any:
    model = llama()
    for layer in model.model.layers:
        weight = Opaque(layer.self_attn.k_proj.weight.detach())
        layer.self_attn.k_proj.weight = nn.Parameter(weight, requires_grad=False)
    return model


def dynamic_rope() -> Any:
    case: ModelCase = by_name("llama")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return replace(
        case, options=case.options | {"rope_parameters": rope, "max_position_embeddings": 16}
    ).build()


def mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


def key_weight(model: Any) -> Any:
    return model.model.layers[1].self_attn.k_proj.weight


def adapters(model: Any) -> list[Adapted]:
    return [module for module in model.modules() if isinstance(module, Adapted)]


@torch.enable_grad()
def gradients(model: Any) -> None:
    model(ids(8), labels=ids(8), use_cache=False).loss.backward()


def train(**options: Any) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        gradients(model)
        torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()

    return step


def with_adapters(name: str, value: Any) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for each in adapters(model):
            setattr(each, name, value)

    return apply


def off_and_on(model: Any) -> None:
    for value in (True, False):
        with_adapters("disable_adapters", value)(model)
        model(ids(4), use_cache=False)


def merge_and_unmerge(model: Any) -> None:
    for each in adapters(model):
        each.merge()
    model(ids(4), use_cache=False)
    for each in adapters(model):
        each.unmerge()


def drop_idle(model: Any) -> None:
    for each in adapters(model):
        for part in (each.lora_A, each.lora_B, each.scaling):
            part.pop("b")


def a_new(name: str, of: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: setattr(of(model), name, copy.deepcopy(getattr(of(model), name)))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an optimizer's step": (llama, train()),
    "one of a fused optimizer": (llama, train(fused=True)),
    "one that goes tensor by tensor": (llama, train(foreach=False)),
    "a write into an MLP": (llama, lambda m: mlp(m).up_proj.weight.add_(0.1)),
    "a write into a norm": (llama, lambda m: m.model.norm.weight.mul_(1.1)),
    "other data": (llama, lambda m: setattr(mlp(m).up_proj.weight, "data", mlp(m).up_proj.weight * 2)),
    "another checkpoint": (llama, lambda m: m.load_state_dict(noisy().state_dict())),
    "the tensors of another": (llama, lambda m: m.load_state_dict(noisy().state_dict(), assign=True)),
    "another MLP": (llama, a_new("mlp", lambda m: m.model.layers[1])),
    "no MLP": (llama, lambda m: setattr(mlp(m), "down_proj", nn.Linear(96, 64))),
    "other embeddings": (llama, lambda m: m.set_input_embeddings(nn.Embedding(97, 64))),
    "more embeddings": (llama, lambda m: m.resize_token_embeddings(101)),
    "an adapter": (llama, lambda m: setattr(mlp(m), "up_proj", Adapted(mlp(m).up_proj))),
    "another active adapter": (adapted, with_adapters("active_adapters", ["b"])),
    "a second active adapter": (adapted, with_adapters("active_adapters", ["a", "b"])),
    "adapters off": (adapted, with_adapters("disable_adapters", True)),
    "a merge": (adapted, lambda m: [each.merge() for each in adapters(m)]),
    "a scale": (adapted, lambda m: adapters(m)[0].scaling.update(a=0.5)),
    "a write into an active adapter": (adapted, lambda m: adapters(m)[0].lora_A["a"].weight.mul_(2)),
    "a write into a buffer": (in_buffers, lambda m: mlp(m).up_proj.qweight.add_(1)),
    "another buffer": (in_buffers, a_new("scales", lambda m: mlp(m).up_proj)),
    "a write into statistics": (observed, lambda m: m.lm_head.largest.add_(1)),
    "other statistics": (observed, a_new("mean", lambda m: m.lm_head)),
    "a write into an opaque weight": (opaque, lambda m: key_weight(m).mul_(2.0)),
    "a write into what it is made of": (opaque, lambda m: key_weight(m).inner.mul_(2.0)),
}
"""What makes old K and V wrong: how the model is made, and what is done to it."""

SAME: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "nothing": (llama, lambda m: None),
    "moves to where it is": (llama, lambda m: m.to("cpu").to(torch.float32).float()),
    "modes": (llama, lambda m: m.train().eval().requires_grad_(False)),
    "gradients": (llama, gradients),
    "tying": (llama, lambda m: m.tie_weights()),
    "a copy": (llama, copy.deepcopy),
    "a pickle": (llama, pickle.dumps),
    "a wrapper": (llama, lambda m: setattr(m.model.layers[1], "mlp", Wrapped(mlp(m)))),
    "offloading": (llama, lambda m: cpu_offload(m, torch.device("cpu"))),
    "offloading as a whole": (llama, lambda m: cpu_offload_with_hook(m, torch.device("cpu"))[1].offload()),
    "a buffer that is made anew": (dynamic_rope, lambda m: None),
    "counting": (in_buffers, lambda m: m(ids(4), use_cache=False)),
    "statistics of its own": (observed, lambda m: None),
    "a write into an idle adapter": (adapted, lambda m: adapters(m)[0].lora_A["b"].weight.mul_(2)),
    "an idle adapter's end": (adapted, drop_idle),
    "adapters off and on": (adapted, off_and_on),
    "a merge that is undone": (adapted, merge_and_unmerge),
    "opaque weights": (opaque, lambda m: None),
}
"""What leaves them right."""


def assert_like(got: torch.Tensor, want: torch.Tensor) -> None:
    """But for rounding, which differs where tensors of two models are aligned otherwise."""
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def go_on(model: Any, cache: PagedCache, tokens: torch.Tensor, how: str) -> torch.Tensor:
    """Feed tokens after what is cached. Returns logits, or the tokens that come next."""
    if how == "forward":
        return feed(model, cache, tokens)
    text = torch.cat((cache.input_ids, tokens), dim=1)
    out: torch.Tensor = model.generate(text, max_new_tokens=4, do_sample=False, **{cache_kwarg(): cache})
    return out[:, text.shape[1] :]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", ["forward", "generate"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_are_refused_and_the_cache_stays_as_it_was(change: str, how: str, name: str) -> None:
    make, apply = CHANGES[change]
    model = make()
    cache = cache_of(model, name)
    feed(model, cache, ids(20))
    with torch.no_grad():
        apply(model)
    for _ in range(2):
        with pytest.raises(CacheMismatchError, match=r"the 20 cached tokens .* computed by .*reset\(\)"):
            go_on(model, cache, ids(3, seed=1), how)
    assert cache.get_seq_length() == 20
    cache.check_integrity()
    cache.reset()
    fresh = cache_of(model, name)
    assert_like(feed(model, cache, ids(20)), feed(model, fresh, ids(20)))
    assert_like(go_on(model, cache, ids(3), how), go_on(model, fresh, ids(3), how))


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "more embeddings": (
        llama, lambda m: m.resize_token_embeddings(101),
        r"`model\.embed_tokens\.weight` is \[101, 64\] torch\.float32, and was \[97, 64\] .*cache\.reset\(\)",
    ),
    "statistics of another forward": (
        observed, lambda m: m(ids(4), use_cache=False),
        r"\.largest` was written to \(a buffer; `register_buffer\(\.\.\., persistent=False\)` if",
    ),
}  # fmt: skip
"""What is refused although K and V are right: how it is made, what is done, and what is said of it."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_told_from_other_weights_is_refused_by_name(what: str) -> None:
    make, apply, words = REFUSED[what]
    model = make()
    cache = cache_of(model, "auto")
    feed(model, cache, ids(20))
    apply(model)
    with pytest.raises(CacheMismatchError, match=words):
        feed(model, cache, ids(3, seed=1))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", ["forward", "generate"])
@pytest.mark.parametrize("what", SAME)
def test_the_same_weights_go_on(what: str, how: str, name: str) -> None:
    make, apply = SAME[what]
    model, undisturbed = make(), make()
    cache, want = (cache_of(each, name, max_tokens=256) for each in (model, undisturbed))
    assert_like(feed(model, cache, ids(20)), feed(undisturbed, want, ids(20)))
    with torch.no_grad():
        apply(model)
    for seed in (1, 2):
        tokens = ids(3, seed=seed)
        assert_like(go_on(model, cache, tokens, how), go_on(undisturbed, want, tokens, how))


@pytest.mark.parametrize("case", ["llama", "gpt-oss", "bart"])
def test_weights_that_are_brought_for_every_forward_are_the_same(case: str) -> None:
    """Offloading puts a new parameter into a module whenever that runs; one of gpt-oss is in attention."""
    model, undisturbed = by_name(case).build(), by_name(case).build()
    cache, want = paged_cache(model), paged_cache(undisturbed)
    cpu_offload(model, torch.device("cpu"))
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    for seed in range(3):
        told = {"input_ids": ids(5)} | {name: ids(6, seed=seed)}
        with torch.no_grad():
            got = model(**told, **{cache_kwarg(): cache}).logits
            expected = undisturbed(**told, **{cache_kwarg(): want}).logits
        assert_like(got, expected)


@pytest.mark.parametrize("is_decoder_first", [True, False])
def test_a_decoder_alone_and_in_its_model_share_a_cache(is_decoder_first: bool) -> None:
    model, stock = llama(), llama()
    cache, want = cache_of(model, "auto"), cache_of(stock, "auto")
    parts = (model.model, model) if is_decoder_first else (model, model.model)
    with torch.no_grad():
        for seed in range(3):
            parts[seed % 2](ids(5, seed=seed), **{cache_kwarg(): cache})
            feed(stock, want, ids(5, seed=seed))
        assert_like(feed(model, cache, ids(2)), feed(stock, want, ids(2)))
        model.model.embed_tokens.weight[0] += 1
        for part in parts:
            with pytest.raises(CacheMismatchError, match=r"embed_tokens\.weight` was written to"):
                part(ids(2), **{cache_kwarg(): cache})


def test_the_weights_of_an_encoder_count_for_what_cross_attention_reads() -> None:
    model = by_name("bart").build()
    cache = paged_cache(model)
    told = {"input_ids": ids(5), cache_kwarg(): cache}
    with torch.no_grad():
        model(**told, decoder_input_ids=ids(3))
        model(**told, decoder_input_ids=ids(1))
        model.get_encoder().layers[0].fc1.weight.mul_(1.5)
        with pytest.raises(CacheMismatchError, match="was written to"):
            model(**told, decoder_input_ids=ids(1))
        rows = cache.cross_attention_cache._state.rows
        with pytest.raises(CacheMismatchError, match="was written to"):
            ownership.check_prompt(rows.owner, model, rows.end)


def test_modules_that_are_no_model_of_the_host_are_known_too() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 32, bias=False)

        def forward(self, x: torch.Tensor, cache: PagedCache, layer: int) -> torch.Tensor:
            states = self.proj(x).view(1, -1, 2, 16).transpose(1, 2)
            return cache.update(states, states, layer)[0].sum((1, 2)).repeat(1, 4)[:, None]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(97, 64), nn.ModuleList(Attention() for _ in range(3))

        def forward(self, tokens: torch.Tensor, cache: PagedCache) -> torch.Tensor:
            x = self.embed(tokens)
            for index, layer in enumerate(self.layers):
                x = x + layer(x, cache, index)
            return x

    model, cache = Model(), cache_of(llama(), "auto")
    with torch.no_grad():
        model(ids(4, 1), cache)
        model(ids(1, 1), cache)
        model.embed.weight.mul_(2)
        with pytest.raises(CacheMismatchError, match=r"`embed\.weight` was written to"):
            model(ids(1, 1), cache)


COPIES: dict[str, Callable[[PagedCache], PagedCache]] = {
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "from_cache": lambda cache: PagedCache.from_cache(cache, cache._config, block_size=16),
}
SAVED: dict[str, Callable[[PagedCache], PagedCache]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "pickled twice": lambda cache: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(cache)))),
}


@pytest.mark.parametrize("make", [llama, observed])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_belongs_to_the_same_weights(
    copied: Callable[[PagedCache], PagedCache], make: Callable[[], Any]
) -> None:
    model = make()
    cache = cache_of(model, "auto")
    feed(model, cache, ids(20))
    twin = copied(cache)
    assert_like(feed(model, twin, ids(2)), feed(model, cache, ids(2)))
    twin = copied(cache)
    with pytest.raises(CacheMismatchError, match="is not the one that did"):
        feed(copy.deepcopy(model), twin, ids(2))
    with torch.no_grad():
        mlp(model).up_proj.weight.add_(0.1)
    for each in (twin, copied(cache)):
        with pytest.raises(CacheMismatchError, match=r"`model\.layers\.1\.mlp\.up_proj\.weight` was written"):
            feed(model, each, ids(2))


@pytest.mark.parametrize("make", [llama, adapted, observed])
@pytest.mark.parametrize("is_model_first", [True, False])
def test_a_model_and_a_cache_that_are_copied_together_belong_together(
    is_model_first: bool, make: Callable[[], Any]
) -> None:
    model = make()
    cache = cache_of(model, "auto")
    feed(model, cache, ids(20))
    before = copy.deepcopy(cache)
    pair = copy.deepcopy((model, before, cache) if is_model_first else (cache, before, model))
    one, other, twin = (pair[0], *pair[1:]) if is_model_first else (pair[2], pair[1], pair[0])
    want = feed(model, cache.fork(), ids(2))
    for each in (twin, other):
        assert_like(feed(one, each.fork(), ids(2)), want)
        with pytest.raises(CacheMismatchError, match="is not the one that did"):
            feed(model, each, ids(2))
    with torch.no_grad():
        mlp(one).up_proj.weight.add_(0.1)
    with pytest.raises(CacheMismatchError, match=r"up_proj\.weight` was written to"):
        feed(one, twin, ids(2))
    with torch.no_grad():
        mlp(model).up_proj.weight.add_(0.1)
    copied, twin = copy.deepcopy((model, cache))
    with pytest.raises(CacheMismatchError, match="is not the one that did"):
        feed(copied, twin, ids(2))


@pytest.mark.parametrize("make", [llama, in_buffers, adapted, opaque])
@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
def test_a_saved_cache_goes_by_names_shapes_and_some_values(
    saved: Callable[[PagedCache], PagedCache], make: Callable[[], Any]
) -> None:
    model, again = make(), make()
    cache = cache_of(model, "auto")
    feed(model, cache, ids(20))
    want = feed(model, cache.fork(), ids(2))
    assert_like(feed(again, saved(cache), ids(2)), want)
    again.model(ids(2), **{cache_kwarg(): (loaded := saved(cache))})
    assert loaded.get_seq_length() == 22
    with torch.no_grad():
        mlp(again).down_proj.weight.add_(0.1)
    for other in (again, again.model):
        with pytest.raises(CacheMismatchError, match=r"down_proj\.weight` is another tensor"):
            other(ids(2), **{cache_kwarg(): saved(cache)})


def test_a_cache_saved_after_its_model_has_changed_says_nothing_of_the_values() -> None:
    model = llama()
    cache = cache_of(model, "auto")
    feed(model, cache, ids(20))
    with torch.no_grad():
        mlp(model).up_proj.weight.add_(0.1)
    said = cache.state_dict()["owner"]["tensors"]
    assert said["model.layers.1.mlp.up_proj.weight"] == {
        "shape": [96, 64],
        "dtype": "torch.float32",
        "digest": None,
    }
    assert said["model.layers.0.mlp.up_proj.weight"]["digest"] is not None
    feed(llama(), pickle.loads(pickle.dumps(cache)), ids(2))


DAMAGED = [3, {}, {"tensors": [], "adapters": ""}, {"tensors": {"a": [1]}, "adapters": ""}]


@pytest.mark.parametrize("owner", DAMAGED)
def test_a_damaged_owner_is_refused_and_changes_nothing(owner: Any) -> None:
    model = llama()
    cache = cache_of(model, "auto")
    feed(model, cache, ids(20))
    with pytest.raises(PagedCacheError, match=r"state_dict\['owner'\]"):
        cache.load_state_dict(cache.state_dict() | {"owner": owner})
    assert cache.get_seq_length() == 20


def test_a_generation_looks_once_and_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[weights.Weights] = []
    look = weights.weights_of
    monkeypatch.setattr(ownership, "weights_of", lambda model: looks.append(look(model)) or looks[-1])
    model = llama()
    cache = cache_of(model, "auto")
    feed(model, cache, ids(4))
    go_on(model, cache, ids(3), "generate")
    assert len(looks) == 2
    assert looks[0] is looks[1]
    looks.clear()
    replaced = weakref.ref(mlp(model).up_proj.weight)
    mlp(model).up_proj.weight = nn.Parameter(torch.zeros(96, 64))
    assert replaced() is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(CacheMismatchError, match="is not the one that did"):
        feed(llama(), cache, ids(2))


@pytest.mark.slow  # two processes that load a model each
def test_ranks_of_a_tensor_parallel_model_generate_what_one_process_does(tmp_path: Path) -> None:
    """Their weights are DTensors, and each holds the K and V of its own heads."""
    model = llama()
    model.save_pretrained(tmp_path)
    formats = ("auto", *NAMES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.tensor_parallel", str(tmp_path), *formats]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    want = {name: generate(model, cache_of(model, name)) for name in formats}
    want["stock"] = generate(model, DynamicCache(config=model.config))
    assert want["auto"] == want["stock"]
    for rank in ranks:
        out, _ = rank.communicate(timeout=600)
        assert rank.returncode == 0
        assert out.splitlines()[-1].startswith("DTensor {")
        assert ast.literal_eval(out.splitlines()[-1].removeprefix("DTensor ")) == want


def test_layers_that_convert_their_weights_at_the_first_forward_go_on() -> None:
    """As those of bitsandbytes do with biases, and on CPUs with weights."""
    model = by_name("llama").build()
    linear = model.model.layers[1].mlp.up_proj

    def converting(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.clone()
        return torch.nn.functional.linear(x, self.weight)

    kind = type("Linear4bit", (torch.nn.Linear,), {"forward": converting, "__module__": "bitsandbytes.nn"})
    linear.__class__ = kind
    cache = PagedCache(model, block_size=16)
    for tokens in (20, 3):
        feed(model, cache, ids(tokens))
    assert cache.get_seq_length() == 23
