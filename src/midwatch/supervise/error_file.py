"""The error file that torchelastic's ``record`` writes in a rank: read for what is needed of it, and for no more.

The rank wrote it, perhaps in its last moment, so it may hold anything: it is read within bounds, nesting included.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final, cast

from midwatch.config import redact_text
from midwatch.storage import open_regular

_FILE_BYTES: Final = 1024 * 1024
_TEXT: Final = 20_000
"""Characters kept of a message or a stack; the end of a stack is what tells."""


def read_error_file(path: Path) -> dict[str, Any] | None:
    """``{"message": {"message": .., "extraInfo": {"py_callstack": ..}}}``, secrets hidden; None when there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with os.fdopen(open_regular(path), "rb") as file:
            value = json.loads(file.read(_FILE_BYTES))
        if isinstance(value, dict):
            return _kept(cast("dict[str, Any]", value))
    return None


def _kept(content: dict[str, Any]) -> dict[str, Any]:
    message: Any = content.get("message")
    if not isinstance(message, dict):
        return {"message": _text(message)} if isinstance(message, str) else {}
    told = cast("dict[str, Any]", message)
    info: Any = told.get("extraInfo")
    stack: Any = cast("dict[str, Any]", info).get("py_callstack") if isinstance(info, dict) else None
    kept: dict[str, Any] = {}
    if isinstance(told.get("message"), str):
        kept["message"] = _text(told["message"])
    if isinstance(stack, str):
        kept["extraInfo"] = {"py_callstack": _text(stack)}
    return {"message": kept}


def _text(value: str) -> str:
    """Bounded; what is no Unicode (a file name of another encoding) is replaced, or it could not be sent on."""
    short = value if len(value) <= _TEXT else f"{value[: _TEXT // 4]}\n...\n{value[-_TEXT * 3 // 4 :]}"
    return redact_text(short.encode(errors="replace").decode())
