"""Thousands of agents at once: each is written down before it is told, and none is given up because we were busy."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from midwatch.config import WatchConfig
from midwatch.core import boot_id
from midwatch.storage import ops
from midwatch.supervise.chat import Console
from midwatch.supervise.coordinator import Coordinator
from midwatch.supervise.decide import Rules
from midwatch.supervise.messages import NodeJoined
from midwatch.supervise.specs import CarrySpec, CoordinatorSpec
from midwatch.supervise.wire import Join

TIMEOUT_S = 0.6


@pytest.fixture
def console() -> Iterator[Console]:
    with Path(os.devnull).open("w") as stream:
        yield Console(stream)


def coordinator(folder: Path, console: Console, nodes: int, *, timeout_s: float = TIMEOUT_S) -> Coordinator:
    carry = CarrySpec(run="r1", run_dir=str(folder), checkpoint_dir=str(folder), tag="t", confirm_s=0.1, max_restarts=1)
    spec = CoordinatorSpec(
        carry=carry,
        nnodes=nodes,
        command_hash="c",
        command=("train.py",),
        token="",
        socket_fd=-1,
        host="127.0.0.1",
        rules=Rules(watch=WatchConfig(agent_timeout_s=timeout_s)),
        config_digest="0",
    )
    return Coordinator(spec, console, 1)


def joining(made: Coordinator, number: int, nodes: int) -> Join:
    return Join(
        node=f"n{number}",
        is_name_fixed=True,
        agent=f"a{number}",
        tag=f"t{number}",
        nproc=1,
        nnodes=nodes,
        command="c",
        address="127.0.0.1",
        port=1,
        boot=boot_id(),
        mono_ns=0,
        pid=1,
    )


def arrival(number: int) -> NodeJoined:
    return NodeJoined(
        cause="c", now_ns=time.monotonic_ns(), node=f"n{number}", agent=f"a{number}", nproc=1, address="127.0.0.1"
    )


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30.0))


def events(folder: Path, name: str) -> int:
    lines = (folder / "ledger" / "coordinator.jsonl").read_text().splitlines()
    return sum(json.loads(line)["event"] == name for line in lines)


def test_a_crowd_of_joins_is_durable_before_it_is_told_and_synced_once(tmp_path: Path, console: Console) -> None:
    synced: list[int] = []

    async def join(made: Coordinator, number: int) -> int:
        await made.feed_with_others(arrival(number))
        return len(synced)

    async def story() -> None:
        made = coordinator(tmp_path, console, 300)
        ops.set_observer(lambda operation, _: synced.append(1) if operation == "fsync_file" else None)
        try:
            told = await asyncio.gather(*(join(made, number) for number in range(200)))
        finally:
            ops.set_observer(None)
        assert told == [1] * 200
        assert events(tmp_path, "node.joined") == 200
        made.feed(arrival(200))
        assert events(tmp_path, "node.joined") == 201
        await made.end()

    run(story)


def test_whatever_comes_behind_a_crowd_is_decided_behind_it(tmp_path: Path, console: Console) -> None:
    async def story() -> None:
        made = coordinator(tmp_path, console, 3)
        made.members.admit(joining(made, 0, 3), 0)
        waiting = asyncio.create_task(made.feed_with_others(arrival(0)))
        await asyncio.sleep(0)
        made.lose("a0")
        await waiting
        assert events(tmp_path, "node.lost") == 1, "it had joined before it was lost"
        await made.end()

    run(story)


def test_nobody_is_lost_while_the_coordinator_is_busy(tmp_path: Path, console: Console) -> None:
    async def story() -> None:
        made = coordinator(tmp_path, console, 2)
        made.members.admit(joining(made, 0, 2), made.attention.listened_ns())
        await made.feed_with_others(arrival(0))
        clock = asyncio.create_task(made.keep_time())
        await asyncio.sleep(0.15)
        # The loop does not turn for twice the time-out: what the agent sends meanwhile lies in its socket.
        time.sleep(2 * TIMEOUT_S)
        await asyncio.sleep(0.2)
        assert made.members.live_count == 1
        while made.members.live_count:
            await asyncio.sleep(0.02)  # now it is listened to, and says nothing
        assert events(tmp_path, "node.lost") == 1
        made.over.set()
        await clock
        await made.end()

    run(story)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_node_whose_connection_broke_is_lost_unless_it_comes_back_at_once(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setattr("midwatch.supervise.silence._GONE_S", 0.5)

    async def story() -> None:
        made = coordinator(tmp_path, console, 2, timeout_s=60.0)
        member, _ = made.members.admit(joining(made, 0, 2), made.attention.listened_ns())
        await made.feed_with_others(arrival(0))
        clock = asyncio.create_task(made.keep_time())
        made.hung_up(member)
        # A report that lay in its other connection says nothing about afterwards; an order poll does.
        member.heard_ns = made.attention.listened_ns()
        member.polls = int(comes_back)
        await asyncio.sleep(0.7)
        assert member.is_lost is not comes_back
        made.over.set()
        await clock
        await made.end()

    run(story)
