"""A cache as a plain dict of tensors and numbers, and back: what `state_dict`, `pickle` and `torch.save` use.

Blocks that rows hold are written, numbered anew, as the bytes that they are: a quantized cache comes back bit
for bit, and rows that share a block share it still. What lies there beside the rows' own tokens is written as
zeros. `saved` describes the whole of it.

Loading looks at everything first: types and sizes (none goes beyond the tensors that are really there), that
parts agree with each other and with the cache, and a checksum. Then contents are put beside those that the
cache has, and take their place in one go.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.blocks import NULL_BLOCK
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.formats import KVFormat, format_name, with_keys_in_int8
from hf_paged_cache.forward.left_padding import Padding
from hf_paged_cache.forward.weights import Weights
from hf_paged_cache.host import architectures
from hf_paged_cache.host.lazy_tensor import plain_tensors
from hf_paged_cache.store import key_guard
from hf_paged_cache.store.precision import Precision
from hf_paged_cache.store.saved import (
    VERSION,
    SavedCache,
    SavedGroup,
    SavedLayer,
    SavedPadding,
    SavedSettings,
    checksum,
    expect,
    is_whole,
    parse,
    plain,
)

from .layer import PagedLayer

if TYPE_CHECKING:
    from hf_paged_cache.forward.recurrent_state import HostStates
    from hf_paged_cache.forward.state import CacheState

Attributes = dict[str, Any]


def as_state_dict(state: CacheState, hosts: HostStates) -> dict[str, Any]:
    """The contents of a cache, in tensors of their own."""
    ids = state.rows.ids.known
    taken: dict[str, Any] = plain(
        SavedCache(
            version=VERSION,
            settings=SavedSettings(state.config.block_size, state.config.kv_cache_dtype),
            batch=state.rows.batch,
            length=state.rows.end,
            tokens=dict(state.rows.tokens),
            record_past=state.rows.record_past,
            input_ids=ids if ids.shape[1] else ids.new_empty(state.rows.batch, 0),
            owner=state.rows.owner.saved() if isinstance(state.rows.owner, Weights) else state.rows.owner,
            padding=SavedPadding(**state.rows.padding.state_dict()),
            groups=[group.export(state.rows.tokens) for group in state.groups] if state.rows.batch else [],
            hosts=[_copied(_plain_attributes(vars(part))) for part in hosts.all],
        )
    )
    return taken | {"checksum": checksum(taken)}


def load(state: CacheState, hosts: HostStates, layers: Sequence[Any], state_dict: object) -> None:
    """Replace the contents of a cache, all of them or none; raises as `PagedCache.load_state_dict` says."""
    saved = _parsed(state, hosts, state_dict)
    first_tokens = _check_groups(state, saved) if saved.batch else 1
    parts = _checked_parts(hosts, saved)
    found = checksum(plain(saved))  # last: only now it is known to have an end
    expect(saved.checksum == found, "state_dict", f"what its checksum {saved.checksum!r} is of", found)
    before, padding = state.layer_groups, Padding.from_state_dict(plain(saved.padding))
    tokens = {index: saved.tokens[index] for index in state.rows.tokens}  # in the order of writing

    def make() -> None:
        groups = before.beside(saved if saved.batch else None, first_tokens)
        vars(state).update(state.with_contents(groups, saved, tokens, padding))
        for part, values in parts:
            part.__dict__ = _copied(values)
        vars(hosts).update(hosts.settled())
        for layer in layers:
            if isinstance(layer, PagedLayer):
                layer.forget()

    state.change(make, hosts)
    before.store.change(before.save, before.reset)


def _parsed(state: CacheState, hosts: HostStates, state_dict: object) -> SavedCache:
    """What a state dict says, if it is of a cache with the same layers and settings."""
    if not isinstance(state_dict, Mapping) or "version" not in state_dict:
        got = type(state_dict).__name__
        raise PagedCacheError(f"state_dict must be what `cache.state_dict()` returned, got {got}")
    _require_same("version", VERSION, parse(int, state_dict["version"], "state_dict['version']"))
    saved: SavedCache = parse(SavedCache, dict(state_dict))
    _require_same("block_size", state.config.block_size, saved.settings.block_size)
    _require_same("kv_cache_dtype", state.config.kv_cache_dtype, saved.settings.kv_cache_dtype)
    _require_same("layers", sorted(state.rows.tokens), sorted(saved.tokens))
    _require_same("other layers", len(hosts.all), len(saved.hosts))
    _check_lengths(saved)
    _check_padding(saved)
    return saved


def _require_same(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise PagedCacheError(
            f"state_dict does not fit this cache: {name} is {theirs} there and {mine} here. Load it into a "
            "PagedCache made for the same model with the same settings"
        )


def _check_lengths(saved: SavedCache) -> None:
    where, length, batch, counts = "state_dict['tokens']", saved.length, saved.batch, [*saved.tokens.values()]
    longest = max(counts, default=0)
    expect(length == longest >= 0, "state_dict['length']", f"that of the longest layer, {longest}", length)
    expect(min(counts, default=0) >= 0, where, f"0…{length} for every layer", counts)
    claimed = {index: layer for group in saved.groups for index, layer in group.layers.items()}
    for index, count in saved.tokens.items():
        layer = claimed.get(index)
        sides = () if layer is None else (layer.keys, layer.values, layer.records)
        is_fitting = count > 0 or not any(bool(side.any()) for side in sides)
        expect(is_fitting, f"{where}[{index}]", "not 0, as there are K and V", count)
        expect(layer is not None or not count, f"{where}[{index}]", "0, as there is no K and V", count)
    expect((batch > 0) is bool(claimed), "state_dict['batch']", "0 just where no layer has K and V", batch)
    ids = saved.input_ids
    is_fitting = ids.dtype == torch.int64 and ids.dim() == 2 and len(ids) == batch and ids.shape[1] <= length
    expect(is_fitting, "state_dict['input_ids']", f"int64 [{batch}, at most {length}]", ids)


def _check_padding(saved: SavedCache) -> None:
    where, padding, batch, length = "state_dict['padding']", saved.padding, saved.batch, saved.length
    for name, rows in (("tokens", padding.tokens), ("runs", padding.runs)):
        expect(len(rows) in (0, batch), f"{where}[{name!r}]", f"of {batch} rows or none", rows)
    is_fitting = all(0 <= tokens <= length for tokens in padding.tokens)
    expect(is_fitting, f"{where}['tokens']", f"0…{length} of every row", padding.tokens)
    expect(0 <= padding.end <= length, f"{where}['end']", f"0…{length}", padding.end)
    for row, runs in enumerate(padding.runs):
        edges = [0, *(edge for start, end, _ in runs for edge in (start, end)), padding.end]
        is_fitting = edges == sorted(edges) and all(start < end for start, end, _ in runs)
        expected = f"runs of tokens in 0…{padding.end}, one after the other"
        expect(is_fitting, f"{where}['runs'][{row}]", expected, runs)


def _check_groups(state: CacheState, saved: SavedCache) -> int:
    """Look at all groups; tokens of a prompt by which their formats would be chosen."""
    specs = state.layer_groups.specs
    windows = [group.window for group in saved.groups]
    expected = [*dict.fromkeys(spec.window for spec in specs.values())]
    expect(windows == expected, "state_dict['groups']", f"one for each of the windows {expected}", windows)
    first_tokens, formats = _formats(state, saved)
    for index, group in enumerate(saved.groups):
        layers = {i: layer_format for i, layer_format in formats.items() if specs[i].window == group.window}
        size = state.config.block_size_of(group.window)
        _check_group(saved, group, layers, size, f"state_dict['groups'][{index}]")
    return first_tokens


def _formats(state: CacheState, saved: SavedCache) -> tuple[int, dict[int, KVFormat | None]]:
    """The tokens of a prompt for which layers are stored as they are, and their formats."""
    found = {index: layer.format for group in saved.groups for index, layer in group.layers.items()}
    for tokens in (1, state.config.adaptive_threshold + 1):  # what `adaptive` chooses by
        formats = dict(Precision.of(state.config, state.rows.tokens, tokens).formats)
        for index, name in found.items():
            begun = formats.get(index)
            if begun is not None and begun.name != name and key_guard.concerns(begun):
                formats[index] = with_keys_in_int8(begun)  # as the guard may have stored it since
        if all(index in formats and format_name(formats[index]) == name for index, name in found.items()):
            return tokens, formats
    raise PagedCacheError(
        f"state_dict does not fit this cache: layers are stored as {found} there and as "
        f"{state.layer_groups.layer_dtypes()} here"
    )


def _check_group(
    saved: SavedCache, group: SavedGroup, formats: Mapping[int, KVFormat | None], size: int, where: str
) -> None:
    count, dense, first, layers = group.num_blocks, group.dense, group.first_held, group.layers
    _check_tables(saved, group, size, where)
    is_fitting = 0 <= first <= (0 if group.window is None else saved.length)
    expect(is_fitting, f"{where}['first_held']", "a token, and the first one without a window", first)
    is_fitting = len(set(dense) & set(range(count))) == len(dense) and (not dense or any(formats.values()))
    expect(is_fitting, f"{where}['dense']", f"different blocks of {count}, of quantized layers", dense)
    expect(layers.keys() <= formats.keys(), f"{where}['layers']", f"of {[*formats]}", [*layers])
    for index, layer in layers.items():
        _check_layer(group, layer, formats[index], size, f"{where}['layers'][{index}]")
    guarded = [index for index in layers if key_guard.concerns(formats[index])]
    is_fitting = group.unguarded == [index for index in guarded if index in set(group.unguarded)]
    expect(is_fitting, f"{where}['unguarded']", f"some of {guarded} in that order", group.unguarded)


def _check_tables(saved: SavedCache, group: SavedGroup, size: int, where: str) -> None:
    length, tables, offsets = saved.length, group.tables, group.offsets
    for name, rows in (("tables", tables), ("offsets", offsets)):
        expect(len(rows) == saved.batch, f"{where}[{name!r}]", f"of {saved.batch} rows", rows)
    expected = saved.padding.tokens if saved.padding.is_left_out else []
    is_fitting = offsets == (expected or [0] * saved.batch)
    expect(is_fitting, f"{where}['offsets']", f"as the padding, {expected}", offsets)
    columns: dict[int, int] = {}
    first_needed = 0 if group.window is None else max(0, length - (group.window - 1))
    expected_block = "a block of these tokens or the next new one; -1 only for what is outside of the window"
    for row, (table, offset) in enumerate(zip(tables, offsets, strict=True)):
        num_blocks = -(-(length - offset) // size)
        expect(len(table) == num_blocks, f"{where}['tables'][{row}]", f"{num_blocks} blocks", table)
        for column, number in enumerate(table):
            first = offset + column * size
            is_missing = number == NULL_BLOCK and group.window is not None and first + size <= first_needed
            is_known = columns.get(number) == first or number == len(columns)
            expect(is_missing or is_known, f"{where}['tables'][{row}][{column}]", expected_block, number)
            if not is_missing:
                columns[number] = first


def _check_layer(
    group: SavedGroup, layer: SavedLayer, layer_format: KVFormat | None, size: int, where: str
) -> None:
    keys, values, records = layer.keys, layer.values, layer.records
    num_dense = group.num_blocks if layer_format is None else len(group.dense)
    is_fitting = (
        keys.dim() == values.dim() == 4
        and keys.shape[:3] == values.shape[:3]
        and (keys.shape[0], keys.shape[2]) == (num_dense, size)
        and min(keys.shape[1], keys.shape[3], values.shape[3]) > 0
        and keys.dtype == values.dtype
        and keys.dtype.is_floating_point
        and keys.device == values.device
    )
    expected = f"as 'keys', floating point [{num_dense}, kv_heads, {size}, head_dim] ("
    expected += f"{tuple(keys.shape)} of {keys.dtype} on {keys.device})"
    expect(is_fitting, f"{where}['values']", expected, values)
    layout = None if layer_format is None else layer_format.bind(size, keys.shape[3], values.shape[3])
    shape = (group.num_blocks - num_dense, keys.shape[1], 0 if layout is None else layout.nbytes)
    is_fitting = records.shape == shape and records.dtype == torch.uint8 and records.device == keys.device
    expected = f"uint8 {shape} on {keys.device}, as {layer.format!r} has them (with the same group_size)"
    expect(is_fitting, f"{where}['records']", expected, records)


# --- objects of the host ------------------------------------------------------------------------------------

# Attributes of host objects that a forward never changes.
_SETTINGS = ("number_of_states", "sliding_window", "_sliding_window_tensor")


def _checked_parts(hosts: HostStates, saved: SavedCache) -> list[tuple[Any, Attributes]]:
    found: list[tuple[Any, Attributes]] = []
    rows = {saved.batch} if saved.batch else set()
    for (index, (part, empty)), values in zip(hosts.with_empty().items(), saved.hosts, strict=True):
        where = f"state_dict['hosts'][{len(found)}]"
        attributes = _checked_attributes(type(part), empty, values, where)
        if architectures.is_linear(part):
            rows |= _rows_of_states(attributes, where)
        else:
            more, length = _rows_and_length(attributes, where)
            rows |= more
            expected = length if index in hosts.fixed else saved.tokens.get(index, length)
            expect(length == expected, where, f"of {expected} tokens", length)
        found.append((part, attributes))
    expect(len(rows) <= 1, "state_dict['hosts']", f"of {saved.batch} rows", sorted(rows))
    return found


def _checked_attributes(kind: type, empty: Attributes, values: Attributes, where: str) -> Attributes:
    """The attributes of an object, those of an empty one (which it goes by) overwritten by saved ones."""
    known = _plain_attributes(empty)
    missing = known.keys() - values.keys()
    expect(not missing, where, f"a dict with {', '.join(sorted(missing))}", values)
    for name, value in values.items():
        at = f"{where}[{name!r}]" if type(name) is str else where
        if name in known:
            expected = f"as an empty {kind.__name__} has it, or filled"
            expect(_is_like(known[name], value), at, expected, value)
            expect(name not in _SETTINGS or _is_equal(known[name], value), at, "that of the model", value)
        else:  # what the host notes when the first K and V come
            is_free = type(name) is str and not hasattr(kind, name)
            expect(is_free and _is_note(value), at, f"an attribute of a {kind.__name__}", value)
    attributes = empty | values
    devices = {x.device for name in values if name not in _SETTINGS for x in plain_tensors(values[name])}
    expect(len(devices) <= 1, where, "on one device", sorted(map(str, devices)))
    for name in [name for name, value in values.items() if devices and type(value) is torch.device]:
        attributes[name] = next(iter(devices))  # tensors may have been moved when they were read
    return attributes


def _is_like(empty: Any, value: Any) -> bool:
    """Whether an attribute can have become this value from what it was when nothing was held."""
    if isinstance(empty, dict):
        is_dict = type(value) is dict and value.keys() == empty.keys()
        return is_dict and all(_is_like(item, value[key]) for key, item in empty.items())
    if isinstance(empty, torch.Tensor):
        return is_whole(value) and value.shape == empty.shape and value.dtype == empty.dtype
    is_count = type(value) is int and 0 <= value < 1 << 63
    if empty is None:
        return is_count or _is_note(value)
    return is_count if type(empty) is int else type(value) is type(empty)


def _is_note(value: object) -> bool:
    return value is None or type(value) in (torch.dtype, torch.device) or is_whole(value)


def _is_equal(mine: Any, theirs: Any) -> bool:
    return torch.equal(mine, theirs.to(mine.device)) if isinstance(mine, torch.Tensor) else mine == theirs


def _rows_of_states(attributes: Attributes, where: str) -> set[int]:
    """Rows of a linear layer's states, if it has any."""
    rows = set()
    for name in ("conv_states", "recurrent_states"):
        for key, states in attributes[name].items():
            is_filled = isinstance(states, torch.Tensor) and states.dim() > 1
            is_there = attributes[f"is_{name}_initialized"][key]
            is_fitting = is_there is is_filled and (is_filled or states is None)
            expect(is_fitting, f"{where}[{name!r}][{key!r}]", "there if it is initialised", states)
            rows |= {states.shape[0]} if is_filled else set()
    for key, states in attributes["conv_states"].items():
        width, dtype = attributes["conv_kernel_size"][key], attributes["dtype"]
        is_fitting = width is None
        if states is not None:
            is_wide = type(width) is int and (states.shape[-1] == width or attributes["record_past"])
            is_fitting = is_wide and states.dtype == dtype and type(attributes["device"]) is torch.device
        expected = f"{dtype} and as wide as the convolution, {width}"
        expect(is_fitting, f"{where}['conv_states'][{key!r}]", expected, states)
        has_previous = attributes["has_previous_state"][key]
        is_fitting = states is not None or not has_previous
        expect(is_fitting, f"{where}['has_previous_state']", "False", has_previous)
    return rows


def _rows_and_length(attributes: Attributes, where: str) -> tuple[set[int], int]:
    """Rows and tokens of an object that keeps K and V, or the keys of an indexer."""
    rows, length = set(), 0
    for name, flag, ndim in (("keys", "is_initialized", 4), ("indexer_keys", "is_indexer_initialized", 3)):
        if name not in attributes:
            continue
        states, others = attributes[name], attributes["values"] if ndim == 4 else attributes[name]
        is_there = isinstance(states, torch.Tensor) and isinstance(others, torch.Tensor)
        is_filled = is_there and states.dim() == others.dim() == ndim
        is_fitting = attributes[flag] is is_there and (is_there or (states is None and others is None))
        if is_there:
            is_empty = states.numel() == others.numel() == 0
            is_even = is_empty if not is_filled else states.shape[:-1] == others.shape[:-1]
            is_fitting = is_fitting and is_even and states.dtype == others.dtype
        expect(is_fitting, f"{where}[{name!r}]", f"there if it is initialised, of {ndim} dims", states)
        if is_filled:
            rows.add(states.shape[0])
            length = max(length, states.shape[-2])
    tokens = attributes.get("cumulative_length", length)
    expect(length <= tokens, f"{where}['cumulative_length']", f"at least {length}", tokens)
    positions = attributes.get("indexer_position_ids")
    if positions is not None:
        is_fitting = isinstance(positions, torch.Tensor) and positions.dim() == 3
        expect(is_fitting, f"{where}['indexer_position_ids']", "[dims, batch, tokens]", positions)
        rows.add(positions.shape[1])
    return rows, tokens


def _plain_attributes(values: Mapping[str, Any]) -> Attributes:
    """Those that a safe loader knows."""
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, torch.Tensor | torch.dtype | torch.device | int | float | str | None)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
