"""Where ``midwatch run`` begins on a node: it takes the seat in the run folder, or finds who has it, and launches."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from midwatch.core import MidwatchError, SuperviseError
from midwatch.supervise.ending import Result, how_it_ended
from midwatch.supervise.endpoint import read_endpoint
from midwatch.supervise.failover import FolderLock, Vigil, is_seat_abandoned, is_stamped, refuse_second
from midwatch.supervise.launcher import Launcher, Say
from midwatch.supervise.members import pace_s
from midwatch.supervise.prepare import Host, Plan
from midwatch.supervise.protocol import read_token
from midwatch.supervise.tee import Mode

_SEEK_S: Final = (0.1, 1.0)
"""Between two looks into the run folder for the coordinator, growing: thousands of wrappers may look."""
_HEIR_S: Final = Vigil.FREE_S + 2.0
"""Beyond the pace of reports: until a wrapper that has lost its host sits in its place."""


def launch(plan: Plan, say: Say, *, tee: Mode = "0", out: int = 1) -> Result:
    """Run the command under supervision on this node.

    Raises:
        SuperviseError: SV102 somebody else runs in this folder. StorageError: the folder cannot be used.

    Blocking: until the run is over.
    """
    folder = plan.paths.supervisor_dir
    was_abandoned = plan.request.place is not None and is_seat_abandoned(folder)
    if was_abandoned and how_it_ended(plan.paths.run_dir) is None:
        # A launcher that starts ranks one by one is quicker with the next start of the host's rank than the wrappers
        # of the last start with taking over. They must: who else would judge? If none is alive, the seat is ours.
        heir_s = pace_s(plan.request.nnodes) + _HEIR_S
        say(f"the host of the last start was killed: up to {heir_s:.0f} s for others of it to take over", "info")
        is_stamped(folder, heir_s)
    seat = FolderLock.take(folder, plan.tag)
    if seat is None and was_abandoned:
        # Another wrapper may have looked in this very moment, as we did.
        time.sleep(_SEEK_S[0])
        seat = FolderLock.take(folder, plan.tag)
    if seat is not None:
        return asyncio.run(_host(plan, seat, say, tee, out))
    if plan.request.place is not None:
        return asyncio.run(_adopt(plan, say, tee, out))
    if plan.request.most_nodes == 1:
        raise refuse_second(folder)
    return asyncio.run(_join(plan, say, tee, out))


async def _host(plan: Plan, seat: FolderLock, say: Say, tee: Mode, out: int) -> Result:
    host = Host(plan, seat)
    try:
        return await Launcher(plan, host, say, tee, out).run(host.url, host.token, host.run, plan.certificate)
    finally:
        host.close()


async def _adopt(plan: Plan, say: Say, tee: Mode, out: int) -> Result:
    """Beside many others of one host: no question is asked over the network here, which would cost each its stack.

    An address left from an earlier start does no harm: the agent finds nobody there and looks again.
    """
    run_dir, pause_s = plan.paths.run_dir, _SEEK_S[0]
    end = time.monotonic() + plan.request.config.restart.join_timeout_s
    while True:
        try:
            endpoint, token = read_endpoint(run_dir), read_token(plan.paths.supervisor_dir / "token")
            break
        except MidwatchError as error:
            if time.monotonic() > end:
                what = f"no coordinator within {plan.request.config.restart.join_timeout_s:g} s: {error.message}"
                raise SuperviseError("SV106", what) from error
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _SEEK_S[1])
        # Whoever had it when we came may have been of the start before.
        seat = FolderLock.take(plan.paths.supervisor_dir, plan.tag)
        if seat is not None:
            return await _host(plan, seat, say, tee, out)
    launcher = Launcher(plan, None, say, tee, out)
    return await launcher.run(endpoint.url, token.hex(), endpoint.run, endpoint.certificate)


async def _join(plan: Plan, say: Say, tee: Mode, out: int) -> Result:
    # Only a joining node talks to the coordinator by itself, so only it pays for the network stack.
    from midwatch.supervise.joining import find_coordinator

    timeout_s = plan.request.config.restart.join_timeout_s
    end = time.monotonic() + timeout_s
    while True:
        try:
            found = await find_coordinator(plan.paths.run_dir, min(_SEEK_S[1], timeout_s))
            break
        except SuperviseError as error:
            if time.monotonic() > end:
                what = f"no coordinator to join within {timeout_s:g} s: {error.__cause__ or error.message}"
                raise SuperviseError("SV106", what) from error
        # Whoever had it when we came may have been of a run that was just ending.
        seat = FolderLock.take(plan.paths.supervisor_dir, plan.tag)
        if seat is not None:
            return await _host(plan, seat, say, tee, out)
    say(f"joining the run hosted on {found.hostname}", "info")
    return await Launcher(plan, None, say, tee, out).run(found.url, found.token, found.run, found.certificate)
