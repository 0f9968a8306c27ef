from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_paged_cache.kernels import cpp
from hf_paged_cache.kernels.cpp import build


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: with tensors so small, a busy machine spends most time waiting for the second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has loaded nothing yet, with an empty folder of compiled kernels."""
    monkeypatch.setattr(cpp, "_loaded", None)
    monkeypatch.setenv("HF_PAGED_CACHE_CPU_ISA", "portable")
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def tiny_source(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel of one function, which compiles at once."""
    sources = tmp_path_factory.mktemp("sources")
    (sources / "attention.cpp").write_text(
        "#ifndef ANSWER\n#define ANSWER 42\n#endif\n"
        'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    monkeypatch.setattr(build, "_SOURCE_DIR", sources)
    monkeypatch.setattr(build, "_SOURCES", ("attention.cpp",))
    monkeypatch.setattr(build, "_EXPORTS", ("answer",))
    return sources


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder
