"""The invariants of the decision core. Expensive and for tests; production does not call them."""

from __future__ import annotations

from midwatch.supervise.decide import stopping
from midwatch.supervise.decide.core import Core


def _asks(core: Core) -> bool:
    return core.hold is not None and core.hold.by == "rule" and core.rules.can_probe


def check(core: Core) -> None:
    """Assert what must hold between two events."""
    memory = core.memory
    assert 0 <= memory.restarts_used <= core.restart.max_restarts, "the budget is exceeded"
    assert (core.incident is not None) >= (core.state == "judging"), "judging without an incident"
    assert core.incident is None or core.state in ("judging", "stopping"), "an incident is open but nobody acts"
    assert ("recheck" in core.timers) == (core.watching is not None), "a near-miss nobody looks at again"
    assert core.state == "finished" or core.watching is None or core.is_training
    assert not core.is_leaving or core.stop is not None, "leaving without being asked"
    assert not core.is_leaving or core.is_training, "leaving while not training"
    if core.is_live:
        assert core.attempt is not None, "live without an attempt"
        assert core.next_attempt > core.attempt.number, "an attempt number would be used twice"
        assert set(core.attempt.exits) <= set(core.attempt.ranks), "a stranger's exit"
    if core.state == "stopping":
        assert stopping.is_pending(core), "all ranks are gone, but nothing follows"
        assert "gone" in core.timers, "an unbounded wait for ranks to end"
    if core.state == "judging":
        assert "evidence" in core.timers or "second_look" in core.timers, "an unbounded wait for evidence"
    if core.state == "backing_off":
        assert "backoff" in core.timers, "an unbounded back-off"
    if core.state == "waiting" and core.roster.nodes:
        assert "join" in core.timers or "gate" in core.timers, "an unbounded wait for nodes"
    assert ("gate" in core.timers) == (core.gate is not None), "a gate that nobody closes"
    assert core.gate is None or core.state == "waiting", "a gate where nothing is to start"
    if core.state == "held":
        assert core.hold is not None, "held by nobody"
        assert not _asks(core) or "probe" in core.timers, "a hold that nobody looks after"
        assert core.rules.grade.hold_max_s == 0 or "hold_max" in core.timers, "an unbounded hold"
    if core.state == "finished":
        assert not core.timers, "something is still to come"
