"""Checkpoints that do not slow training and can be trusted.

``checkpoint.format`` is the part without torch; ``Checkpointer`` loads torch on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Checkpointer", "Identity", "ResumePoint"]

if TYPE_CHECKING:
    from midwatch.checkpoint.checkpointer import Checkpointer, Identity, ResumePoint

_HOMES = {
    "Checkpointer": "midwatch.checkpoint.checkpointer",
    "Identity": "midwatch.checkpoint.checkpointer",
    "ResumePoint": "midwatch.checkpoint.checkpointer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'midwatch.checkpoint' has no attribute {name!r}")
