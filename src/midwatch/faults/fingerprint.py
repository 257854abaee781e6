"""Same cause, same fingerprint: what changes from one attempt to the next is taken out before hashing."""

from __future__ import annotations

import hashlib
import re

from midwatch.faults.types import Frame

_NOISE = (
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"(?:[\w.~-]*/)+[\w.~-]*"), "PATH"),
    (re.compile(r"\b(?=\w*\d)[0-9a-fA-F]{7,}\b"), "#"),
    (re.compile(r"\d+(?:\.\d+)*"), "#"),
    (re.compile(r"\s+"), " "),
)
_MOST = 2000
"""Characters looked at: some patterns take the square of a length."""


def normalise(message: str) -> str:
    """A message without addresses, ids, paths and numbers."""
    message = message[:_MOST]
    for pattern, replacement in _NOISE:
        message = pattern.sub(replacement, message)
    return message.strip()[:500]


def fingerprint(fault_class: str, message: str, frame: Frame | None) -> str:
    """16 hex digits. The frame counts by file name and function: a line number moves with every edit above it."""
    place = f"{frame.file.rsplit('/', 1)[-1]}:{frame.function}" if frame else ""
    text = "\n".join((fault_class, normalise(message), place))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
