"""The weights that computed what a cache holds.

K and V of a token depend on all that ran before them: embeddings, every earlier layer, adapters. So they
belong to a whole model, of which facts are remembered, no values: its tensor objects, where their memory is,
the writes that torch has counted in each, and steps of optimizers (fused ones are no counted writes).
Parameters count, and buffers that a checkpoint holds, but for single integers, which count something. Of
adapters it is which are active, disabled, or merged, and with what scale, as `peft` names it.

Not seen: writes through `tensor.data` into memory that stays in place, or by code that torch does not know;
weights that others keep for a model (offloading hooks, FSDP, ZeRO) and are new tensors in every forward, or
that their layers convert at the first; activity of adapters that is told to a forward alone. What a call of
the host that uses the cache writes into buffers while it runs (running statistics) is its own.

Refused although K and V would be right: more tokens in the embeddings, a model that was moved to another
device and back, and persistent buffers that a forward writes before it asks the cache how long masks are, or
that one writes which fails or has another cache.

A saved cache knows names, shapes, dtypes, and a digest of a few values of every plain tensor, read when it is
saved, and when a model uses it for the first time.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_paged_cache.host.lazy_tensor import plain_tensors
from hf_paged_cache.store.saved import SavedWeight, SavedWeights

_WATCH = "_hf_paged_cache_watch"
_SAMPLES = 16
_MOVING_HOOKS = {"CpuOffload", "LayerwiseCastingHook"}  # of accelerate: always move weights; others say so
# Packages whose layers bring their weights into another form at their first forward.
_CONVERTING = {"bitsandbytes", "gptqmodel", "auto_gptq", "awq"}


@dataclass(frozen=True, slots=True)
class _Weight:
    """What is known of one tensor of a model."""

    name: str  # as in `named_parameters`; inner tensors of a subclass have that of the whole
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool  # or part of one
    tensor: weakref.ref[torch.Tensor] | None = None  # None if others put it there for the time of a forward
    address: int = 0  # of its memory; 0 if it has none, or none of its own
    version: int | None = None  # writes that torch has counted; None for an inference tensor
    steps: int = 0  # of optimizers, since models are looked at

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, is_moved: bool, is_buffer: bool) -> _Weight:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if is_moved or tensor.is_meta:
            return cls(name, shape, dtype, is_buffer)
        version = None if tensor.is_inference() else tensor._version
        address, steps = _address_of(tensor), _steps[id(tensor)]
        return cls(name, shape, dtype, is_buffer, weakref.ref(tensor), address, version, steps)

    def difference(self, now: _Weight) -> str | None:
        """How a tensor in the same place differs; None if nothing tells it from this one."""
        if (self.shape, self.dtype) != (now.shape, now.dtype):
            found = f"is {list(now.shape)} {now.dtype}, and was {list(self.shape)} {self.dtype}"
        elif self.tensor is None or now.tensor is None:
            return None
        elif self.tensor() is not now.tensor():
            found = "is another tensor"
        elif (self.version, self.steps) != (now.version, now.steps):
            found = "was written to"
        elif self.address and now.address and self.address != now.address:
            found = "has its data elsewhere"
        else:
            return None
        if now.is_buffer:
            found += " (a buffer; `register_buffer(..., persistent=False)` if it is no weight)"
        return f"`{now.name}` {found}"

    def saved(self) -> SavedWeight:
        """What can be said to another process; of values only if they are still there, and plain."""
        tensor, digest = None if self.tensor is None else self.tensor(), None
        if tensor is not None and self.difference(self.as_now(tensor)) is None:
            digest = _digest(tensor)
        return SavedWeight(list(self.shape), str(self.dtype), digest)

    def as_now(self, tensor: torch.Tensor) -> _Weight:
        """What is known now of this tensor, or of a copy of it."""
        return _Weight.of(self.name, tensor, is_moved=False, is_buffer=self.is_buffer)


@dataclass(slots=True, eq=False)
class Weights:
    """The facts about a model's weights at one time."""

    model: weakref.ref[torch.nn.Module]
    modules: frozenset[int]  # identities of its modules then
    tensors: list[_Weight]  # parameters and saved buffers, in the order of modules; copies share this list
    adapters: tuple[Any, ...]  # of every module with adapters, which of them do what
    has_buffers: bool  # among the tensors

    def difference(self, now: Weights) -> str | None:
        """What has changed since; None if nothing has."""
        if now is self:
            return None
        if self.adapters != now.adapters:
            return "its adapters were switched, scaled or merged"
        for weight, other in zip(self.tensors, now.tensors, strict=False):
            if (found := weight.difference(other)) is not None:
                return found
        if len(self.tensors) != len(now.tensors):
            return f"it has {len(now.tensors)} tensors, and had {len(self.tensors)}"
        return None

    def saved(self) -> SavedWeights:
        """What can be said to another process."""
        with torch._C.DisableTorchFunctionSubclass():
            tensors = {weight.name: weight.saved() for weight in self.tensors}
        return SavedWeights(tensors, repr(self.adapters))

    def take_in_buffers(self) -> None:
        """Let what was written into buffers until now be no change: a call of the model has done it."""
        if (model := self.model()) is None:
            return
        now = weights_of(model)
        if len(now.tensors) == len(self.tensors):
            self.tensors[:] = [
                after if after.is_buffer and after.name == before.name else before
                for before, after in zip(self.tensors, now.tensors, strict=True)
            ]
        if self.difference(now) is None:
            vars(model)[_WATCH].weights = self  # other caches of the model hold it too

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        """A copy of a cache belongs to the same model; if that is copied too, `move_to_copy` is called."""
        model = self.model()
        now = self if model is None else weights_of(model)
        is_other = now is not self and self.difference(now) is None
        return copy.deepcopy(now, memo) if is_other else replace(self)

    def move_to_copy(self, memo: dict[int, Any]) -> None:
        """Become the facts about a copy of the model, if the `memo` of a deep copy has all its parts."""
        model, modules = memo.get(id(self.model())), [memo.get(each) for each in self.modules]
        parts: Iterator[torch.Tensor] = iter(())
        tensors: list[_Weight] = []
        for weight in self.tensors:
            tensor = next(parts, None)
            if tensor is None and weight.tensor is not None:
                tensor = memo.get(id(weight.tensor()))
                if tensor is None:
                    return
                parts = iter(plain_tensors(tensor) if hasattr(tensor, "__tensor_flatten__") else ())
            tensors.append(weight if tensor is None else weight.as_now(tensor))
        if model is not None and None not in modules:
            self.model, self.modules = weakref.ref(model), frozenset(map(id, modules))
            self.tensors = tensors


def weights_of(model: torch.nn.Module) -> Weights:
    """The facts about a model's weights now; the same object as long as nothing changes."""
    with torch._C.DisableTorchFunctionSubclass():
        watch = vars(model).get(_WATCH)
        if watch is not None and watch.model() is not model:  # a shallow copy has that of its original
            watch = None
        if watch is None or not watch.is_unchanged():
            before = None if watch is None else watch.weights
            vars(model)[_WATCH] = watch = _Watch(model, before)
        weights: Weights = watch.weights
    return weights


_ALL = 0
# Identity of a parameter -> steps that optimizers have taken with it; under `_ALL` the steps of all.
_steps: Counter[int] = Counter()
_listen = cache(register_optimizer_step_post_hook)  # once for each listener


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    _steps.update([_ALL, *(id(weight) for weight in weights if weight.grad is not None)])


class _Watch:
    """Tells at little cost whether the weights of a model, in which it lies, are still what they were."""

    def __init__(self, model: torch.nn.Module, before: Weights | None) -> None:
        _listen(_count_step)
        self.model = weakref.ref(model)
        survey = _Survey(model)
        adapted = [weakref.ref(module) for module in survey.modules if _adapters_of(module) is not None]
        counted = [weight.tensor for weight in survey.weights if weight.version is not None]
        placed = [weight.tensor for weight in survey.weights if weight.address]
        self._watched: list[tuple[Callable[[Any], Any], list[Any]]] = [
            (attrgetter("_version"), counted),
            (torch.Tensor.data_ptr, placed),
            (_adapters_of, adapted),
        ]
        self._before = self._now()
        modules = frozenset(map(id, survey.modules))
        has_buffers = any(weight.is_buffer for weight in survey.weights)
        self.weights = Weights(self.model, modules, survey.weights, tuple(self._before[-1]), has_buffers)
        if before is not None and before.modules == modules and before.difference(self.weights) is None:
            self.weights = before  # caches hold it already
        self._all_steps = _steps[_ALL]
        self._gone: list[object] = []
        self._modules = [weakref.ref(module, self._gone.append) for module in survey.modules]
        self._dicts = [each.values() for module in survey.modules for each in _dicts_of(module)]
        # Identities only, so that a tensor which is replaced is free at once.
        self._members = list(map(id, chain.from_iterable(self._dicts)))

    def is_unchanged(self) -> bool:
        """Whether all is as it was when this was made."""
        try:
            return (
                not self._gone
                and self._all_steps == _steps[_ALL]
                and list(map(id, chain.from_iterable(self._dicts))) == self._members
                and self._now() == self._before
            )
        except (AttributeError, TypeError, RuntimeError):  # a tensor is gone, or lost its memory
            return False

    def _now(self) -> list[list[Any]]:
        return [list(map(fact, [each() for each in references])) for fact, references in self._watched]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch | None:
        """That of a copy of the model, which looks anew, and finds what copies of caches know of it."""
        model = self.model()
        if model is None:
            return None
        # All parts of the model have their copies by now; the caches may come before it or after.
        with torch._C.DisableTorchFunctionSubclass():
            weights = copy.deepcopy(weights_of(model), memo)
            weights.move_to_copy(memo)
        copied = _Watch.__new__(_Watch)
        copied.model, copied.weights = weights.model, weights
        copied._gone = [None]  # so that the first who asks has it made anew
        return copied

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A model in a file has none."""
        return type(None), ()


class _Survey:
    """What a model consists of: itself and the modules below it, and the tensors that count."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules: list[torch.nn.Module] = []
        self.weights: list[_Weight] = []
        self._seen: set[int] = set()
        self._visit(model, "", is_moved=False)

    def _visit(
        self, module: torch.nn.Module, name: str, *, is_moved: bool, keys: frozenset[str] | None = None
    ) -> None:
        """Take in a module, all of it or the members `keys`; `is_moved` as of a module around it."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self.modules.append(module)
        is_moved = is_moved or _is_moved(module)
        converts = type(module).__module__.partition(".")[0] in _CONVERTING
        # FSDP and others put plain tensors there.
        given: dict[str, torch.Tensor | None] = {**module._parameters}
        for key, tensor in given.items():
            if tensor is not None and (keys is None or key in keys):
                # Made for the time of a forward, or to be: the second is a mark of DeepSpeed's.
                is_lent = not isinstance(tensor, torch.nn.Parameter) and tensor._is_view()
                is_lent = is_lent or hasattr(tensor, "ds_id")
                self._add(tensor, name + key, is_moved=is_moved or is_lent, converts=converts)
        for key, tensor in module._buffers.items():
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            is_count = tensor.numel() == 1 and not (tensor.is_floating_point() or tensor.is_complex())
            if not is_count:
                self._add(tensor, name + key, is_moved=is_moved, converts=converts, is_buffer=True)
        adapters = _adapters_of(module)
        for key, child in module._modules.items():
            if child is not None and (keys is None or key in keys):
                is_choice = adapters is not None and key in getattr(module, "adapter_layer_names", ())
                chosen = frozenset(adapters.active) if adapters is not None and is_choice else None
                self._visit(child, f"{name}{key}.", is_moved=is_moved, keys=chosen)

    def _add(
        self, tensor: torch.Tensor, name: str, *, is_moved: bool, converts: bool, is_buffer: bool = False
    ) -> None:
        if id(tensor) in self._seen or torch.nn.parameter.is_lazy(tensor):
            return
        self._seen.add(id(tensor))
        if converts:
            self.weights.append(_Weight(name, (), torch.uint8, is_buffer))
            return
        self.weights.append(_Weight.of(name, tensor, is_moved=is_moved, is_buffer=is_buffer))
        if hasattr(tensor, "__tensor_flatten__") and not is_moved:
            # What a subclass is made of may be written to by itself.
            for index, inner in enumerate(plain_tensors(tensor)):
                part = _Weight.of(f"{name}.{index}", inner, is_moved=False, is_buffer=is_buffer)
                self.weights.append(part)


class _Adapters(NamedTuple):
    """What the adapters of one module do, as `peft` and `loralib` say it."""

    active: tuple[str, ...]
    merged: tuple[str, ...]
    scaling: tuple[tuple[str, float], ...]


def _adapters_of(module: torch.nn.Module) -> _Adapters | None:
    """Those of a module; None for one without any."""
    is_disabled, is_merged = _attribute(module, "disable_adapters"), _attribute(module, "merged")
    if not isinstance(is_disabled, bool) and not isinstance(is_merged, bool):
        return None
    names = _attribute(module, "active_adapters") or ()
    active = () if is_disabled is True else (names,) if isinstance(names, str) else tuple(names)
    merged = tuple(_attribute(module, "merged_adapters") or ()) or ((str(is_merged),) if is_merged else ())
    scaling = _attribute(module, "scaling")
    scales = scaling.items() if isinstance(scaling, dict) else [("", scaling)]
    counted = ((k, s) for k, s in scales if isinstance(s, int | float) and (k in active or not k))
    return _Adapters(active, merged, tuple(counted))


def _attribute(module: torch.nn.Module, name: str) -> Any:
    """Of the object or its class; `getattr` would search parameters and wrapped modules, and slowly."""
    own = vars(module)
    return own[name] if name in own else getattr(module, name) if hasattr(type(module), name) else None


def _is_moved(module: torch.nn.Module) -> bool:
    """Whether others bring the weights of a module for the time of a forward: accelerate, or FSDP."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    names = {kind.__name__ for each in hooks for kind in type(each).__mro__}
    return (
        hasattr(type(module), "unshard")
        or not names.isdisjoint(_MOVING_HOOKS)
        or any(getattr(each, "offload", False) is True for each in hooks)
    )


def _dicts_of(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Where a module keeps what counts, as far as there is any."""
    has_saved = not module._non_persistent_buffers_set.issuperset(module._buffers)
    return filter(None, (module._parameters, module._buffers if has_saved else {}, module._modules))


def _address_of(tensor: torch.Tensor) -> int:
    try:
        # What is given to another process moves to memory that both can see. (On a GPU all is shared.)
        is_shared: bool = tensor.is_cpu and tensor.is_shared()  # type: ignore[no-untyped-call]
        return 0 if is_shared else tensor.data_ptr()
    except RuntimeError:  # what torch says of a tensor without memory
        return 0


def _digest(tensor: torch.Tensor) -> str | None:
    """Of a few values; None if they cannot be read, or are not plain."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or not tensor.numel():
        return None
    sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)].contiguous()
    return hashlib.blake2b(sample.view(torch.uint8).cpu().numpy().tobytes(), digest_size=8).hexdigest()
