"""What a training script imports: ``attach`` and the ``Run`` it returns. Loads PyTorch on first use only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Run", "attach"]

if TYPE_CHECKING:
    from midwatch.train.attaching import attach
    from midwatch.train.run import Run

_HOMES = {"Run": "midwatch.train.run", "attach": "midwatch.train.attaching"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'midwatch.train' has no attribute {name!r}")
