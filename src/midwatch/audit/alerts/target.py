"""Whoever is told: one small protocol, so that a new kind of receiver is one class."""

from __future__ import annotations

from typing import Final, Protocol

from midwatch.audit.alerts.alert import Message

TIMEOUT_S: Final = 10.0
"""Of one delivery. Receivers of hooks answer within a second or two, or not at all."""


class Target(Protocol):
    """One receiver."""

    name: str
    """Tells two targets apart, such as ``slack:1``; for people, too. Without secrets."""
    is_stateful: bool
    """It keeps open what it was told, and joins what belongs together by itself: it wants every alert, and alone."""

    def check(self) -> str:
        """What could be wrong before anything is sent; where it goes, in words.

        Raises:
            ConfigError: CF102, CF104 a secret is not there; CF107 a library is not.
        """
        ...

    def send(self, message: Message, timeout_s: float) -> str:
        """Tell, and wait for the answer.

        Returns:
            The answer, for people.

        Raises:
            TargetRefusedError: It understood, and does not want this message.
            TargetAwayError: Not delivered as far as we know: try again later.
            ConfigError: As ``check``.
        """
        ...


class TargetError(Exception):
    """A receiver was not told. The text holds no secret."""


class TargetRefusedError(TargetError):
    """To send the same again is of no use."""


class TargetAwayError(TargetError):
    """Out of reach or busy; ``retry_after_s`` is the receiver's wish, 0 without one."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
