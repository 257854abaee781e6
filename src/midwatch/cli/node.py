"""``midwatch node``: machines that are left out of runs, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from midwatch.cli._output import exits, json_option, say, show_json, table, when
from midwatch.cli._places import run_argument, run_folder
from midwatch.cli._wish import ask, dry_run_option, reason_option
from midwatch.core import SYSTEM_CLOCK
from midwatch.supervise import Machine, SuspicionLedger, isolate_rules

names_argument = click.argument("names", metavar="[RUN] NODE", nargs=-1, required=True)


@click.group("node", short_help="Leave a node out of a run, let it in again, list what is held against it.")
def command() -> None:
    """Nodes of a run: which are left out, and why."""


@command.command(
    "list", epilog=exits(65, 74) + " Example: sbatch --exclude=$(midwatch node list RUN --format slurm) ..."
)
@run_argument
@click.option("--format", "form", type=click.Choice(["table", "slurm"]), default="table", help="slurm: for --exclude.")
@json_option
def show(run: Path | None, *, form: Literal["table", "slurm"], is_json: bool) -> None:
    """List the machines that something is held against; with ``--format slurm`` the hosts that are left out now."""
    folder = run_folder(run)
    ledger = SuspicionLedger.of(folder, isolate_rules(folder))
    now_s = SYSTEM_CLOCK.wall_ns() / 1e9
    machines = sorted(ledger.machines().items(), key=lambda item: -ledger.score(item[1], now_s))
    if is_json:
        show_json([_row(key, machine, ledger.score(machine, now_s), now_s) for key, machine in machines])
    elif form == "slurm":
        out = (machine.scheduler_node or key.split("/")[0] for key, machine in machines if machine.is_out(now_s))
        say(",".join(dict.fromkeys(out)))
    else:
        rows = [_row(key, machine, ledger.score(machine, now_s), now_s) for key, machine in machines]
        table(("machine", "node", "score", "incidents", "left out", "last reason"), [list(_cells(row)) for row in rows])


@command.command("isolate", epilog=exits(65, 74, 76, e65="no run folder there"))
@names_argument
@reason_option
@dry_run_option
@json_option
def isolate(names: tuple[str, ...], *, reason: str, dry_run: bool, is_json: bool) -> None:
    """Leave NODE out of the run in the folder RUN from its next attempt on, and of later jobs for a while.

    Without a live run it is only written down for the next one.
    """
    run, node = _run_and_node(names)
    ask(run_folder(run), "isolate", reason, node=node, dry_run=dry_run, is_json=is_json)


@command.command("release", epilog=exits(65, 74, 76, e65="no run folder there"))
@names_argument
@reason_option
@dry_run_option
@json_option
def release(names: tuple[str, ...], *, reason: str, dry_run: bool, is_json: bool) -> None:
    """Let NODE take part again, in the live run or in the next one."""
    run, node = _run_and_node(names)
    ask(run_folder(run), "release", reason, node=node, dry_run=dry_run, is_json=is_json)


def _run_and_node(names: tuple[str, ...]) -> tuple[Path | None, str]:
    *run, node = names
    if len(run) > 1:
        raise click.UsageError(f"one NODE at a time, after RUN: {' '.join(names)}")
    return (Path(run[0]) if run else None), node


def _row(key: str, machine: Machine, score: float, now_s: float) -> dict[str, Any]:
    return {
        "machine": key,
        "node": machine.name,
        "scheduler_node": machine.scheduler_node,
        "score": round(score, 3),
        "incidents_30d": machine.recent(now_s),
        "is_out": machine.is_out(now_s),
        "out_until_s": machine.out_until_s,
        "reasons": machine.reasons,
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    last = row["reasons"][-1].text if row["reasons"] else ""
    out = "no"
    if row["is_out"]:
        out = f"until {when(int(row['out_until_s'] * 1e9))}" if row["out_until_s"] else "until released"
    return row["machine"], row["node"], row["score"], row["incidents_30d"], out, last
