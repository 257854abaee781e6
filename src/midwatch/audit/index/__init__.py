"""Metrics by (run, attempt, metric, step), answered from SQLite on a local disk and rebuilt from journals at will."""

from midwatch.audit.index.place import index_folder, shared_kind
from midwatch.audit.index.store import MetricIndex
from midwatch.audit.index.types import Branch, Bucket, DeadBranch, MetricInfo, Newest, Point, SyncReport

__all__ = [
    "Branch",
    "Bucket",
    "DeadBranch",
    "MetricIndex",
    "MetricInfo",
    "Newest",
    "Point",
    "SyncReport",
    "index_folder",
    "shared_kind",
]
