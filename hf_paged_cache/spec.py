"""What is known of a model's layers before the first forward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a cache, as the model's config describes it.

    The shapes are hints: they size pools and gather layers of one shape into one pool. What a layer really
    stores is read from the first K and V it gets.

    Attributes:
        layer_type: The config's name for the layer's kind, e.g. `full_attention`.
        window: Tokens a query sees, itself included (sliding and chunked attention), or None.
        kv_heads: Heads of K and V, None if the config does not say.
        head_dim: Width of one head, None if the config does not say.
        is_paged: Whether its K and V lie in blocks; otherwise the layer is one of the host's own class.
    """

    layer_type: str
    window: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    is_paged: bool = True
