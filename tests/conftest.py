from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores already


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws from the same state, alone or in a full run."""
    torch.manual_seed(0)
