"""A cache as a plain dict of tensors and numbers, and back: what `state_dict`, `pickle` and `torch.save` use.

Blocks that rows hold are written, numbered anew, as the bytes that they are: a quantized cache comes
back bit for bit, and rows that share a block share it still. What lies in these blocks beside the rows' own
tokens (of whoever had them before, of tokens that were cropped) is written as zeros. What `saved` describes
is the whole of it.

Loading looks at everything first: each part has its type and size, the parts agree with each other and with
the cache, no size goes beyond the tensors that are really there, and a checksum of all of it is right. Then
contents are put beside those that the cache has, and take their place in one go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged_cache.blocks import NULL_BLOCK
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.formats import KVFormat, with_keys_in_int8
from hf_paged_cache.forward.left_padding import Padding
from hf_paged_cache.forward.ownership import Weights
from hf_paged_cache.forward.recurrent_state import HostParts
from hf_paged_cache.forward.state import CacheState
from hf_paged_cache.host import architectures
from hf_paged_cache.store.precision import Precision
from hf_paged_cache.store.saved import (
    VERSION,
    SavedCache,
    SavedGroup,
    SavedLayer,
    SavedPadding,
    SavedSettings,
    checksum,
    damaged,
    is_whole,
    parse,
    plain,
)

from .layer import PagedLayer

Attributes = dict[str, Any]


def as_state_dict(state: CacheState, hosts: HostParts) -> dict[str, Any]:
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
            hosts=[_copied(_plain_attributes(vars(part))) for part in hosts.parts],
        )
    )
    return taken | {"checksum": checksum(taken)}


@dataclass(frozen=True)
class Contents:
    """Saved contents that were checked against the cache which is to hold them.

    Attributes:
        saved: They.
        tokens: Layer index -> tokens per row, in the order of writing.
        padding: What is remembered of padding.
        parts: The objects of the host's own classes, and the attributes that they will have.
        first_tokens: Of a prompt by which the formats of the layers would be chosen.
    """

    saved: SavedCache
    tokens: dict[int, int]
    padding: Padding
    parts: list[tuple[Any, Attributes]]
    first_tokens: int


def contents_of(state: CacheState, hosts: HostParts, state_dict: object) -> Contents:
    """What a state dict says; changes nothing.

    Raises:
        PagedCacheError: It is damaged, or of another model or other settings.
    """
    if not isinstance(state_dict, Mapping) or "version" not in state_dict:
        raise PagedCacheError(
            f"state_dict must be what `cache.state_dict()` returned, got {type(state_dict).__name__}"
        )
    _require_same("version", VERSION, parse(int, state_dict["version"], "state_dict['version']"))
    saved = parse(SavedCache, dict(state_dict))
    _require_same("block_size", state.config.block_size, saved.settings.block_size)
    _require_same("kv_cache_dtype", state.config.kv_cache_dtype, saved.settings.kv_cache_dtype)
    _require_same("layers", sorted(state.rows.tokens), sorted(saved.tokens))
    _require_same("other layers", len(hosts.parts), len(saved.hosts))
    _check_lengths(saved)
    _check_padding(saved)
    first_tokens = 1
    if saved.batch:
        specs = state.layer_groups.specs
        windows = [group.window for group in saved.groups]
        expected = list(dict.fromkeys(spec.window for spec in specs.values()))
        _expect(
            windows == expected, "state_dict['groups']", f"one for each of the windows {expected}", windows
        )
        first_tokens, formats = _formats(state, saved)
        for index, group in enumerate(saved.groups):
            layers = {i: form for i, form in formats.items() if specs[i].window == group.window}
            size = state.config.block_size_of(group.window)
            _check_group(saved, group, layers, size, f"state_dict['groups'][{index}]")
    parts = _checked_parts(hosts, saved)
    found = checksum(plain(saved))  # last: only now it is known to have an end
    _expect(saved.checksum == found, "state_dict", f"what its checksum {saved.checksum!r} is of", found)
    return Contents(
        saved,
        tokens={index: saved.tokens[index] for index in state.rows.tokens},
        padding=Padding.from_state_dict(plain(saved.padding)),
        parts=parts,
        first_tokens=first_tokens,
    )


def load_contents(state: CacheState, hosts: HostParts, layers: Sequence[Any], contents: Contents) -> None:
    """Replace the contents of a cache.

    Raises:
        PoolExhausted: They do not fit into the pool. Whatever is raised, the cache is as it was.
    """
    before = state.layer_groups
    saved = contents.saved if contents.saved.batch else None

    def make() -> None:
        groups = before.beside(saved, contents.first_tokens)
        vars(state).update(state.with_contents(groups, contents.saved, contents.tokens, contents.padding))
        for part, values in contents.parts:
            part.__dict__ = _copied(values)
        vars(hosts).update(hosts.settled())
        for layer in layers:
            if isinstance(layer, PagedLayer):
                layer.forget()

    state.change(make, hosts)
    before.store.change(before.save, before.reset)


# --- what must be true --------------------------------------------------------------------------------------


def _expect(is_right: bool, where: str, expected: str, got: object) -> None:
    if not is_right:
        raise damaged(where, expected, got)


def _require_same(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise PagedCacheError(
            f"state_dict does not fit this cache: {name} is {theirs} there and {mine} here. Load it into a "
            "PagedCache made for the same model with the same settings"
        )


def _check_lengths(saved: SavedCache) -> None:
    where, length, counts = "state_dict['tokens']", saved.length, list(saved.tokens.values())
    longest = max(counts, default=0)
    _expect(length == longest >= 0, "state_dict['length']", f"that of the longest layer, {longest}", length)
    _expect(min(counts, default=0) >= 0, where, f"0…{length} for every layer", counts)
    claimed = {index: layer for group in saved.groups for index, layer in group.layers.items()}
    for index, count in saved.tokens.items():
        layer = claimed.get(index)
        is_empty = (
            count
            or layer is None
            or not any(side.any() for side in (layer.keys, layer.values, layer.records))
        )
        _expect(bool(is_empty), f"{where}[{index}]", "not 0, as there are K and V", count)
        _expect(layer is not None or not count, f"{where}[{index}]", "0, as there is no K and V", count)
    has_rows = bool(claimed)
    _expect(
        (saved.batch > 0) is has_rows, "state_dict['batch']", "0 just where no layer has K and V", saved.batch
    )
    ids = saved.input_ids
    _expect(
        ids.dtype == torch.int64
        and ids.dim() == 2
        and ids.shape[0] == saved.batch
        and ids.shape[1] <= length,
        "state_dict['input_ids']",
        f"int64 [{saved.batch}, at most {length}]",
        ids,
    )


def _check_padding(saved: SavedCache) -> None:
    where, padding, batch = "state_dict['padding']", saved.padding, saved.batch
    for name in ("tokens", "runs"):
        rows = getattr(padding, name)
        _expect(len(rows) in (0, batch), f"{where}[{name!r}]", f"of {batch} rows or none", rows)
    _expect(
        all(0 <= tokens <= saved.length for tokens in padding.tokens),
        f"{where}['tokens']",
        f"0…{saved.length} of every row",
        padding.tokens,
    )
    _expect(0 <= padding.end <= saved.length, f"{where}['end']", f"0…{saved.length}", padding.end)
    for row, runs in enumerate(padding.runs):
        edges = [edge for start, end, _ in runs for edge in (start, end)]
        _expect(
            all(start < end for start, end, _ in runs)
            and edges == sorted(edges)
            and all(0 <= edge <= padding.end for edge in edges),
            f"{where}['runs'][{row}]",
            f"runs of tokens in 0…{padding.end}, one after the other",
            runs,
        )


def _formats(state: CacheState, saved: SavedCache) -> tuple[int, dict[int, KVFormat | None]]:
    """How layers are stored, and the tokens of a prompt for which that is chosen."""
    found = {index: layer.format for group in saved.groups for index, layer in group.layers.items()}
    for tokens in (1, state.config.adaptive_threshold + 1):  # what `adaptive` chooses by
        formats = Precision.of(state.config, state.rows.tokens, tokens).formats
        stored = {i: _stored_format(formats[i], name) for i, name in found.items() if i in formats}
        if None not in stored.values() and len(stored) == len(found):
            return tokens, formats | {i: form for i, (form,) in stored.items()}  # type: ignore[misc]
    raise PagedCacheError(
        f"state_dict does not fit this cache: layers are stored as {found} there and as "
        f"{state.layer_groups.layer_dtypes()} here"
    )


def _stored_format(form: KVFormat | None, name: str) -> tuple[KVFormat | None] | None:
    """The format of that name, of a layer that starts in one: the guard may move its keys. Or None."""
    candidates = [form]
    if form is not None and form.keys.bits <= 4:
        candidates.append(with_keys_in_int8(form))
    return next(((each,) for each in candidates if ("auto" if each is None else each.name) == name), None)


def _check_group(
    saved: SavedCache, group: SavedGroup, formats: Mapping[int, KVFormat | None], size: int, where: str
) -> None:
    count = group.num_blocks
    _check_tables(saved, group, size, where)
    _expect(
        0 <= group.first_held <= (0 if group.window is None else saved.length),
        f"{where}['first_held']",
        "a token, and the first one without a window",
        group.first_held,
    )
    _expect(
        len(set(group.dense)) == len(group.dense)
        and all(0 <= number < count for number in group.dense)
        and (not group.dense or any(formats.values())),
        f"{where}['dense']",
        f"different blocks of {count}, of quantized layers",
        group.dense,
    )
    _expect(group.layers.keys() <= formats.keys(), f"{where}['layers']", f"of {[*formats]}", [*group.layers])
    for index, layer in group.layers.items():
        _check_layer(group, layer, formats[index], size, count, f"{where}['layers'][{index}]")
    judged = [i for i in group.layers if (form := formats[i]) is not None and form.keys.bits <= 4]
    _expect(
        group.unguarded == [index for index in judged if index in set(group.unguarded)],
        f"{where}['unguarded']",
        f"some of {judged} in that order",
        group.unguarded,
    )


def _check_tables(saved: SavedCache, group: SavedGroup, size: int, where: str) -> None:
    length, tables, offsets = saved.length, group.tables, group.offsets
    for name, rows in (("tables", tables), ("offsets", offsets)):
        _expect(len(rows) == saved.batch, f"{where}[{name!r}]", f"of {saved.batch} rows", rows)
    expected = saved.padding.tokens if saved.padding.is_left_out else []
    _expect(
        offsets == (expected or [0] * saved.batch),
        f"{where}['offsets']",
        f"as the padding, {expected}",
        offsets,
    )
    columns: dict[int, int] = {}
    first_needed = 0 if group.window is None else max(0, length - (group.window - 1))
    for row, (table, offset) in enumerate(zip(tables, offsets, strict=True)):
        num_blocks = -(-(length - offset) // size)
        _expect(len(table) == num_blocks, f"{where}['tables'][{row}]", f"{num_blocks} blocks", table)
        for place, number in enumerate(table):
            first = offset + place * size
            is_missing = number == NULL_BLOCK and group.window is not None and first + size <= first_needed
            is_known = columns.get(number) == first or number == len(columns)
            _expect(
                is_missing or is_known,
                f"{where}['tables'][{row}][{place}]",
                "a block of these tokens or the next new one; -1 only for what is outside of the window",
                number,
            )
            if not is_missing:
                columns[number] = first


def _check_layer(
    group: SavedGroup, layer: SavedLayer, form: KVFormat | None, size: int, count: int, where: str
) -> None:
    keys, values, records = layer.keys, layer.values, layer.records
    num_dense = count if form is None else len(group.dense)
    _expect(
        keys.dim() == values.dim() == 4
        and keys.shape[:3] == values.shape[:3]
        and (keys.shape[0], keys.shape[2]) == (num_dense, size)
        and min(keys.shape[1], keys.shape[3], values.shape[3]) > 0
        and keys.dtype == values.dtype
        and keys.dtype.is_floating_point
        and keys.device == values.device,
        f"{where}['values']",
        f"as 'keys', floating point [{num_dense}, kv_heads, {size}, head_dim] ({tuple(keys.shape)} of "
        f"{keys.dtype} on {keys.device})",
        values,
    )
    nbytes = 0 if form is None else form.bind(size, keys.shape[3], values.shape[3]).nbytes
    shape = (count - num_dense, keys.shape[1], nbytes)
    _expect(
        records.shape == shape and records.dtype == torch.uint8 and records.device == keys.device,
        f"{where}['records']",
        f"uint8 {shape} on {keys.device}, as {layer.format!r} has them (with the same group_size)",
        records,
    )


# --- objects of the host ------------------------------------------------------------------------------------

_SETTINGS = ("number_of_states", "sliding_window", "_sliding_window_tensor")
"""Attributes of host objects that a forward never changes."""


def _checked_parts(hosts: HostParts, saved: SavedCache) -> list[tuple[Any, Attributes]]:
    found: list[tuple[Any, Attributes]] = []
    rows = {saved.batch} if saved.batch else set()
    for (index, (part, empty)), values in zip(hosts.empty_parts().items(), saved.hosts, strict=True):
        where = f"state_dict['hosts'][{len(found)}]"
        attributes = _checked_attributes(type(part), empty, values, where)
        if architectures.is_linear(part):
            rows |= _rows_of_states(attributes, where)
        else:
            more, length = _rows_and_length(attributes, where)
            rows |= more
            expected = length if index in hosts.fixed else saved.tokens.get(index, length)
            _expect(length == expected, where, f"of {expected} tokens", length)
        found.append((part, attributes))
    _expect(len(rows) <= 1, "state_dict['hosts']", f"of {saved.batch} rows", sorted(rows))
    return found


def _checked_attributes(kind: type, empty: Attributes, values: Attributes, where: str) -> Attributes:
    """The attributes of an object, those of an empty one (which it goes by) overwritten by saved ones."""
    expected = _plain_attributes(empty)
    missing = expected.keys() - values.keys()
    _expect(not missing, where, f"a dict with {', '.join(sorted(missing))}", values)
    for name, value in values.items():
        at = f"{where}[{name!r}]" if type(name) is str else where
        if name in expected:
            _expect(
                _is_like(expected[name], value), at, f"as an empty {kind.__name__} has it, or filled", value
            )
            is_same = name not in _SETTINGS or _is_equal(expected[name], value)
            _expect(is_same, at, "that of the model", value)
        else:  # what the host notes when the first K and V come
            is_free = type(name) is str and not hasattr(kind, name)
            is_note = value is None or type(value) in (torch.dtype, torch.device) or is_whole(value)
            _expect(is_free and is_note, at, f"an attribute of a {kind.__name__}", value)
    attributes = empty | values
    devices = {tensor.device for name, tensor in _tensors(values) if name not in _SETTINGS}
    _expect(len(devices) <= 1, where, "on one device", sorted(map(str, devices)))
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
    if empty is None:
        return (
            value is None or type(value) in (torch.dtype, torch.device) or is_whole(value) or _is_count(value)
        )
    return _is_count(value) if type(empty) is int else type(value) is type(empty)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_equal(mine: Any, theirs: Any) -> bool:
    return torch.equal(mine, theirs.to(mine.device)) if isinstance(mine, torch.Tensor) else mine == theirs


def _rows_of_states(attributes: Attributes, where: str) -> set[int]:
    """Rows of a linear layer's states, if it has any."""
    rows = set()
    for kind in ("conv", "recurrent"):
        name = f"{kind}_states"
        for key, states in attributes[name].items():
            is_filled = isinstance(states, torch.Tensor) and states.dim() > 1
            _expect(
                attributes[f"is_{name}_initialized"][key] is is_filled and (is_filled or states is None),
                f"{where}[{name!r}][{key!r}]",
                "there if it is initialised",
                states,
            )
            if is_filled:
                rows.add(states.shape[0])
    for key, states in attributes["conv_states"].items():
        width, dtype = attributes["conv_kernel_size"][key], attributes["dtype"]
        is_filled = states is not None
        _expect(
            (not is_filled and width is None)
            or (
                is_filled
                and type(width) is int
                and (states.shape[-1] == width or attributes["record_past"])
                and states.dtype == dtype
                and type(attributes["device"]) is torch.device
            ),
            f"{where}['conv_states'][{key!r}]",
            f"{dtype} and as wide as the convolution, {width}",
            states,
        )
        has_previous = attributes["has_previous_state"][key]
        _expect(is_filled or not has_previous, f"{where}['has_previous_state']", "False", has_previous)
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
        _expect(
            attributes[flag] is is_there
            and (is_there or (states is None and others is None))
            and (not is_filled or states.shape[:-1] == others.shape[:-1])
            and (not is_there or is_filled or states.numel() == others.numel() == 0)
            and (not is_there or states.dtype == others.dtype),
            f"{where}[{name!r}]",
            f"there if it is initialised, of {ndim} dims",
            states,
        )
        if is_filled:
            rows.add(states.shape[0])
            length = max(length, states.shape[-2])
    seen = attributes.get("cumulative_length", length)
    _expect(length <= seen, f"{where}['cumulative_length']", f"at least {length}", seen)
    positions = attributes.get("indexer_position_ids")
    if positions is not None:
        is_right = isinstance(positions, torch.Tensor) and positions.dim() == 3
        _expect(is_right, f"{where}['indexer_position_ids']", "[dims, batch, tokens]", positions)
        rows.add(positions.shape[1])
    return rows, seen


def _plain_attributes(values: Mapping[str, Any]) -> Attributes:
    """Those that a safe loader knows."""
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, torch.Tensor | torch.dtype | torch.device | int | float | str | None)


def _tensors(values: Attributes) -> Iterable[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        for item in value.values() if isinstance(value, dict) else [value]:
            if isinstance(item, torch.Tensor):
                yield name, item


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
