"""The processes of one attempt on one node: started together, watched by pidfd and slot, ended together."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from midwatch.config import WatchConfig
from midwatch.core import StorageError, SuperviseError
from midwatch.faults import CollectiveCount
from midwatch.pulse import Flag, PulseReader, Slot, SlotFile
from midwatch.supervise.activity import Activity, activity
from midwatch.supervise.desync import CountComparer
from midwatch.supervise.flight import files_of
from midwatch.supervise.kernel import OomCount
from midwatch.supervise.lessons import Lessons
from midwatch.supervise.logcap import LogCap
from midwatch.supervise.milestones import Milestones
from midwatch.supervise.procs import SHM, read_stat, sweep_shm
from midwatch.supervise.rank_proc import RankProc
from midwatch.supervise.sample import RankView
from midwatch.supervise.spawn import NodeSetup, log_paths, open_output, rank_environment, start_rank
from midwatch.supervise.waiting import ExitWatch
from midwatch.supervise.warm import Parked
from midwatch.supervise.watch import RankWatch
from midwatch.supervise.wire import Exited, Fact, RankStatus, StartRanks, Suspected, ToldCounts, Warned
from midwatch.supervise.zero_code import Look, StandstillWatch, main_thread_ns

_NOT_STARTED: Final = 127
"""The shell's code for "command not found": reported when a rank could not even be executed."""


class LocalAttempt:
    """This node's share of one attempt.

    Args:
        setup: Of this node.
        start: What the coordinator ordered.
        config: When silence is suspicious.
        tell: Called with each fact, in order.
        lessons: What earlier attempts taught.
    """

    def __init__(
        self, setup: NodeSetup, start: StartRanks, config: WatchConfig, tell: Callable[[Fact], None], lessons: Lessons
    ) -> None:
        self.setup = setup
        self.start = start
        self.number = start.attempt
        self.started_ns = time.monotonic_ns()
        self.is_stopping = False
        self._standstill = StandstillWatch(config, self.started_ns)
        self._tell = tell
        self._on_change: list[Callable[[], None]] = []
        self._slots: SlotFile | None = None
        self._reader: PulseReader | None = None
        self._base: dict[str, str] = {}
        self._pulse_path = SHM / f"midwatch-{setup.tag}-a{start.attempt:04d}"
        self.is_warm = False
        """Its ranks were forked from the parked process."""
        self._lessons = lessons
        self._is_recalled = False
        self._comparer = CountComparer(start.attempt, lessons.lockstep) if config.detect.collectives else None
        self.milestones = Milestones()
        self.logs = LogCap(setup.log_limit_mb)
        self._oom = OomCount()
        run_dir = Path(setup.run_dir)
        self.ranks = [
            RankProc(
                rank,
                local_rank,
                log_paths(run_dir, start.attempt, setup.node, rank),
                RankWatch(start.attempt, rank, self.started_ns, config),
            )
            for local_rank, rank in enumerate(start.ranks)
        ]

    def launch(self, base: Mapping[str, str], parked: Parked | None = None) -> None:
        """Start every rank. One that cannot be executed counts as ended with 127, its reason in its stderr file.

        Args:
            base: The environment that the ranks' own is added to.
            parked: Ranks are forked from it if it is ready.
        """
        self._slots = self._make_slots()
        self._reader = PulseReader(self._pulse_path, file=self._slots)
        self._base = dict(base)
        self._fork(parked)
        for proc in self.ranks:
            if proc.process is None:
                self._start_cold(proc)
            if proc.process is not None:
                proc.exit_watch = ExitWatch(proc.pid, lambda proc=proc: self._reap(proc))
        self._keep_logs()

    def _make_slots(self) -> SlotFile:
        """In shared memory; where that is full, on the local disk: the ranks may do without what fills it."""
        self._pulse_path.unlink(missing_ok=True)
        try:
            return SlotFile.create(self._pulse_path, len(self.ranks), attempt=self.number)
        except StorageError as error:
            self._tell(Warned(what="shm.low", sentence=f"{error.message}; taking {tempfile.gettempdir()} instead"))
            self._pulse_path = Path(tempfile.gettempdir()) / self._pulse_path.name
            self._pulse_path.unlink(missing_ok=True)
            return SlotFile.create(self._pulse_path, len(self.ranks), attempt=self.number)

    def _keep_logs(self) -> None:
        self.logs.look(path for proc in self.ranks for path in (proc.out, proc.err))

    def environment(self, proc: RankProc) -> dict[str, str]:
        """Of one rank, as it was or will be started."""
        paths = {"pulse": str(self._pulse_path), "error": str(proc.error)}
        return rank_environment(self._base, self.setup, self.start, proc.local_rank, paths)

    def _fork(self, parked: Parked | None) -> None:
        if parked is None or not parked.is_ready:
            return
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(open_output(path)) for proc in self.ranks for path in (proc.out, proc.err)]
            files = list(zip(opened[::2], opened[1::2], strict=True))
            forked = parked.fork([self.environment(proc) for proc in self.ranks], files)
        for proc, process in zip(self.ranks, forked, strict=False):
            proc.process = process
        self.is_warm = bool(forked)

    def _start_cold(self, proc: RankProc) -> None:
        try:
            env, stdin_fd = self.environment(proc), self.setup.stdin_fd
            proc.process = start_rank(self.setup.command, env, proc.out, proc.err, stdin_fd)
        except SuperviseError as error:
            with contextlib.suppress(OSError), proc.err.open("a") as file:
                file.write(f"{error}\n")
            self._end(proc, _NOT_STARTED)

    @property
    def are_all_ended(self) -> bool:
        return all(not proc.is_alive for proc in self.ranks)

    @property
    def are_any_working(self) -> bool:
        """Some rank is alive and not known to stand still."""
        return any(proc.is_alive and not (proc.watch.is_overdue or proc.is_idle) for proc in self.ranks)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back after each exit."""
        self._on_change.append(callback)

    def slot(self, proc: RankProc) -> Slot:
        assert self._reader is not None
        return self._reader.read(proc.local_rank)

    def poll(self, now_ns: int) -> None:
        """Look at every living rank once and tell what is new."""
        self._keep_logs()
        looks: dict[int, Look] = {}
        self._oom.look({proc.rank: proc.pid for proc in self.ranks if proc.is_alive}, now_ns)
        for proc in self.ranks:
            if not proc.is_alive or self.is_stopping:
                continue
            slot = self.slot(proc)
            pid = proc.worker.pid(proc.pid, slot.pid, now_ns)
            stat = read_stat(pid)
            self._recall(slot)
            for fact in proc.watch.feed(slot, stat.state if stat else "?", now_ns):
                self._tell(fact)
            ran_ns, queued_ns = main_thread_ns(pid)
            proc.own_time.feed(slot, ran_ns, now_ns)
            looks[proc.rank] = Look(ran_ns, proc.written, stat.state if stat else "?", queued_ns)
        # Behind the recall: which groups are trusted is known by then.
        self._compare_counts()
        if looks:
            self._look_for_standstill(looks, now_ns)

    def _recall(self, slot: Slot) -> None:
        """What was learned of this configuration, once the first rank says which one it is."""
        if self._is_recalled or not slot.has_resumed:
            return
        self._is_recalled = True
        times = self._lessons.open(slot.config_hash, self.start.world_size)
        for proc in self.ranks:
            proc.watch.recall(times.get(str(proc.local_rank), ()))

    def teach(self) -> None:
        """Hand on what was learned."""
        if self._is_recalled:
            for proc in self.ranks:
                self._lessons.note(proc.local_rank, proc.watch.taught())

    def _compare_counts(self) -> None:
        if self._comparer is None or self._reader is None or self.is_stopping:
            return
        found = {proc.rank: self._reader.counts(proc.local_rank) for proc in self.ranks if proc.is_alive}
        members = Counter(group.digest for groups in found.values() for group in groups)
        for rank, groups in found.items():
            for group in groups:
                self.milestones.note(rank, group.digest, group.counts)
                # With one member here there is nothing to compare: the coordinator does, across nodes.
                if (count := members[group.digest]) > 1:
                    differ = self._comparer.take(rank, group.digest, group.counts, count)
                    if differ is not None:
                        self._tell(differ)

    def counts(self, proc: RankProc) -> tuple[CollectiveCount, ...]:
        """What the rank counted of its groups, oldest first."""
        assert self._reader is not None
        groups = self._reader.counts(proc.local_rank)
        return tuple(CollectiveCount(group.digest, step, count) for group in groups for step, count in group.counts)

    def forgive(self, now_ns: int) -> None:
        for proc in self.ranks:
            proc.watch.forgive(now_ns)
        self._standstill.forgive(now_ns)

    def _look_for_standstill(self, looks: Mapping[int, Look], now_ns: int) -> None:
        """Ranks that do not beat: suspected when none of this node moves for longer than they ever do."""
        idle_s = self._standstill.feed(looks, now_ns, self._activity)
        alive = [proc for proc in self.ranks if proc.is_alive]
        if idle_s == 0.0:
            for proc in alive:
                proc.is_idle = False
        deadline_s = self._standstill.deadline_s
        is_still = idle_s >= deadline_s
        silent = None if is_still else self._standstill.fallen_silent(now_ns)
        if not (is_still or silent) or any(self.slot(proc).is_attached for proc in alive):
            return
        self._standstill.told(now_ns)
        for proc in alive:
            if silent is not None and proc.rank != silent[0]:
                continue
            proc.is_idle = is_still
            _, silent_s, limit_s = silent or (0, idle_s, deadline_s)
            self._tell(
                Suspected(
                    attempt=self.number,
                    rank=proc.rank,
                    step=None,
                    phase="",
                    silent_s=round(silent_s, 3),
                    deadline_s=round(limit_s, 3),
                    proc_state=looks[proc.rank].state if proc.rank in looks else "?",
                )
            )

    def _activity(self) -> dict[int, Activity]:
        return {proc.rank: activity(proc.pid) for proc in self.ranks if proc.is_alive}

    def set_flag(self, flag: Flag) -> None:
        assert self._reader is not None
        for proc in self.ranks:
            self._reader.set_flag(proc.local_rank, flag)

    def ask_to_exit(self) -> None:
        """Attached ranks look at the flag between steps; the others understand only a signal."""
        self.set_flag(Flag.STOP)
        for proc in self.ranks:
            if not self.slot(proc).is_attached:
                proc.signal(signal.SIGTERM)

    def views(self) -> list[RankView]:
        """What ``sample`` starts from."""
        return [self._view(proc) for proc in self.ranks]

    def statuses(self) -> tuple[RankStatus, ...]:
        now_ns = time.monotonic_ns()
        return tuple(_status(proc, self.slot(proc), now_ns) for proc in self.ranks)

    def news_of_counts(self) -> tuple[ToldCounts, ...]:
        """For the comparison across nodes."""
        return () if len(self.ranks) == self.start.world_size else self.milestones.news()

    def facts(self) -> list[Fact]:
        """Everything a coordinator that remembers nothing must be told again."""
        told: list[Fact] = [proc.exited for proc in self.ranks if proc.exited]
        slots = ((proc, self.slot(proc)) for proc in self.ranks)
        return [*(proc.watch.resume_fact(slot) for proc, slot in slots if slot.has_resumed), *told]

    def close(self) -> None:
        """Give back descriptors and shared memory; every rank must have ended."""
        for proc in self.ranks:
            if proc.exit_watch:
                proc.exit_watch.close()
        self.logs.close()
        if self._slots is not None:
            self._slots.unlink()
            self._slots.close()
        if self._pulse_path.parent != SHM:
            sweep_shm(self._pulse_path.name, self._pulse_path.parent)  # what else lies beside the slots

    def _reap(self, proc: RankProc) -> None:
        assert proc.process is not None
        self._end(proc, proc.process.wait())

    def _end(self, proc: RankProc, exit_code: int) -> None:
        is_finished = self.slot(proc).is_finished
        proc.exited = Exited(
            attempt=self.number,
            rank=proc.rank,
            exit_code=exit_code,
            mono_ns=time.monotonic_ns(),
            is_finished=is_finished,
        )
        self._tell(proc.exited)
        for callback in self._on_change:
            callback()

    def _view(self, proc: RankProc) -> RankView:
        env = self.environment(proc)
        return RankView(
            rank=proc.rank,
            pid=proc.worker.last or proc.pid,
            root=proc.pid,
            slot=self.slot(proc),
            exit_code=proc.exited.exit_code if proc.exited else None,
            exit_mono_ns=proc.exited.mono_ns if proc.exited else None,
            signalled_by_us=proc.signalled_by_us,
            is_overdue=proc.watch.is_overdue,
            is_oom_counted=self._oom.has_risen(proc.rank),
            err_path=proc.err,
            # An outside launcher's own, where there is one.
            error_path=Path(env.get("TORCHELASTIC_ERROR_FILE") or proc.error),
            flight=files_of(env),
            counts=self.counts(proc),
            position=self._reader.position(proc.local_rank) if self._reader else "",
            state_s=proc.watch.state_s(time.monotonic_ns()),
            stands_still=self._standstill.stands_still(proc.rank, time.monotonic_ns()),
        )


def _status(proc: RankProc, slot: Slot, now_ns: int) -> RankStatus:
    part = proc.own_time.part
    return RankStatus(
        rank=proc.rank,
        pid=proc.pid,
        state=slot.state,
        step=slot.step,
        steps_done=slot.steps_done,
        phase=slot.phase,
        phase_age_s=round(slot.phase_age_s(now_ns), 3) if slot.is_attached else 0.0,
        verified_step=slot.verified_step,
        is_attached=slot.is_attached,
        exit_code=proc.exited.exit_code if proc.exited else None,
        own_s=round(part.own_s, 6) if part else None,
        step_s=round(part.step_s, 6) if part else None,
    )
