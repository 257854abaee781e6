"""The hold: no ranks run and none start. A wide cause is waited out, not restarted into.

A hold of ours ends by ``grade.green_rounds`` good rounds of probes in a row, and only on the side that has most of the
last attempt's nodes; a person's ends by a person. Either ends the run (SV113) after ``grade.hold_max_s``, and the
smaller side gives up (SV114) when the others do not come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from midwatch.core import CODES, format_seconds
from midwatch.supervise.decide import sides
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import SECOND, Hold, Outcome
from midwatch.supervise.messages import HoldRequested, NodesProbed, ProbeNodes, ProbeResult, ResumeRequested

PROBES_S = 15.0
"""Probes have deadlines of their own (10 s each, side by side), and answers their way back (2 s): beyond this the way
to a node itself is stuck."""


def hold_requested(core: Core, event: HoldRequested) -> None:
    """What trains goes on; the next launch waits for a person."""
    if core.hold is not None and core.hold.by == "person":
        core.set_aside("a person holds it already")
        return
    want(core, "person", event.reason)
    if core.is_live:
        core.say(f"held on request ({event.reason}): training goes on, but nothing is restarted", "warning")
    elif core.state == "held":
        core.disarm("probe", "hold_max")
        if core.rules.grade.hold_max_s > 0:
            core.arm("hold_max", core.rules.grade.hold_max_s)
        core.say(f"held on request ({event.reason}) until a person lets it go on", "warning")
    elif not core.returning:
        enter(core)


def want(core: Core, by: Literal["person", "rule"], reason: str, *, unfit: Iterable[str] = ()) -> None:
    """No launch from here on. What a person holds stays theirs: no rule may take it over, and so end it by probes."""
    old = core.hold
    if by == "rule" and old is not None and old.by == "person":
        return
    began_ns = old.began_ns if old is not None else None
    core.hold = Hold(by=by, reason=reason, cause=core.cause, began_ns=began_ns, unfit=tuple(unfit))
    # Who takes over must know what another node may end.
    core.record("hold.wanted", by=by, reason=reason, unfit=list(unfit))


def enter(core: Core) -> None:
    """No ranks are left: stand still."""
    hold = core.hold
    assert hold is not None
    core.disarm("join", "backoff", "gate")
    core.gate = None
    core.move("held")
    core.cause = hold.cause = hold.cause or core.cause
    hold.began_ns = core.now_ns
    core.short_since_ns = None
    core.record("run.held", by=hold.by, reason=hold.reason)
    limit_s = _limit_s(core, hold)
    if limit_s > 0:
        core.arm("hold_max", limit_s)
    if hold.by == "person":
        core.say(f"held on request ({hold.reason}) until a person lets it go on", "warning")
        return
    rounds = f"after {core.rules.grade.green_rounds} good rounds of probes, or " if core.rules.can_probe else ""
    core.say(f"held: {hold.reason}; going on {rounds}when a person says so", "error")
    _ask(core, hold)


def _limit_s(core: Core, hold: Hold) -> float:
    """0 for none. One bad node is no reason to keep all others for longer than a lost one."""
    limits = [core.rules.grade.hold_max_s, max(core.restart.spare_wait_s, 1.0) if hold.unfit else 0.0]
    return min((limit for limit in limits if limit > 0), default=0.0)


def _ask(core: Core, hold: Hold) -> None:
    """One round: every live node, spares included."""
    if not core.rules.can_probe:
        return
    core.questions += 1
    hold.question = f"hold-{core.next_attempt}-{core.questions}"
    nodes = tuple(name for name in core.roster.nodes if core.roster.is_usable(name))
    if nodes:
        core.emit(ProbeNodes(cause=core.cause, question=hold.question, nodes=nodes, purpose="hold"))
    core.arm("probe", _round_s(core))


def _round_s(core: Core) -> float:
    """For an answer. Asking again before it would pile up probes on slow nodes, and no round would count."""
    return max(core.rules.grade.probe_s, PROBES_S)


def _ask_again(core: Core) -> None:
    """The answer is there: the next round comes ``grade.probe_s`` after this one began."""
    due = core.timers.get("probe", core.now_ns) - round((_round_s(core) - core.rules.grade.probe_s) * SECOND)
    core.arm("probe", max(0, due - core.now_ns) / SECOND)


def probe_due(core: Core) -> None:
    """The next round; one that was never answered was not good."""
    hold = core.hold
    if core.state != "held" or hold is None or hold.by == "person":
        return
    core.cause = hold.cause
    if hold.question:
        _not_green(core, hold, "the probes did not answer")
    if not _is_forsaken(core):
        _ask(core, hold)


def _is_forsaken(core: Core) -> bool:
    """The smaller side waits for the others as long as for a spare; then they are gone, or go on without us."""
    if not sides.is_minority(core):
        core.short_since_ns = None
        return False
    if core.short_since_ns is None:
        core.short_since_ns = core.now_ns
    wait_s = core.restart.spare_wait_s
    if core.now_ns - core.short_since_ns <= wait_s * SECOND:
        return False
    sentence = f"only {sides.words(core)} are here, and no others came within {format_seconds(wait_s)}"
    code = CODES["SV114"]
    core.finish(Outcome(exit_code=code.exit_code, error="SV114", sentence=sentence, cause=core.cause))
    return True


def probed(core: Core, event: NodesProbed) -> None:
    hold = core.hold
    if core.state != "held" or hold is None or event.question != hold.question:
        core.set_aside("an answer nobody waits for")
        return
    core.cause = hold.cause
    hold.question = ""
    _ask_again(core)
    bad = against(core, event.results)
    if bad:
        _not_green(core, hold, bad)
        return
    hold.green_rounds += 1
    needed = core.rules.grade.green_rounds
    core.record("hold.probed", is_good=True, rounds=hold.green_rounds, against="")
    if hold.green_rounds >= needed:
        core.passed.update(core.roster.nodes)
        release(core, "probes", f"{needed} good rounds of probes")


def _not_green(core: Core, hold: Hold, why: str) -> None:
    hold.green_rounds = 0
    core.record("hold.probed", is_good=False, rounds=0, against=why)
    core.say(f"still held: {why}", "warning")


def against(core: Core, results: Sequence[ProbeResult]) -> str:
    """What speaks against going on; empty for nothing."""
    if sides.is_minority(core):
        return f"only {sides.words(core)} of the last attempt are in reach"
    bad = [result for result in results if is_bad(result)]
    if not bad:
        return "" if results else "no node answered"
    first = bad[0]
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"node {first.node}, {first.probe}: {first.text or first.status}{more}"


def is_bad(result: ProbeResult) -> bool:
    """During a hold an answer that does not come is a sign, too: hung storage shows itself by silence."""
    return result.status == "fail" or (result.status == "unknown" and not result.is_blind)


def resume_requested(core: Core, event: ResumeRequested) -> None:
    """A person takes it upon them: the hold ends, budgets are full again, and no gate is in the way."""
    if core.memory.refill():
        core.record("budget.refilled", step=core.attempt.step if core.attempt else None, by="person")
    if core.hold is None:
        core.set_aside("not held")
        return
    core.passed.update(core.roster.nodes)
    release(core, "person", event.reason)


def release(core: Core, by: Literal["person", "probes", "spare"], reason: str) -> None:
    """Launch again when the ranks are gone, or now where the run stands still (see ``launching.go_on``)."""
    hold = core.hold
    assert hold is not None
    core.hold = None
    core.disarm("probe", "hold_max")
    core.record("hold.ended", by=by, reason=reason)
    core.say(f"no longer held: {reason}")


def adopted(core: Core) -> None:
    """The attempt that was to be stopped for a hold of ours lives on without its coordinator: let it train."""
    if core.hold is not None and core.hold.by == "rule":
        release(core, "probes", "the attempt still runs")


def given_up(core: Core) -> None:
    hold = core.hold
    if core.state != "held" or hold is None:
        return
    waited = format_seconds(_limit_s(core, hold))
    error = "SV114" if hold.unfit else "SV113"
    core.finish(
        Outcome(
            exit_code=CODES[error].exit_code,
            error=error,
            sentence=f"held for {waited} without an end ({hold.reason})",
            cause=hold.cause,
        )
    )
