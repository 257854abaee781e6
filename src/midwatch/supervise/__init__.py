"""Launching, watching and restarting a run: a pure decision core and the shells that act for it.

``decide`` and ``messages`` are rooms of their own: the simulator and triage import them without the network stack, so
the names of this file are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "Fold",
    "FolderFamilies",
    "LaunchRequest",
    "LogFile",
    "LogReader",
    "Machine",
    "PersonAsks",
    "Plan",
    "Result",
    "SuspicionLedger",
    "attempts_with_logs",
    "check_between_runs",
    "fetch_status",
    "first_lines",
    "foresee_request",
    "hold_between_runs",
    "is_stamped",
    "isolate_rules",
    "launch",
    "log_files",
    "note_between_runs",
    "parse_ranks",
    "plan",
    "planned_environments",
    "rank_ranges",
    "send_wish",
    "serve_folder",
]

if TYPE_CHECKING:
    from midwatch.supervise.between_runs import check_between_runs, foresee_request, note_between_runs
    from midwatch.supervise.ending import Result
    from midwatch.supervise.failover import is_stamped
    from midwatch.supervise.folder_families import FolderFamilies
    from midwatch.supervise.folding import Fold
    from midwatch.supervise.held_between import hold_between_runs
    from midwatch.supervise.joining import fetch_status, send_wish
    from midwatch.supervise.kept_rules import isolate_rules
    from midwatch.supervise.loglines import (
        LogFile,
        LogReader,
        attempts_with_logs,
        first_lines,
        log_files,
        parse_ranks,
        rank_ranges,
    )
    from midwatch.supervise.prepare import LaunchRequest, Plan, plan, planned_environments
    from midwatch.supervise.seating import launch
    from midwatch.supervise.serving_page import serve_folder
    from midwatch.supervise.suspicion import Machine, SuspicionLedger
    from midwatch.supervise.wire import PersonAsks

_HOMES = {
    "Fold": "midwatch.supervise.folding",
    "FolderFamilies": "midwatch.supervise.folder_families",
    "LaunchRequest": "midwatch.supervise.prepare",
    "LogFile": "midwatch.supervise.loglines",
    "LogReader": "midwatch.supervise.loglines",
    "Machine": "midwatch.supervise.suspicion",
    "PersonAsks": "midwatch.supervise.wire",
    "Plan": "midwatch.supervise.prepare",
    "Result": "midwatch.supervise.ending",
    "SuspicionLedger": "midwatch.supervise.suspicion",
    "attempts_with_logs": "midwatch.supervise.loglines",
    "check_between_runs": "midwatch.supervise.between_runs",
    "foresee_request": "midwatch.supervise.between_runs",
    "fetch_status": "midwatch.supervise.joining",
    "first_lines": "midwatch.supervise.loglines",
    "hold_between_runs": "midwatch.supervise.held_between",
    "is_stamped": "midwatch.supervise.failover",
    "isolate_rules": "midwatch.supervise.kept_rules",
    "launch": "midwatch.supervise.seating",
    "log_files": "midwatch.supervise.loglines",
    "note_between_runs": "midwatch.supervise.between_runs",
    "parse_ranks": "midwatch.supervise.loglines",
    "plan": "midwatch.supervise.prepare",
    "planned_environments": "midwatch.supervise.prepare",
    "rank_ranges": "midwatch.supervise.loglines",
    "send_wish": "midwatch.supervise.joining",
    "serve_folder": "midwatch.supervise.serving_page",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'midwatch.supervise' has no attribute {name!r}")
