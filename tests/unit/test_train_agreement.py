"""Beyond 64 ranks only sums are seen; that some ranks are elsewhere in the loop shows in them all the same."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from midwatch.core import GuardError  # noqa: E402
from midwatch.train.agreement import _COMPARED, NAMES, Agreed, _from_sums, _summands  # noqa: E402
from midwatch.train.batch_numbers import READ  # noqa: E402
from midwatch.train.highest import keys_of, of_keys  # noqa: E402
from midwatch.train.inspecting_numbers import Evidence  # noqa: E402

pytestmark = pytest.mark.torch


def summed(places: list[float]) -> Agreed:
    rows = torch.zeros(len(NAMES), 4, dtype=torch.float64)
    for rank, place in enumerate(places):
        numbers = {"loss": 2.0, "place": place, "first_position": 7.0, "position": 9.0 + rank}
        rows += _summands(numbers, rank)
    return _from_sums(5, rows.tolist(), {})


@pytest.mark.parametrize("place", [0.0, 11.0, 1023.0, 2_000_001.0, 2.0**40])
def test_ranks_at_one_place_agree(place: float) -> None:
    agreed = summed([place] * 100)
    assert agreed.found["loss"] == 2.0
    assert agreed.found["place"] % 2 == place % 2
    assert (agreed.first_position, agreed.position) == (7, 9)


def test_of_very_many_ranks_the_one_with_most_rows_read_before_is_known() -> None:
    own = READ["seen_share"]
    rows, numbers = (
        torch.zeros(len(NAMES), 4, dtype=torch.float64),
        [{own: 0.75 if rank == 70 else 0.0} for rank in range(100)],
    )
    for rank, mine in enumerate(numbers):
        rows += _summands({**mine, "place": 3.0}, rank)
    keys = torch.stack([keys_of([mine.get(name) for name in _COMPARED], rank) for rank, mine in enumerate(numbers)])
    agreed = _from_sums(5, rows.tolist(), dict(zip(_COMPARED, of_keys(keys.amax(dim=0)), strict=True)))
    Evidence().complete(agreed.found)
    sample = agreed.sample()
    assert (sample.seen_share, sample.rank_repeated) == (pytest.approx(0.0075), None)
    assert sample.rank_seen == {70: pytest.approx(0.75)}


@pytest.mark.parametrize("odd", [0, 57, 99])
def test_one_of_a_hundred_that_is_elsewhere_is_refused(odd: int) -> None:
    for at in (10.0, 1022.0, 2_000_001.0):
        places = [at] * 100
        places[odd] += 1
        with pytest.raises(GuardError) as caught:
            summed(places)
        assert caught.value.code == "GD103"
