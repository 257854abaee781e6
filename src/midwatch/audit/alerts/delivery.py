"""From what waits to who is told: folded, throttled, tried again, and never without end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from midwatch.audit.alerts.alert import Alert, Message
from midwatch.audit.alerts.state import State, Waiting
from midwatch.audit.alerts.target import TIMEOUT_S, Target, TargetAwayError, TargetError, TargetRefusedError
from midwatch.core import Clock, ConfigError

MOST_WAITING: Final = 100
"""Alerts; beyond it the oldest goes, and the next message says how many went."""
_OLDEST_S: Final = 24 * 3600.0
"""What could not be told for a day is nobody's alert any more; the ledger has it."""
_LONGEST_PAUSE_S: Final = 300.0


class _Line(msgspec.Struct):
    """How it goes with one target."""

    failures: int = 0
    not_before_ns: int = 0
    is_complained: bool = False


class Delivery:
    """Tells targets. Blocks for ``TIMEOUT_S`` a target that does not answer.

    Args:
        say: Tells people on the spot that others were not told: a sentence, without secrets.
    """

    def __init__(self, targets: Sequence[Target], min_gap_s: float, clock: Clock, say: Callable[[str], None]) -> None:
        self._targets = targets
        self._gap_ns = int(min_gap_s * 1e9)
        self._clock = clock
        self._say = say
        self._lines = {target.name: _Line() for target in targets}

    def take(self, state: State, alerts: Iterable[Alert]) -> bool:
        """Let new alerts wait for everybody they are for; whether anything changed."""
        is_changed = False
        for alert in alerts:
            left = [target.name for target in self._targets if target.is_stateful or not alert.is_quiet]
            if left:
                state.waiting.append(Waiting(alert=alert, left=left))
                is_changed = True
        return self._tidy(state) or is_changed

    def deliver(self, state: State, save: Callable[[], None], *, is_ending: bool = False) -> None:
        """Tell whom it is time to tell.

        Args:
            save: Called after each delivery.
            is_ending: There is no later: nobody is waited for, and what waits goes out.
        """
        for target in self._targets:
            line = self._lines[target.name]
            if self._clock.monotonic_ns() < line.not_before_ns and not is_ending:
                continue
            for batch in self._due(state, target, is_ending=is_ending):
                if not self._tell(state, target, line, batch):
                    break
                save()

    def _tell(self, state: State, target: Target, line: _Line, batch: list[Waiting]) -> bool:
        """Whether the batch is done with."""
        now_ns = self._clock.wall_ns()
        *earlier, newest = (one.alert for one in batch)
        message = Message(alert=newest, earlier=tuple(earlier), dropped=state.dropped, now_ns=now_ns)
        try:
            target.send(message, TIMEOUT_S)
        except TargetRefusedError as error:
            self._complain(line, f"{target.name} does not take an alert ({newest.title}): {error}")
        except (TargetError, ConfigError) as error:
            wish_s = error.retry_after_s if isinstance(error, TargetAwayError) else 0.0
            self._pause(line, wish_s)
            reason = error.message if isinstance(error, ConfigError) else str(error)
            self._complain(line, f"{target.name} was not told ({newest.title}), and is told later: {reason}")
            return False
        else:
            line.failures, line.is_complained = 0, False
            state.last_ns[f"{target.name} {newest.kind}"] = now_ns
            state.dropped = 0
            for one in batch:
                state.note(one.alert, target.name, now_ns)
        for one in batch:
            one.left.remove(target.name)
        state.waiting = [one for one in state.waiting if one.left]
        return True

    def _due(self, state: State, target: Target, *, is_ending: bool) -> list[list[Waiting]]:
        """What this target is to be told now, a message each."""
        mine = [one for one in state.waiting if target.name in one.left]
        if target.is_stateful:
            return [[one] for one in mine]
        kinds: dict[str, list[Waiting]] = {}
        for one in mine:
            kinds.setdefault(one.alert.kind, []).append(one)
        return [
            batch for kind, batch in kinds.items() if is_ending or self._is_time(state, f"{target.name} {kind}", batch)
        ]

    def _is_time(self, state: State, name: str, batch: list[Waiting]) -> bool:
        since_ns = self._clock.wall_ns() - state.last_ns.get(name, 0)
        # A clock that was set back must not silence us.
        return not 0 <= since_ns < self._gap_ns or any(one.alert.severity == "critical" for one in batch)

    def _tidy(self, state: State) -> bool:
        """Drop what nobody can be told any more; whether there was any."""
        before = len(state.waiting)
        names = set(self._lines)
        oldest_ns = self._clock.wall_ns() - int(_OLDEST_S * 1e9)
        kept: list[Waiting] = []
        for one in state.waiting:
            one.left = [name for name in one.left if name in names]  # targets may have gone from the configuration
            if one.left and one.alert.ts_ns < oldest_ns:
                self._warn(f"nobody could be told for a day: {one.alert.title}")
                state.dropped += 1
            elif one.left:
                kept.append(one)
        excess = max(0, len(kept) - MOST_WAITING)
        state.dropped += excess
        state.waiting = kept[excess:]
        return len(state.waiting) != before

    def _pause(self, line: _Line, wish_s: float) -> None:
        line.failures = min(line.failures + 1, 10)
        pause_s = max(min(wish_s, _LONGEST_PAUSE_S), min(_LONGEST_PAUSE_S, 2.0**line.failures))
        line.not_before_ns = self._clock.monotonic_ns() + int(pause_s * 1e9)

    def _complain(self, line: _Line, sentence: str) -> None:
        """Once, until the target is well again."""
        if not line.is_complained:
            line.is_complained = True
            self._warn(sentence)

    def _warn(self, sentence: str) -> None:
        self._say(f"[AL101] {sentence}")
