"""Text from outside, made fit to be shown."""

from __future__ import annotations


def printable(text: object) -> str:
    """On one line, with control characters, invisible ones and broken ones as escapes: it cannot move the cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))
