"""The kernel variants that ship, as launches on tensors that hold no data.

A covering list, not the product: every value of every compile-time flag stands in some row, beside what it is
most often met with. A new format is met in the loops over `FORMATS`; what is rare about it gets rows here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

from hf_paged_cache.formats import FORMATS, RecordFormat, kv_format
from hf_paged_cache.kernels.call import Attention, LayerBlocks

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_GATHER_BYTES = 16
"""What one thread can move by one instruction."""
_DENSE_BLOCKS = 200
"""Of a quantized layer, in the model's dtype."""
_SOME_TARGETS = frozenset({"sm_86", "sm_90", "gfx942"})
"""One of each kind, for what costs more to compile everywhere than it tells."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as one kind of launch compiles it.

    Attributes:
        name: What is particular about it.
        kernel: Name of the kernel, because one launch may start two.
        launch: Launches it; gets the module `launch`.
        piece_bits: Width in which K and V can move at best: what divides their rows, 128 at most.
        is_quantized: Whether the layer is quantized.
        over_dense: Whether it is the launch of `attend_kernel` over its blocks in the model's dtype.
        targets: Names of the targets that it is compiled for; None for all.
    """

    name: str
    kernel: str
    launch: Callable[[Any], object]
    piece_bits: int
    is_quantized: bool = False
    over_dense: bool = False
    targets: frozenset[str] | None = None

    def is_for(self, target: str) -> bool:
        """Whether it is compiled for that target."""
        return self.targets is None or target in self.targets


def _tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def _piece_bits(*row_bytes: int) -> int:
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

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of K and V."""
        return self.head_dim, self.v_head_dim or self.head_dim

    def pools(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in blocks."""
        k_dim, v_dim = self.dims
        shape = num_blocks, self.kv_heads, self.block_size
        return _tensor(*shape, k_dim, dtype=self.dtype), _tensor(*shape, v_dim, dtype=self.dtype)

    def layout(self, name: str, group_size: int = 32) -> RecordFormat:
        """Its records in that format."""
        layer_format = kv_format(name, group_size=group_size)
        assert layer_format is not None, f"{name} has no records"
        return layer_format.bind(self.block_size, *self.dims)

    def blocks(
        self, layout: RecordFormat | None = None, batch: int = 8, *, padded: bool = False, check: bool = False
    ) -> LayerBlocks:
        """One layer's blocks, under tables of 128 columns."""
        blocks = LayerBlocks(*self.pools(_DENSE_BLOCKS if layout else self.num_blocks), _tensor(batch, 128))
        if layout is not None:
            blocks.layout = layout
            blocks.records = _tensor(self.num_blocks, self.kv_heads, layout.nbytes, dtype=torch.uint8)
            blocks.fault = _tensor(2) if check else None
        blocks.offsets = _tensor(batch) if padded else None
        return blocks

    def new(self, tokens: int, batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """As projections leave them: `[batch, tokens, kv_heads, head_dim]`, two dims swapped."""
        keys, values = (
            _tensor(batch, tokens, self.kv_heads, dim, dtype=self.dtype).transpose(1, 2) for dim in self.dims
        )
        return keys, values

    def query(self, tokens: int, batch: int = 8) -> torch.Tensor:
        """Laid out as `new` is."""
        heads = self.kv_heads * self.group
        return _tensor(batch, tokens, heads, self.head_dim, dtype=self.dtype).transpose(1, 2)

    def mask(self, kind: str | None, q_tokens: int, tokens: int, batch: int) -> torch.Tensor | None:
        """`padding` is one for all queries of a row, `rows` and `additive` differ between queries."""
        if kind is None:
            return None
        if kind == "padding":
            return _tensor(batch, 1, 1, tokens, dtype=torch.bool)
        return _tensor(batch, 1, q_tokens, tokens, dtype=torch.bool if kind == "rows" else self.dtype)

    @property
    def piece_bits(self) -> int:
        """Of rows of K and V."""
        return _piece_bits(*(dim * self.dtype.itemsize for dim in self.dims))


_LLAMA = Model()


def _attend(
    name: str,
    model: Model = _LLAMA,
    kv_cache_dtype: str = "auto",
    *,
    kernel: str = "attend_kernel",
    q_tokens: int = 1,
    tokens: int = 8192,
    batch: int = 8,
    mask: str | None = None,
    sinks: bool = False,
    padded: bool = False,
    splits: int | None = None,
    dense_columns: tuple[tuple[int, ...], ...] = (),
    over_dense: bool = False,
    bits: int | None = None,
    **options: Any,
) -> Variant:
    layout = None if kv_cache_dtype == "auto" else model.layout(kv_cache_dtype)

    def launch(module: Any) -> None:
        a = Attention(
            model.query(q_tokens, batch),
            0,
            tokens,
            0.125,
            model.mask(mask, q_tokens, tokens, batch),
            sinks=_tensor(model.kv_heads * model.group, dtype=model.dtype) if sinks else None,
            **options,
        )
        blocks = model.blocks(layout, batch, padded=padded)
        module.attend(blocks, a, _tensor(batch), dense_columns=dense_columns, splits=splits)

    best = model.piece_bits
    if layout is not None and not over_dense:
        best = _piece_bits(*(layout.codec(side).row_bytes(layout.dim(side)) for side in ("keys", "values")))
    return Variant(name, kernel, launch, bits or best, layout is not None, over_dense)


def _dense(name: str, model: Model, *, tokens: int = 512, batch: int = 8, **options: Any) -> Variant:
    def launch(module: Any) -> None:
        a = Attention(model.query(tokens, batch), 0, tokens, 0.125, causal=True, **options)
        module.attend_dense(a, *model.new(tokens, batch))

    return Variant(name, "attend_kernel", launch, model.piece_bits)


def _write(
    name: str,
    model: Model = _LLAMA,
    kv_cache_dtype: str = "auto",
    *,
    tokens: int = 1,
    padded: bool = False,
    group_size: int = 32,
) -> Variant:
    layout = None if kv_cache_dtype == "auto" else model.layout(kv_cache_dtype, group_size)

    def launch(module: Any) -> None:
        blocks = model.blocks(layout, padded=padded, check=True)
        dense = layout is None or not layout.format.is_per_token
        module.write(blocks, _tensor(8), *model.new(tokens), dense=dense)

    return Variant(name, "write_kernel", launch, model.piece_bits, layout is not None)


def _encode(name: str, kv_cache_dtype: str, model: Model = _LLAMA, *, padded: bool = False) -> Variant:
    layout = model.layout(kv_cache_dtype)

    def launch(module: Any) -> None:
        module.encode(model.blocks(layout, padded=padded, check=True), layout, *model.new(512), 0)

    return Variant(name, "encode_kernel", launch, model.piece_bits, True)


def _seal(name: str, kv_cache_dtype: str, model: Model = _LLAMA) -> Variant:
    layout = model.layout(kv_cache_dtype)

    def launch(module: Any) -> None:
        blocks, ids = model.blocks(layout), _tensor(2, 8)
        assert blocks.records is not None, "a quantized layer has records"
        pools = (pool[:, None] for pool in (blocks.records, blocks.keys, blocks.values))
        module.seal(layout, *pools, ids[0], ids[1])

    return Variant(name, "encode_kernel", launch, model.piece_bits, True)


def _copy(name: str, model: Model = _LLAMA) -> Variant:
    def launch(module: Any) -> None:
        module.copy_blocks(model.pools(model.num_blocks)[0], [1, 2], [3, 4])

    block_bytes = model.kv_heads * model.block_size * model.head_dim * model.dtype.itemsize
    return Variant(name, "copy_kernel", launch, _piece_bits(block_bytes))


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
        _dense("dense", _LLAMA),
        _dense("dense fp32", Model(_FP32)),
        _dense("dense window softcap d256", Model(head_dim=256, group=2), window=4096, softcap=50.0),
        _dense("dense long", _LLAMA, tokens=1 << 22, batch=2),  # strides of rows past 2**31
    ]


def _other_rows() -> list[Variant]:
    return [
        _attend("merge", kernel="merge_kernel", splits=8),
        _attend("merge sinks d97", Model(head_dim=97), kernel="merge_kernel", splits=8, sinks=True),
        _attend("merge d256 fp32", Model(_FP32, head_dim=256), kernel="merge_kernel", splits=8, softcap=50.0),
        _write("write one"),
        _write("write one begins later", padded=True),
        _write("write many", tokens=512),
        _write("write fp16 d80", Model(_FP16, head_dim=80)),
        _write("write fp32 d256", Model(_FP32, head_dim=256)),
        _write("write d97", Model(head_dim=97)),
        _write("write d192/128", Model(head_dim=192, v_head_dim=128)),
        _copy("copy"),
        _copy("copy fp16 d80", Model(_FP16, head_dim=80, block_size=16)),
        _copy("copy fp32 d97", Model(_FP32, head_dim=97)),
    ]


def _quantized_rows() -> list[Variant]:
    """Every format in a decode step, in a prefill over history, written or sealed; and what is rare."""
    history: dict[str, Any] = {"q_tokens": 256, "batch": 32}
    edges: dict[str, Any] = {"dense_columns": ((0, 127),)}
    d64, d80, d97 = Model(head_dim=64), Model(head_dim=80, group=1), Model(head_dim=97)
    d256, fp32 = Model(head_dim=256, group=2), Model(_FP32)
    late: dict[str, Any] = {"dense_columns": ((0, 127), (0, 99)), "padded": True}
    common = [
        *(_attend(f"{name} decode", _LLAMA, name) for name in FORMATS),
        _attend("int8 history", _LLAMA, "int8", **history),
        _attend("int4 history", _LLAMA, "int4", **history),
        _attend("int4 dense blocks", _LLAMA, "int4", over_dense=True, **edges),
        _attend("int4 merge", _LLAMA, "int4", kernel="merge_kernel", **edges),
        *(_attend(f"{name} decode begins later", _LLAMA, name, padded=True) for name in ("int8", "int4")),
        _attend("int4 dense blocks begin later", _LLAMA, "int4", over_dense=True, **late),
        _write("int8 write", _LLAMA, "int8"),
        _write("int8 write begins later", _LLAMA, "int8", padded=True),
        _seal("int4 seal", "int4"),
    ]
    unsplit: dict[str, Any] = {"batch": 64, "sinks": True, "window": 128, "causal": True}
    masked: dict[str, Any] = {"mask": "padding", "window": 1024, "causal": True, **history}
    others = [
        *(
            _attend(f"{name} history", _LLAMA, name, **history)
            for name in FORMATS
            if name not in ("int8", "int4")
        ),
        _attend("int8 decode unsplit sinks window", _LLAMA, "int8", **unsplit),
        _attend("int8 decode softcap d256", d256, "int8", softcap=50.0),
        _attend("int8 decode fp32", fp32, "int8"),
        _attend("int8 decode d97", d97, "int8"),
        _attend("int8 prefill rows", _LLAMA, "int8", mask="rows", q_tokens=256),
        # 64 tokens of 32 bytes are 8 for each of the 256 threads of an AMD program.
        _attend("int4 decode d64 padding", d64, "int4", mask="padding", bits=64, **edges),
        _attend("int4 decode d80", d80, "int4"),
        _attend("int4 decode d256", d256, "int4"),
        _attend("int4 prefill window padding", _LLAMA, "int4", **masked),
        _attend("fp8 decode d80", d80, "fp8"),
        _write("fp8 write d64", d64, "fp8"),
        _write("k8v4 write d256", d256, "k8v4"),
        _write("int4_group write d80", d80, "int4_group", tokens=512, group_size=20),
        _write("int4 write", _LLAMA, "int4"),
        _encode("int4 encode d80", "int4", d80),
        _encode("int4 encode begins later", "int4", padded=True),
        _seal("int8_block seal d97", "int8_block", d97),
        _seal("int8 seal d64", "int8", d64),
        _seal("fp8 seal", "fp8"),
    ]
    return [*common, *(replace(row, targets=_SOME_TARGETS) for row in others)]


def all_variants() -> dict[str, Variant]:
    """Every row by its name."""
    rows = [*_decode_rows(), *_prefill_rows(), *_other_rows(), *_quantized_rows()]
    named = {row.name: row for row in rows}
    assert len(named) == len(rows), "two variants have one name"
    return named
