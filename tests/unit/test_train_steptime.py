"""Where the time of a step goes: every second is in one part, and nothing is called 0 that nobody saw."""

from __future__ import annotations

import contextlib
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from midwatch.pulse import NullPulse  # noqa: E402
from midwatch.train.steptime import Phases, StepTime  # noqa: E402
from midwatch.train.waits import Waits  # noqa: E402

pytestmark = pytest.mark.torch


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_parts_are_means_and_together_the_whole(clock: Clock) -> None:
    times = StepTime(clock)
    phases = Phases(NullPulse(), times)
    clock.now += 50  # loading a checkpoint, before the loop
    times.begin()
    with phases.phase("data_wait"):
        clock.now += 2
    clock.now += 7
    assert times.end_step() == 9
    with phases.phase("checkpoint_save"):
        clock.now += 5
    with phases.phase("forward_backward"):
        clock.now += 6
    assert times.end_step() == 11, "a save counts in the step after"
    assert times.take() == {"data_wait_s": 1.0, "checkpoint_s": 2.5, "compute_s": 6.5}
    clock.now += 3
    times.end_step()
    assert times.take() == {"data_wait_s": 0.0, "checkpoint_s": 0.0, "compute_s": 3.0}


def test_what_an_evaluation_waits_for_is_its_own_and_a_phase_of_the_scripts_is_divided(clock: Clock) -> None:
    times = StepTime(clock)
    phases = Phases(NullPulse(), times)
    times.begin()
    with phases.phase("eval"):
        clock.now += 1
        with phases.phase("data_wait"):
            clock.now += 2
        with phases.phase("custom:inner"):
            clock.now += 4
    with phases.phase("custom:all of it"):
        clock.now += 10
        with phases.phase("collective"):
            clock.now += 20
        with phases.phase("compile"):
            clock.now += 40
    times.end_step()
    assert times.take() == {"eval_s": 7.0, "other_s": 50.0, "communication_s": 20.0, "compute_s": 0.0}


def test_a_phase_that_fails_is_over(clock: Clock) -> None:
    times = StepTime(clock)
    phases = Phases(NullPulse(), times)
    times.begin()
    with contextlib.suppress(RuntimeError), phases.phase("eval"):
        clock.now += 1
        raise RuntimeError
    clock.now += 1
    times.end_step()
    assert times.take() == {"eval_s": 1.0, "compute_s": 1.0}


def test_own_time_leaves_out_waiting_for_others(clock: Clock) -> None:
    times = StepTime(clock)
    times.begin()
    for _ in range(2):
        clock.now += 3
        assert times.enter("communication")
        clock.now += 7
        times.leave()
        own_s = times.own_s()
        assert own_s == 3
        times.end_step()
    assert times.part_s("data_wait") is None


def test_another_thread_is_no_part_of_the_loop(clock: Clock) -> None:
    times = StepTime(clock)
    entered: list[bool] = []
    thread = threading.Thread(target=lambda: entered.append(times.enter("data_wait")))
    thread.start()
    thread.join()
    assert entered == [False]
    assert times.enter("eval")


class Rows:
    """A loader of the user's own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> int:
        self._clock.now += 4
        return 1


class MoreRows(Rows):
    pass


def test_loaders_are_seen_while_they_are_watched(clock: Clock) -> None:
    times = StepTime(clock)
    rows = MoreRows(clock)
    Waits.watch(times, rows, has_peers=False)
    try:
        times.begin()
        assert [row for row, _ in zip(rows, range(1), strict=False)] == [1]
        assert next(rows) == 1
        times.end_step()
        assert times.take() == {"data_wait_s": 12.0, "compute_s": 0.0}
        Waits.watch(times, rows, has_peers=False)
        assert next(rows) == 1
        times.end_step()
        assert times.take() == {"data_wait_s": 4.0, "compute_s": 0.0}, "wrapped once, however often it is watched"
    finally:
        Waits.unwatch(times)
    assert next(rows) == 1
    times.end_step()
    assert times.take() == {"data_wait_s": 0.0, "compute_s": 4.0}


def test_a_stock_loader_is_seen_and_ends_as_ever() -> None:
    times = StepTime()
    Waits.watch(times, None, has_peers=False)
    try:
        times.begin()
        loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
        assert [len(batch[0]) for batch in loader] == [2, 2, 2]
        times.end_step()
        assert times.take()["data_wait_s"] > 0
    finally:
        Waits.unwatch(times)
