"""What a person asks of a live run: sent signed to its coordinator, or only shown."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from midwatch.cli._output import plain, say, show_json
from midwatch.config import load_config
from midwatch.core import SuperviseError

reason_option = click.option("--reason", required=True, help="Why; it goes to the ledger.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be asked, and ask nothing.")

Wish = Literal["hold", "resume", "isolate", "release"]


def ask(folder: Path, wish: Wish, reason: str, *, node: str = "", dry_run: bool, is_json: bool) -> None:
    """Ask, and say how the run stands then."""
    state = "unchanged (dry run)" if dry_run else _send(folder, wish, reason, node)
    if is_json:
        show_json({"wish": wish, "node": node, "reason": reason, "dry_run": dry_run, "state": state})
        return
    what = f"{wish} {node}".strip()
    say(f"{'would ask' if dry_run else 'asked'} the run in {plain(folder)} to {plain(what)}: {plain(reason)}")
    say(f"state: {plain(state)}")


def _send(folder: Path, wish: Wish, reason: str, node: str) -> str:
    # aiohttp is loaded only when there is somebody to ask.
    from midwatch.supervise import PersonAsks, note_between_runs, send_wish

    try:
        return str(send_wish(folder, PersonAsks(wish=wish, reason=reason, node=node))["state"])
    except SuperviseError as error:
        if error.code != "SV110" or wish not in ("isolate", "release"):
            raise
        return note_between_runs(folder, load_config().isolate, wish, node, reason)
