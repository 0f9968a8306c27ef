"""What random numbers of all benches start from."""

from __future__ import annotations

SEED = 0
