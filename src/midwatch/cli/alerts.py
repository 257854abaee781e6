"""``midwatch alerts``: whether people can be told, and what they were told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from midwatch.audit.alerts import (
    TIMEOUT_S,
    Alert,
    Message,
    Target,
    TargetError,
    body,
    read_state,
    subject,
    targets_of,
)
from midwatch.cli._output import exits, json_option, plain, say, show_json, table, when
from midwatch.cli._places import run_argument, run_folder
from midwatch.config import load_config
from midwatch.core import SYSTEM_CLOCK, AlertError, ConfigError


@click.group("alerts", short_help="Try whether people can be told, see what they were told.")
def command() -> None:
    """Alerts: messages to people when a run needs them. Whom, and of what: the table [alerts] of the configuration."""


@command.command(
    "test",
    epilog=exits(74, 78, e74="somebody was not told", e78="nobody to tell, or a secret is not there")
    + " Example: midwatch alerts test --config midwatch.toml",
)
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="The TOML file of the run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Look whether secrets and libraries are there; send nothing.")
@json_option
def test(*, config_file: Path | None, overrides: Sequence[str], dry_run: bool, is_json: bool) -> None:
    """Send a test message to everybody named in [alerts.to], and say what each answered."""
    config = load_config(config_file, overrides)
    targets = targets_of(config.alerts)
    if not targets:
        raise AlertError("AL102", "the configuration names nobody to tell: [alerts.to] is empty")
    message = _message(config.run.name)
    answers = [_ask(target, message, is_sent=not dry_run) for target in targets]
    if is_json:
        show_json({"dry_run": dry_run, "subject": subject(message), "text": body(message), "targets": answers})
    else:
        _show(answers, message, dry_run=dry_run)
    failed = [answer for answer in answers if not answer["is_fine"]]
    if failed:
        is_set_up = all(answer["where"] for answer in failed)
        click.get_current_context().exit(74 if is_set_up else 78)


@command.command("show", epilog=exits(65, 74, e65="no run there") + " Example: midwatch alerts show RUN")
@run_argument
@json_option
def show(run: Path | None, *, is_json: bool) -> None:
    """Show the last alerts of the run in the folder RUN, who was told, and who is still to be."""
    state = read_state(run_folder(run))
    if is_json:
        show_json({"sent": state.sent, "waiting": state.waiting, "dropped": state.dropped, "on": state.memory.on})
        return
    table(("told", "target", "what"), [(when(one.ts_ns), one.target, one.title) for one in state.sent])
    for one in state.waiting:
        say(
            f"waits for {plain(', '.join(one.left))}: {plain(one.alert.title)}: {plain(one.alert.sentence)}",
            fg="yellow",
        )
    if state.dropped:
        say(f"{state.dropped} alerts were dropped: nobody could be told for too long", fg="red")


def _message(name: str) -> Message:
    now_ns = SYSTEM_CLOCK.wall_ns()
    alert = Alert(
        id=f"test:{now_ns}",
        kind="test",
        severity="info",
        key=f"test/{now_ns}",
        title="a test",
        sentence="This is a test of midwatch's alerts: nothing has happened.",
        did="It sent this message.",
        look="midwatch alerts test --dry-run",
        page="AL101",
        name=name or "test",
        ts_ns=now_ns,
    )
    return Message(alert=alert, now_ns=now_ns)


def _ask(target: Target, message: Message, *, is_sent: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"target": target.name, "where": "", "is_fine": False, "answer": ""}
    try:
        answer["where"] = target.check()
        if is_sent:
            answer["answer"] = target.send(message, TIMEOUT_S)
            if target.is_stateful:
                # What was opened only to try it is closed again.
                over = msgspec.structs.replace(message.alert, state="over")
                target.send(msgspec.structs.replace(message, alert=over), TIMEOUT_S)
        answer["is_fine"] = True
    except TargetError as error:
        answer["answer"] = f"not told: {error}"
    except ConfigError as error:
        answer["answer"] = f"not told: [{error.code}] {error.message}"
    return answer


def _show(answers: list[dict[str, Any]], message: Message, *, dry_run: bool) -> None:
    say(subject(message))
    for line in body(message).splitlines():
        say(f"  {plain(line)}")
    for one in answers:
        what = one["answer"] or ("would be told" if dry_run else "told")
        where = f" ({plain(one['where'])})" if one["where"] else ""
        say(f"{plain(one['target'])}{where}: {plain(what)}", fg="green" if one["is_fine"] else "red")
