from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws from the same state, alone or in a full run."""
    torch.manual_seed(0)
