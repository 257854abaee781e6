"""Carry out what the decision core says: the ledger, the fencing claim, orders to agents, words to people."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.audit import Ledger, known_checkpoints, seal_of
from midwatch.checkpoint.format import committed_names, mark_suspect
from midwatch.core import StorageError, attempt_name, parse_checkpoint_name
from midwatch.faults.types import Evidence, Verdict
from midwatch.storage import Fence, as_storage_error, claim_attempt, newest_attempt
from midwatch.supervise.attention import Attention
from midwatch.supervise.bundling import Bundles
from midwatch.supervise.chat import Console
from midwatch.supervise.gathering import Gathering
from midwatch.supervise.isolating import Isolation
from midwatch.supervise.late import completed
from midwatch.supervise.members import Members
from midwatch.supervise.messages import (
    AllowTraining,
    AskToSaveAndExit,
    Finish,
    GatherEvidence,
    Instruction,
    IsolateNode,
    LaunchAttempt,
    ProbeNodes,
    Record,
    ReleaseNode,
    Say,
    StopRanks,
    SuspectCheckpoints,
    WakeAt,
    WriteVerdict,
)
from midwatch.supervise.probing import ProbeRound
from midwatch.supervise.specs import CarrySpec
from midwatch.supervise.wire import AskToExit, FinishRun, OpenGate, Order, SayLine, StartRanks, StopLocal

_SENTENCES: Final = 50
_SCHEDULER_S: Final = 2.0
"""At the end, for requests that came a moment ago; what is not done by then stays on disk."""
_ENDS: Final = frozenset({"attempt.ended", "run.finished"})
"""Facts after which no rank of the attempt writes any more."""
_log: Final = logging.getLogger("midwatch.coordinator")


class Carrier:
    """The coordinator's hands.

    Args:
        spec: Of this run.
        members: Who can be ordered.
        console: The hosting launcher.
        answers: Called with ("evidence", Evidence), ("wake", None) or ("unclaimed", StorageError) when something asked
            for is there, or cannot be.
        attention: By it agents are waited for.
    """

    def __init__(
        self,
        spec: CarrySpec,
        members: Members,
        console: Console,
        answers: Callable[[str, Any], None],
        attention: Attention,
    ) -> None:
        self._spec = spec
        self._members = members
        self._console = console
        self._answers = answers
        self._attention = attention
        self._run_dir = Path(spec.run_dir)
        self._epoch = newest_attempt(self._run_dir)
        self._sealed = 0
        self.ledger = Ledger(self._run_dir / "ledger" / "coordinator.jsonl", run=spec.run, fence=lambda: self._fence())
        self.gathering: Gathering | None = None
        self.probing: ProbeRound | None = None
        self.isolation = Isolation(spec, members, self.record, self.say)
        self.verdict: Verdict | None = None
        self.finish: Finish | None = None
        self.sentences: deque[str] = deque(maxlen=_SENTENCES)
        self.isolation.begin()
        self._writing: set[asyncio.Task[None]] = set()
        self._bundles = Bundles(self._run_dir, self.say)
        self._story: Callable[[str], tuple[str, ...]] = lambda cause: ()

    def tell_stories(self, story: Callable[[str], tuple[str, ...]]) -> None:
        """How an incident went, for its report."""
        self._story = story

    @property
    def epoch(self) -> int:
        """The attempt whose claim we hold."""
        return self._epoch

    def carry_out(self, instruction: Instruction) -> None:
        """Do one.

        Raises:
            FencedError: CK401 somebody else has claimed a newer attempt of this run.
        """
        match instruction:
            case Record():
                if instruction.event in _ENDS:
                    self._seal(instruction.cause)
                self.record(instruction.event, instruction.step, instruction.cause, instruction.data)
            case LaunchAttempt():
                self._launch(instruction)
            case GatherEvidence():
                self._gather(instruction)
            case StopRanks():
                self._stop(instruction)
            case SuspectCheckpoints():
                self._doubt(instruction)
            case ProbeNodes():
                self._probe(instruction)
            case IsolateNode():
                self.isolation.isolate(instruction.node, instruction.reason, instruction.incident, instruction.cause)
            case ReleaseNode():
                self.isolation.release(instruction.node, instruction.reason, instruction.cause)
            case AllowTraining(attempt=attempt):
                self._order_all(OpenGate(attempt=attempt))
            case AskToSaveAndExit(attempt=attempt):
                self._order_all(AskToExit(attempt=attempt, reason=instruction.reason))
            case WriteVerdict():
                self._write(instruction)
            case WakeAt():
                self._answers("wake", instruction.at_ns)
            case Say():
                self.say(instruction.sentence, instruction.level, is_local=instruction.is_local)
            case Finish():
                self._finish(instruction)

    def record(self, event: str, step: int | None = None, cause: str = "", data: dict[str, Any] | None = None) -> None:
        """Write a fact down; a full disk must not end training, so it is said and survived."""
        try:
            self.ledger.record(event, step=step, cause=cause, **(data or {}))
        except (OSError, StorageError) as error:
            self._complain(error)

    @contextmanager
    def together(self) -> Generator[None]:
        """What is written down inside becomes durable when this ends, before anybody outside can have heard of it."""
        batch = self.ledger.together()
        batch.__enter__()
        try:
            yield
        finally:
            try:
                batch.__exit__(None, None, None)
            except (OSError, StorageError) as error:
                self._complain(error)

    def _complain(self, error: OSError | StorageError) -> None:
        _log.error("ledger: %s", error)
        self.say(f"the ledger cannot be written: {getattr(error, 'message', error)}", "error")

    def _seal(self, cause: str) -> None:
        """The attempt's ranks are gone: note how far their ledgers had got, so that a cut-off end is noticed."""
        if self._sealed == self._epoch:
            return
        self._sealed = self._epoch
        for path in sorted((self._run_dir / "ledger").glob(f"{attempt_name(self._epoch)}-r*.jsonl")):
            try:
                seal = seal_of(path)
            except OSError as error:
                _log.warning("%s cannot be sealed: %s", path, error)
                continue
            if seal is not None:
                self.record("ledger.sealed", cause=cause, data=msgspec.structs.asdict(seal))

    def say(self, sentence: str, level: str = "info", *, is_local: bool = False) -> None:
        self.sentences.append(sentence)
        self._console.send("say", sentence=sentence, level=level)
        for member in self._members.live if not (is_local or self._spec.is_adopted) else ():
            if member.join.tag != self._spec.tag:
                member.order(SayLine(sentence=sentence, level="error" if level == "error" else "info"))

    async def settle(self, timeout_s: float) -> None:
        """Let what was begun come to an end: bundles written, last orders fetched; at most ``timeout_s``."""
        self._bundles.end()
        if self._writing:
            _, unwritten = await asyncio.wait(self._writing, timeout=timeout_s)
            if unwritten:
                self.say("the last incident is not written down completely: its storage does not answer", "error")
        await self.isolation.settle(_SCHEDULER_S)
        end = asyncio.get_running_loop().time() + timeout_s
        while any(m.has_orders for m in self._members.live) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    # --- one instruction each ----------------------------------------------------------------------------------

    def _launch(self, launch: LaunchAttempt) -> None:
        try:
            self._epoch = self._claim(launch.attempt)
        except OSError as error:
            self._answers("unclaimed", as_storage_error(error, f"cannot claim the run in {self._run_dir}"))
            return
        except StorageError as error:
            self._answers("unclaimed", error)
            return
        host = self._members.at(launch.placements[0].node)
        for group_rank, placement in enumerate(launch.placements):
            member = self._members.at(placement.node)
            if member is None or host is None:
                continue
            member.order(
                StartRanks(
                    attempt=launch.attempt,
                    world_size=launch.world_size,
                    ranks=placement.ranks,
                    group_rank=group_rank,
                    group_world_size=len(launch.placements),
                    master_addr=host.join.address,
                    master_port=host.port,
                    restart_count=launch.restart_count,
                    max_restarts=self._spec.max_restarts,
                )
            )
        self._console.send("attempt", attempt=launch.attempt)

    def _claim(self, attempt: int) -> int:
        """Fence all older attempts, listing what they may be resumed from: what both tiers hold, and what the ledgers
        know besides, for a mount may be missing at this moment.
        """
        names = {name for folder in self._checkpoint_folders for name in committed_names(folder)}
        inventory = sorted(names | set(known_checkpoints(self._run_dir)))
        return claim_attempt(self._run_dir, run=self._spec.run, inventory=inventory, attempt=attempt)

    def _doubt(self, doubt: SuspectCheckpoints) -> None:
        for folder in self._checkpoint_folders:
            for name in committed_names(folder):
                known = parse_checkpoint_name(name)
                if known is None or known.attempt != doubt.attempt or known.step < doubt.from_step:
                    continue
                try:
                    mark_suspect(folder, name, doubt.reason, run_dir=self._run_dir)
                except (OSError, StorageError) as error:
                    self.say(f"{name} cannot be marked suspect: {error}", "error")
                    continue
                self.record("checkpoint.suspected", known.step, doubt.cause, {"name": name, "reason": doubt.reason})

    @property
    def _checkpoint_folders(self) -> list[Path]:
        local = self._spec.checkpoint_local_dir
        return [Path(folder) for folder in (self._spec.checkpoint_dir, local) if folder]

    def _gather(self, asked: GatherEvidence) -> None:
        late = None
        if self.gathering is not None:
            self.gathering.cancel()
            late = self.gathering.open_late()
        self.gathering = Gathering(
            asked,
            self._members.live,
            self._spec.confirm_s,
            lambda evidence: self._answers("evidence", evidence),
            later=self._attention.later,
        )
        self.gathering.late = late

    def _probe(self, asked: ProbeNodes) -> None:
        if self.probing is not None:
            self.probing.cancel()
        members = {member.name: member for member in self._members.live}
        self.probing = ProbeRound(
            asked, members, lambda results: self._answers("probed", results), later=self._attention.later
        )

    def _stop(self, stop: StopRanks) -> None:
        order = StopLocal(attempt=stop.attempt, grace_s=stop.grace_s, reason=stop.reason)
        if not stop.node:
            self._order_all(order)
        elif (member := self._members.at(stop.node)) is not None:
            member.order(order)

    def _order_all(self, order: Order) -> None:
        for member in self._members.live:
            member.order(order)

    def _write(self, written: WriteVerdict) -> None:
        self.verdict = written.verdict
        if written.verdict.causal_nodes:
            self._writing.add(blaming := asyncio.create_task(self.isolation.suspect(written.verdict)))
            blaming.add_done_callback(self._writing.discard)
        remarks = dict(self.gathering.remarks) if self.gathering else {}
        task = asyncio.create_task(self._bundles.write(written, remarks, self._story(written.cause)))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        if self.gathering is not None and self.gathering.asked.is_quick:
            # Asked for now: the order must be there before the one that ends the ranks.
            answer: asyncio.Future[Evidence] = asyncio.get_running_loop().create_future()
            asked, later = self.gathering.asked, self._attention.later
            late = Gathering(asked, self._members.live, 0.0, answer.set_result, is_late=True, later=later)
            late.late, self.gathering.late = self.gathering.open_late(), late
            self._writing.add(rest := asyncio.create_task(self._complete(task, written, answer, remarks)))
            rest.add_done_callback(self._writing.discard)

    async def _complete(
        self,
        first: asyncio.Task[None],
        written: WriteVerdict,
        answer: asyncio.Future[Evidence],
        remarks: dict[str, tuple[str, ...]],
    ) -> None:
        """Behind the restart: what a quick judgement did not wait for."""
        evidence = await answer
        await first
        if evidence.ranks:
            written = msgspec.structs.replace(written, evidence=completed(written.evidence, evidence))
            await self._bundles.write(written, remarks, self._story(written.cause))

    def _finish(self, finish: Finish) -> None:
        self.finish = finish
        order = FinishRun(exit_code=finish.exit_code, error=finish.error, sentence=finish.sentence)
        self._order_all(msgspec.structs.replace(order, verdict=self.last_verdict()))

    def last_verdict(self) -> dict[str, Any] | None:
        return msgspec.to_builtins(self.verdict) if self.verdict else None

    def _fence(self) -> None:
        Fence(self._run_dir, self._epoch).check()
