"""The highest of all ranks and whose it is, told by the maximum of whole numbers alone."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

from midwatch.train.highest import Highest, keys_of, of_keys, of_values  # noqa: E402

pytestmark = pytest.mark.torch


def highest(values: list[float | None]) -> Highest | None:
    """As ranks find it together: one value each."""
    keys = torch.stack([keys_of([value], rank) for rank, value in enumerate(values)])
    return of_keys(keys.max(0).values)[0]


def test_both_ways_agree() -> None:
    source = random.Random(5)
    kinds = [0.0, -1.5, 2.5, math.inf, -math.inf, 1e-300, -1e300]
    for _ in range(300):
        values = [source.choice([*kinds, source.gauss(0, 1e3)]) for _ in range(source.randint(1, 9))]
        exact, sent = of_values(dict(enumerate(values))), highest([*values])
        assert sent is not None
        assert sent.rank == exact.rank, values
        assert sent.value == pytest.approx(exact.value, rel=1e-9, abs=1e-300)


def test_nan_is_above_everything_whatever_its_sign() -> None:
    for nan in (math.nan, -math.nan):
        for found in (highest([math.inf, nan, 1.0, nan]), of_values({0: math.inf, 1: nan, 2: 1.0, 3: nan})):
            assert found is not None
            assert (math.isnan(found.value), found.rank) == (True, 1)


def test_ranks_without_a_value_do_not_count() -> None:
    assert highest([None, -7.0, None]) == Highest(pytest.approx(-7.0), 1)
    assert highest([None, None]) is None


def test_of_equals_the_lowest_rank_is_named_also_among_very_many() -> None:
    assert highest([1.0, 3.0, 3.0]) == Highest(3.0, 1)
    keys = torch.stack([keys_of([2.0], 0), keys_of([2.5], 1_000_000)])
    assert of_keys(keys.max(0).values) == [Highest(pytest.approx(2.5), 1_000_000)]
