"""One word for a tracker, as in ``--to``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from midwatch.audit.exporters.bridges import Tracker

TrackerKind = Literal["wandb", "mlflow", "trackio", "tensorboard"]


def tracker_of(kind: TrackerKind, project: str, at: str = "") -> Tracker:
    """The tracker; its library is loaded here and not before. Nothing is connected or written yet.

    Args:
        project: Or experiment; not used by TensorBoard.
        at: Where: a folder (tensorboard, wandb), an address (mlflow), a Space (trackio); empty: the library's default.

    Raises:
        ConfigError: CF107 the library is not installed.
    """
    if kind == "wandb":
        from midwatch.audit.exporters.bridges_wandb import WandbTracker

        return WandbTracker(project, at)
    if kind == "mlflow":
        from midwatch.audit.exporters.bridges_mlflow import MlflowTracker

        return MlflowTracker(project, at)
    if kind == "trackio":
        from midwatch.audit.exporters.bridges_trackio import TrackioTracker

        return TrackioTracker(project, at)
    from midwatch.audit.exporters.bridges_tensorboard import TensorBoardTracker

    return TensorBoardTracker(Path(at).absolute())
