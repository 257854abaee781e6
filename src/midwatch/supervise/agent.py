"""The node agent: one per node, parent of the ranks, eyes and hands of the coordinator.

It never decides. Each cycle reads the world (slots, process states), compares, and tells what is new. Orders come by
long poll and are carried out. Out of the coordinator's reach it lets the ranks train on and keeps trying, as long as
they do train. Its own death takes the ranks with it (parent-death signal); the end of its launcher ends it.

Single-threaded on purpose: the parent-death signal hangs on the thread that started a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.config import scheduler_node
from midwatch.core import MidwatchError, ProtocolError, boot_id
from midwatch.supervise.chat import Console, open_stdin, read_lines
from midwatch.supervise.clocks import CoordinatorClock
from midwatch.supervise.endpoint import read_endpoint
from midwatch.supervise.hands import Hands
from midwatch.supervise.link import Link, Refused, answer_s, untaken_s
from midwatch.supervise.node_view import WRITE_S, NodeView, write_view
from midwatch.supervise.outbox import Outbox
from midwatch.supervise.procs import become_subreaper
from midwatch.supervise.protocol import read_token
from midwatch.supervise.specs import AgentSpec
from midwatch.supervise.suspicion import machine_key
from midwatch.supervise.wire import Join, NumberedOrder, Orders, Receipt, Refusal, Report, StopAsked, StopLocal, Welcome

POLL_S: Final = 0.05
"""Between two looks at slots and states: a stopped rank is seen within a few of them."""
REPORT_S: Final = 1.0
"""A sign of life when there is nothing to say, until the coordinator names another pace; ``watch.agent_timeout_s`` is
many times this."""
LAG_S: Final = 1.0
"""A cycle this late means that the agent itself did not run: what looks like silence of the ranks may be ours."""
HOLD_S: Final = 20.0
"""How long the coordinator may hold an order poll open."""
_MIND_S: Final = 0.5
_UNHEARD_S: Final = 1.0
"""Beyond the pace of reports: for the answer."""
_GOODBYE_S: Final = 1.0
"""For the last report: inside one cluster it takes milliseconds."""
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_log: Final = logging.getLogger("midwatch.agent")


class Agent:
    """The loop of one node."""

    def __init__(self, spec: AgentSpec, link: Link, console: Console) -> None:
        self._spec = spec
        self._link = link
        self._console = console
        self._id = f"{spec.setup.node}-{os.getpid()}-{secrets.token_hex(4)}"
        self._outbox = Outbox()
        self._hands = Hands(spec.setup, spec.watch, self._outbox, console, is_warm=spec.is_warm)
        self._session = ""
        self._heard = time.monotonic()
        self._trouble: Refusal | None = None
        """What was wrong with the coordinator last, or why it does not let us in yet."""
        self._has_said_why = False
        self._answered = self._heard
        """By a coordinator that does not let us in yet."""
        self._answer_s = answer_s(spec.nnodes)
        self._clock = CoordinatorClock()
        self._last_order = 0
        self._report_s = REPORT_S
        self._joined = asyncio.Event()
        self._polling: asyncio.Task[Orders] | None = None
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.cycle_errors = 0

    async def run(self, lines: asyncio.StreamReader) -> int:
        """Work until the run is over or the launcher is gone; returns the exit code of this process."""
        loops = [self._guarded(loop()) for loop in self._loops]
        tasks = [asyncio.create_task(loop) for loop in [*loops, self._listen(lines)]]
        await self._over.wait()
        await self._hands.end_everything()
        await self._say_goodbye()
        for task in [*tasks, *self._tasks]:
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        await self._link.close()
        return 0

    @property
    def _loops(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        loops = [self._watch, self._talk, self._obey, self._mind_silence]
        return [*loops, self._show] if self._spec.view_path else loops

    async def _say_goodbye(self) -> None:
        """The last facts, and that the last order arrived; a coordinator that cannot hear it has other worries."""
        with contextlib.suppress(ProtocolError, Refused, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self._report("goodbye")

    async def _guarded(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except Exception:  # noqa: BLE001 - the agent cycle: a bug must end the agent with a word, not leave it half alive
            self.cycle_errors += 1
            _log.exception("agent loop failed")
            self._console.send("failed", reason="agent loop failed; see its log")
            self._over.set()

    # --- the world ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        due = time.monotonic()
        while True:
            due += POLL_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now_ns = time.monotonic_ns()
            late_s = time.monotonic() - due
            if late_s > LAG_S:
                _log.warning("this agent did not run for %.1f s: silence is forgiven", late_s)
                due += late_s
                self._hands.forgive(now_ns)
                # The coordinator could not be heard either.
                self._heard = min(self._heard + late_s, time.monotonic())
            self._hands.poll(now_ns)

    async def _show(self) -> None:
        """For the page of metrics, which is another process: what is slow there must not be slow here."""
        path = Path(self._spec.view_path)
        while True:
            view = NodeView(
                run=self._hands.setup.run,
                node=self._hands.setup.node,
                mono_ns=time.monotonic_ns(),
                attempt=self._hands.running_attempt,
                unheard_s=round(time.monotonic() - self._heard, 3),
                ranks=self._hands.statuses(),
            )
            with contextlib.suppress(OSError):
                write_view(path, view)
            await asyncio.sleep(WRITE_S)

    # --- telling -----------------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                if not self._joined.is_set():
                    await self._join()
                await self._report()
                failures = 0
            except ProtocolError as error:
                await self._pause(error, failures, began)
                failures += 1
                continue
            except Refused as refused:
                if not await self._is_patient(refused):
                    return
                continue
            await self._outbox.wait(self._report_s)

    async def _join(self) -> None:
        hello = await self._link.hello(timeout_s=self._answer_s)
        spec = self._spec
        join = Join(
            node=self._hands.setup.node,
            is_name_fixed=spec.is_name_fixed,
            agent=self._id,
            tag=spec.setup.tag,
            nproc=spec.setup.nproc,
            nnodes=spec.nnodes,
            command=spec.command_hash,
            address=spec.address,
            port=self._hands.port.number,
            boot=boot_id(),
            mono_ns=time.monotonic_ns(),
            pid=os.getpid(),
            machine=machine_key(),
            scheduler_node=scheduler_node(),
            running_attempt=self._hands.running_attempt,
            ranks=(spec.setup.place.rank,) if spec.setup.place else (),
            is_back=spec.is_back or bool(self._session),
        )
        welcome = await self._link.ask("report", "/v1/join", join, Welcome, timeout_s=self._answer_s)
        # Not before we are let in: to a run that ends, and to its attempts, whoever means the next one owes nothing.
        self._link.attempt = max(self._link.attempt, hello.attempt)
        self._hands.settle(welcome.node, hello.run)
        if hello.session != self._session:
            # Another coordinator process: it counts its orders from one and has heard nothing from us.
            self._session, self._last_order = hello.session, 0
            self._outbox.start_over(self._hands.start_over())
            self._clock.forget()
        self._joined.set()
        self._console.send("joined", node=welcome.node, agent=self._id)

    async def _report(self, channel: str = "report") -> None:
        facts = self._outbox.pending()
        ranks, sent_ns = self._hands.statuses(), time.monotonic_ns()
        report = Report(
            node=self._hands.setup.node,
            mono_ns=sent_ns,
            attempt=self._hands.running_attempt,
            port=self._hands.port.number,
            facts=facts,
            ranks=ranks,
            counts=self._hands.counts(),
            seen_order=self._last_order,
            clock=self._clock.reading(sent_ns),
        )
        receipt = await self._link.ask(channel, "/v1/report", report, Receipt, timeout_s=self._answer_s)
        back_ns = time.monotonic_ns()
        self._heard, self._trouble = back_ns / 1e9, None
        self._clock.note(sent_ns=sent_ns, heard_ns=receipt.heard_ns, told_ns=receipt.told_ns, back_ns=back_ns)
        self._outbox.acknowledge(receipt.upto)
        self._hands.counts_heard(report.attempt, report.counts)
        if self._hands.is_done and self._outbox.is_empty:
            # Another launcher waits for this rank alone.
            self._console.send("done")
        self._report_s = receipt.report_s

    async def _pause(self, error: ProtocolError, failures: int, began: float) -> None:
        # A foreign answer is as good as none: say so and try again from the first question.
        (_log.info if failures else _log.warning)("coordinator: %s", error.message)
        self._joined.clear()
        if self._polling is not None:
            # A host that stands still holds a poll open for as long as it likes.
            self._polling.cancel()
        self._look_for_another()
        self._trouble = Refusal(error=error.code, message=error.message)
        # Waiting in vain for an answer was a pause already; a coordinator that comes back must not wait for us.
        # Of a large fleet nobody comes again as fast as alone, nor all at the same moment.
        spread = max(1.0, self._report_s) * random.uniform(0.75, 1.25)
        pause_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)] * spread - (time.monotonic() - began)
        await asyncio.sleep(max(_RETRY_S[0], pause_s))

    async def _mind_silence(self) -> None:
        """While an answer is still waited for: the launcher decides what it means, and another node may host by now."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(_MIND_S)
            if time.monotonic() - began > _MIND_S + LAG_S:
                continue  # we did not run ourselves; ``_watch`` forgives that
            unheard_s = time.monotonic() - self._heard
            unreached_s = min(unheard_s, time.monotonic() - self._answered)
            if unreached_s > self._report_s + _UNHEARD_S:
                self._console.send("unreached", seconds=unreached_s)
                self._look_for_another()
            if unheard_s > self._report_s + _UNHEARD_S:
                self._say_why_it_waits()
            if unheard_s > self._spec.patience_s and not self._hands.has_working_ranks:
                trouble = self._trouble or Refusal(error="PR104", message=f"no answer from {self._link.url}")
                self._console.send("refused", error=trouble.error, message=trouble.message)
                self._over.set()

    def _say_why_it_waits(self) -> None:
        if self._trouble is not None and self._trouble.error == "SV102" and not self._has_said_why:
            self._has_said_why = True
            self._console.send("say", sentence=f"not let in yet: {self._trouble.message}", level="info")

    def _look_for_another(self) -> None:
        """Another node may host the coordinator by now; the run folder says where."""
        run_dir = Path(self._spec.setup.run_dir)
        with contextlib.suppress(MidwatchError):
            endpoint, token = read_endpoint(run_dir), read_token(run_dir / "supervisor" / "token")
            # Once encrypted, always encrypted: the next host may have been started without a certificate.
            is_open = bool(self._spec.certificate) and not endpoint.certificate
            if endpoint.url != self._link.url and not is_open:
                _log.warning("the coordinator is at %s now", endpoint.url)
                self._link.follow(endpoint.url, token, endpoint.certificate)

    async def _is_patient(self, refused: Refused) -> bool:
        refusal = refused.refusal
        _log.warning("refused: %s %s", refusal.error, refusal.message)
        self._joined.clear()
        if refusal.is_final:
            self._console.send("refused", error=refusal.error, message=refusal.message)
            self._over.set()
            return False
        self._trouble, self._answered = refusal, time.monotonic()
        await asyncio.sleep(_RETRY_S[2])
        return True

    # --- obeying -----------------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        while True:
            await self._joined.wait()
            answer = await self._poll_orders()
            if answer is None:
                # The report channel finds out by itself what is wrong, and joins again.
                self._joined.clear()
                self._outbox.wake()
                await asyncio.sleep(_RETRY_S[0])
                continue
            for numbered in answer.orders:
                self._carry_out(numbered)

    async def _poll_orders(self) -> Orders | None:
        """What is to be done next; None when the coordinator is not there, or not there any more."""
        path = f"/v1/commands?after={self._last_order}"
        self._polling = asyncio.create_task(self._link.ask("orders", path, None, Orders, timeout_s=HOLD_S + 5.0))
        try:
            await asyncio.wait([self._polling])
        finally:
            self._polling.cancel()
        if self._polling.cancelled() or isinstance(self._polling.exception(), (ProtocolError, Refused)):
            return None
        return self._polling.result()

    def _carry_out(self, numbered: NumberedOrder) -> None:
        if numbered.number <= self._last_order:
            return
        self._last_order = numbered.number
        attempt = getattr(numbered.order, "attempt", 0)
        # A node that was out of reach may still hold ranks of an old attempt: to end those is never too late.
        is_overdue_end = isinstance(numbered.order, StopLocal) and attempt == self._hands.running_attempt
        if attempt and attempt < self._link.attempt and not is_overdue_end:
            _log.warning("PR103 order of attempt %d refused: attempt %d is known", attempt, self._link.attempt)
            return
        self._link.attempt = max(self._link.attempt, attempt)
        task = asyncio.create_task(self._guarded(self._hands.carry_out(numbered.order, self._over)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        async for word, _ in read_lines(lines):
            if word == "stop":
                self._outbox.put(StopAsked(reason="the launcher of this node was asked to stop"))
            elif word == "leave":
                self._over.set()
        self._over.set()


async def _serve() -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # A scheduler may signal every process of the job; what it means is the launcher's to say.
        loop.add_signal_handler(number, _log.info, "signal %s is the launcher's business", number.name)
    lines = await open_stdin()
    spec = msgspec.json.decode(await lines.readline(), type=AgentSpec)
    sender = f"agent-{os.getpid()}-{secrets.token_hex(4)}"
    patience_s = untaken_s(spec.watch.agent_timeout_s)
    link = Link(spec.url, bytes.fromhex(spec.token), sender, spec.certificate, untaken_s=patience_s)
    return await Agent(spec, link, Console(sys.stdout)).run(lines)


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    become_subreaper()
    return asyncio.run(_serve())


if __name__ == "__main__":
    sys.exit(main())
