"""What midwatch refuses, and how it says so.

    MidwatchError
    ├── ConfigError       CFxxx   a configuration cannot be used                      exit 78
    ├── StorageError      STxxx   the disk said no (full, read-only, unreadable)      exit 74
    ├── CheckpointError   CKxxx   a checkpoint cannot be written, trusted or loaded   exit 65
    │   └── FencedError   CK4xx   a newer attempt holds the run                       exit 65
    ├── LedgerError       LGxxx   the audit trail is broken or held by another writer exit 65
    ├── MetricsError      MTxxx   metrics cannot be read, imported or indexed         exit 2, 65, 74
    ├── SuperviseError    SVxxx   a run cannot be launched, joined or kept going      exit 1, 73, 75, 93
    ├── ProtocolError     PRxxx   a message between agent and coordinator is refused  exit 76
    ├── GuardError        GDxxx   training was stopped, or a decision cannot be taken exit 65, 78, 93
    ├── AlertError        ALxxx   people cannot be told                                exit 74, 78
    └── TriageError       TRxxx   a recorded curve cannot be judged                   exit 65

A *fault* in the world (a rank died) is data and lives in ``midwatch.faults``; an *error* is our own refusal.
Each code is stable, is listed in ``core/codes.py`` with its exit code, and has a page in ``docs/runbook``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from midwatch.core.codes import CODES, Code

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises for a file that is not what we wrote; a hostile one may nest too deep for any reader."""


class MidwatchError(Exception):
    """The root of everything midwatch raises on purpose.

    Args:
        code: A key of ``CODES``, e.g. ``"CK104"``. Its family must be the raising class's.
        message: What happened, where (rank, node, step, path) and what was done about it.
        hint: What to do now; the code's standing hint is used when this is empty.
        context: Facts for machines (``--json``); values must be JSON-ready.
    """

    family = ""

    def __init__(self, code: str, message: str, *, hint: str = "", **context: Any) -> None:
        if code not in CODES or not code.startswith(self.family):
            raise AssertionError(f"{code} is not a code of {type(self).__name__}")
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint or CODES[code].hint
        self.context = context

    @property
    def entry(self) -> Code:
        """The table row behind this error's code."""
        return CODES[self.code]

    @property
    def exit_code(self) -> int:
        """The process exit code the command line uses for this error."""
        return self.entry.exit_code

    def as_dict(self) -> dict[str, Any]:
        """The error as ``--json`` prints it."""
        return {
            "error": self.code,
            "title": self.entry.title,
            "message": self.message,
            "hint": self.hint,
            "context": self.context,
        }

    def __str__(self) -> str:
        hint = f"\n  -> {self.hint}" if self.hint else ""
        return f"[{self.code}] {self.message}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not survive the default reduce (multiprocessing, pytest-xdist).
        return _rebuild, (type(self), self.code, self.message, self.hint, self.context)


def _rebuild(kind: type[MidwatchError], code: str, message: str, hint: str, context: dict[str, Any]) -> MidwatchError:
    return kind(code, message, hint=hint, **context)


class ConfigError(MidwatchError):
    """A configuration cannot be used."""

    family = "CF"


class StorageError(MidwatchError):
    """The disk said no."""

    family = "ST"


class CheckpointError(MidwatchError):
    """A checkpoint cannot be written, trusted or loaded."""

    family = "CK"


class FencedError(CheckpointError):
    """A newer attempt holds the run, so this one may no longer write."""

    family = "CK4"


class LedgerError(MidwatchError):
    """The audit trail is broken or held by another writer."""

    family = "LG"


class MetricsError(MidwatchError):
    """Metrics cannot be read, imported or indexed."""

    family = "MT"


class SuperviseError(MidwatchError):
    """A run cannot be launched, joined or kept going."""

    family = "SV"


class ProtocolError(MidwatchError):
    """A message between agent and coordinator is refused."""

    family = "PR"


class GuardError(MidwatchError):
    """The circuit breaker stopped training, or does not take a decision."""

    family = "GD"


class AlertError(MidwatchError):
    """People cannot be told of what happened."""

    family = "AL"


class TriageError(MidwatchError):
    """A recorded curve cannot be judged."""

    family = "TR"


_KINDS = (
    FencedError,
    ConfigError,
    StorageError,
    CheckpointError,
    LedgerError,
    MetricsError,
    SuperviseError,
    ProtocolError,
    GuardError,
    AlertError,
    TriageError,
)
"""A class before its parent."""


def error_from_dict(told: Mapping[str, Any]) -> MidwatchError:
    """The error that another process met, of its own class: the inverse of ``as_dict``."""
    code = str(told["error"])
    kind = next((kind for kind in _KINDS if code.startswith(kind.family)), MidwatchError)
    context = {str(name): value for name, value in told.get("context", {}).items()}
    return kind(code, told["message"], hint=told.get("hint", ""), **context)
