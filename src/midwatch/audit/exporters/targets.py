"""One word for a receiver, as in ``--to`` and in the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from midwatch.audit.exporters.http_push import RemoteWriteSink
from midwatch.audit.exporters.sink import Sink
from midwatch.audit.exporters.tensorboard import TensorBoardSink

_TENSORBOARD: Final = "tensorboard:"


def sink_of(target: str, token_file: Path | None = None) -> Sink:
    """The sink that ``tensorboard:FOLDER`` or an address means. Nothing is connected or written yet.

    Raises:
        ConfigError: CF102 for what is no address.
    """
    if target.startswith(_TENSORBOARD):
        return TensorBoardSink(Path(target.removeprefix(_TENSORBOARD)).absolute())
    return RemoteWriteSink(target, token_file=token_file)
