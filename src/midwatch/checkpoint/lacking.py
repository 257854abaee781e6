"""What a run's checkpoints will lack, said loudly at the first save and not at the resume that needs it."""

from __future__ import annotations

import logging

from midwatch.checkpoint.tracked import Tracked
from midwatch.config import CheckpointConfig
from midwatch.core import Recorder

_log = logging.getLogger(__name__)

_LOST = {
    "model": "the weights",
    "optimizer": "its momentum starts from zero after a resume",
    "scheduler": "the learning rate starts over after a resume",
    "scaler": "the loss scale starts over after a resume",
    "data": "a resumed run sees data again, or never",
}
"""Part to what its absence costs. Random generators are always saved."""


def missing_parts(tracked: Tracked, config: CheckpointConfig) -> dict[str, str]:
    """Part to consequence, of everything that is neither saved nor absent on purpose."""
    absent: frozenset[str] = frozenset(config.absent_on_purpose)
    missing: dict[str, str] = {}
    for part, lost in _LOST.items():
        if getattr(tracked, part) is None:
            if part not in absent:
                missing[part] = lost
        elif part == "optimizer" and not config.save_optimizer:
            missing[part] = f"checkpoint.save_optimizer is false: {lost}"
    return missing


def warn_of_missing(tracked: Tracked, config: CheckpointConfig, recorder: Recorder) -> None:
    """One warning of several lines and a ``checkpoint.incomplete`` event; silence when nothing is missing."""
    missing = missing_parts(tracked, config)
    if not missing:
        return
    lines = "".join(f"\n  no {part}: {lost}" for part, lost in missing.items())
    nameable = ", ".join(f'"{part}"' for part in missing if part != "model" and getattr(tracked, part) is None)
    way_out = f"; if it has none, say so: checkpoint.absent_on_purpose = [{nameable}]" if nameable else ""
    _log.warning(
        "THE CHECKPOINTS OF THIS RUN ARE NOT COMPLETE; a run that has these parts will not continue exactly:%s\n"
        "  Track what the run has (run.track)%s",
        lines,
        way_out,
    )
    recorder.record("checkpoint.incomplete", missing=list(missing), save_optimizer=config.save_optimizer)
