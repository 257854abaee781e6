"""Scripts that tell nothing: when standing still is a hang, and when it is a pause they take now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from midwatch.config import DetectConfig, WatchConfig
from midwatch.supervise.activity import Activity
from midwatch.supervise.zero_code import Look, StandstillWatch

LOOK_S = 0.05
Moves = Callable[[float], bool]


class Watched:
    """Two ranks, looked at twenty times a second."""

    def __init__(self, **config: object) -> None:
        self.watch = StandstillWatch(WatchConfig(**config), 0)  # type: ignore[arg-type]
        self.now = 0.0
        self.run_ns = {0: 0, 1: 0}
        self.written = 0
        self.states = {0: "S", 1: "S"}

    def look(self, *moving: int, wrote: bool = False, work: Mapping[int, Activity] | None = None) -> float:
        self.now += LOOK_S
        self.written += wrote
        for rank in moving:
            self.run_ns[rank] += 5_000_000
        looks = {rank: Look(self.run_ns[rank], self.written, self.states[rank]) for rank in self.run_ns}
        return self.watch.feed(looks, round(self.now * 1e9), None if work is None else lambda: work)

    def train(self, seconds: float, *, pause_s: float = 0.1) -> None:
        """Steps that compute for a moment and wait ``pause_s``."""
        end = self.now + seconds
        while self.now < end:
            self.look(0, 1)
            for _ in range(round(pause_s / LOOK_S)):
                self.look()

    def until_suspected(self) -> float:
        began = self.now
        while self.look() < self.watch.deadline_s:
            assert self.now - began < 3600
        return self.now - began


def test_a_hang_of_all_ranks_is_suspected_after_the_floor() -> None:
    run = Watched()
    run.train(5.0)
    assert run.watch.deadline_s == 5.0
    assert 4.8 <= run.until_suspected() <= 5.2, "from the last move on"


def test_the_deadline_is_ten_ordinary_pauses() -> None:
    run = Watched()
    run.train(60.0, pause_s=1.5)
    assert 14.0 <= run.watch.deadline_s <= 16.0


def test_a_pause_that_was_taken_once_is_allowed_again() -> None:
    run = Watched()
    run.train(10.0)
    run.train(4.0, pause_s=4.0)
    run.train(10.0)
    assert run.watch.deadline_s > 10.0, "an evaluation of four seconds may take ten another time"


def test_before_anything_is_known_patience_is_long() -> None:
    run = Watched(phase_timeout_s=600.0)
    run.train(1.0)
    assert run.watch.deadline_s == 600.0


def test_a_script_that_never_pauses_is_learned_by_the_second() -> None:
    run = Watched()
    for _ in range(round(25 / LOOK_S)):
        run.look(0, 1)
    assert run.watch.deadline_s == 5.0


def test_one_rank_that_works_is_enough() -> None:
    run = Watched()
    run.train(5.0)
    assert all(run.look(1) == 0.0 for _ in range(400))


def test_a_line_of_output_is_a_move() -> None:
    run = Watched()
    run.train(5.0)
    run.look()
    assert run.look(wrote=True) == 0.0


def test_waiting_for_storage_is_not_standing_still() -> None:
    run = Watched()
    run.train(5.0)
    run.states[0] = "D"
    assert all(run.look() == 0.0 for _ in range(400))


def test_it_can_be_switched_off() -> None:
    run = Watched(detect=DetectConfig(zero_code=False))
    run.train(60.0)
    assert run.watch.deadline_s == 600.0


def test_when_the_agent_itself_did_not_run_nobody_stood_still() -> None:
    run = Watched()
    run.train(5.0)
    run.now += 60.0
    run.watch.forgive(round(run.now * 1e9))
    assert run.look() <= LOOK_S + 1e-6


def test_work_of_children_and_threads_is_progress_while_the_main_threads_wait() -> None:
    run = Watched()
    run.train(5.0)
    done = Activity(0.0, 0)
    for _ in range(round(30 / LOOK_S)):
        done += Activity(0.5 * LOOK_S, 0)
        assert run.look(work={0: done}) < 2.5
    for _ in range(round(30 / LOOK_S)):
        done += Activity(0.01 * LOOK_S, 5_000)
        assert run.look(work={0: done}) < 2.5


def test_the_crumbs_of_loggers_and_watchdogs_are_no_work() -> None:
    run = Watched()
    run.train(5.0)
    done, idle_s = Activity(0.0, 0), 0.0
    for _ in range(round(6 / LOOK_S)):
        done += Activity(0.01 * LOOK_S, 20)
        idle_s = run.look(work={0: done})
    assert idle_s > run.watch.deadline_s


def test_a_rank_that_stands_still_while_its_peers_spin_is_suspected_when_the_lines_cease() -> None:
    run = Watched()
    for _ in range(60):
        run.train(0.5)
        run.look(wrote=True)
    for _ in range(round(9 / LOOK_S)):
        assert run.look(0) == 0.0, "its peer spins"
    found = run.watch.fallen_silent(round(run.now * 1e9))
    assert found is not None
    assert found[0] == 1
    assert found[2] < 10.0


def test_peers_that_compute_without_a_line_are_left_alone() -> None:
    run = Watched()
    for _ in range(60):
        run.train(0.5)
        run.look(wrote=True)
    for _ in range(round(30 / LOOK_S)):
        run.look(0, 1)
    assert run.watch.fallen_silent(round(run.now * 1e9)) is None


def test_fast_steps_are_learned_as_soon_as_slow_ones() -> None:
    run = Watched()
    for _ in range(22):
        run.look(0, 1)
    assert run.watch.deadline_s == 5.0, "twenty looks in which the main threads ran and rested"


def test_the_keep_alives_of_many_ranks_do_not_add_up_to_work() -> None:
    run = Watched()
    run.train(5.0)
    spent, still_s = 0.0, 0.0
    for _ in range(round(30 / LOOK_S)):
        spent += 0.03 * LOOK_S
        still_s = run.look(work={rank: Activity(spent, 0) for rank in range(16)})
    assert still_s > 25.0
