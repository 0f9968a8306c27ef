from __future__ import annotations

import builtins
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval import plots, report
from eval.report import Run
from eval.runner import Row
from eval.settings import Settings

MIB = 2**20
NOTE = "pip install 'hf-paged-cache[plots]'"


def _row(task: str, cache: str, scale: int = 1) -> Row:
    return Row(
        task,
        cache,
        "BLEU",
        kv_bytes=3 * MIB * scale // 2,
        rise_bytes=200 * MIB * scale,
        prefill_ms=1234.5 * scale,
        decode_ms_per_token=78.9 * scale,
    )


ROWS = [
    _row("summarization", "dynamic"),
    _row("summarization", "paged", 2),
    _row("translation", "dynamic"),
    Row("translation", "paged", "BLEU", problem="no compiler"),
]


def _run(rows: Sequence[Row]) -> Run:
    return Run(Settings(), "some/folder/tiny_$model$", {}, "measured somehow", 1.0, list(rows), [])


def _png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


def _without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize(
    "rows",
    [ROWS, ROWS[:1], ROWS[3:], [_row(f"task{i}", f"cache{j}") for i in range(3) for j in range(9)]],
    ids=["two caches", "one bar", "nothing measured", "many caches"],
)
def test_every_question_becomes_a_png_that_grows_with_its_bars(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plots.draw(_run(rows), tmp_path) == ["memory.png", "latency.png"]
    for name in ("memory.png", "latency.png"):
        width, height = _png_size(tmp_path / name)
        assert width == 1080
        assert 43 * len(rows) < height < 43 * len(rows) + 400
        assert 5_000 < (tmp_path / name).stat().st_size < 300_000


def test_bars_carry_the_numbers_of_the_table_and_gaps_are_named() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    plots._fill(figure, plots.PICTURES[0], ROWS)
    kv, rise = figure.axes[2:]  # the second task
    assert [text.get_text() for text in kv.texts] == ["1.50", "not measured"]
    assert [text.get_text() for text in rise.texts] == ["200", "not measured"]
    assert kv.get_xlabel() == "KV held at the end, largest batch (MiB)"
    assert [label.get_text() for label in kv.get_yticklabels()] == ["dynamic", "paged"]


def test_a_cache_keeps_its_hatch_in_every_panel_and_differs_from_the_others() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    plots._fill(figure, plots.PICTURES[1], ROWS)
    hatches = [tuple(bar.get_hatch() for bar in axes.patches) for axes in figure.axes]
    assert len(set(hatches)) == 1
    assert len(set(hatches[0])) == 2


@pytest.mark.parametrize("picture", plots.PICTURES, ids=lambda picture: picture.file_name)
def test_no_text_overlaps_another(picture: plots.Picture) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    figure = figure_module.Figure(figsize=(9.0, plots._height_inches(ROWS)), dpi=100, layout="constrained")
    plots._fill(figure, picture, ROWS)
    figure.canvas.draw()
    texts = [
        text
        for axes in figure.axes
        for text in (*axes.texts, axes._left_title, axes.xaxis.label, *axes.get_yticklabels())
        if text.get_text() and text.get_visible()
    ]
    boxes = [text.get_window_extent() for text in texts]
    overlapping = [
        (texts[i].get_text(), texts[j].get_text())
        for i in range(len(boxes))
        for j in range(i)
        if boxes[i].overlaps(boxes[j])
    ]
    assert overlapping == []


def test_drawing_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.draw(_run(ROWS), tmp_path)
    assert "matplotlib.pyplot" not in sys.modules


def test_the_report_links_the_pictures_that_were_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = _run(ROWS)
    report.write(run, tmp_path, plots.draw(run, tmp_path))
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "![memory.png](memory.png)\n\n![latency.png](latency.png)" in text
    assert NOTE not in text


def test_without_matplotlib_the_report_says_how_to_get_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_matplotlib(monkeypatch)
    run = _run(ROWS)
    pictures = plots.draw(run, tmp_path)
    assert pictures is None
    report.write(run, tmp_path, pictures)
    assert NOTE in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert list(tmp_path.glob("*.png")) == []
