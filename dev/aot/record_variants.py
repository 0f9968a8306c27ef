"""The variants of the kernels that read and write quantized blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_paged_cache.formats import FORMATS, RecordFormat, kv_format

from .variants import Model, Variant, mask_of, offsets, piece_bits, table, tensor

_SLOTS = 200
_LLAMA = Model()
_SOME_TARGETS = frozenset({"sm_86", "sm_90", "gfx942"})
"""One of each kind, for what costs more to compile everywhere than it tells."""


def _form(name: str, model: Model, group_size: int) -> RecordFormat:
    form = kv_format(name, group_size=group_size)
    assert form is not None, f"{name} has no records"
    return form.bind(model.block_size, model.head_dim, model.v_head_dim or model.head_dim)


def _row_bits(form: RecordFormat) -> int:
    return piece_bits(*(form.codec(side).row_bytes(form.dim(side)) for side in ("keys", "values")))


def _records(form: RecordFormat, model: Model) -> torch.Tensor:
    return tensor(model.num_blocks, model.kv_heads, form.nbytes, dtype=torch.uint8)


def _attend(
    name: str,
    form_name: str,
    model: Model = _LLAMA,
    *,
    kernel: str = "attend_records_kernel",
    q_tokens: int = 1,
    tokens: int = 8192,
    batch: int = 8,
    mask: str | None = None,
    sinks: bool = False,
    dense_columns: tuple[tuple[int, ...], ...] = (),
    padded: bool = False,
    group_size: int = 32,
    bits: int | None = None,
    **options: Any,
) -> Variant:
    form = _form(form_name, model, group_size)

    def launch(module: Any) -> None:
        module.attend(
            form,
            _records(form, model),
            *model.pools(_SLOTS),
            *table(batch),
            model.query(q_tokens, batch),
            tokens=tokens,
            dense_columns=dense_columns,
            offsets=offsets(batch) if padded else None,
            scale=0.125,
            mask=mask and mask_of(mask, model, q_tokens, tokens, batch),
            sinks=tensor(model.kv_heads * model.group, dtype=model.dtype) if sinks else None,
            **({"start": 0, "back": 0, "causal": False, "window": None, "softcap": None} | options),
            queries_are_last=True,
        )

    if bits is None:
        bits = model.piece_bits if kernel == "attend_kernel" else _row_bits(form)
    return Variant(name, kernel, launch, bits, of_records=True)


def _write(
    name: str, form_name: str, model: Model, *, tokens: int = 1, group_size: int = 32, padded: bool = False
) -> Variant:
    form = _form(form_name, model, group_size)

    def launch(module: Any) -> None:
        module.write_tokens(
            form,
            _records(form, model),
            *model.pools(_SLOTS),
            *table(),
            *model.new(tokens),
            fault=tensor(2, dtype=torch.int32),
            dense=not form.format.is_per_token,
            offsets=offsets() if padded else None,
        )

    return Variant(name, "write_records_kernel", launch, model.piece_bits, of_records=True)


def _encode(
    name: str, form_name: str, model: Model, *, seal: bool, group_size: int = 32, padded: bool = False
) -> Variant:
    form = _form(form_name, model, group_size)

    def launch(module: Any) -> None:
        if seal:
            pools = (pool[:, None] for pool in model.pools(_SLOTS))
            ids = tensor(2, 8, dtype=torch.int32)
            module.seal(form, _records(form, model)[:, None], *pools, ids[0], ids[1])
        else:
            module.write_blocks(
                form,
                _records(form, model),
                table()[0],
                *model.new(512),
                0,
                fault=tensor(2, dtype=torch.int32),
                offsets=offsets() if padded else None,
            )

    return Variant(name, "encode_records_kernel", launch, model.piece_bits, of_records=True)


def record_rows() -> list[Variant]:
    """Every format in a decode step, in a prefill over history, written or sealed; and what is rare."""
    history: dict[str, Any] = {"q_tokens": 256, "batch": 32}
    d64, d80, d97 = Model(head_dim=64), Model(head_dim=80, group=1), Model(head_dim=97)
    d256 = Model(head_dim=256, group=2)
    fp32 = Model(torch.float32)
    common = [
        *(_attend(f"{name} decode", name) for name in FORMATS),
        _attend("int8 history", "int8", **history),
        _attend("int4 history", "int4", **history),
        _attend("int4 dense blocks", "int4", kernel="attend_kernel", dense_columns=((0, 127),)),
        _attend("int4 merge", "int4", kernel="merge_records_kernel", dense_columns=((0, 127),)),
        *(_attend(f"{name} decode begins later", name, padded=True) for name in ("int8", "int4")),
        _attend(
            "int4 dense blocks begin later",
            "int4",
            kernel="attend_kernel",
            dense_columns=((0, 127), (0, 99)),
            padded=True,
        ),
        _write("int8 write", "int8", Model()),
        _write("int8 write begins later", "int8", Model(), padded=True),
        _encode("int4 seal", "int4", Model(), seal=True),
    ]
    others = [
        *(_attend(f"{name} history", name, **history) for name in FORMATS if name not in ("int8", "int4")),
        _attend("int8 decode unsplit sinks window", "int8", batch=64, sinks=True, window=128, causal=True),
        _attend("int8 decode softcap d256", "int8", d256, softcap=50.0),
        _attend("int8 decode fp32", "int8", fp32),
        _attend("int8 decode d97", "int8", d97),
        _attend("int8 prefill rows", "int8", mask="rows", q_tokens=256),
        # 64 tokens of 32 bytes are 8 for each of the 256 threads of an AMD program.
        _attend("int4 decode d64 padding", "int4", d64, mask="padding", dense_columns=((0, 127),), bits=64),
        _attend("int4 decode d80", "int4", d80),
        _attend("int4 decode d256", "int4", d256),
        _attend("int4 prefill window padding", "int4", mask="padding", window=1024, causal=True, **history),
        _attend("fp8 decode d80", "fp8", d80),
        _write("fp8 write d64", "fp8", d64),
        _write("k8v4 write d256", "k8v4", d256),
        _write("int4_group write d80", "int4_group", d80, tokens=512, group_size=20),
        _write("int4 write", "int4", Model()),
        _encode("int4 encode d80", "int4", d80, seal=False),
        _encode("int4 encode begins later", "int4", Model(), seal=False, padded=True),
        _encode("int8_block seal d97", "int8_block", d97, seal=True),
        _encode("int8 seal d64", "int8", d64, seal=True),
        _encode("fp8 seal", "fp8", Model(), seal=True),
    ]
    return [*common, *(replace(row, targets=_SOME_TARGETS) for row in others)]
