"""What a person asks of a run: sent signed to its coordinator, written down between runs, or only looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from midwatch.cli._output import plain, say, show_json
from midwatch.cli._places import is_run
from midwatch.core import SuperviseError

_REASON_CHARS = 1000


def _reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Whoever comes next must find a reason there, and not a novel."""
    if not value.strip():
        raise click.BadParameter("must not be empty")
    if len(value) > _REASON_CHARS:
        raise click.BadParameter(f"at most {_REASON_CHARS} characters")
    return value.strip()


reason_option = click.option("--reason", required=True, callback=_reason, help="Why; it goes to the ledger.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be asked, and ask nothing.")

Wish = Literal["hold", "resume", "isolate", "release"]


def ask(folder: Path, wish: Wish, reason: str, *, node: str = "", dry_run: bool, is_json: bool) -> None:
    """Ask, and say how the run stands then. A dry run fails where the wish itself would."""
    answer = _foresee(folder, wish, node) if dry_run else _send(folder, wish, reason, node)
    if is_json:
        show_json({"wish": wish, "node": node, "reason": reason, "dry_run": dry_run, **answer})
        return
    what = f"{wish} {node}".strip()
    say(f"{'would ask' if dry_run else 'asked'} the run in {plain(folder)} to {plain(what)}: {plain(reason)}")
    say(f"state: {plain(answer['state'])}")
    if answer["held"]:
        say(f"held: {plain(answer['held'])}")
    if answer["excluded"]:
        say(f"left out: {', '.join(plain(name) for name in answer['excluded'])}")


def _send(folder: Path, wish: Wish, reason: str, node: str) -> dict[str, Any]:
    # aiohttp is loaded only when there is somebody to ask.
    from midwatch.supervise import PersonAsks, hold_between_runs, isolate_rules, note_between_runs, send_wish

    try:
        return _standing(send_wish(folder, PersonAsks(wish=wish, reason=reason, node=node)))
    except SuperviseError as error:
        where = _instead(folder, wish, error)
    if wish == "hold" or wish == "resume":
        return _written(f"{where}; {hold_between_runs(folder, wish, reason)}")
    return _written(note_between_runs(folder, isolate_rules(folder), wish, node, reason, where=where))


def _foresee(folder: Path, wish: Wish, node: str) -> dict[str, Any]:
    from midwatch.supervise import (
        check_between_runs,
        fetch_status,
        foresee_request,
        hold_between_runs,
        isolate_rules,
    )

    try:
        status = fetch_status(folder)
        if node and node not in _names(status):
            raise SuperviseError("SV115", f"the run has no node {node!r}")
    except SuperviseError as error:
        where = _instead(folder, wish, error)
    else:
        state = f"unchanged (dry run): {status['state']}"
        if wish == "isolate" or wish == "release":
            would = foresee_request(folder, isolate_rules(folder), wish, node, _target(status, node))
            state = f"{state}; {would}" if would else state
        return {**_standing(status), "state": state}
    would = ""
    if wish == "hold" or wish == "resume":
        hold_between_runs(folder, wish, "", is_dry=True)
    else:
        check_between_runs(folder, isolate_rules(folder), wish, node)
        would = foresee_request(folder, isolate_rules(folder), wish, node)
    done = f"unchanged (dry run): {where}, so it would be written down for the next one"
    return _written(f"{done}; {would}" if would else done)


def _instead(folder: Path, wish: Wish, error: SuperviseError) -> str:
    """Why a wish that no run has taken may be written down; raises the error where it may not."""
    from midwatch.supervise import is_stamped

    if wish == "release" and error.code == "SV115":
        # Of an earlier job, and so on the list only, which this run reads again when the machine comes.
        return "the live run has no such node"
    if error.code != "SV110":
        raise error
    if not is_run(folder):
        raise error
    supervisor = folder / "supervisor"
    if (supervisor / "coordinator.json").exists() and is_stamped(supervisor):
        message = f"the run in {folder} is live, but does not answer; nothing was changed: {error.message}"
        raise SuperviseError("SV110", message, hint="Try again in a moment; RUN/supervisor/coordinator.log says more.")
    return "no run is live"


def _standing(status: dict[str, Any]) -> dict[str, Any]:
    return {"state": str(status["state"]), "held": status.get("held"), "excluded": list(status.get("excluded", ()))}


def _written(sentence: str) -> dict[str, Any]:
    return {"state": sentence, "held": None, "excluded": []}


def _target(status: dict[str, Any], node: str) -> str:
    """The scheduler's name for a node of a live run."""
    for agent in status.get("agents", ()):
        machine, theirs = str(agent.get("machine", "")), str(agent.get("scheduler_node", ""))
        if node in (agent.get("node"), machine, machine.split("/")[0], theirs):
            return theirs
    return ""


def _names(status: dict[str, Any]) -> set[str]:
    """All by which a person may mean a node of a live run."""
    machines = [str(agent.get("machine", "")) for agent in status.get("agents", ())]
    hosts = [machine.split("/")[0] for machine in machines]
    theirs = [str(agent.get("scheduler_node", "")) for agent in status.get("agents", ())]
    return {*status.get("nodes", ()), *status.get("excluded", ()), *machines, *hosts, *theirs} - {""}
