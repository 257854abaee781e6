"""What a person says about a machine that no live run has: into the list of suspicions, and to the scheduler."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final, Literal

from midwatch.cluster import Driver, Outbox, Reply, Request, driver_for
from midwatch.config import IsolateConfig, SchedulerKind, scheduler_kind, slurm_conf
from midwatch.core import SYSTEM_CLOCK, SuperviseError
from midwatch.supervise.isolating import REQUESTS, WANTED_S
from midwatch.supervise.suspicion import Machine, Reason, SuspicionLedger

NO_RUN: Final = "no run is live"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,255}")
"""One machine, by whatever name: it goes into the scheduler's command line and into ``--exclude`` lists."""


def note_between_runs(
    run_dir: Path,
    config: IsolateConfig,
    wish: Literal["isolate", "release"],
    node: str,
    reason: str,
    *,
    where: str = NO_RUN,
) -> str:
    """Do it, and say in one sentence what was done.

    Args:
        run_dir: Whose list it is, unless the configuration names another.
        config: Of the run, or of this command.
        wish: What to do.
        node: By the name it had in a run, its host name, or the scheduler's name.
        reason: The person's.
        where: Begins the sentence: why no run was asked.

    Raises:
        SuperviseError: SV115 nothing is held against such a machine, so it cannot be released; or no machine can have
            that name. StorageError: ST102, ST103, ST104 the list cannot be used.

    Blocking: for the scheduler, twice its deadline at most.
    """
    keys = check_between_runs(run_dir, config, wish, node)
    ledger, now_s = SuspicionLedger.of(run_dir, config), SYSTEM_CLOCK.wall_ns() / 1e9
    known = ledger.machines()
    target = _target(known, keys)
    outbox = Outbox(run_dir / "supervisor" / REQUESTS)
    # What an earlier run still wants of this machine must not come true after this.
    for name in sorted({target, node} - {""}):
        outbox.drop(name)
    if wish == "isolate":
        for key in keys or [node]:
            ledger.exclude(key, known[key].name if key in known else node, Reason(at_s=now_s, text=reason))
        target = target or node
        done = "left out of the next run" + ("" if keys else " (no machine of that name was on this list before)")
    else:
        for key in keys:
            ledger.release(key, Reason(at_s=now_s, text=f"released: {reason}"))
        done = "let in again"
    if wish == "isolate" and config.drain != "do":
        return f"{where}; node {node} is {done}"
    driver = _driver(config, target)
    reply = _ask(driver, outbox, wish, target, f"midwatch: {reason}", now_s)
    return f"{where}; node {node} is {done}{_what_came(driver, wish, reply, is_asked_again=config.drain == 'do')}"


def check_between_runs(
    run_dir: Path, config: IsolateConfig, wish: Literal["isolate", "release"], node: str
) -> list[str]:
    """The keys of the machine that is meant. Raises what ``note_between_runs`` would, and changes nothing."""
    if not _NAME.fullmatch(node):
        raise SuperviseError("SV115", f"{node[:40]!r} is not the name of one machine")
    keys = SuspicionLedger.of(run_dir, config).matching(node)
    if wish == "release" and not keys:
        raise SuperviseError("SV115", f"nothing is held against {node!r}")
    return keys


def foresee_request(
    run_dir: Path, config: IsolateConfig, wish: Literal["isolate", "release"], node: str, target: str = ""
) -> str:
    """What the scheduler would be asked, for a sentence; empty when nobody would be. Asks nobody.

    Args:
        target: The scheduler's name, where a live run knows the node; otherwise it is what the list knows.

    Raises as ``note_between_runs``.
    """
    if config.drain != "do" and (target or wish == "isolate"):
        return ""
    if not target:
        known = SuspicionLedger.of(run_dir, config).machines()
        keys = check_between_runs(run_dir, config, wish, node)
        target = _target(known, keys) or (node if wish == "isolate" else "")
    driver = _driver(config, target)
    if driver.name == "local" or not target:
        return ""
    return f"{driver.name} would be asked to {driver.verb if wish == 'isolate' else 'give back'} node {target}"


def _target(known: dict[str, Machine], keys: list[str]) -> str:
    return next((known[key].scheduler_node for key in keys if known[key].scheduler_node), "")


def _driver(config: IsolateConfig, target: str) -> Driver:
    """That of the last run in this folder."""
    kind: SchedulerKind = scheduler_kind(config.scheduler)
    # Who never ran here may still have a scheduler: only Slurm's commands can be tried without knowing more.
    return driver_for("slurm" if kind == "none" and target else kind, slurm_conf=slurm_conf())


def _ask(
    driver: Driver, outbox: Outbox, wish: Literal["isolate", "release"], target: str, reason: str, now_s: float
) -> Reply:
    reply = asyncio.run(driver.isolate(target, reason) if wish == "isolate" else driver.release(target))
    if reply.status == "silent":
        outbox.put(Request(verb=wish, node=target, reason=reason, until_s=now_s + WANTED_S))
    return reply


def _what_came(driver: Driver, wish: str, reply: Reply, *, is_asked_again: bool) -> str:
    match reply.status:
        case "done":
            return f", and {f'{driver.verb}ed' if wish == 'isolate' else 'in service'} in {driver.name}"
        case "silent":
            then = "the next run in this folder asks again" if is_asked_again else "ask it by hand, or this again"
            return f"; {driver.name} does not answer ({reply.text}), {then}"
        case "refused":
            return f"; {driver.name} does not do it: {reply.text}"
        case "unneeded":
            return f"; {driver.name}: {reply.text}" if driver.name != "local" else ""
