"""Checkpoints that do not slow training and can be trusted.

``checkpoint.format`` is the part without torch; ``Checkpointer`` loads torch on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "Checkpointer",
    "ControlGroup",
    "Holding",
    "Identity",
    "ResumePoint",
    "SaveEvent",
    "SaveHealth",
    "VerifyingReader",
    "export_dcp",
    "holdings",
    "host_memory",
    "raise_remote",
]

if TYPE_CHECKING:
    from midwatch.checkpoint.checkpointer import Checkpointer
    from midwatch.checkpoint.export_torch import export_dcp
    from midwatch.checkpoint.group import ControlGroup
    from midwatch.checkpoint.holders import Holding, holdings
    from midwatch.checkpoint.identity import Identity
    from midwatch.checkpoint.jobs import SaveEvent
    from midwatch.checkpoint.load import VerifyingReader
    from midwatch.checkpoint.memory import host_memory
    from midwatch.checkpoint.outcomes import SaveHealth
    from midwatch.checkpoint.resume import ResumePoint, raise_remote

_HOMES = {
    "Checkpointer": "midwatch.checkpoint.checkpointer",
    "ControlGroup": "midwatch.checkpoint.group",
    "Holding": "midwatch.checkpoint.holders",
    "Identity": "midwatch.checkpoint.identity",
    "ResumePoint": "midwatch.checkpoint.resume",
    "SaveEvent": "midwatch.checkpoint.jobs",
    "SaveHealth": "midwatch.checkpoint.outcomes",
    "VerifyingReader": "midwatch.checkpoint.load",
    "export_dcp": "midwatch.checkpoint.export_torch",
    "holdings": "midwatch.checkpoint.holders",
    "host_memory": "midwatch.checkpoint.memory",
    "raise_remote": "midwatch.checkpoint.resume",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'midwatch.checkpoint' has no attribute {name!r}")
