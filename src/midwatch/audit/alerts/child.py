"""Targets behind a program of their own: the user's command, and the library apprise.

apprise knows some hundred services, and half a second of the interpreter goes to loading it; what it does in its own
process can neither hold training up nor take it down.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from typing import Any, Final

import msgspec

from midwatch.audit.alerts.alert import Message, body, document, subject
from midwatch.audit.alerts.target import TargetAwayError
from midwatch.config import read_secret
from midwatch.core import UNREADABLE, ConfigError, printable

_WORDS_SHOWN: Final = 200


class Command:
    """The user's program. It gets the alert as JSON, as a webhook does; exit code 0 means that somebody was told."""

    is_stateful = False
    name = "command"

    def __init__(self, argv: tuple[str, ...]) -> None:
        self._argv = argv

    def check(self) -> str:
        if shutil.which(self._argv[0]) is None:
            raise ConfigError(
                "CF102", f"alerts.to.command: {self._argv[0]!r} is no program here", key="alerts.to.command"
            )
        return os.path.basename(self._argv[0])  # noqa: PTH119 - a word, not a place

    def send(self, message: Message, timeout_s: float) -> str:
        exit_code, out = _run(list(self._argv), msgspec.json.encode(document(message)), timeout_s)
        if exit_code != 0:
            raise TargetAwayError(f"exit code {exit_code} {_shown(out)}".strip())
        return f"exit code 0 {_shown(out)}".strip()


class Apprise:
    """The addresses of one file or variable, through apprise."""

    is_stateful = False
    _key = "alerts.to.apprise"

    def __init__(self, number: int, reference: str) -> None:
        self.name = f"apprise:{number}"
        self._reference = reference

    def check(self) -> str:
        if importlib.util.find_spec("apprise") is None:
            raise ConfigError(
                "CF107",
                "alerts.to.apprise needs the library apprise, which is not installed",
                hint="pip install 'midwatch[alerts]'",
                module="apprise",
                extra="alerts",
            )
        schemes = sorted({address.partition("://")[0] for address in self._addresses()})
        return ", ".join(schemes)

    def send(self, message: Message, timeout_s: float) -> str:
        self.check()
        task = {
            "addresses": self._addresses(),
            "title": subject(message),
            "body": body(message),
            "severity": message.severity,
        }
        argv = [sys.executable, "-P", "-m", "midwatch.audit.alerts.apprise_child"]
        exit_code, out = _run(argv, msgspec.json.encode(task), timeout_s)
        told, failed = _counts(out)
        if exit_code != 0 or not told:
            raise TargetAwayError(f"none of {len(task['addresses'])} addresses took it")
        # To try those again that failed would tell the others twice.
        return f"{told} told" + (f"; addresses {failed} of the list did not take it" if failed else "")

    def _addresses(self) -> list[str]:
        lines = [line.strip() for line in read_secret(self._key, self._reference).splitlines()]
        addresses = [line for line in lines if line and not line.startswith("#")]
        if not addresses or not all("://" in address for address in addresses):
            raise ConfigError("CF102", f"what {self._key} points to are no addresses, one a line", key=self._key)
        return addresses


def _counts(out: bytes) -> tuple[int, list[int]]:
    try:
        answer = msgspec.json.decode(out, type=dict[str, list[int]])
    except UNREADABLE:
        return 0, []
    return len(answer.get("told", [])), answer.get("failed", [])


def _run(argv: list[str], given: bytes, timeout_s: float) -> tuple[int, bytes]:
    """Its exit code and what it wrote. Where it does not end in time, it goes, and all it started in its session."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise TargetAwayError(f"it cannot be started: {printable(error)}") from None
    try:
        out, _ = process.communicate(given, timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        raise TargetAwayError(f"it did not end within {timeout_s:g} s") from None
    return process.returncode, out


def _shown(out: bytes) -> str:
    return printable(out[:_WORDS_SHOWN].decode("utf-8", "replace").strip())


def _end(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1.0)
