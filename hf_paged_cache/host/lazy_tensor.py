"""Tensors that stand for others: they become dense only if somebody looks, and nobody writes to them.

And the plain tensors behind what wraps them, as whoever counts bytes needs them (`plain_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from hf_paged_cache.errors import WAYS_TO_CHANGE, PagedCacheError

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_make_subclass: Any = torch.Tensor._make_subclass
_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def _refused(what: str) -> Any:
    """A method that would write."""
    return lambda tensor, *args, **kwargs: tensor._refuse(what)


class LazyTensor(torch.Tensor):
    """Stands for a tensor that `dense()` makes: right shape, dtype and device, no storage.

    Code that knows the subclass reads what it stands for. Every operation of anybody else works on the dense
    tensor. That tensor is read-only, since changing it would not change what it was made from; and so is
    every part of it that an operation returns (a slice, a transpose).
    """

    # Operators reach __torch_dispatch__ without this detour through Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of_shape(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """A shape, and nothing behind it; what it stands for is told by attributes of the class."""
        tensor: Self = _make_wrapper(cls, shape, dtype=dtype, device=device)
        # Whoever takes the address of what is not there gets an error, and not a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        return tensor

    def dense(self) -> torch.Tensor:
        """The ordinary tensor."""
        raise AssertionError("a lazy tensor says itself how it becomes dense")

    def origin(self) -> str:
        """What the tensor stands for, in messages."""
        raise AssertionError("a lazy tensor says itself what it stands for")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without `classmethod`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the dense tensors."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        origins: dict[int, str] = {}  # of the memory that must not be written

        def read(lazy: LazyTensor) -> torch.Tensor:
            tensor = lazy.dense()
            if tensor.stride() != lazy.stride():  # by which it was decided what an operator may do
                tensor = tensor.contiguous()
            origins[tensor.untyped_storage().data_ptr()] = lazy.origin()
            return tensor

        def protect(result: torch.Tensor) -> torch.Tensor:
            if result.layout is not torch.strided:
                return result
            origin = origins.get(result.untyped_storage().data_ptr())
            return result if origin is None else ReadOnlyTensor.of(result, origin)

        args, named = _mapped(LazyTensor, read, (args, tuple(kwargs.values())))
        return _mapped(torch.Tensor, protect, func(*args, **dict(zip(kwargs, named, strict=True))))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"{type(self).__name__}({self.origin()}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = self.dense().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return reduced

    data = property(
        lambda self: self.detach(), _refused("assigning to `data`"), doc="As `torch.Tensor.data`."
    )
    __dlpack__ = _refused("`__dlpack__`")  # whoever gets the memory could write to it
    apply_ = _refused("`apply_`")

    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`, of a copy that is read-only too."""
        array = self.dense().detach().clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """As `torch.Tensor.tolist`."""
        return self.dense().tolist()

    def _refuse(self, what: str) -> NoReturn:
        raise PagedCacheError(
            f"{what} would write into the {self.origin()}, which is read-only: `.clone()` the tensor and use "
            f"that. {WAYS_TO_CHANGE}"
        )


class ReadOnlyTensor(LazyTensor):
    """A part of what a lazy tensor stands for, over the same memory."""

    _origin: str
    _dense: torch.Tensor

    @classmethod
    def of(cls, part: torch.Tensor, origin: str) -> ReadOnlyTensor:
        """The same tensor for reading; `origin` says in messages what it is of."""
        tensor: ReadOnlyTensor = _make_subclass(cls, part)
        tensor._dense, tensor._origin = part, origin
        return tensor

    def dense(self) -> torch.Tensor:
        """The ordinary tensor."""
        return self._dense

    def origin(self) -> str:
        """What it is of."""
        return self._origin


def dense(tensor: Any) -> Any:
    """The dense tensor behind a lazy one that is no part of a graph; anything else as it is."""
    return tensor.dense() if isinstance(tensor, LazyTensor) and not tensor.requires_grad else tensor


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors inside what torch's pytrees know (tuples, lists, dicts), and inside other tensors."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            continue
        if hasattr(leaf, "__tensor_flatten__"):
            yield from plain_tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        else:
            yield leaf


def _mapped(kind: type[_Tensor], function: Callable[[_Tensor], Any], value: Any) -> Any:
    """The same with a function applied to the tensors of one kind, faster than torch's `tree_map` does it."""
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(kind, function, item) for item in value])
    return function(value) if isinstance(value, kind) else value


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            _mapped(LazyTensor, lambda target: target._refuse(f"`{func}`"), given)
