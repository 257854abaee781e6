"""Watches the ledgers of one run in a thread of its own, and tells people what they say.

Nothing that happens here can hold up or end whoever started it: the thread dies with the process, and what it could not
say waits in the run folder for the next one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from midwatch.audit.alerts.alert import Alert
from midwatch.audit.alerts.delivery import Delivery
from midwatch.audit.alerts.rules import Rules
from midwatch.audit.alerts.state import BusyError, State, Store
from midwatch.audit.alerts.targets import targets_of
from midwatch.audit.alerts.wording import Run
from midwatch.audit.following import new_lines, skip_history
from midwatch.audit.runfile import read_run
from midwatch.config import AlertsConfig
from midwatch.core import SYSTEM_CLOCK, Clock, ConfigError, StorageError, printable

_log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""Between two looks at the ledgers: people need longer to wake up, and a shared file system has its peace."""

_LAST_TRIES_S: Final = (0.0, 1.0, 4.0)
"""Before each of the last attempts to tell: a network that blinks should not swallow the end of a run."""

Ending = tuple[str, str, str, dict[str, Any]]
"""An end of which no line tells: its id, the sentence, the code, and where."""


class Bell:
    """Of one process. Made once the run folder is there; several may be made for one run, and one of them tells.

    Args:
        name: The run's label.
        say: Shows people a sentence on the spot; by default the log does.
        is_new: The run begins now, so nobody trains yet; False where one that goes on is taken over.
    """

    def __init__(
        self,
        run_dir: Path,
        config: AlertsConfig,
        *,
        name: str = "",
        say: Callable[[str], None] = _log.warning,
        clock: Clock = SYSTEM_CLOCK,
        is_new: bool = True,
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._name = name
        self._id = ""
        self._say = say
        self._clock = clock
        self._store = Store(run_dir)
        self._targets = targets_of(config)
        self._delivery = Delivery(self._targets, config.min_gap_s, clock, say)
        self._direct: queue.SimpleQueue[Ending] = queue.SimpleQueue()
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_forgetful = is_new
        self._began_ns = clock.wall_ns()
        self._is_ill = False
        self._is_left = False
        self._begin()

    @property
    def is_wanted(self) -> bool:
        """There is somebody to tell."""
        return bool(self._targets)

    def start(self) -> None:
        """From here on people are told."""
        self._thread = threading.Thread(target=self._watch, name="midwatch-alerts", daemon=True)
        self._thread.start()

    def ended(self, ident: str, sentence: str, error: str = "", **where: Any) -> None:
        """Tell of an end of which no ledger will."""
        self._direct.put((ident, sentence, error, where))

    def stop(self, timeout_s: float) -> bool:
        """Tell what is there to tell, and end.

        Returns:
            False when the time was not enough; what was not told is told by the next process.

        Blocking: ``timeout_s``.
        """
        self._is_ending.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive() and not self._is_waiting
        return True

    def leave(self) -> None:
        """End without a word: another process tells now."""
        self._is_left = True
        self._is_ending.set()

    def turn(self, *, is_ending: bool = False) -> None:
        """Read what is new, and tell whom it is time to tell. Never raises for a disk's or a receiver's sake."""
        if not (self._run_dir / "run.json").exists():
            return  # a mount is missing, and nothing must be made below it
        try:
            with self._store.opened() as state:
                self._work(state, is_ending=is_ending)
        except BusyError:
            pass
        except (StorageError, OSError) as error:
            self._complain(error)
            # A disk that is full or read-only is what people must hear of: then as well as this process knows.
            self._work(self._store.state, is_ending=is_ending)

    @property
    def _is_waiting(self) -> bool:
        """Somebody has something to be told still."""
        return bool(self._store.state.waiting) or not self._direct.empty()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Where nobody was ever told anything, what the ledgers hold by now is history."""
        if not self.is_wanted:
            return
        for target in self._targets:
            try:
                target.check()
            except ConfigError as error:
                self._say(f"[AL102] {target.name} cannot be told of alerts: {printable(error.message)}")
        try:
            with self._store.opened() as state:
                if self._read(state, is_first=True):
                    self._store.save()
        except (BusyError, StorageError, OSError) as error:
            self._say(f"[AL101] alerts begin later: {printable(error)}")

    def _watch(self) -> None:
        while not self._is_ending.wait(LOOK_S):
            self.turn()
        for pause_s in _LAST_TRIES_S if not self._is_left else ():
            time.sleep(pause_s)
            self.turn(is_ending=True)
            if not self._is_waiting:
                return

    def _work(self, state: State, *, is_ending: bool) -> None:
        try:
            is_changed = self._read(state)
        except (StorageError, OSError) as error:
            self._complain(error)
            is_changed = False
        if is_changed:
            self._save()
        self._delivery.deliver(state, self._save, is_ending=is_ending)

    def _save(self) -> None:
        """What cannot be written down is known to this process at least."""
        try:
            self._store.save()
            self._is_ill = False
        except OSError as error:
            self._complain(error)

    def _complain(self, error: StorageError | OSError) -> None:
        """Once, until the run folder is well again."""
        if not self._is_ill:
            self._is_ill = True
            reason = error.message if isinstance(error, StorageError) else error
            self._say(f"[AL101] what people are told cannot be noted, and may be told again: {printable(reason)}")

    def _read(self, state: State, *, is_first: bool = False) -> bool:
        """Take in what is new; whether anything changed."""
        if not state.is_begun:
            skip_history(self._run_dir, state.places)
            state.is_begun = True
        rules = Rules(self._config, self._run(), state.memory)
        before = dict(state.places)
        alerts: list[Alert] = []
        for line in new_lines(self._run_dir, state.places) if not is_first else []:
            if line.ts_ns >= self._began_ns:
                self._forget(rules)
            alerts += rules.read(line)
        # What a process before this one wrote may come to light later still.
        self._forget(rules, again=is_first)
        now_ns = self._clock.wall_ns()
        alerts += rules.look(now_ns)
        while not self._direct.empty():
            ident, sentence, error, where = self._direct.get()
            if "ended" in self._config.on:
                alerts.append(rules.ended(ident, sentence, error, now_ns, **where))
        return self._delivery.take(state, alerts) or is_first or before != state.places

    def _forget(self, rules: Rules, *, again: bool = False) -> None:
        """Behind what a process before this one left unread: that it trained says nothing of now."""
        if self._is_forgetful:
            rules.rest()
            self._is_forgetful = again

    def _run(self) -> Run:
        if not self._id and (info := read_run(self._run_dir)) is not None:
            self._id = info.run
        return Run(run_dir=str(self._run_dir), run=self._id, name=self._name)
