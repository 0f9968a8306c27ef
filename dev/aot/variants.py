"""The kernel variants that ship, as launches on tensors that hold no data.

A covering list, not the product: every value of every compile-time flag stands in some row, beside what it is
most often met with. A new format adds rows here and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_GATHER_BYTES = 16
"""What one thread can move by one instruction."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as one kind of launch compiles it.

    Attributes:
        name: What is particular about it.
        kernel: Name of the kernel, because one launch may start two.
        launch: Launches it; gets the module `launch`, or `records`.
        piece_bits: Width in which K and V can move at best: what divides their rows, 128 at most.
        of_records: Whether blocks are quantized.
        targets: Names of the targets that it is compiled for; None for all.
    """

    name: str
    kernel: str
    launch: Callable[[Any], object]
    piece_bits: int
    of_records: bool = False
    targets: frozenset[str] | None = None

    def is_for(self, target: str) -> bool:
        """Whether it is compiled for that target."""
        return self.targets is None or target in self.targets


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def piece_bits(*row_bytes: int) -> int:
    """Width in which rows of so many bytes can move at best."""
    return 8 * gcd(_GATHER_BYTES, *row_bytes)


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes and dtype of blocks; the defaults are those of Llama-3-8B."""

    dtype: torch.dtype = _BF16
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    v_head_dim: int | None = None
    block_size: int = 64
    num_blocks: int = 20_000  # over 2 GiB, where AMD's compiler loses its 32-bit offsets

    def pools(self, num_blocks: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in blocks."""
        shape = num_blocks or self.num_blocks, self.kv_heads, self.block_size
        return (
            tensor(*shape, self.head_dim, dtype=self.dtype),
            tensor(*shape, self.v_head_dim or self.head_dim, dtype=self.dtype),
        )

    def new(self, tokens: int, batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """As projections leave them: `[batch, tokens, kv_heads, head_dim]`, two dims swapped."""
        dims = self.head_dim, self.v_head_dim or self.head_dim
        keys, values = (
            tensor(batch, tokens, self.kv_heads, dim, dtype=self.dtype).transpose(1, 2) for dim in dims
        )
        return keys, values

    def query(self, tokens: int, batch: int = 8) -> torch.Tensor:
        """Laid out as `new` is."""
        heads = self.kv_heads * self.group
        return tensor(batch, tokens, heads, self.head_dim, dtype=self.dtype).transpose(1, 2)

    @property
    def piece_bits(self) -> int:
        """Of rows of K and V."""
        dims = self.head_dim, self.v_head_dim or self.head_dim
        return piece_bits(*(dim * self.dtype.itemsize for dim in dims))


def table(batch: int = 8, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of blocks, and the lengths of its rows."""
    return tensor(batch, columns, dtype=torch.int32), tensor(batch, dtype=torch.int32)


def offsets(batch: int = 8) -> torch.Tensor:
    """Columns before each row begins."""
    return tensor(batch, dtype=torch.int32)


def mask_of(kind: str, model: Model, q_tokens: int, tokens: int, batch: int = 8) -> torch.Tensor:
    """`padding` is one for all queries of a row, `rows` and `additive` differ between queries."""
    if kind == "padding":
        return tensor(batch, 1, 1, tokens, dtype=torch.bool)
    return tensor(batch, 1, q_tokens, tokens, dtype=torch.bool if kind == "rows" else model.dtype)


def _attend(
    name: str,
    model: Model = Model(),
    *,
    kernel: str = "attend_kernel",
    q_tokens: int = 1,
    tokens: int = 8192,
    batch: int = 8,
    mask: str | None = None,
    sinks: bool = False,
    padded: bool = False,
    **options: Any,
) -> Variant:
    def launch(module: Any) -> None:
        module.attend(
            model.query(q_tokens, batch),
            *model.pools(),
            *table(batch),
            tokens=tokens,
            offsets=offsets(batch) if padded else None,
            scale=0.125,
            mask=mask and mask_of(mask, model, q_tokens, tokens, batch),
            sinks=tensor(model.kv_heads * model.group, dtype=model.dtype) if sinks else None,
            **options,
        )

    return Variant(name, kernel, launch, model.piece_bits)


def _dense(name: str, model: Model, *, tokens: int = 512, batch: int = 8, **options: Any) -> Variant:
    def launch(module: Any) -> None:
        query, new = model.query(tokens, batch), model.new(tokens, batch)
        module.attend_dense(query, *new, scale=0.125, causal=True, **options)

    return Variant(name, "attend_kernel", launch, model.piece_bits)


def _write(name: str, model: Model, tokens: int = 1, *, padded: bool = False) -> Variant:
    def launch(module: Any) -> None:
        begin = offsets() if padded else None
        module.write(*model.pools(), *table(), *model.new(tokens), offsets=begin)

    return Variant(name, "write_kernel", launch, model.piece_bits)


def _copy(name: str, model: Model) -> Variant:
    def launch(module: Any) -> None:
        module.copy_blocks(model.pools()[0], [1, 2], [3, 4])

    block_bytes = model.kv_heads * model.block_size * model.head_dim * model.dtype.itemsize
    return Variant(name, "copy_kernel", launch, piece_bits(block_bytes))


def _decode_rows() -> list[Variant]:
    return [
        _attend("decode"),
        _attend("decode fp16", Model(_FP16)),
        _attend("decode fp32", Model(_FP32)),
        _attend("decode unsplit", splits=1),
        _attend("decode unsplit sinks", sinks=True, window=128, splits=1),
        _attend("decode window", window=4096, causal=True),
        _attend("decode window softcap d256", Model(head_dim=256, group=2), window=4096, softcap=50.0),
        _attend("decode padding", mask="padding"),
        _attend("decode begins later", padded=True),
        _attend("decode begins later padding", mask="padding", padded=True),
        _attend("decode additive", mask="additive"),
        _attend("decode additive fp32", Model(_FP32), mask="additive"),
        _attend("decode d64", Model(head_dim=64)),
        _attend("decode d80", Model(head_dim=80, group=1)),
        _attend("decode d96", Model(head_dim=96, group=1)),
        _attend("decode d97", Model(head_dim=97)),
        _attend("decode d97 fp32", Model(_FP32, head_dim=97)),
        _attend("decode d256 fp32", Model(_FP32, head_dim=256, group=2), softcap=50.0),
        _attend("decode d192/128", Model(head_dim=192, v_head_dim=128, group=1)),
        _attend("decode group 8", Model(group=8)),
        _attend("decode group 32", Model(kv_heads=1, group=32)),
        _attend("decode blocks of 16", Model(block_size=16)),
        _attend("decode blocks of 16 fp32", Model(_FP32, block_size=16)),
        _attend("decode few blocks", Model(num_blocks=500)),
        _attend("speculate 8", q_tokens=8, causal=True),
        _attend("speculate 4 fp32", Model(_FP32, group=8), q_tokens=4, causal=True, window=1024),
        _attend("speculate 4 d256 rows", Model(head_dim=256, group=8), q_tokens=4, mask="rows"),
    ]


def _prefill_rows() -> list[Variant]:
    many: dict[str, Any] = {"q_tokens": 256, "causal": True}
    return [
        _attend("history", q_tokens=256, batch=32),
        _attend("history begins later", q_tokens=256, batch=32, padded=True),
        _attend("history split", q_tokens=256, batch=1, splits=4),
        _attend("prefill fp16", Model(_FP16), **many),
        _attend("prefill fp32", Model(_FP32), **many),
        _attend("prefill window softcap", window=1024, softcap=50.0, splits=1, **many),
        _attend("prefill sinks window", Model(head_dim=64, group=8), sinks=True, window=128, **many),
        _attend("prefill padding", mask="padding", **many),
        _attend("prefill rows", mask="rows", q_tokens=256),
        _attend("prefill additive", mask="additive", q_tokens=256),
        _attend("prefill additive fp32", Model(_FP32), mask="additive", q_tokens=256),
        _attend("prefill d256", Model(head_dim=256, group=2), softcap=50.0, window=4096, **many),
        _attend("prefill d256 fp32", Model(_FP32, head_dim=256, group=2), softcap=50.0, **many),
        _attend("prefill d192/128", Model(head_dim=192, v_head_dim=128, group=1), **many),
        _attend("prefill d80", Model(head_dim=80, group=1), **many),
        _attend("prefill d97", Model(head_dim=97), **many),
        _attend("prefill d97 rows", Model(head_dim=97), mask="rows", q_tokens=256),
        _attend("prefill blocks of 16", Model(block_size=16), **many),
        _dense("dense", Model()),
        _dense("dense fp32", Model(_FP32)),
        _dense("dense window softcap d256", Model(head_dim=256, group=2), window=4096, softcap=50.0),
        _dense("dense long", Model(), tokens=1 << 22, batch=2),  # strides of rows past 2**31
    ]


def _other_rows() -> list[Variant]:
    return [
        _attend("merge", kernel="merge_kernel", splits=8),
        _attend("merge sinks d97", Model(head_dim=97), kernel="merge_kernel", splits=8, sinks=True),
        _attend("merge d256 fp32", Model(_FP32, head_dim=256), kernel="merge_kernel", splits=8, softcap=50.0),
        _write("write one", Model()),
        _write("write one begins later", Model(), padded=True),
        _write("write many", Model(), tokens=512),
        _write("write fp16 d80", Model(_FP16, head_dim=80)),
        _write("write fp32 d256", Model(_FP32, head_dim=256)),
        _write("write d97", Model(head_dim=97)),
        _write("write d192/128", Model(head_dim=192, v_head_dim=128)),
        _copy("copy", Model()),
        _copy("copy fp16 d80", Model(_FP16, head_dim=80, block_size=16)),
        _copy("copy fp32 d97", Model(_FP32, head_dim=97)),
    ]


def all_variants() -> dict[str, Variant]:
    """Every row by its name."""
    from .record_variants import record_rows  # which takes models and tensors from here

    rows = [*_decode_rows(), *_prefill_rows(), *_other_rows(), *record_rows()]
    named = {row.name: row for row in rows}
    assert len(named) == len(rows), "two variants have one name"
    return named
