"""What a person says about a machine while no run is live: into the list of suspicions, and to the scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Literal

from midwatch.cluster import Driver, Outbox, Reply, Request, driver_for
from midwatch.config import IsolateConfig, slurm_conf
from midwatch.core import SYSTEM_CLOCK, SuperviseError
from midwatch.supervise.isolating import REQUESTS, WANTED_S
from midwatch.supervise.suspicion import Reason, SuspicionLedger

_SHORT: Final = {"isolate": "drained", "release": "in service"}


def note_between_runs(
    run_dir: Path, config: IsolateConfig, wish: Literal["isolate", "release"], node: str, reason: str
) -> str:
    """Do it, and say in one sentence what was done.

    Args:
        run_dir: Whose list it is, unless the configuration names another.
        config: Of this command.
        wish: What to do.
        node: By the name it had in a run, its host name, or the scheduler's name.
        reason: The person's.

    Raises:
        SuperviseError: SV115 nothing is held against such a machine, so it cannot be released. StorageError: ST102,
            ST103, ST104 the list cannot be used.

    Blocking: for the scheduler, twice its deadline at most.
    """
    ledger, now_s = SuspicionLedger.of(run_dir, config), SYSTEM_CLOCK.wall_ns() / 1e9
    key = ledger.find(node)
    entry = Reason(at_s=now_s, text=reason if wish == "isolate" else f"released: {reason}")
    if wish == "isolate":
        target = ledger.exclude(key or node, node, entry).scheduler_node or node
    elif key is None:
        raise SuperviseError("SV115", f"nothing is held against {node!r}")
    else:
        target = ledger.machines()[key].scheduler_node
        ledger.release(key, entry)
    done = "left out of the next run" if wish == "isolate" else "let in again"
    if wish == "isolate" and config.drain != "do":
        return f"no run is live; node {node} is {done}"
    driver = driver_for(is_slurm=bool(target), slurm_conf=slurm_conf())
    reply = _ask(driver, run_dir, wish, target, f"midwatch: {reason}", now_s)
    return f"no run is live; node {node} is {done}{_what_came(driver, wish, reply)}"


def _ask(
    driver: Driver, run_dir: Path, wish: Literal["isolate", "release"], target: str, reason: str, now_s: float
) -> Reply:
    reply = asyncio.run(driver.isolate(target, reason) if wish == "isolate" else driver.release(target))
    if reply.status == "silent":
        request = Request(verb=wish, node=target, reason=reason, until_s=now_s + WANTED_S)
        Outbox(run_dir / "supervisor" / REQUESTS).put(request)
    return reply


def _what_came(driver: Driver, wish: str, reply: Reply) -> str:
    match reply.status:
        case "done":
            return f", and {_SHORT[wish]} in {driver.name}"
        case "silent":
            return f"; {driver.name} does not answer ({reply.text}), the next run in this folder asks again"
        case "refused":
            return f"; {driver.name} does not do it: {reply.text}"
        case "unneeded":
            return f"; {driver.name}: {reply.text}" if driver.name != "local" else ""
