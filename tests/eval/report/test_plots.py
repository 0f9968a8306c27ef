from __future__ import annotations

import dataclasses
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import plots, report
from eval.plots.looks import looks_of, spaced
from eval.report.content import NO_PICTURES
from eval.run.rows import HeatCell, Metric, Row
from tests.eval.report.fake_runs import BITS, CONTEXTS, DEPTHS, FAILED, LENGTHS, MISSING, few_rows, full_run
from tests.support.tails import few

pytest.importorskip("matplotlib")
from eval.plots import bars, frontier, heat, lines
from eval.plots.frontier import Point, front, points

BY_CONTEXT = (lines.MEMORY, lines.TIME)
QUESTIONS: tuple[Any, ...] = (frontier, heat, *BY_CONTEXT)
BY_TASK = few_rows(["summarization", "translation"], ["dynamic", FAILED, "paged", MISSING])


def _figure(question: Any, rows: list[Row]) -> Any:
    figure = question.figure(rows, looks_of(rows))
    figure.draw_without_rendering()
    return figure


@pytest.fixture(scope="module")
def figures() -> dict[Any, Any]:
    """Every picture of a full run, drawn."""
    return {question: _figure(question, full_run().rows) for question in QUESTIONS}


def _texts(figure: Any) -> list[Any]:
    """All texts that are seen: names, titles, ticks, labels of axes."""
    found = [figure._supxlabel, figure._supylabel]
    for axes in figure.axes:
        if axes.get_visible():
            ticks = [*_seen(axes.xaxis, axes.get_xlim()), *_seen(axes.yaxis, axes.get_ylim())]
            found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *ticks]
    return [text for text in found if text is not None and text.get_text().strip() and text.get_visible()]


def _overlapping(texts: list[Any]) -> list[tuple[str, str]]:
    boxes = np.array([text.get_window_extent().extents for text in texts])
    low, high = boxes[:, None, :2], boxes[None, :, 2:]
    meet = np.all(low < high, axis=2) & np.all(low < high, axis=2).T
    return [(texts[i].get_text(), texts[j].get_text()) for i, j in np.argwhere(np.triu(meet, 1))]


def _seen(axis: Any, limits: tuple[float, float]) -> list[Any]:
    low, high = sorted(limits)
    return [
        tick.label1
        for tick in axis.get_major_ticks()
        if low <= tick.get_loc() <= high and tick.label1.get_visible()
    ]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.PICTURE.file_name)
def test_no_text_of_a_full_picture_overlaps_another_or_leaves_it(
    question: Any, figures: dict[Any, Any]
) -> None:
    texts = _texts(figures[question])
    assert _overlapping(texts) == []
    frame = figures[question].bbox
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    outside = [
        name
        for name, box in boxes
        if box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
    ]
    assert outside == []
    assert len(boxes) > 30


@pytest.mark.parametrize("number", few([0, 1], {"0"}))
def test_names_on_the_frontier_stay_apart_for_other_numbers_too(number: int) -> None:
    figure = _figure(frontier, full_run(seed=number + 1).rows)
    for axes in figure.axes:
        assert not axes.get_visible() or _overlapping(axes.texts) == []


def test_every_cache_with_numbers_is_named_once_in_each_panel(figures: dict[Any, Any]) -> None:
    measured = sorted(cache for cache in BITS if cache != MISSING)
    for question in BY_CONTEXT:
        for axes in figures[question].axes:
            assert sorted(text.get_text() for text in axes.texts) == measured
    panels = {axes._left_title.get_text(): axes for axes in figures[frontier].axes if axes.get_visible()}
    assert list(panels) == ["summarization", "translation", "retrieval", "perplexity", "fidelity"]
    for task, axes in panels.items():
        names = sorted(text.get_text() for text in axes.texts)
        assert names == [cache for cache in measured if (cache, task) != (FAILED, "translation")]


def test_a_cache_looks_alike_in_every_picture_and_markers_tell_fourteen_apart() -> None:
    looks = looks_of(full_run().rows)
    assert len(looks) == len({look.marker for look in looks.values()}) == 14


def test_lines_go_through_the_medians_on_axes_of_powers(figures: dict[Any, Any]) -> None:
    above, _ = figures[lines.TIME].axes
    line = above.containers[0].lines[0]
    row = next(row for row in full_run().rows if row.contexts)
    # Moved aside by less than half of the way to the next, so that bars do not hide each other.
    assert list(line.get_xdata()) == pytest.approx(CONTEXTS, rel=0.1)
    assert list(line.get_ydata()) == [at.decode_ms.median for at in row.contexts]
    assert (above.get_xscale(), above.get_yscale()) == ("log", "log")
    assert above.get_ylabel() == "decode (ms/token)"


def test_bars_stand_apart_and_are_not_cut_off(figures: dict[Any, Any]) -> None:
    for axes in figures[lines.TIME].axes:
        bars = [segment for drawn in axes.containers for segment in drawn.lines[2][0].get_segments()]
        assert len({bar[0][0] for bar in bars}) == len(bars) == 13 * len(CONTEXTS)
        low, high = axes.get_ylim()
        assert min(bar[0][1] for bar in bars) > low
        assert max(bar[1][1] for bar in bars) < high


@pytest.mark.parametrize("contexts", [(256, 4096), (256, 1024, 4096), (512, 768)])
def test_no_line_begins_or_ends_outside_its_axis(contexts: tuple[int, ...]) -> None:
    rows = [
        dataclasses.replace(
            row,
            contexts=tuple(
                dataclasses.replace(at, context_tokens=tokens)
                for at, tokens in zip(row.contexts, contexts, strict=False)
            ),
        )
        for row in full_run().rows
        if row.contexts
    ]
    for axes in _figure(lines.TIME, rows).axes:
        places = [x for drawn in axes.containers for x in drawn.lines[0].get_xdata()]
        low, high = axes.get_xlim()
        assert low < min(places) < max(places) < high


def test_a_rise_of_zero_gets_an_axis_that_has_a_zero() -> None:
    rows = few_rows(["latency"]).rows
    still = [
        dataclasses.replace(row, contexts=tuple(dataclasses.replace(at, rise_bytes=0) for at in row.contexts))
        for row in rows
    ]
    kv, rise = _figure(lines.MEMORY, still).axes
    assert (kv.get_yscale(), rise.get_yscale()) == ("log", "linear")


def test_better_is_up_whichever_way_the_metric_goes(figures: dict[Any, Any]) -> None:
    up = {axes._left_title.get_text(): axes.get_ylim() for axes in figures[frontier].axes}
    assert up["summarization"][0] < up["summarization"][1]
    assert up["perplexity"][0] > up["perplexity"][1]


def test_each_map_writes_its_numbers_into_its_cells_on_one_scale(figures: dict[Any, Any]) -> None:
    maps = {axes.get_title(): axes for axes in figures[heat].axes if axes.get_title()}
    assert list(maps) == list(BITS)
    assert [text.get_text() for text in maps[MISSING].texts] == ["not available"]
    row = next(row for row in full_run().rows if row.heat)
    assert [text.get_text() for text in maps["dynamic"].texts] == [f"{c.exact_percent:.0f}" for c in row.heat]
    assert {axes.images[0].get_clim() for axes in maps.values() if axes.images} == {(0, 100)}
    cell = maps["dynamic"].texts[1]
    assert cell.get_position() == (LENGTHS.index(512), DEPTHS.index(25))


def test_a_map_with_gaps_leaves_them_empty() -> None:
    cells = (HeatCell(512, 0, 100.0, 1), HeatCell(1024, 50, 0.0, 1))
    figure = _figure(heat, [Row("retrieval", "dynamic", heat=cells)])
    assert [text.get_text() for text in figure.axes[0].texts] == ["100", "0"]


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.5, 0.6]),
        ([0.1, 0.9, 0.9], [0.1, 0.9, 1.0]),
        ([0.0, 0.0, 0.0], [0.0, 0.1, 0.2]),
        ([0.95, 1.0, 1.0], [0.8, 0.9, 1.0]),
    ],
)
def test_names_stay_in_order_and_a_gap_apart(wanted: list[float], places: list[float]) -> None:
    assert spaced(wanted, 0.1) == pytest.approx(places)


def _point(name: str, bits: float, quality: float) -> Point:
    return Point((name,), bits, quality, quality, quality, quality)


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ([("a", 32, 0.0), ("b", 8, 0.0), ("c", 4, -1.0), ("d", 5, -2.0)], ["c", "b"]),
        ([("a", 32, 0.0), ("b", 8, -0.1)], ["b", "a"]),
        ([("a", 8, 0.0), ("b", 8, 0.0)], ["a", "b"]),
    ],
    ids=["fewer bits as good", "more bits better", "tie"],
)
def test_the_front_holds_what_nothing_beats(found: list[tuple[str, float, float]], best: list[str]) -> None:
    assert [point.caches[0] for point in front([_point(*one) for one in found])] == best


@pytest.mark.parametrize(("higher_is_better", "sign"), [(True, 1), (False, -1)])
def test_noise_counts_as_no_difference_and_the_rest_as_better_upwards(
    higher_is_better: bool, sign: int
) -> None:
    def row(cache: str, difference: float, low: float, high: float) -> Row:
        metric = Metric("m", "M", "", 1.0, 0.9, 1.1, higher_is_better, difference, low, high)
        return Row("t", cache, metrics=(metric,), bits_per_value=8.0)

    noise, real = points([row("noise", 0.3, -0.1, 0.7), row("real", 0.5, 0.2, 0.8)])
    assert (noise.quality, real.quality) == (0.0, sign * 0.5)


def test_caches_on_one_spot_share_a_point_and_those_without_a_place_have_none() -> None:
    rows = few_rows(["perplexity"], ["dynamic", "offloaded", MISSING]).rows
    bare = dataclasses.replace(rows[0], cache="bare", bits_per_value=None)
    assert [point.caches for point in points([*rows, bare])] == [("dynamic", "offloaded")]


@pytest.mark.parametrize("picture", [bars.MEMORY, bars.TIME], ids=["memory", "time"])
def test_bars_carry_the_numbers_of_the_table_and_gaps_are_named(picture: bars.Bars) -> None:
    figure = _figure(picture, BY_TASK.rows)
    left, right = figure.axes[2:]  # the second task
    assert [label.get_text() for label in left.get_yticklabels()] == [row.cache for row in BY_TASK.rows[:4]]
    for axes in (left, right):
        gaps = [text.get_text() == "not measured" for text in axes.texts]
        assert gaps == [row.problem is not None for row in BY_TASK.rows[4:]]
    assert _overlapping(_texts(figure)) == []
    hatches = [tuple(bar.get_hatch() for bar in axes.patches) for axes in figure.axes]
    assert len(set(hatches)) == 1
    assert len(set(hatches[0])) == 4


def _png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        (["latency"], ["memory_by_context.png", "time_by_context.png"]),
        (["summarization"], ["quality_by_bits.png", "memory.png", "time.png"]),
        (
            ["retrieval", "latency"],
            ["quality_by_bits.png", "retrieval.png", "memory_by_context.png", "time_by_context.png"],
        ),
        ([], []),
    ],
    ids=lambda value: None,
)
def test_a_run_has_the_pictures_of_the_questions_it_asked(
    tasks: list[str], names: list[str], tmp_path: Path
) -> None:
    run = dataclasses.replace(few_rows(tasks), source="some/folder/tiny_$model$")
    drawn = plots.draw(run, tmp_path)
    assert drawn is not None
    assert [picture.file_name for picture in drawn] == names
    for name in names:
        assert min(_png_size(tmp_path / name)) > 300


def test_drawing_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.draw(few_rows(["latency"]), tmp_path)
    assert "matplotlib.pyplot" not in sys.modules


def test_the_report_links_the_pictures_that_were_drawn(tmp_path: Path) -> None:
    report.write(few_rows(["latency"]), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "![Memory against context](memory_by_context.png)" in text
    assert "![Time against context](time_by_context.png)" in text
    assert NO_PICTURES not in text


def test_without_matplotlib_the_reports_say_how_to_get_pictures(
    tmp_path: Path, without_matplotlib: None
) -> None:
    report.write(few_rows(), tmp_path)
    assert "pip install 'hf-paged-cache[plots]'" in (tmp_path / "report.md").read_text(
        encoding="utf-8"
    ).replace("\\", "")
    assert "hf-paged-cache[plots]" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert list(tmp_path.glob("*.png")) == []
