"""Where the ranks' writers will meet in this attempt: decided once, by all ranks together."""

from __future__ import annotations

import time
from pathlib import Path

from midwatch.checkpoint.address import LOOPBACK, address_towards, network_identity, own_address
from midwatch.checkpoint.board_wire import NetPlace, make_token
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.net_board import BROKEN, Line
from midwatch.checkpoint.writer import WriterClient
from midwatch.core import MidwatchError, Recorder

MEET_TIMEOUT_S = 5.0
"""Covers the start of rank 0's writer (its imports) on a busy machine; a network that is slower is not worth having."""

PAUSE_S = 0.05


class Meeting:
    """Decide how the writers meet: over rank 0's receipt store where every rank reaches it, else by files.

    Rank 0 opens a listening socket, which its writer process inherits; every rank tries to connect and to prove itself,
    and one that cannot within ``MEET_TIMEOUT_S`` decides for files. In two parts, so that the writer starts while the
    ranks load their checkpoint: training after a restart does not wait for it.

    Args:
        writer: This rank's. Rank 0's is restarted when it runs already, so that it inherits the socket.

    Collective: made and finished by every rank at the same places.
    """

    def __init__(
        self, group: ControlGroup, writer: WriterClient, run_dir: Path, *, identity: Identity, recorder: Recorder
    ) -> None:
        self._group, self._writer, self._run_dir = group, writer, run_dir
        self._identity, self._recorder = identity, recorder
        self._offer = {"address": "", "fault": ""}
        if identity.world_size > 1:
            where = group.gather({"network": network_identity(), "address": own_address()})
            offer = _offer(where, writer, run_dir, identity) if identity.rank == 0 else None
            self._offer = group.broadcast(offer)

    def finish(self) -> str:
        """Where the store is, ``host:port``; empty: files. Recorded as ``checkpoint.board_chosen``.

        Collective: yes.
        Blocking: ``MEET_TIMEOUT_S`` besides the agreement itself.
        """
        if self._identity.world_size == 1:
            return ""
        offer = self._offer
        line, fault = _visit(offer["address"], self._run_dir, self._identity)
        faults = self._group.gather(fault)
        if line is not None:
            line.close()  # only now: the store has held a connection of every rank at once
        apart = [f"rank {rank}: {text}" for rank, text in enumerate(faults) if text]
        if self._identity.rank == 0:
            reason = offer["fault"] or "; ".join(apart[:4])
            if reason:
                self._writer.stop_listening()
            kind, address = ("files", "") if reason else ("store", offer["address"])
            self._recorder.record("checkpoint.board_chosen", board=kind, address=address, reason=reason)
        return "" if apart or offer["fault"] else offer["address"]


def _offer(where: list[dict[str, str]], writer: WriterClient, run_dir: Path, identity: Identity) -> dict[str, str]:
    """Rank 0 opens the store; what keeps it from that is told to all."""
    others = [place["address"] for place in where if place["network"] != where[0]["network"]]
    host = address_towards(others) if others else LOOPBACK
    if others and host == LOOPBACK:
        return {"address": "", "fault": "rank 0's node has no address that other nodes could reach"}
    try:
        token_file = make_token(run_dir)
        address = writer.listen(host, token_file=token_file, run=identity.run, attempt=identity.attempt)
    except (OSError, MidwatchError) as error:
        return {"address": "", "fault": f"rank 0 cannot open the store: {error}"}
    return {"address": address, "fault": ""}


def _visit(address: str, run_dir: Path, identity: Identity) -> tuple[Line | None, str]:
    """Connect and prove ourselves; the connection, or what kept us from it."""
    if not address:
        return None, "no store"
    place = NetPlace(address=address, run_dir=run_dir, run=identity.run, attempt=identity.attempt)
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while True:
        try:
            return Line(place, max(deadline - time.monotonic(), PAUSE_S)), ""
        except MidwatchError as error:
            return None, error.message
        except BROKEN as error:
            if time.monotonic() + PAUSE_S >= deadline:
                return None, f"{type(error).__name__}: {error}"
            time.sleep(PAUSE_S)
