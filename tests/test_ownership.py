"""K and V are used by the weights that computed them, by those of the whole model, and by no others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from hf_paged_cache import CacheMismatchError
from tests.models import by_name, cache_kwarg
from tests.quantised import cache_of, feed, ids

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

    def merge(self, sign: int = 1) -> None:
        for name in self.active_adapters:
            self.base_layer.weight.data += (
                sign * self.lora_B[name].weight.data @ self.lora_A[name].weight.data
            )
        self.merged_adapters = list(self.active_adapters) if sign > 0 else []


class InBuffers(nn.Module):
    """A layer whose weight is stored in integers, in buffers, as GPTQ's is. It counts its calls."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scales = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (base.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x @ (self.qweight * self.scales).T


class Opaque(torch.Tensor):
    """A weight of some library: it can be multiplied by and copied into, and nothing else."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        out: Opaque = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        out.inner = inner
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in ("t", "mm", "detach", "mul_", "copy_", "_to_copy", "clone"):
            raise NotImplementedError(f"Opaque: unimplemented {name}")
        plain = [each.inner if isinstance(each, Opaque) else each for each in args]
        result = func(*plain, **(kwargs or {}))
        if name.endswith("_"):
            return args[0]
        return result if name == "mm" else Opaque(result)


def llama() -> Any:
    return by_name("llama").build()


def adapted() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model.eval()


def in_buffers() -> Any:
    model = llama()
    model.model.layers[1].mlp.up_proj = InBuffers(model.model.layers[1].mlp.up_proj)
    return model.eval()


def opaque() -> Any:
    model = llama()
    for layer in model.model.layers:
        proj = layer.self_attn.k_proj
        proj.weight = nn.Parameter(Opaque(proj.weight.detach()), requires_grad=False)
    return model


def dynamic_rope() -> Any:
    case = by_name("llama")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return type(case)(
        **vars(case) | {"options": case.options | {"rope_parameters": rope, "max_position_embeddings": 16}}
    ).build()


def mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


def adapters(model: Any) -> list[Adapted]:
    return [module for module in model.modules() if isinstance(module, Adapted)]


def train(model: Any, **options: Any) -> None:
    with torch.enable_grad():
        model(ids(8), labels=ids(8), use_cache=False).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()


def set_adapters(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: [setattr(each, name, value) for each in adapters(model)] and None


def replace(holder: Callable[[Any], Any], name: str) -> Callable[[Any], None]:
    return lambda model: setattr(holder(model), name, copy.deepcopy(getattr(holder(model), name)))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an optimizer's step": (llama, train),
    "a fused optimizer's step": (llama, lambda m: train(m, fused=True)),
    "one that goes parameter by parameter": (llama, lambda m: train(m, foreach=False)),
    "a write into an MLP": (llama, lambda m: mlp(m).up_proj.weight.add_(0.1)),
    "a write into a norm": (llama, lambda m: m.model.norm.weight.mul_(1.1)),
    "other data": (llama, lambda m: setattr(mlp(m).up_proj.weight, "data", mlp(m).up_proj.weight * 2)),
    "another checkpoint": (llama, lambda m: m.load_state_dict(by_name("llama").build(noise=0.5).state_dict())),
    "the tensors of another": (
        llama, lambda m: m.load_state_dict(by_name("llama").build(noise=0.5).state_dict(), assign=True)
    ),
    "another MLP": (llama, replace(lambda m: m.model.layers[1], "mlp")),
    "no MLP": (llama, lambda m: setattr(m.model.layers[1], "mlp", nn.Identity())),
    "other embeddings": (llama, lambda m: m.set_input_embeddings(nn.Embedding(97, 64))),
    "another order of layers": (llama, lambda m: m.model.layers.insert(0, m.model.layers.pop(2))),
    "more tokens in the vocabulary": (llama, lambda m: m.resize_token_embeddings(101)),
    "an adapter": (llama, lambda m: setattr(mlp(m), "up_proj", Adapted(mlp(m).up_proj))),
    "a switch of adapters": (adapted, set_adapters("active_adapters", ["b"])),
    "a second active adapter": (adapted, set_adapters("active_adapters", ["a", "b"])),
    "adapters off": (adapted, set_adapters("disable_adapters", True)),
    "a merge": (adapted, lambda m: [each.merge() for each in adapters(m)]),
    "a scale": (adapted, lambda m: adapters(m)[0].scaling.update(a=0.5)),
    "a step of the active adapter": (adapted, lambda m: adapters(m)[0].lora_A["a"].weight.mul_(2)),
    "a write into a buffer": (in_buffers, lambda m: mlp(m).up_proj.qweight.add_(1)),
    "another buffer": (in_buffers, replace(lambda m: mlp(m).up_proj, "scales")),
    "a write into an opaque weight": (opaque, lambda m: m.model.layers[1].self_attn.k_proj.weight.mul_(2.0)),
    "a write into its inside": (opaque, lambda m: m.model.layers[1].self_attn.k_proj.weight.inner.mul_(2.0)),
}  # fmt: skip
"""What makes old K and V wrong: how the model is made, and what is done to it."""

SAME: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "nothing": (llama, lambda m: None),
    "moves to where it is": (llama, lambda m: m.to("cpu").to(torch.float32).float()),
    "modes": (llama, lambda m: m.train().eval().requires_grad_(False)),
    "gradients": (llama, lambda m: m(ids(4), labels=ids(4), use_cache=False).loss),
    "tying": (llama, lambda m: m.tie_weights()),
    "a copy": (llama, copy.deepcopy),
    "a pickle": (llama, pickle.dumps),
    "wrappers": (llama, lambda m: m.model.layers.__setitem__(1, Wrapped(m.model.layers[1]))),
    "offloading": (llama, lambda m: cpu_offload(m, torch.device("cpu"))),
    "a buffer that is made anew": (dynamic_rope, lambda m: m(ids(60), use_cache=False)),
    "counting": (in_buffers, lambda m: m(ids(4), use_cache=False)),
    "an idle adapter's step": (adapted, lambda m: adapters(m)[0].lora_A["b"].weight.mul_(2)),
    "an idle adapter's end": (
        adapted,
        lambda m: [
            part.pop("b") for each in adapters(m) for part in (each.lora_A, each.lora_B, each.scaling)
        ],
    ),
    "adapters off and on": (
        adapted,
        lambda m: [
            set_adapters("disable_adapters", value)(m) or m(ids(4), use_cache=False)
            for value in (True, False)
        ],
    ),
    "a merge that is undone": (
        adapted,
        lambda m: [each.merge(sign) for sign in (1, -1) for each in adapters(m)],
    ),
    "opaque weights": (opaque, lambda m: None),
}
"""What leaves them right."""


class Wrapped(nn.Module):
    """As what a compiler puts around a layer."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)


def go_on(model: Any, cache: Any, tokens: torch.Tensor, how: str) -> torch.Tensor:
    """Feed tokens after what is cached. Logits, or the tokens that come next."""
    if how == "forward":
        return feed(model, cache, tokens)
    held = cache.input_ids
    text = torch.cat((held, tokens), dim=1)
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
    assert torch.equal(feed(model, cache, ids(20)), feed(model, fresh, ids(20)))
    assert torch.equal(go_on(model, cache, ids(3), how), go_on(model, fresh, ids(3), how))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", ["forward", "generate"])
@pytest.mark.parametrize("what", SAME)
def test_the_same_weights_go_on(what: str, how: str, name: str) -> None:
    make, apply = SAME[what]
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    cache, undisturbed = cache_of(model, name), cache_of(other, name)
    assert torch.equal(feed(model, cache, ids(20)), feed(other, undisturbed, ids(20)))
    apply(model)
    for seed in (1, 2):
        got, want = (go_on(m, c, ids(3, seed=seed), how) for m, c in ((model, cache), (other, undisturbed)))
        torch.testing.assert_close(got, want)
