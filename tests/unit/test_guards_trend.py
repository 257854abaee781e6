"""The robust trend: what a spike does to it, how it follows, and that a saved one goes on the same."""

from __future__ import annotations

import json
import random

import pytest

from midwatch.guards.trend import Trend
from midwatch.guards.window import RollingMedian

SIGMA = 0.01


def wandering(count: int, seed: int = 1) -> list[float]:
    source = random.Random(seed)
    return [1.2 - 0.0002 * at + source.gauss(0, SIGMA) for at in range(count)]


def fed(values: list[float], **settings: int) -> Trend:
    trend = Trend(0.001, **settings)
    for value in values:
        trend.learn(value, trend.score(value))
    return trend


def test_score_before_enough_is_known() -> None:
    assert fed(wandering(199)).score(9.0) is None
    assert fed(wandering(200)).score(9.0) is not None


def test_scale_and_slope_are_those_of_the_series() -> None:
    trend = fed(wandering(1000))
    assert trend.scale == pytest.approx(SIGMA, rel=0.3)
    assert trend.expect() == pytest.approx(1.2 - 0.0002 * 1000, abs=2 * SIGMA)
    assert trend.expect(100) - trend.expect() == pytest.approx(-0.02, abs=SIGMA)


def test_a_spike_does_not_hide_the_next_one() -> None:
    values = wandering(600)
    trend = fed(values[:500])
    before = trend.scale
    scores: list[float] = []
    for at, value in enumerate(values[500:600]):
        seen = value + 0.5 if at % 25 == 0 else value
        score = trend.score(seen)
        assert score is not None
        trend.learn(seen, score)
        scores.append(score)
    assert all(score > 30 for score in scores[::25])
    assert max(abs(score) for at, score in enumerate(scores) if at % 25) < 6
    assert trend.scale == pytest.approx(before, rel=0.3)


def test_falls_are_followed_at_once_and_a_higher_level_only_when_it_stays() -> None:
    trend = fed(wandering(500))
    for _ in range(40):
        trend.learn(0.6, trend.score(0.6))
    assert trend.expect() < 0.7
    trend = fed(wandering(500))
    for _ in range(32):
        score = trend.score(2.0)
        assert score is not None
        assert score > 6
        trend.learn(2.0, score)
    for _ in range(96):
        trend.learn(2.0, trend.score(2.0))
    assert trend.score(2.0) == pytest.approx(0, abs=3)


def test_equal_values_have_the_floor_as_scale() -> None:
    trend = fed([1.0] * 300)
    assert trend.scale == 0.001
    assert trend.score(1.01) == pytest.approx(10)


@pytest.mark.parametrize("cut", [3, 31, 32, 33, 63, 64, 127, 128, 129, 203, 471])
def test_a_saved_trend_goes_on_the_same(cut: int) -> None:
    values = wandering(480)
    values[440:476] = [3.0] * 36
    whole, first = Trend(0.001), fed(values[:cut])
    for value in values[:cut]:
        whole.learn(value, whole.score(value))
    second = Trend(0.001)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values[cut:]:
        assert second.score(value) == whole.score(value)
        second.learn(value, second.score(value))
        whole.learn(value, whole.score(value))


def test_rolling_median_is_the_median_of_the_last() -> None:
    source, rolling, last = random.Random(3), RollingMedian(7), []
    for _ in range(300):
        value = float(source.randrange(9))
        rolling.add(value)
        last = [*last[-6:], value]
        ordered = sorted(last)
        half = len(ordered) // 2
        expected = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
        assert rolling.median == expected
