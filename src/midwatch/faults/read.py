"""Stage one: each rank's own facts become one cause class, without a look at the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Final

import msgspec

from midwatch.core import EXIT_DO_NOT_REQUEUE, EXIT_GO_BACK
from midwatch.faults import frames, texts, tracebacks, wordings
from midwatch.faults.table import class_of
from midwatch.faults.types import Confidence, Frame, RankEvidence

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
_STARTUP_CODES = (2, 126, 127)
"""Usage error of an argument parser, command not executable, command not found."""
STARTUP_LIFE_S = 60.0
"""A bare exit 2 is an argument error only while the script can hardly have begun."""
_OOM_COUNTED = "the memory cgroup's oom_kill counter rose"


class RankFact(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's own traces say about its end, or about its life when it still runs."""

    evidence: RankEvidence
    fault_class: str
    phrase: str
    """Completes the sentence "rank 1 ..."."""
    message: str = ""
    """What makes this failure the same as another; goes into the fingerprint."""
    frame: Frame | None = None
    """Innermost frame of the user's own code."""
    lines: tuple[str, ...] = ()
    """Quoted evidence, best first."""
    confidence: Confidence = "certain"

    @property
    def rank(self) -> int:
        return self.evidence.rank

    @property
    def node(self) -> str:
        return self.evidence.node

    @property
    def order(self) -> int:
        return class_of(self.fault_class).order

    @property
    def is_dead(self) -> bool:
        return self.evidence.exit_code is not None or self.evidence.proc_state in ("Z", "X")


def read_rank(
    rank: RankEvidence, oom_lines: Mapping[int, str], xid: str = "", lived_s: float | None = None
) -> RankFact:
    """One rank, one cause.

    Args:
        rank: The rank.
        oom_lines: pid -> kernel line about an out-of-memory kill on this rank's node.
        xid: A GPU driver report on this rank's node; empty for none.
        lived_s: How long the attempt lived.
    """
    if rank.exit_code is None:
        return _read_alive(rank)
    if rank.exit_code == 0:
        return RankFact(evidence=rank, fault_class="early_exit", phrase="exited with 0", message="exit 0")
    if rank.signalled_by_us:
        return RankFact(evidence=rank, fault_class="torn_down", phrase="was ended by midwatch", confidence="weak")
    number = _signal_of(rank.exit_code)
    if number is not None:
        return _read_signal(rank, number, oom_lines, xid)
    return _with_oom(_read_exit(rank, rank.exit_code, xid, lived_s), oom_lines)


def _signal_of(exit_code: int) -> signal.Signals | None:
    """The signal behind an exit code, also where a shell or a handler turned it into 128 + n."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        found = signal.Signals(number)
    except ValueError:
        return None
    is_usual = found in (*_CRASHES, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return found if exit_code < 0 or is_usual else None


def _with_oom(fact: RankFact, oom_lines: Mapping[int, str]) -> RankFact:
    """A data loader only says that its worker was killed; the kernel says for what."""
    if fact.fault_class != "data_worker_died":
        return fact
    lines = [oom_lines[pid] for pid in wordings.named_pids(fact.message) if pid in oom_lines]
    if not lines and not (fact.evidence.is_oom_counted and "Killed" in fact.message):
        return fact
    return msgspec.structs.replace(
        fact,
        fault_class="host_out_of_memory",
        phrase="lost a data-loading worker that the kernel killed for memory",
        message="oom kill of a worker",
        lines=(*(lines or [_OOM_COUNTED]), *fact.lines),
    )


def _read_signal(rank: RankEvidence, number: signal.Signals, oom_lines: Mapping[int, str], xid: str) -> RankFact:
    if number is signal.SIGKILL and (rank.oom_killed or rank.pid in oom_lines):
        line = oom_lines.get(rank.pid, _OOM_COUNTED)
        return RankFact(
            evidence=rank,
            fault_class="host_out_of_memory",
            phrase="was killed by the kernel for memory (SIGKILL)",
            message="oom kill",
            lines=(line,),
        )
    if number in _CRASHES:
        return _read_crash(rank, number, xid)
    return RankFact(
        evidence=rank,
        fault_class="killed_outside",
        phrase=f"was killed by {number.name} from outside",
        message=number.name,
        lines=(f"exit code {rank.exit_code} ({number.name}), no sign of an out-of-memory kill, not sent by midwatch",),
    )


def _read_crash(rank: RankEvidence, number: signal.Signals, xid: str) -> RankFact:
    mismatch = wordings.mismatch_line(rank.stderr_tail) if number is signal.SIGABRT else ""
    if mismatch:
        # It noticed; whether it went astray itself or its peer did, its own words do not say.
        return RankFact(
            evidence=rank,
            fault_class="collective_mismatch",
            phrase="was sent another collective than it was in",
            message="collectives differ",
            lines=(mismatch,),
            confidence="weak",
        )
    if number is signal.SIGABRT and (reason := wordings.abort_reason(rank.stderr_tail)) is not None:
        fault_class, line = reason
        return RankFact(
            evidence=rank,
            fault_class=fault_class,
            phrase=f"aborted: {line}",
            message=line,
            lines=(*((xid,) if xid and fault_class == "gpu_error" else ()), line),
        )
    victim = _victim_line(rank, number)
    if victim:
        return RankFact(
            evidence=rank,
            fault_class="peers_lost",
            phrase="was aborted by the communication watchdog"
            if number is signal.SIGABRT
            else "crashed when it had lost its peers",
            message="watchdog",
            lines=(victim,),
        )
    fatal = tracebacks.find_fatal(rank.stderr_tail)
    frame = frames.user_frame(fatal.frames) if fatal else None
    at = f" in {frame.function} ({frames.basename(frame.file)}:{frame.line})" if frame else ""
    lines = [f"exit code {rank.exit_code} ({number.name})"]
    if fatal:
        lines.insert(0, f"Fatal Python error: {fatal.what}{at}")
    lines.extend(() if fatal else texts.last_lines(rank.stderr_tail))
    if number is signal.SIGBUS:
        lines.append("SIGBUS is often a full /dev/shm or a truncated mapped file")
    return RankFact(
        evidence=rank,
        fault_class="native_crash",
        phrase=f"crashed with {number.name}{at}",
        message=number.name,
        frame=frame,
        lines=tuple(lines),
    )


def _victim_line(rank: RankEvidence, number: signal.Signals) -> str:
    """What shows that a crash was only the end of a rank that had lost its peers; empty for a crash of its own."""
    raised = tracebacks.find_raised(rank.stderr_tail)
    is_uncaught = raised is not None and bool(raised.frames) and raised.frames[-1].function == "<module>"
    if raised is not None and is_uncaught and wordings.classify_raised(raised) == "peers_lost":
        return raised.line  # libraries that take themselves down among broken connections crash now and then
    return wordings.communication_line(rank.stderr_tail) if number is signal.SIGABRT else ""


_DECIDED: Final = {
    EXIT_DO_NOT_REQUEUE: ("breaker_ended", "ended the run, as the circuit breaker or a person decided"),
    EXIT_GO_BACK: ("breaker_went_back", "left, to go back to an older checkpoint"),
}
"""Exit codes by which a rank says what it wants."""
_BACK_TO: Final = re.compile(r"leaving to go back before step (\d+)")
"""What each rank logs last then."""


def _read_exit(rank: RankEvidence, code: int, xid: str, lived_s: float | None) -> RankFact:
    if rank.is_attached and code in _DECIDED:
        fault_class, phrase = _DECIDED[code]
        if code == EXIT_GO_BACK and (where := _BACK_TO.findall("\n".join(rank.stderr_tail))):
            phrase = f"left, to go back to a checkpoint from before step {where[-1]}"
        return RankFact(
            evidence=rank,
            fault_class=fault_class,
            phrase=phrase,
            message=f"exit {code}",
            lines=(f"exit code {code}", *texts.last_lines(rank.stderr_tail, 1)),
        )
    raised = tracebacks.raised_from_error_file(rank.error_file) if rank.error_file else None
    if raised is None and code not in _STARTUP_CODES[1:]:
        raised = tracebacks.find_raised(rank.stderr_tail)
    if raised is not None and (code == 1 or rank.error_file or tracebacks.is_last_word(rank.stderr_tail)):
        return _read_raised(rank, raised, xid)
    blamed = wordings.surroundings_line(rank.stderr_tail) if code in _STARTUP_CODES[1:] else ""
    if blamed:
        return RankFact(
            evidence=rank,
            fault_class="environment_error",
            phrase="could not be started",
            message=blamed,
            lines=(blamed,),
        )
    startup = wordings.startup_line(rank.stderr_tail)
    is_early = rank.step is None and (lived_s is None or lived_s < STARTUP_LIFE_S)
    if is_early and (code in _STARTUP_CODES or (startup and "No module named" in startup)):
        return RankFact(
            evidence=rank,
            fault_class="startup_error",
            phrase=f"exited with code {code} before it began",
            message=startup or f"exit {code}",
            lines=(startup or f"exit code {code}",),
            confidence="certain" if startup else "likely",
        )
    victim = wordings.communication_line(rank.stderr_tail)
    if victim and raised is None and code == 1:
        return RankFact(
            evidence=rank, fault_class="peers_lost", phrase="lost its peers", message="lost peers", lines=(victim,)
        )
    return RankFact(
        evidence=rank,
        fault_class="explicit_exit",
        phrase=f"exited with code {code}",
        message=f"exit {code}",
        frame=frames.user_frame(raised.frames) if raised else None,
        lines=(f"exit code {code}", *texts.last_lines(rank.stderr_tail, 1)),
    )


def _read_raised(rank: RankEvidence, raised: texts.Raised, xid: str = "") -> RankFact:
    """A rank that ended, or is about to end, by an uncaught exception."""
    fault_class = wordings.classify_raised(raised)
    frame = frames.user_frame(raised.frames)
    at = f" in {frame.function} ({frames.basename(frame.file)}:{frame.line})" if frame else ""
    verb = "lost its peers" if fault_class == "peers_lost" else f"raised {raised.line}{at}"
    lines = [raised.line]
    if at:
        lines.append(f"raised{at}")
    if xid and fault_class == "gpu_error":
        lines.insert(0, xid)
    return RankFact(
        evidence=rank,
        fault_class=fault_class,
        phrase=verb,
        message=f"{raised.short_type}: {raised.message}",
        frame=frame,
        lines=tuple(lines),
    )


def _read_alive(rank: RankEvidence) -> RankFact:
    """Alive: innocent by itself, unless its log ends with a traceback. Then it is on its way out."""
    raised = tracebacks.find_raised(rank.stderr_tail) if tracebacks.ends_uncaught(rank.stderr_tail) else None
    if raised is not None:
        fact = _read_raised(rank, raised)
        return msgspec.structs.replace(fact, confidence="likely")
    return RankFact(evidence=rank, fault_class="no_fault", phrase="is alive")
