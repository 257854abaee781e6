"""Probes that a site brings along: executables, by the exit codes that monitoring plugins have had for decades."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from midwatch.probes.answers import Answer, Status

CODES: Final[Mapping[int, Status]] = {0: "ok", 1: "warn", 2: "fail"}
"""Any other one, a signal included, says nothing about the node: ``unknown``."""
_TEXT_CHARS: Final = 200


class _Said(msgspec.Struct):
    status: Status
    text: str = ""


def plugin_name(path: str) -> str:
    return f"plugin:{Path(path).name}"


def plugin_answer(path: str, code: int, output: bytes) -> Answer:
    """What the executable meant: a JSON object with ``status`` and ``text``, else its exit code and first line."""
    name = plugin_name(path)
    try:
        said = msgspec.json.decode(output, type=_Said)
        return Answer(probe=name, status=said.status, text=said.text[:_TEXT_CHARS])
    except msgspec.MsgspecError:
        line = output.decode(errors="replace").strip().partition("\n")[0][:_TEXT_CHARS]
        return Answer(probe=name, status=CODES.get(code, "unknown"), text=line or f"ended with code {code}")
