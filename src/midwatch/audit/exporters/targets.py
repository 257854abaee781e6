"""One word for a receiver, as in ``--to`` and in the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from midwatch.audit.exporters.http_push import RemoteWriteSink
from midwatch.audit.exporters.sink import Sink
from midwatch.audit.exporters.tensorboard import TensorBoardSink

_TENSORBOARD: Final = "tensorboard:"
_OTLP_PATH: Final = "/v1/metrics"

PushKind = Literal["auto", "remote_write", "otlp"]


def sink_of(target: str, token_file: Path | None = None, kind: PushKind = "auto") -> Sink:
    """The sink that ``tensorboard:FOLDER`` or an address means. Nothing is connected or written yet.

    Args:
        target: The word.
        token_file: For an address.
        kind: For an address; ``auto`` goes by its path.

    Raises:
        ConfigError: CF102 for what is no address, CF107 where an extra is not installed.
    """
    if target.startswith(_TENSORBOARD):
        return TensorBoardSink(Path(target.removeprefix(_TENSORBOARD)).absolute())
    is_otlp = kind == "otlp" or (kind == "auto" and target.partition("?")[0].rstrip("/").endswith(_OTLP_PATH))
    if is_otlp:
        # Only who sends by it needs its library.
        from midwatch.audit.exporters.otlp import OtlpSink

        return OtlpSink(target, token_file=token_file)
    return RemoteWriteSink(target, token_file=token_file)
