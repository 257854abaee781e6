"""Metrics out: a page for Prometheus, remote write, OTLP, TensorBoard; one protocol for further bridges."""

from midwatch.audit.exporters.bridges import Row, Tracker, TrackerRun
from midwatch.audit.exporters.bridges_export import ExportReport, TrackerExport
from midwatch.audit.exporters.bridges_targets import TrackerKind, tracker_of
from midwatch.audit.exporters.http_push import RemoteWriteSink
from midwatch.audit.exporters.page_server import Listen, PageServer, joined
from midwatch.audit.exporters.push_trouble import PushTrouble
from midwatch.audit.exporters.pusher import Pusher, PushReport
from midwatch.audit.exporters.run_families import LedgerCounts, breaker_families
from midwatch.audit.exporters.sink import Outgoing, Sink, SinkAwayError, SinkError, SinkRefusedError
from midwatch.audit.exporters.targets import sink_of
from midwatch.audit.exporters.tensorboard import TensorBoardSink
from midwatch.audit.exporters.text import CONTENT_TYPE, Family, Sample, render, training_families

__all__ = [
    "CONTENT_TYPE",
    "ExportReport",
    "Family",
    "LedgerCounts",
    "Listen",
    "Outgoing",
    "PageServer",
    "PushReport",
    "PushTrouble",
    "Pusher",
    "RemoteWriteSink",
    "Row",
    "Sample",
    "Sink",
    "SinkAwayError",
    "SinkError",
    "SinkRefusedError",
    "TensorBoardSink",
    "Tracker",
    "TrackerExport",
    "TrackerKind",
    "TrackerRun",
    "breaker_families",
    "joined",
    "render",
    "sink_of",
    "tracker_of",
    "training_families",
]
