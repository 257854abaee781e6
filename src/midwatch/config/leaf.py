"""What the tables of the configuration are made of."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Steps = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]


class Leaf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all leaves: immutable, keyword-only, strict."""
