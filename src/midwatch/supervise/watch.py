"""One rank under watch: its slot and its process state become facts. Pure: the agent feeds it, time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from midwatch.config import WatchConfig
from midwatch.pulse import DeadlineLearner, Slot
from midwatch.supervise.wire import Fact, Resumed, Suspected

STOPPED_DWELL_S: Final = 0.15
"""State T must be seen this long: three polls, so that a debugger's short stop is not an alarm."""
KERNEL_DWELL_S: Final = 30.0
"""State D (uninterruptible) must last this long without a break: a storage server's failover takes that, and reading a
checkpoint shows D in most samples but not in all."""
_REPEAT_S: Final = 5.0
"""A suspicion that nothing came of is raised again after one more deadline, but not more often than this."""


class RankWatch:
    """What is known about one rank, and when its silence becomes suspicious."""

    def __init__(self, attempt: int, rank: int, started_ns: int, config: WatchConfig) -> None:
        self.attempt = attempt
        self.rank = rank
        self._learner = DeadlineLearner(
            init_timeout_s=config.init_timeout_s,
            phase_timeout_s=config.phase_timeout_s,
            floor_s=config.floor_s,
            learned_after=config.learned_after,
        )
        self._forgiven_ns = started_ns
        """Silence before this does not count: the rank, or the agent itself, could not know better."""
        self._state_since: tuple[str, int] = ("?", started_ns)
        self._last: Slot | None = None
        self._told_resume = False
        self._told_ns: int | None = None
        self._told_progress_ns = 0
        self.is_overdue = False

    def recall(self, times_s: Sequence[float]) -> None:
        """How long steps took in an earlier attempt of the same work."""
        self._learner.recall(times_s)

    def taught(self) -> list[float]:
        """The same, for the next attempt; empty before enough steps."""
        return self._learner.taught()

    def forgive(self, now_ns: int) -> None:
        """The agent itself was not running (suspended, starved): all clocks of silence start again."""
        self._forgiven_ns = now_ns
        self._state_since = (self._state_since[0], now_ns)

    def state_s(self, now_ns: int) -> float:
        """For how long its process has been in its state without a break."""
        return (now_ns - self._state_since[1]) / 1e9

    def feed(self, slot: Slot, state: str, now_ns: int) -> list[Fact]:
        """One look at the rank; returns what is new."""
        self._learn(slot)
        self._last = slot
        if state != self._state_since[0]:
            self._state_since = (state, now_ns)
        facts: list[Fact] = []
        if slot.has_resumed and not self._told_resume:
            self._told_resume = True
            facts.append(self.resume_fact(slot))
        suspicion = self._suspicion(slot, now_ns)
        if suspicion is None:
            self.is_overdue, self._told_ns = False, None
        elif self._is_news(slot, suspicion, now_ns):
            self.is_overdue, self._told_ns, self._told_progress_ns = True, now_ns, slot.phase_ns
            facts.append(suspicion)
        return facts

    def resume_fact(self, slot: Slot) -> Resumed:
        return Resumed(
            attempt=self.attempt,
            rank=self.rank,
            step=slot.resumed_step,
            checkpoint=slot.digest,
            config_hash=slot.config_hash,
        )

    def _learn(self, slot: Slot) -> None:
        last = self._last
        if last is None or last.beats == 0 or slot.beats <= last.beats:
            return
        # Beats between two polls share the time evenly; a poll is shorter than any deadline, so this is exact enough.
        own_ns = slot.beat_ns - last.beat_ns - (slot.long_ns - last.long_ns)
        count = slot.beats - last.beats
        for _ in range(min(count, 64)):
            self._learner.observe(own_ns / count / 1e9)

    def _suspicion(self, slot: Slot, now_ns: int) -> Suspected | None:
        state, since_ns = self._state_since
        dwell_s = (now_ns - max(since_ns, self._forgiven_ns)) / 1e9
        silent_s = (now_ns - max(slot.phase_ns, self._forgiven_ns)) / 1e9
        if state == "T" and dwell_s >= STOPPED_DWELL_S:
            return self._suspected(slot, dwell_s, STOPPED_DWELL_S)
        if state == "D" and dwell_s >= KERNEL_DWELL_S and silent_s >= KERNEL_DWELL_S:
            return self._suspected(slot, dwell_s, KERNEL_DWELL_S)
        if not slot.is_attached or slot.attempt != self.attempt or silent_s <= self._learner.shortest_s:
            return None
        deadline_s = self._deadline_s(slot)
        if state == "D":
            # It waits for a disk or a mount: that has a patience of its own.
            deadline_s = max(deadline_s, KERNEL_DWELL_S)
        return self._suspected(slot, silent_s, deadline_s) if silent_s > deadline_s else None

    def _deadline_s(self, slot: Slot) -> float:
        # After its last step a rank still saves and tears down: a long phase without a name.
        return self._learner.deadline_s("custom" if slot.is_finished else slot.phase)

    def _suspected(self, slot: Slot, silent_s: float, deadline_s: float) -> Suspected:
        return Suspected(
            attempt=self.attempt,
            rank=self.rank,
            step=slot.step,
            phase=slot.phase,
            silent_s=round(silent_s, 3),
            deadline_s=round(deadline_s, 3),
            proc_state=self._state_since[0],
        )

    def _is_news(self, slot: Slot, suspicion: Suspected, now_ns: int) -> bool:
        if self._told_ns is None or slot.phase_ns != self._told_progress_ns:
            return True
        return now_ns - self._told_ns > max(_REPEAT_S, suspicion.deadline_s) * 1e9
