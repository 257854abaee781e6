"""What every room may use: ids, clocks, units, errors, events. Standard library and msgspec only."""

from midwatch.core.clock import SYSTEM_CLOCK, Clock, SystemClock
from midwatch.core.codes import (
    CODES,
    EXIT_DATA,
    EXIT_FAILED,
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_USAGE,
    Code,
)
from midwatch.core.errors import (
    UNREADABLE,
    CheckpointError,
    ConfigError,
    FencedError,
    LedgerError,
    MetricsError,
    MidwatchError,
    ProtocolError,
    StorageError,
    SuperviseError,
    error_from_dict,
)
from midwatch.core.events import Event, NullRecorder, Recorder
from midwatch.core.ids import CheckpointName, attempt_name, boot_id, new_run_id, parse_checkpoint_name
from midwatch.core.phases import LONG_PHASES, is_long_phase
from midwatch.core.text import printable
from midwatch.core.units import format_bytes, format_seconds

__all__ = [
    "CODES",
    "EXIT_DATA",
    "EXIT_FAILED",
    "EXIT_INTERNAL",
    "EXIT_OK",
    "EXIT_REQUEUE",
    "EXIT_USAGE",
    "LONG_PHASES",
    "SYSTEM_CLOCK",
    "UNREADABLE",
    "CheckpointError",
    "CheckpointName",
    "Clock",
    "Code",
    "ConfigError",
    "Event",
    "FencedError",
    "LedgerError",
    "MetricsError",
    "MidwatchError",
    "NullRecorder",
    "ProtocolError",
    "Recorder",
    "StorageError",
    "SuperviseError",
    "SystemClock",
    "attempt_name",
    "boot_id",
    "error_from_dict",
    "format_bytes",
    "format_seconds",
    "is_long_phase",
    "new_run_id",
    "parse_checkpoint_name",
    "printable",
]
