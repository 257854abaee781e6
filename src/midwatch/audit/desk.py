"""Where a run keeps what its breaker knows, and where people leave decisions: ``<run.dir>/guards``.

    breaker.json       the breaker's memory, written by rank 0 when it changes
    in-force.json      what was decided and still holds: data to leave out, learning rates lowered, where to go back to
    rules.json         the table [guards] of the attempt that ran last: what its findings were judged by
    decisions/*.json   left by people, each taken once; what was taken moves to ``decisions/taken``
    lifts/*.json       likewise: what shall hold no longer; apart, for a pause does not make an earlier one stale

Plain JSON throughout; what cannot be read is said and left aside. What the memory and a decision consist of is the
breaker's business, not this room's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.audit.in_force import InForce, Lift
from midwatch.config import GuardsConfig
from midwatch.core import SYSTEM_CLOCK, UNREADABLE
from midwatch.storage import ops, read_regular, write_json_atomic

_log = logging.getLogger(__name__)

FOLDER: Final = "guards"
_MEMORY: Final = "breaker.json"
_IN_FORCE: Final = "in-force.json"
_RULES: Final = "rules.json"
_DECISIONS: Final = "decisions"
_LIFTS: Final = "lifts"
_TAKEN: Final = "taken"


class Desk:
    """The folder of one run. Rank 0 writes; others may look, and leave decisions.

    Args:
        is_writer: Sets damaged files aside, so that they are kept when new ones take their place.
        fence: Called before what is in force is written; raises FencedError when a newer attempt holds the run.
    """

    def __init__(self, run_dir: Path, *, is_writer: bool = False, fence: Callable[[], None] = lambda: None) -> None:
        self._folder = run_dir / FOLDER
        self._is_writer = is_writer
        self._fence = fence
        self._kept: dict[str, Any] = {}
        self._taken: set[str] = set()
        """Decisions that were given out and could not be moved away."""
        self._unread: set[str] = set()
        """What could not be read, and was said to be so: a pause looks twice a second."""

    @property
    def folder(self) -> Path:
        return self._folder

    def memory(self) -> dict[str, Any]:
        """The breaker's, as ``Breaker.load_state_dict`` takes it; empty for none. Raises as ``in_force``."""
        return self._read(_MEMORY, dict[str, Any]) or {}

    def keep_memory(self, state: dict[str, Any]) -> None:
        """Durable when it returns; what is the same as before costs nothing.

        Raises:
            OSError: The storage refused it.
        """
        if state != self._kept:
            self._write(_MEMORY, state)
            self._kept = state

    def in_force(self) -> InForce:
        """Raises OSError where the storage does not say: that is another thing than nothing."""
        return self._read(_IN_FORCE, InForce) or InForce()

    def sound_in_force(self) -> InForce:
        """As ``in_force``, for whoever wants it changed: raises also ``UNREADABLE``, where the file is damaged."""
        return self._decode(_IN_FORCE, InForce) or InForce()

    def keep_in_force(self, what: InForce) -> None:
        """Raises OSError, and what the fence raises. Durable when it returns."""
        self._fence()
        self._write(_IN_FORCE, what)

    def rules(self) -> GuardsConfig:
        """What the run is judged by; the defaults where nothing was kept. Raises as ``in_force``."""
        return self._read(_RULES, GuardsConfig) or GuardsConfig()

    def keep_rules(self, rules: GuardsConfig) -> None:
        """Raises OSError. Durable when it returns."""
        if self.rules() != rules:
            self._write(_RULES, rules)

    # --- decisions ------------------------------------------------------------------------------------------------

    def leave(self, decision: dict[str, Any]) -> Path:
        """Put a decision where the run finds it within a second, if it is paused.

        Raises:
            OSError: The folder cannot be written.
        """
        return self._leave(_DECISIONS, decision)

    def take(self, most: int | None = None) -> list[dict[str, Any]]:
        """The decisions left since the last call, oldest first, no more than ``most``; each is given out once.

        Where the storage does not let one be moved away (a full disk) it is remembered until this process ends; the
        next one may meet it again, and knows by the number of the pause what became of it.
        """
        found: list[dict[str, Any]] = []
        for path in self._waiting(_DECISIONS):
            if most is not None and len(found) >= most:
                break
            try:
                decision = self._read(f"{_DECISIONS}/{path.name}", dict[str, Any])
            except OSError as error:
                self._say_unread(path, error)
                continue
            if decision is not None and self._put_away(path):
                found.append(decision)
        return found

    def _put_away(self, path: Path) -> bool:
        """Whether it was still to be given out."""
        is_new = path.name not in self._taken
        try:
            ops.make_dirs(path.parent / _TAKEN)
            ops.rename(path, path.parent / _TAKEN / path.name)
        except FileNotFoundError:
            return False  # somebody has taken it back
        except OSError as error:
            if is_new:
                _log.warning("%s is taken, and stays where it is: %s", path, error)
            self._taken.add(path.name)
        return is_new

    def _say_unread(self, path: Path, error: OSError) -> None:
        if path.name not in self._unread:
            self._unread.add(path.name)
            _log.warning("%s cannot be read now: %s", path, error)

    def waiting(self) -> list[str]:
        """Names of decisions that nobody took yet."""
        return [path.name for path in self._waiting(_DECISIONS)]

    def leave_lift(self, lift: Lift) -> Path:
        """Put a lift where the run finds it behind its next save, or when it is started. Raises as ``leave``."""
        return self._leave(_LIFTS, lift)

    def lifts(self) -> dict[str, Lift]:
        """Those that wait, by name, oldest first; they stay where they are."""
        found: dict[str, Lift] = {}
        for path in self._waiting(_LIFTS):
            try:
                lift = self._read(f"{_LIFTS}/{path.name}", Lift)
            except OSError as error:
                self._say_unread(path, error)
                continue
            if lift is not None:
                found[path.name] = lift
        return found

    def put_lift_away(self, name: str) -> None:
        """It is done; ``InForce.lifted`` knows, where it cannot be moved."""
        self._put_away(self._folder / _LIFTS / name)

    def _leave(self, box: str, what: Any) -> Path:
        folder = self._folder / box
        ops.make_dirs(folder)
        path = folder / f"{SYSTEM_CLOCK.wall_ns():020d}-{secrets.token_hex(4)}.json"
        write_json_atomic(path, what)
        return path

    def _waiting(self, box: str) -> list[Path]:
        try:
            return sorted((self._folder / box).glob("*.json"))
        except OSError:
            return []

    # --- files ----------------------------------------------------------------------------------------------------

    def _read(self, name: str, kind: type[Any]) -> Any:
        path = self._folder / name
        try:
            return self._decode(name, kind)
        except UNREADABLE as error:
            _log.error("%s is damaged and left aside: %s", path, error)
            if self._is_writer:
                ops.rename(path, path.with_name(f"{path.name}.damaged"))
            return None

    def _decode(self, name: str, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(read_regular(self._folder / name), type=kind)
        except FileNotFoundError:
            return None

    def _write(self, name: str, what: Any) -> None:
        ops.make_dirs(self._folder)
        write_json_atomic(self._folder / name, what)
