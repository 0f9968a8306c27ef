"""Tensors without storage that become dense only if somebody looks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from .errors import PagedCacheError

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass


class LazyTensor(torch.Tensor):
    """Stands for a tensor that `dense()` makes: right shape, dtype and device, no storage.

    Code that knows the subclass reads what it stands for. Every operation of anybody else works on the dense
    tensor. That tensor is read-only, since changing it would not change what it was made from.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # Operators reach __torch_dispatch__ without this detour through Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
        args, kwargs = (tree_map_only(LazyTensor, _contiguous, given) for given in (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"{type(self).__name__}({self.origin()}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = self.dense().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return reduced

    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`."""
        return self.dense().numpy(force=force)

    def tolist(self) -> Any:
        """As `torch.Tensor.tolist`."""
        return self.dense().tolist()


def dense(tensor: Any) -> Any:
    """The dense tensor behind a lazy one; anything else as it is."""
    return tensor.dense() if isinstance(tensor, LazyTensor) else tensor


def _contiguous(tensor: LazyTensor) -> torch.Tensor:
    """The dense tensor, laid out as the lazy one says: what an operator may do was decided by its strides."""
    return tensor.dense().contiguous()


def make_wrapper(
    cls: type[LazyTensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of a lazy class: a shape, and nothing behind it."""
    return _make_wrapper(cls, shape, dtype=dtype, device=device)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(target, LazyTensor):
            raise PagedCacheError(
                f"`{func}` would write into the {target.origin()}, which is read-only: `.clone()` the tensor "
                "first, or write through `cache.update(...)`"
            )
