from __future__ import annotations

import math
import socket

import pytest

from tests.eval.text_scores import METRICS, score


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        # All 3 predicted words are among 4: P 1, R 3/4. Bigrams: P 2/2, R 2/3. The longest run: all 3.
        (["the cat sat"], ["the cat sat down"], (600 / 7, 80.0, 600 / 7)),
        # Order matters to bigrams and to the longest common subsequence only.
        (["red blue"], ["blue red"], (100.0, 0.0, 50.0)),
        # Stems are compared: runs = run.
        (["run"], ["runs"], (100.0, 0.0, 100.0)),
        # The mean over samples.
        (["run", "walk"], ["run", "fly"], (50.0, 0.0, 50.0)),
        ([""], ["something"], (0.0, 0.0, 0.0)),
    ],
)
def test_rouge_equals_values_computed_by_hand(
    predictions: list[str], references: list[str], expected: tuple[float, float, float]
) -> None:
    scores = [score(name, predictions, references) for name in ("rouge_1", "rouge_2", "rouge_l")]
    assert scores == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        (["a b c d e"], ["a b c d e"], 100.0),
        # n-gram precisions 4/5, 3/4, 2/3, 1/2: the fourth root of their product, 1/5.
        (["a b c d e"], ["a b c d f"], 100 * 0.2**0.25),
        # All precisions 1, brevity penalty exp(1 - 6/4).
        (["a b c d"], ["a b c d e f"], 100 * math.exp(-0.5)),
        # A corpus pools its counts: precisions 6/8, 4/6, 2/4, 1/2.
        (["a b c d", "a b x y"], ["a b c d", "a b u v"], 100 * (6 / 8 * 4 / 6 * 2 / 4 * 1 / 2) ** 0.25),
    ],
)
def test_bleu_equals_values_computed_by_hand(
    predictions: list[str], references: list[str], expected: float
) -> None:
    assert score("bleu", predictions, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        (["abc"], ["abc"], 100.0),
        # Precision = recall = mean of 2/3, 1/2 and 0.
        (["abc"], ["abd"], 100 * (2 / 3 + 1 / 2 + 0) / 3),
        (["xyz"], ["abc"], 0.0),
    ],
)
def test_chrf_equals_values_computed_by_hand(
    predictions: list[str], references: list[str], expected: float
) -> None:
    assert score("chrf", predictions, references) == pytest.approx(expected)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_open_no_connection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a metric tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert score(name, ["a b c d e"], ["a b c d e"]) > 99.9
