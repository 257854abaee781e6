"""``midwatch breaker``: what the circuit breaker of a run is doing, and what a person decides."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from midwatch.audit import Desk, Lift, lift_from
from midwatch.cli import _breaker_lift, _breaker_show
from midwatch.cli._numbers import FiniteRange
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import is_run, run_argument, run_folder
from midwatch.cli._wish import ask, dry_run_option, reason_option
from midwatch.core import SYSTEM_CLOCK, GuardError, SuperviseError
from midwatch.guards import Act, Decision, Memory

_ENDS = exits(65, 74, e65="no such run, or it waits for no decision")
_LIFT_ENDS = exits(65, 74, e65="no such run, that is not in force there, or the record of it is damaged")


@click.group("breaker", short_help="See why training is paused, and decide.")
def command() -> None:
    """The circuit breaker of a run: it pauses training when the loss goes astray, and waits for a decision."""


@command.command("show", epilog=exits(65, 74))
@run_argument
@json_option
def show(run: Path | None, *, is_json: bool) -> None:
    """Say what the breaker of the run in the folder RUN is doing, what was decided and still holds, and what the logged
    numbers tell of the cause.
    """
    folder = run_folder(run)
    desk = Desk(folder)
    if not is_run(folder) and not desk.folder.is_dir():
        raise SuperviseError("SV110", f"{folder} holds no run", path=str(folder))
    memory = _memory(desk)
    if is_json:
        show_json(_breaker_show.document(folder, desk, memory))
    else:
        _breaker_show.show(folder, desk, memory)


@command.command("go-on", epilog=_ENDS)
@run_argument
@reason_option
@dry_run_option
@json_option
def go_on(run: Path | None, *, reason: str, dry_run: bool, is_json: bool) -> None:
    """It was a false alarm: train on from here, and trust the checkpoints again."""
    _decide(run, "go_on", reason, dry_run=dry_run, is_json=is_json)


@command.command("stop", epilog=_ENDS)
@run_argument
@reason_option
@dry_run_option
@json_option
def stop(run: Path | None, *, reason: str, dry_run: bool, is_json: bool) -> None:
    """End the run with exit code 93, so that no scheduler starts it again by itself."""
    _decide(run, "stop", reason, dry_run=dry_run, is_json=is_json)


_before = click.option("--before", type=click.IntRange(min=0), help="Go back to a checkpoint before this step.")


@command.command("rewind", epilog=_ENDS)
@run_argument
@_before
@reason_option
@dry_run_option
@json_option
def rewind(run: Path | None, *, before: int | None, reason: str, dry_run: bool, is_json: bool) -> None:
    """Go back to a checkpoint from well before the trouble, and train the same again."""
    _decide(run, "rewind", reason, dry_run=dry_run, is_json=is_json, before_step=before)


@command.command("skip", epilog=_ENDS)
@run_argument
@click.option("--first", type=click.IntRange(min=0), help="First batch to leave out. Default: where the trouble began.")
@click.option("--last", type=click.IntRange(min=0), help="Last batch to leave out. Default: where the run was paused.")
@_before
@reason_option
@dry_run_option
@json_option
def skip(
    run: Path | None,
    *,
    first: int | None,
    last: int | None,
    before: int | None,
    reason: str,
    dry_run: bool,
    is_json: bool,
) -> None:
    """Go back, and leave out a range of batches. The script must ask ``run.skips``."""
    folder = run_folder(run)
    _refuse_unless_waiting(folder, "skip_range")
    trip = _memory(Desk(folder)).trip
    first = first if first is not None else (trip.position if trip else None)
    last = last if last is not None else (trip.last_position if trip else None)
    if first is None or last is None or last < first:
        raise click.BadParameter(f"--first {first} and --last {last} are no range of batches")
    _decide(run, "skip_range", reason, dry_run=dry_run, is_json=is_json, before_step=before, first=first, last=last)


@command.command("lower-lr", epilog=_ENDS)
@run_argument
@click.option("--factor", type=FiniteRange(0, 1, min_open=True, max_open=True), required=True, help="Such as 0.5.")
@_before
@reason_option
@dry_run_option
@json_option
def lower_lr(run: Path | None, *, factor: float, before: int | None, reason: str, dry_run: bool, is_json: bool) -> None:
    """Go back, and multiply all learning rates by a factor from then on."""
    _decide(run, "lower_lr", reason, dry_run=dry_run, is_json=is_json, before_step=before, factor=factor)


@command.command("drop-node", epilog=_ENDS)
@run_argument
@click.option("--node", required=True, help="Its name in the run.")
@_before
@reason_option
@dry_run_option
@json_option
def drop_node(run: Path | None, *, node: str, before: int | None, reason: str, dry_run: bool, is_json: bool) -> None:
    """Go back, and go on without a node (see ``midwatch node isolate``)."""
    folder = run_folder(run)
    _refuse_unless_waiting(folder, "drop_node")
    # One document on stdout: what is said of the node is for people.
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        ask(folder, "isolate", reason, node=node, dry_run=dry_run, is_json=False)
    _decide(run, "drop_node", reason, dry_run=dry_run, is_json=is_json, before_step=before, node=node)
    if not is_json and not (folder / "ledger" / "coordinator.jsonl").exists():
        say(
            f"`midwatch run` did not start this run: take {plain(node)} out of your launcher's list before you start it"
        )


@command.command("lift", epilog=_LIFT_ENDS)
@run_argument
@click.option("--lr", is_flag=True, help="The learning rates: they are those of the plan again.")
@click.option("--batches", is_flag=True, help="All batches that are left out.")
@click.option("--first", type=click.IntRange(min=0), help="With --last: of the batches only these.")
@click.option("--last", type=click.IntRange(min=0), help="With --first: of the batches only these.")
@reason_option
@dry_run_option
@json_option
def lift(
    run: Path | None,
    *,
    lr: bool,
    batches: bool,
    first: int | None,
    last: int | None,
    reason: str,
    dry_run: bool,
    is_json: bool,
) -> None:
    """Take back what was decided and still holds. The run need not be paused: behind its next save, or at its next
    start, training goes on without it.
    """
    if (first is None) != (last is None) or (first is not None and last is not None and last < first):
        raise click.BadParameter(f"--first {first} and --last {last} are no range of batches")
    only = (first, last) if first is not None and last is not None else None
    if not lr and not batches and only is None:
        raise click.UsageError("Say what to lift: --lr, --batches, or --first and --last.")
    folder = run_folder(run)
    desk = Desk(folder)
    held = _breaker_lift.in_force_soon(desk)
    asked = Lift(by=_whoever(), reason=reason, only=only)
    asked = _breaker_lift.lift_of(folder, held, asked, lr=lr, batches=batches)
    left, _ = lift_from(held, asked)
    if not dry_run:
        desk.leave_lift(asked)
    if is_json:
        show_json({"lift": asked, "in_force": left, "dry_run": dry_run})
        return
    done = "would leave" if dry_run else "left"
    say(f"{done} for the run in {plain(str(folder))}: lift {asked.what}: {plain(reason)}")
    say(f"no longer in force {_breaker_lift.WHEN}, whichever comes first; then in force: {left.what or 'nothing'}")


def _decide(run: Path | None, act: Act, reason: str, *, dry_run: bool, is_json: bool, **what: Any) -> None:
    folder = run_folder(run)
    memory = _refuse_unless_waiting(folder, act)
    given = {name: value for name, value in what.items() if value is not None}
    now_ns = SYSTEM_CLOCK.wall_ns()
    decision = Decision(now_ns=now_ns, act=act, by=_whoever(), reason=reason, pause=memory.pauses, **given)
    if not dry_run:
        Desk(folder).leave(msgspec.to_builtins(decision))
    if is_json:
        show_json({"decision": decision, "dry_run": dry_run})
        return
    details = "".join(f", {name} {plain(str(value))}" for name, value in given.items())
    then = "the next start of the run" if memory.state == "ended" else "the run"
    say(f"{'would leave' if dry_run else 'left'} for {then} in {plain(str(folder))}: {act}{details}: {plain(reason)}")


def _refuse_unless_waiting(folder: Path, act: Act) -> Memory:
    memory = _memory(Desk(folder))
    if memory.state == "ended" and act == "stop":
        message = f"the run in {folder} has ended: {memory.why_ended}"
        raise GuardError("GD102", message, state=memory.state)
    if memory.state not in ("open", "ended"):
        message = f"the run in {folder} is not paused (its breaker is {memory.state})"
        raise GuardError("GD102", message, state=memory.state)
    return memory


def _memory(desk: Desk) -> Memory:
    try:
        return msgspec.convert(desk.memory(), Memory)
    except msgspec.ValidationError as error:
        raise GuardError("GD102", f"{desk.folder} holds a damaged record: {error}") from error


def _whoever() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
