"""Several threads copy one state: every byte once, whatever the shapes, and a failure in any of them is heard."""

from __future__ import annotations

import pytest
import torch

from midwatch.checkpoint import Identity, copying
from midwatch.checkpoint.copying import Copy, Hands, Streams, spare_hands

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(copying, "_ONE_HANDED_BYTES", 0)


def _state() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(1000, 7),
        torch.randn(13, 500).t(),  # not in one piece
        torch.randn(3000).to(torch.bfloat16),
        torch.randint(0, 100, (999,)),
        torch.tensor(5.0),
        torch.empty(0, 4),
        torch.rand(5000) > 0.5,
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_no_piece_is_lost_or_mixed_up_among_many_hands(count: int) -> None:
    state = _state()
    places = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in state]
    hands = Hands(count)
    Copy(list(zip(places, state, strict=True)), Streams(), hands).run()
    hands.close()
    assert all(torch.equal(place, tensor) for place, tensor in zip(places, state, strict=True))


def test_a_helper_that_fails_is_not_taken_for_a_copy_that_is_done() -> None:
    good = torch.zeros(10)
    bad = (torch.zeros(3, 3), torch.ones(2, 2))
    hands = Hands(3)
    with pytest.raises(RuntimeError):
        hands.copy([(torch.zeros(10), good)] * 20 + [bad] + [(torch.zeros(10), good)] * 20)
    hands.close()


def test_ranks_of_one_node_do_not_take_each_others_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying.os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert spare_hands(Identity(run="r")) == copying.MOST_HANDS
    assert spare_hands(Identity(run="r", world_size=8)) == 2
    assert spare_hands(Identity(run="r", world_size=64, node_ranks=tuple(range(8)))) == 2
    assert spare_hands(Identity(run="r", world_size=64)) == 1
