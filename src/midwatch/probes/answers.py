"""What a probe answers."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail", "unknown"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One probe on one node."""

    probe: str
    status: Status
    text: str = ""
    """What was found, for people."""
    is_blind: bool = False
    """``unknown`` because it cannot be asked here (no permission, no such device), not because it hung."""
