"""``midwatch status``: what a run is doing, from its coordinator, or what its folder tells when nobody answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from midwatch.audit import Desk, LedgerLine, merged, read_run
from midwatch.checkpoint.format import newest_verified
from midwatch.cli import _live
from midwatch.cli._output import exits, json_option, pairs, plain, say, show_json, when
from midwatch.cli._places import find_place, run_argument, run_folder
from midwatch.core import UNREADABLE, LedgerError, MidwatchError, ProtocolError, SuperviseError
from midwatch.storage import newest_attempt, read_regular

_SHOWN_LINES = 5
_DISK_S = 10.0
"""With --watch, between two looks into the run folder: on shared storage each opens some files."""
_OVER = "not supervised, or ended"


@click.command(
    "status",
    short_help="What a run is doing.",
    epilog=exits(65, 76, e65="no run there") + " Example: midwatch status RUN --json",
)
@run_argument
@click.option("--watch", "-w", is_flag=True, help="One live screen until the run is over; lines in a pipe.")
@json_option
def command(run: Path | None, *, watch: bool, is_json: bool) -> None:
    """Say what the run in the folder RUN is doing.

    A live run is asked (signed with its token, so only its owner can); of one that does not answer, the folder tells
    how far it came. "live" in the JSON document says which of the two it was. With --json and --watch there is one
    document a line.
    """
    folder = run_folder(run)
    if watch:
        _live.watch(_Looker(folder).look, _facts, _sentences, is_json=is_json)
        return
    document = _document(_from_disk(folder), *_ask(folder))
    if is_json:
        show_json(document)
        return
    _show(document)


def _document(on_disk: dict[str, Any], status: dict[str, Any] | None, remark: str) -> dict[str, Any]:
    return {**on_disk, "live": status is not None, "remark": remark, "coordinator": status}


class _Looker:
    """Asks the coordinator each time, and the disk, which is dearer, now and then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._on_disk = _from_disk(folder)
        self._read = time.monotonic()
        self._verdict: object = None

    def look(self) -> dict[str, Any]:
        status, remark = _ask(self._folder)
        verdict = (status or {}).get("last_verdict")
        if status is None or verdict != self._verdict or time.monotonic() - self._read > _DISK_S:
            self._on_disk, self._read, self._verdict = _from_disk(self._folder), time.monotonic(), verdict
        document = _document(self._on_disk, status, remark)
        # Nobody is said to listen there, rather than: somebody does not answer.
        return {**document, "is_over": status is None and remark == _OVER}


def _ask(folder: Path) -> tuple[dict[str, Any] | None, str]:
    if not (folder / "supervisor" / "coordinator.json").exists():
        return None, _OVER
    # aiohttp is loaded only when there is somebody to ask.
    from midwatch.supervise import fetch_status

    try:
        return fetch_status(folder), ""
    except ProtocolError:
        raise  # Somebody answers there, and not as this run's coordinator would.
    except MidwatchError as error:
        return None, f"no live coordinator: {error.message}"


def _from_disk(folder: Path) -> dict[str, Any]:
    info, lines = read_run(folder), _lines(folder)
    place = find_place(folder)
    newest = newest_verified(place.root, run_dir=folder)
    if info is None and not lines and newest is None:
        raise SuperviseError("SV110", f"{folder} holds no run", path=str(folder))
    ended = next(
        (line for line in reversed(lines) if line.event == "run.finished" and line.writer == "coordinator"), None
    )
    return {
        "run_dir": str(folder),
        "run": info.run if info else "",
        "name": info.name if info else "",
        "attempt": newest_attempt(folder),
        "newest_verified": newest and {"name": newest.name, "step": newest.step, "written_ns": newest.created_ns},
        "breaker": _breaker(folder),
        "incidents": _incidents(folder),
        "ended": ended and {"ts_ns": ended.ts_ns, **ended.data},
        "last_events": [_event(line) for line in lines[-_SHOWN_LINES:]],
    }


def _breaker(folder: Path) -> str:
    """Whether the circuit breaker pauses the run; empty when it does not."""
    try:
        memory = Desk(folder).memory()
    except OSError as error:
        return f"cannot be read: {error}"
    state = memory.get("state")
    if state == "open" and memory.get("is_going_back"):
        return "going back to an older checkpoint"
    if state == "open":
        return f"paused until {when(memory.get('until_ns', 0))}; see midwatch breaker show"
    until = "nothing starts it before somebody decides; see midwatch breaker show"
    return f"ended the run, and {until}" if state == "ended" else ""


def _lines(folder: Path) -> list[LedgerLine]:
    try:
        return merged(folder)
    except LedgerError:
        return []


def _event(line: LedgerLine) -> dict[str, Any]:
    return {"ts_ns": line.ts_ns, "event": line.event, "attempt": line.attempt, "step": line.step, "data": line.data}


def _incidents(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted((folder / "incidents").glob("*/verdict.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            verdict = msgspec.json.decode(read_regular(path), type=dict[str, Any])
        except (OSError, *UNREADABLE):
            continue
        kept = ("incident", "fault_class", "root_rank", "root_node", "step", "action", "summary")
        found.append({key: verdict.get(key) for key in kept})
    return found


def _facts(document: dict[str, Any]) -> list[tuple[str, object]]:
    status = document["coordinator"] or {}
    newest, ended = document["newest_verified"], document["ended"]
    facts = [
        ("run", f"{document['run']} {document['name']}".strip()),
        ("folder", document["run_dir"]),
        ("state", _state(document)),
        ("attempt", status.get("attempt", document["attempt"])),
        ("step", status.get("step") if document["live"] else ""),
        ("hold", _hold(status)),
        (
            "wrappers" if status.get("is_adopted") else "nodes",
            f"{len(status.get('agents', []))} of {status.get('nodes_wanted', '?')}" if document["live"] else "",
        ),
        ("circuit breaker", document["breaker"]),
        ("restart budget", _budget(status) if document["live"] else ""),
        ("newest verified", f"{newest['name']}, {when(newest['written_ns'])[:19]} UTC" if newest else "none"),
        ("incidents", len(document["incidents"])),
        (
            "ended",
            f"{when(ended['ts_ns'])[:19]} UTC: {ended.get('sentence', '')}" if ended and not document["live"] else "",
        ),
    ]
    return [(name, value) for name, value in facts if value not in ("", None)]


def _sentences(document: dict[str, Any]) -> list[str]:
    status = document["coordinator"] or {}
    return list(status.get("sentences") or [_sentence(event) for event in document["last_events"]])


def _show(document: dict[str, Any]) -> None:
    pairs(_facts(document))
    for incident in document["incidents"][-_SHOWN_LINES:]:
        say(f"  {plain(incident['incident'])}: {plain(incident['summary'])}")
    say("\nlast:")
    for sentence in _sentences(document)[-_SHOWN_LINES:]:
        say(f"  {plain(sentence)}")


def _hold(status: dict[str, Any]) -> str:
    """Also while ranks still train: nothing is restarted once they end."""
    if not status.get("held"):
        return ""
    by = "a person" if status.get("held_by") == "person" else "a rule"
    return f"{status['held']} (by {by}: nothing is started)"


def _budget(status: dict[str, Any]) -> str:
    # Progress fills it up again, so this is not the number of restarts the run has had.
    return f"{status.get('restarts_used')} of {status.get('max_restarts')} used since the last progress"


def _state(document: dict[str, Any]) -> str:
    if document["live"]:
        return str(document["coordinator"].get("state", "live"))
    # A coordinator that does not answer may be dead, stopped, or not ours to ask.
    state = "not running" if document["remark"] == _OVER else "not answering"
    return f"{state} ({document['remark']})"


def _sentence(event: dict[str, Any]) -> str:
    step = "" if event["step"] is None else f" step {event['step']}"
    data = json.dumps(event["data"], ensure_ascii=False, default=str)[:160]
    return f"{when(event['ts_ns'])} {event['event']}{step} {data}"
