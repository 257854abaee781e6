"""Ranks that leave because the circuit breaker says so: what is said of the next start is where it really begins."""

from __future__ import annotations

from decide_drive import Drive
from faults_cases import dead

from midwatch.config import AdoptConfig, RestartConfig, WatchConfig
from midwatch.supervise.decide import Rules, Supervisor
from midwatch.supervise.messages import LaunchAttempt, NodeJoined, RanksStarted, Say, WriteVerdict

LEFT = "[midwatch rank 0] WARNING: leaving to go back before step 7 (rewind)"


def leave(drive: Drive, rank: int = 0) -> None:
    drive.exited(rank, 94)
    drive.answer(dead(rank, 94, is_attached=True, stderr_tail=("epoch 3", LEFT), step=11))


def test_ranks_that_go_back_are_started_from_there() -> None:
    drive = Drive().running(step=11)
    drive.verified(10)
    leave(drive)
    verdict = drive.last(WriteVerdict).verdict
    assert verdict.fault_class == "breaker_went_back"
    assert "go back to a checkpoint from before step 7" in verdict.summary
    said = [one.sentence for one in drive.all(Say)][-1]
    assert "from there" in said
    assert "newest verified" not in said
    drive.gone("n0")
    assert len(drive.all(LaunchAttempt)) == 2


class Wrapped(Drive):
    """One rank, with an agent of its own."""

    def __init__(self) -> None:
        rules = Rules(watch=WatchConfig(), restart=RestartConfig(), adopt=AdoptConfig(), can_probe=True, max_nodes=1)
        super().__init__(nnodes=1, nproc=1, supervisor=Supervisor("r1", 1, rules))

    def node_of(self, rank: int) -> str:
        return f"h0.r{rank}"


def test_another_launcher_is_not_promised_the_newest_step() -> None:
    drive = Wrapped()
    drive.send(NodeJoined, node="h0.r0", agent="h0.r0-a1", nproc=1, address="127.0.0.1", running_attempt=0, ranks=(0,))
    drive.send(RanksStarted, node="h0.r0", attempt=drive.attempt)
    drive.attach(step=None)
    drive.train(11)
    drive.verified(10)
    leave(drive)
    verdict = drive.last(WriteVerdict).verdict
    assert verdict.advice == "start again: it resumes from there"
    assert "before step 7" in verdict.summary
