"""What of a ledger people are told: lines in, alerts out. Pure: the time comes with the lines or is given.

The ledgers say everything that is worth an alert, whoever wrote it, and a line has a name of its own (its file and its
number there). So nothing in the supervisor or in the training loop knows of alerts, and whoever reads the ledgers,
after a restart or on another node, finds the same alerts under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from midwatch.audit.alerts.alert import Alert, Severity, State, clean, clock_time
from midwatch.audit.alerts.wording import DONE, GRADES, OVER, Memory, Run, culprit_of, kind_of, name_of, text_of, whole
from midwatch.audit.line import LedgerLine
from midwatch.config import AlertKind, AlertsConfig
from midwatch.core import CODES, EXIT_DO_NOT_REQUEUE, EXIT_REQUEUE, format_seconds

_STOPPED_ON_REQUEST: Final = "SV109"
_MOST_OPEN: Final = 64
"""Things that are on at a time; more are forgotten, the oldest first."""


class Rules:
    """Reads lines in their order."""

    def __init__(self, config: AlertsConfig, run: Run, memory: Memory | None = None) -> None:
        self._config = config
        self._run = run
        self.memory = memory or Memory()
        self._handlers: dict[str, Callable[[LedgerLine], list[Alert]]] = {
            "breaker.paused": self._paused,
            "breaker.moved": self._moved,
            "breaker.ended": self._broken,
            "fault.judged": self._judged,
            "incident.closed": self._healed,
            "run.held": self._held,
            "hold.ended": lambda line: self._over("held", "held", line, f"the run goes on: {text_of(line, 'reason')}"),
            "run.finished": self._finished,
            "metrics.push_failed": self._push_failed,
            "metrics.push_recovered": lambda line: self._over("push", "push", line, "metrics are delivered again"),
            "run.resumed": self._training,
            "run.started_fresh": self._training,
            "checkpoint.verified": self._verified,
            "checkpoint.staged": self._alive,
            "checkpoint.skipped": self._alive,
            "checkpoint.failed": self._alive,
            "attempt.ended": self._resting,
            "run.stopped": self._resting,
            "run.aborted": self._resting,
        }

    def read(self, line: LedgerLine) -> list[Alert]:
        """What one line is worth."""
        handler = self._handlers.get(line.event)
        found = handler(line) if handler is not None else []
        return [alert for alert in found if alert.kind in self._config.on]

    def look(self, now_ns: int) -> list[Alert]:
        """What the time alone is worth: no checkpoint was verified for too long."""
        memory, limit_s = self.memory, self._config.unverified_s
        age_s = (now_ns - memory.safe_ns) / 1e9
        if "unverified" not in self._config.on or not limit_s or not memory.is_training or not memory.safe_ns:
            return []
        if age_s <= limit_s or "unverified" in memory.on or "breaker" in memory.on:
            return []
        name = f"unverified-{memory.safe_ns}"
        self._begin("unverified", name)
        since = "training began" if memory.safe_step is None else f"that of step {memory.safe_step}"
        return [
            Alert(
                id=name,
                kind="unverified",
                state="on",
                severity="error",
                key=memory.on["unverified"],
                title="no checkpoint was verified for too long",
                sentence=f"no checkpoint was verified for {format_seconds(age_s)}, since {since}; training goes on",
                did="Nothing: a crash now would cost all steps since then.",
                look=self._run.command("ckpt ls"),
                page="CK301",
                ts_ns=now_ns,
                step=memory.safe_step,
                **self._who(),
            )
        ]

    def ended(self, ident: str, sentence: str, error: str, now_ns: int, **where: Any) -> Alert:
        """An end of which no line tells, because nobody was left to write one."""
        self.memory.is_training = False
        return Alert(
            id=ident,
            kind="ended",
            severity="critical",
            key=f"ended/{ident}",
            title="the run ended badly",
            sentence=clean(sentence),
            did="Nothing more: nobody starts it again by itself.",
            look=self._run.command("status"),
            page=error if error in CODES else "",
            ts_ns=now_ns,
            **self._who(),
            **where,
        )

    def rest(self) -> None:
        """Nobody trains as far as we know, until a line says so."""
        self.memory.is_training = False

    # --- the circuit breaker --------------------------------------------------------------------------------------

    def _paused(self, line: LedgerLine) -> list[Alert]:
        self.memory.is_training = False
        # A later attempt may come back into the same pause, and a run on probation may be paused again.
        is_known = "breaker" in self.memory.on
        until = clock_time(whole(line.data.get("until_ns")))
        did = "No further optimizer step is made, and checkpoints since the first outlier are flagged as suspect."
        did += f" Unless somebody decides (or guards.action says rewind), the run ends at {until}." if until else ""
        return [
            *self._over("anomaly", "anomaly", line, "training is paused instead"),
            self._alert(
                line,
                "breaker",
                "on",
                "critical",
                self._begin("breaker", name_of(line)),
                title="the circuit breaker is open" if is_known else "the circuit breaker opened",
                sentence=f"training is paused: {text_of(line, 'why')}",
                did=did,
                look=self._run.command("breaker show"),
                page="GD101",
            ),
        ]

    def _moved(self, line: LedgerLine) -> list[Alert]:
        after, why = line.data.get("after"), text_of(line, "why")
        if after == "closed":
            self._training(line)
            return [
                *self._over("breaker", "breaker", line, f"the circuit breaker closed: {why}"),
                *self._over("anomaly", "anomaly", line, f"the numbers are within their bands again: {why}"),
            ]
        if after == "half_open":
            # Over: should it open again, that is news and wakes people again.
            self._training(line)
            return self._over("breaker", "breaker", line, f"training goes on, on probation: {why}")
        if after != "incident":
            return []
        return [
            self._alert(
                line,
                "anomaly",
                "on",
                "warning",
                self._begin("anomaly", name_of(line)),
                title="numbers out of their band",
                sentence=f"the guards found {why}",
                did="Training goes on.",
                look=self._run.command("breaker show"),
                page="GD101",
            )
        ]

    def _broken(self, line: LedgerLine) -> list[Alert]:
        self.memory.is_training = False
        return [
            self._alert(
                line,
                "breaker",
                "on",
                "critical",
                self._begin("breaker", name_of(line)),
                title="the circuit breaker ended the run",
                sentence=f"training has ended: {text_of(line, 'why')}",
                did="All ranks left with exit code 93, so that nothing starts them again by itself.",
                look=self._run.command("breaker show"),
                page="GD101",
            )
        ]

    # --- faults, holds, the end -----------------------------------------------------------------------------------

    def _judged(self, line: LedgerLine) -> list[Alert]:
        grade, action = str(line.data.get("grade", "")), str(line.data.get("action", ""))
        if grade < self._config.min_grade:
            return []
        incident = text_of(line, "incident")
        return [
            self._alert(
                line,
                "incident",
                "on",
                "warning" if action in ("restart", "none") else "error",
                self._begin(f"incident/{incident}"),
                title=f"a fault of grade {grade}" if grade in GRADES else "a fault",
                sentence=text_of(line, "summary"),
                did=DONE.get(action, ""),
                look=self._run.command("incidents show", incident),
                **culprit_of(line),
            )
        ]

    def _healed(self, line: LedgerLine) -> list[Alert]:
        return self._over("incident", f"incident/{text_of(line, 'incident')}", line, "training is past it")

    def _held(self, line: LedgerLine) -> list[Alert]:
        self.memory.is_training = False
        by = "a person" if line.data.get("by") == "person" else "the supervisor"
        return [
            self._alert(
                line,
                "held",
                "on",
                "info" if line.data.get("by") == "person" else "error",
                self._begin("held", name_of(line)),
                title="the run is held",
                sentence=f"no ranks run; held by {by}: {text_of(line, 'reason')}",
                did="Nothing is started before probes are good, or somebody says so (midwatch resume-run).",
                look=self._run.command("status"),
                page="SV113",
            )
        ]

    def _finished(self, line: LedgerLine) -> list[Alert]:
        """By the coordinator, with the exit code of the run; by rank 0, without one, when all steps are done."""
        self.memory.is_training = False
        exit_code, error = line.data.get("exit_code", 0), str(line.data.get("error", ""))
        if exit_code in (0, None) or error == _STOPPED_ON_REQUEST:
            sentence = "training is over" if exit_code in (0, None) else "the run was stopped on request"
            return [alert for name in list(self.memory.on) for alert in self._over(kind_of(name), name, line, sentence)]
        # A breaker that ended the run is told of already, and closes only after another start.
        is_told = "breaker" in self.memory.on and "breaker" in self._config.on and exit_code == EXIT_DO_NOT_REQUEUE
        self.memory.on = {what: key for what, key in self.memory.on.items() if what == "breaker"}
        if is_told:
            return []
        alert = self.ended(name_of(line), text_of(line, "sentence"), error, line.ts_ns)
        did = "Its exit code says to the scheduler: start it again." if exit_code == EXIT_REQUEUE else alert.did
        attempt = line.attempt or whole(line.data.get("attempt"))
        return [msgspec.structs.replace(alert, attempt=attempt, step=line.step, did=did)]

    def _push_failed(self, line: LedgerLine) -> list[Alert]:
        if "push" in self.memory.on:
            return []
        return [
            self._alert(
                line,
                "push",
                "on",
                "warning",
                self._begin("push", name_of(line)),
                title="metrics cannot be delivered",
                sentence=text_of(line, "problem"),
                did="They wait in the run folder and are sent when the receiver is back; training is not affected.",
                look=self._run.command("metrics push") + " --dry-run",
                page="MT106",
            )
        ]

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _training(self, line: LedgerLine) -> list[Alert]:
        self.memory.is_training = True
        self.memory.safe_ns = line.ts_ns
        return []

    def _alive(self, line: LedgerLine) -> list[Alert]:
        if not self.memory.is_training and "breaker" not in self.memory.on:
            self._training(line)
        return []

    def _verified(self, line: LedgerLine) -> list[Alert]:
        self._training(line)
        self.memory.safe_step = line.step
        return self._over("unverified", "unverified", line, "a checkpoint was verified again")

    def _resting(self, line: LedgerLine) -> list[Alert]:
        self.memory.is_training = False
        return []

    # --- small verbs ----------------------------------------------------------------------------------------------

    def _begin(self, what: str, name: str = "") -> str:
        """The key of what is on now; one that was on already keeps its own."""
        on = self.memory.on
        while len(on) >= _MOST_OPEN:
            del on[next(iter(on))]
        return on.setdefault(what, f"{what}/{name}" if name else what)

    def _end(self, what: str) -> str | None:
        return self.memory.on.pop(what, None)

    def _over(self, kind: AlertKind, what: str, line: LedgerLine, sentence: str) -> list[Alert]:
        key = self._end(what)
        if key is None:
            return []
        return [self._alert(line, kind, "over", "info", key, title=OVER[kind], sentence=clean(sentence))]

    def _alert(
        self, line: LedgerLine, kind: AlertKind, state: State, severity: Severity, key: str, **words: Any
    ) -> Alert:
        given: dict[str, Any] = {"rank": line.rank, "node": clean(line.node), "step": line.step, **words}
        name = name_of(line) if state != "over" else f"{name_of(line)}/{key}"
        return Alert(
            id=name,
            kind=kind,
            state=state,
            severity=severity,
            key=key,
            attempt=line.attempt or whole(line.data.get("attempt")),
            ts_ns=line.ts_ns,
            **self._who(),
            **given,
        )

    def _who(self) -> dict[str, Any]:
        return {"run": self._run.run, "name": clean(self._run.name), "run_dir": clean(self._run.run_dir)}
