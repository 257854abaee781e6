"""How long a receiver over HTTP asks to be left alone.

Source: RFC 9110, section 10.2.3.
"""

from __future__ import annotations

from email.message import Message
from typing import Final

_LONGEST_S: Final = 300.0
"""A receiver that is wrong about its clock must not silence anybody for a day."""


def retry_after_s(headers: Message) -> float:
    """0 where it does not say; the header's other form, a date, is not worth the trouble."""
    text = headers.get("Retry-After", "")
    return min(float(text), _LONGEST_S) if text.isdecimal() else 0.0
