"""How the attention kernel reads stored K and V: one small function for each format.

The kernel gets its function at compile time, so a format costs no branch and needs no kernel of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_plain(pool_ptr, offsets, stored):
    """Values that lie in the pool as they are (`kv_cache_dtype="auto"`).

    Args:
        pool_ptr: Where the tile begins.
        offsets: `[tokens, dims]`, elements from there.
        stored: `[tokens, dims]`, False where nothing may be read; such values become 0.
    """
    return tl.load(pool_ptr + offsets, mask=stored, other=0.0)
