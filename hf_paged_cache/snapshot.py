"""A cache as a plain dict of tensors and numbers, and back: what `state_dict`, `pickle` and `torch.save` use.

Only blocks that rows hold are written, numbered anew from 0, as the bytes that they are: a quantised cache
comes back bit for bit. Rows that share a block share it still.

```
version, settings        what must agree with the cache that loads it
batch, tokens            rows, and tokens per row
input_ids                [rows, known tokens]
padding                  what is remembered of rows that begin with padding
groups                   one per window: tables, the ids of dense blocks, and per layer its blocks
hosts                    attributes of the layers (and parts) of the host's own classes
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .blocks import NULL_BLOCK
from .errors import PagedCacheError, PoolExhausted
from .formats import KVFormat, with_keys_in_int8
from .group import LayerGroup, Owner
from .groups import LayerGroups
from .padding import Padding
from .state import CacheState

VERSION = 1


def take(state: CacheState, hosts: Sequence[Any]) -> dict[str, Any]:
    """The contents of a cache, in tensors of their own."""
    return {
        "version": VERSION,
        "settings": {"block_size": state.config.block_size, "kv_cache_dtype": state.config.kv_cache_dtype},
        "layer_dtypes": state.layer_dtypes(),
        "batch": state.batch,
        "tokens": dict(state.tokens),
        "length": state.step_end,
        "record_past": state.record_past,
        "input_ids": state.history.ids,
        "padding": state.padding.state_dict(),
        "groups": [_take_group(group) for group in state.groups] if state.batch else [],
        "hosts": [_plain(vars(host)) for host in hosts],
    }


def check(state: CacheState, hosts: Sequence[Any], saved: Mapping[str, Any]) -> None:
    """Raise PagedCacheError unless a cache can take these contents; changes nothing."""
    if not isinstance(saved, Mapping) or "version" not in saved:
        raise PagedCacheError(
            f"state_dict must be what `cache.state_dict()` returned, got {type(saved).__name__}"
        )
    settings = state.config
    expected = {
        "version": VERSION,
        "block_size": settings.block_size,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "layers": sorted(state.tokens),
        "other layers": len(hosts),
    }
    got = {
        "version": saved["version"],
        **saved.get("settings", {}),
        "layers": sorted(saved.get("tokens", {})),
        "other layers": len(saved.get("hosts", [])),
    }
    wrong = {name: (value, got.get(name)) for name, value in expected.items() if got.get(name) != value}
    if wrong:
        name, (mine, theirs) = next(iter(wrong.items()))
        raise PagedCacheError(
            f"state_dict does not fit this cache: {name} is {theirs} there and {mine} here. Load it into a "
            "PagedCache made for the same model with the same settings"
        )
    rows = {"batch", "tokens", "length", "record_past", "input_ids", "padding"}
    needed = rows | {"groups", "layer_dtypes", "hosts"}
    if missing := needed - set(saved):
        raise PagedCacheError(f"state_dict lacks {', '.join(sorted(missing))}: it was cut or changed")


def restore(state: CacheState, hosts: Sequence[Any], saved: Mapping[str, Any]) -> None:
    """Fill an empty cache. The caller has called `check`."""
    for host, values in zip(hosts, saved["hosts"], strict=True):
        vars(host).update(_plain(values))
    state.record_past = saved["record_past"]
    if not saved["batch"]:
        return
    with state.layer_groups.store.lock:
        _open(state.layer_groups, state.config.adaptive_threshold, saved)
        for group in state.groups:
            part = next(part for part in saved["groups"] if part["window"] == group.window)
            _restore_group(state.layer_groups, group, part, saved)
    padding = Padding.from_state_dict(saved["padding"])
    state.restore(saved["batch"], saved["tokens"], saved["length"], padding)
    if saved["input_ids"].shape[1]:
        state.history.commit(saved["input_ids"], saved["input_ids"].shape[1])


def _open(groups: LayerGroups, adaptive_threshold: int, saved: Mapping[str, Any]) -> None:
    """Have groups for layers of these shapes, stored in these formats."""
    groups.clear()
    tensors = next(iter(saved["groups"][0]["layers"].values()))
    for tokens in (1, adaptive_threshold + 1):  # what `adaptive` chooses by
        keys, values = (_like(tensors[side], saved["batch"], tokens) for side in ("keys", "values"))
        groups.open_rows(
            keys, values, keep_history=saved["record_past"], would_be_static=lambda device: False
        )
        formats = groups.precision.formats
        if all(name in _names_of(formats[index]) for index, name in saved["layer_dtypes"].items()):
            return
        groups.reset()
    raise PagedCacheError(
        f"state_dict does not fit this cache: layers are stored as {saved['layer_dtypes']} there and as "
        f"{groups.layer_dtypes()} here"
    )


def _names_of(form: KVFormat | None) -> set[str]:
    """What a layer can be stored in that starts in a format: the guard may move its keys."""
    return {"auto"} if form is None else {form.name, with_keys_in_int8(form).name}


def _restore_group(
    groups: LayerGroups, group: LayerGroup, part: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    # With more history than its windows need, as after `activate_past_recording`, it wants more than they do.
    groups.provide(group, len({n for table in part["tables"] for n in table if n != NULL_BLOCK}))
    group.reset()
    for layer_idx, tensors in part["layers"].items():
        form, name = group.formats[layer_idx], saved["layer_dtypes"][layer_idx]
        if form is not None and form.name != name:
            group.formats[layer_idx] = with_keys_in_int8(form)
        keys, values = (_like(tensors[side], saved["batch"], 1) for side in ("keys", "values"))
        groups.claim(layer_idx, keys, values)
    ids = group.manager.adopt(part["tables"], saved["length"], part["padding"])
    if ids is None:
        raise PoolExhausted(
            f"state_dict holds {max(map(len, part['tables']))} blocks per row, and the pool has "
            f"{group.manager.pool.num_free} free ones; make the cache with a larger `max_tokens`",
            needed_blocks=len({n for table in part["tables"] for n in table}),
            free_blocks=group.manager.pool.num_free,
            block_size=group.block_size,
        )
    group.manager.first_held = part["first_held"]
    group.owners = {index: Owner.of_saved(fingerprint) for index, fingerprint in part["owners"].items()}
    slots = group.adopt_dense([ids[n] for n in part["dense_ids"]])
    group.set_guarded(set(part["layers"]) - set(part["unguarded"]))
    for layer_idx, tensors in part["layers"].items():
        blocks = group.blocks_of(layer_idx)
        places = list(ids.values()) if blocks.records is None else slots
        targets = [(blocks.keys, tensors["keys"], places), (blocks.values, tensors["values"], places)]
        if blocks.records is not None:
            targets.append((blocks.records, tensors["records"], list(ids.values())))
        for target, contents, where in targets:
            for place, content in zip(where, contents, strict=True):
                target[place] = content.to(target.device)
    group.sync_tables()
    group.set_length(saved["length"])


def _like(tensor: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """A tensor as layers of that shape bring it, without memory of its own."""
    return tensor.new_empty(1).expand(batch, tensor.shape[1], tokens, tensor.shape[3])


def _take_group(group: LayerGroup) -> dict[str, Any]:
    ids = sorted({block_id for table in group.manager.tables for block_id in table.stored_ids()})
    new_ids = {block_id: index for index, block_id in enumerate(ids)} | {NULL_BLOCK: NULL_BLOCK}
    dense = group.dense
    slots = {} if dense is None else dense.slots_by_id(group.manager)
    layers = {}
    for layer_idx in group.claimed:
        blocks = group.blocks_of(layer_idx)
        where = torch.tensor(ids, dtype=torch.long, device=blocks.keys.device)
        places = torch.tensor(list(slots.values()), dtype=torch.long, device=blocks.keys.device)
        if blocks.records is None:
            tensors = {"keys": blocks.keys[where], "values": blocks.values[where]}
        else:
            tensors = {
                "records": blocks.records[where],
                "keys": blocks.keys[places],
                "values": blocks.values[places],
            }
        layers[layer_idx] = tensors
    return {
        "window": group.window,
        "tables": [[new_ids[block_id] for block_id in table.ids] for table in group.manager.tables],
        "padding": [table.offset for table in group.manager.tables],
        "first_held": group.manager.first_held,
        "owners": {index: owner.fingerprint for index, owner in group.owners.items()},
        "dense_ids": [new_ids[block_id] for block_id in slots],
        "unguarded": [index for index in group.claimed if group.is_unguarded(index)],
        "layers": layers,
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a safe loader knows, tensors copied."""
    return {name: _copied(value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    kinds = (torch.Tensor, torch.dtype, torch.device, int, float, bool, str, type(None))
    return isinstance(value, kinds)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
