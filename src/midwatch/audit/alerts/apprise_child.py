"""The process in which apprise runs: the task as JSON on stdin, one line of JSON on stdout, nothing else there."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Final

import msgspec

from midwatch.core import load_extra

_TYPES: Final = {"info": "info", "warning": "warning", "error": "failure", "critical": "failure"}


class Task(msgspec.Struct):
    """What is to be said to whom."""

    addresses: list[str]
    title: str
    body: str
    severity: str


def tell(task: Task) -> dict[str, list[int]]:
    """Say it to each address; which took it, counted from 1."""
    apprise: Any = load_extra("apprise", "alerts", "alerts.to.apprise")
    told: list[int] = []
    failed: list[int] = []
    for number, address in enumerate(task.addresses, 1):
        service = apprise.Apprise()
        is_taken = service.add(address) and service.notify(
            title=task.title, body=task.body, notify_type=_TYPES.get(task.severity, "info"), body_format="text"
        )
        (told if is_taken else failed).append(number)
    return {"told": told, "failed": failed}


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    # What it logs may hold addresses, and they are secrets.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):  # noqa: PTH123
        answer = tell(task)
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
