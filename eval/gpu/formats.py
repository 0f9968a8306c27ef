"""Section a, continued: the kernels of quantized blocks, every one of them in every format.

Attention is asked as `generate` asks: with lengths on the device and a mask. Answers are held to what the
records say, and records to those that plain torch writes.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch

from eval.bench.models.workload import dtype_name
from eval.core.hardware import Device
from eval.gpu import cases
from eval.gpu.cases import DTYPES, ROOM_FOR_THE_DRAW, bits, relative_error, shared
from eval.gpu.plan import Item, Record, Settings
from hf_paged_cache.formats import FORMATS
from hf_paged_cache.kernels import dispatch, reference
from hf_paged_cache.kernels.call import LayerBlocks, RowLengths, dense_entry

SHAPE: dict[str, Any] = {"kv_heads": 2, "group": 3, "head_dim": 64}
ASKED: dict[str, dict[str, Any]] = {
    "decode": {"mask": "bool_padding", "end": 150},
    "split": {"end": 1100, "batch": 1, "mask": "bool_padding", "sinks": True, "dense": "edges"},
    "draft": {"q_tokens": 4, "causal": True, "end": 150, "window": 70},
    "chunk": {"q_tokens": 40, "mask": "bool", "end": 300, "softcap": 3.0},
    "odd": {"end": 150, "head_dim": 80, "block_size": 16},
}
"""What is asked over `SHAPE`; `split` is merged from several programs, with blocks in the model's dtype."""
_TOY = {"kv_heads": 1, "head_dim": 16}
DRY_RUN_ASKED: dict[str, dict[str, Any]] = {
    "decode": {"mask": "bool_padding", "end": 20, "block_size": 16, "group": 2, **_TOY},
    "split": {"end": 530, "batch": 1, "mask": "bool_padding", "group": 1, "dense": "edges", **_TOY},
}
DRY_RUN_STORED = ("int8", "int4")  # written per token and in whole blocks: interpreted, a store takes seconds
COLUMNS = 3
STORED_TOLERANCE = 1e-2  # RMS ratio of what two encoders stored: a rounding tie may fall to either side


def items(settings: Settings) -> list[Item]:
    """Attention over records, and all that writes them."""
    asked = DRY_RUN_ASKED if settings.dry_run else ASKED
    dtypes = {dtype_name(dtype): dtype for dtype in (DTYPES[1:2] if settings.dry_run else DTYPES)}
    stored: dict[str, Any] = {"block_size": 16, **_TOY} if settings.dry_run else {"block_size": 32}
    return [
        *(
            Item(f"{name}/{what}/{called}", partial(_attend, name, SHAPE | options, dtype, settings.seed))
            for name in FORMATS
            for what, options in asked.items()
            for called, dtype in dtypes.items()
        ),
        *(
            Item(f"{name}/store/{called}", partial(_store, name, SHAPE | stored, dtype, settings.seed))
            for name in (DRY_RUN_STORED if settings.dry_run else FORMATS)
            for called, dtype in dtypes.items()
        ),
    ]


def _attend(
    name: str, options: dict[str, Any], dtype: torch.dtype, seed: int, record: Record, device: Device
) -> None:
    tables, records = shared("kernels.cases"), shared("kernels.quantized")
    dense = options.get("dense")
    case = tables.Case(name, **{key: value for key, value in options.items() if key != "dense"})
    problem = records.build_quantized(case, records.layout_of(name, case), dtype, dense=dense, seed=seed)
    blocks = cases.blocks_on(problem.blocks, device.torch_device)
    lengths = torch.full((case.batch,), case.end, dtype=torch.int32, device=device.torch_device)
    blocks.lengths = RowLengths(case.end, lengths)
    with device.poisoned():
        got, _ = dispatch.decode(blocks, cases.attention_on(problem.attention, device.torch_device))
    got = got.cpu()
    record.values["backend"] = dispatch.backend_name(blocks)
    record.values["rms_ratio"] = relative_error(got, problem.want)
    allowed = ROOM_FOR_THE_DRAW * records.TOLERANCE[dtype]
    record.attempt(name, partial(tables.assert_answers, problem, got, tolerance=allowed))


def _store(
    name: str, options: dict[str, Any], dtype: torch.dtype, seed: int, record: Record, device: Device
) -> None:
    """Two rows written token by token or in whole blocks, then their first blocks sealed."""
    case = shared("kernels.cases").Case("store", **options)
    layout = shared("kernels.quantized").layout_of(name, case)
    generator = torch.Generator().manual_seed(seed)
    tokens = case.block_size * COLUMNS
    keys, values = (
        torch.randn(2, tokens, case.kv_heads, case.head_dim, generator=generator).to(dtype).transpose(1, 2)
        for _ in range(2)
    )
    want = _empty(layout, case.kv_heads, dtype)
    got = cases.blocks_on(want, device.torch_device)
    got.fault = torch.zeros(2, dtype=torch.int32, device=device.torch_device)
    cuts = [0, 1, tokens - case.block_size + 1, tokens] if layout.format.is_per_token else [0, tokens]
    for start, end in pairwise(cuts):
        new_keys, new_values = (x[:, :, start:end] for x in (keys, values))
        reference.write(want, new_keys, new_values, start)
        dispatch.write(got, new_keys.to(device.torch_device), new_values.to(device.torch_device), start)
    assert want.records is not None, "a format has records"
    assert got.records is not None, "a format has records"
    for module, b, records in ((reference, want, want.records), (dispatch, got, got.records)):
        pool = records[:, None], b.keys[:, None], b.values[:, None]
        module.encode_blocks(layout, *pool, [0, 1], [1, 3])
    device.synchronize()
    record.check("no token was found unfit", not got.fault.any())
    for side, mine, theirs in (("keys", got.keys, want.keys), ("values", got.values, want.values)):
        record.check(f"{side} in the model's dtype", torch.equal(bits(mine.cpu()), bits(theirs)))
    errors = list(map(relative_error, layout.decode(got.records.cpu()), layout.decode(want.records)))
    record.values["rms_ratio"] = max(errors)
    for side, error in zip(("keys", "values"), errors, strict=True):
        record.bound(f"{side} in records", error, STORED_TOLERANCE)


def _empty(layout: Any, heads: int, dtype: torch.dtype) -> LayerBlocks:
    """Two rows, whose first and last blocks are in the model's dtype."""
    shape = 4, heads, layout.block_size, layout.head_dim
    keys, values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    records = torch.zeros(4, heads, layout.nbytes, dtype=torch.uint8)
    ids = torch.tensor([[dense_entry(0), 2, dense_entry(1)], [dense_entry(2), 0, dense_entry(3)]])
    return LayerBlocks(keys, values, ids.to(torch.int32), None, records, layout, ((0, COLUMNS - 1),) * 2)
