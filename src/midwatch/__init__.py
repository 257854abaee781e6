"""midwatch keeps PyTorch pretraining runs alive.

The five lines a training script needs::

    run = midwatch.attach("midwatch.toml")
    run.track(model=model, optimizer=opt, scheduler=sched, data=loader)
    start = run.resume()
    for step in run.steps(start, total_steps):
        ...
        run.log(loss=loss)

Nothing happens at import: ``attach`` and ``Run`` load PyTorch on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["MidwatchError", "Run", "__version__", "attach"]

if TYPE_CHECKING:
    from midwatch.core import MidwatchError
    from midwatch.train import Run, attach

_HOMES = {"attach": "midwatch.train", "Run": "midwatch.train", "MidwatchError": "midwatch.core"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'midwatch' has no attribute {name!r}")
