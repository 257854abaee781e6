"""What every scheduler must be able to do for us, and the one for machines that have none."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from midwatch.cluster.topology import Topology
from midwatch.config import SchedulerKind


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request."""

    status: Literal["done", "unneeded", "refused", "silent"]
    """``unneeded``: it was so already. ``refused``: asking again cannot help. ``silent``: it may have been done or
    not, so ask again."""
    text: str = ""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node in the scheduler's eyes."""

    node: str
    state: str
    """In the scheduler's words."""
    is_drained: bool
    """It gets no new jobs, because somebody said so."""
    reason: str = ""


class Driver(Protocol):
    """A scheduler. All names are the scheduler's own; every call is bounded by a deadline of the driver."""

    @property
    def name(self) -> str: ...

    @property
    def verb(self) -> str:
        """What people there call it to take a node out; with "ed" it is done."""
        ...

    async def isolate(self, node: str, reason: str) -> Reply:
        """Let the node finish what it does and give it nothing new. Somebody else's reason is left as it is."""
        ...

    async def release(self, node: str) -> Reply:
        """Take our own ``isolate`` back; what somebody else has taken out stays out."""
        ...

    async def describe(self, nodes: Sequence[str]) -> dict[str, NodeState]:
        """Those that the scheduler knows. One that is missing is unknown, not gone."""
        ...

    async def topology(self) -> Topology | None:
        """Which nodes share what; empty when that is unknown, None when there was no answer: ask again later."""
        ...

    def exclude_list(self, nodes: Iterable[str]) -> str:
        """The nodes as the scheduler's submit command wants them."""
        ...

    def by_hand(self, node: str, reason: str) -> str:
        """The command by which a person takes the node out; empty where there is none."""
        ...


class LocalDriver:
    """No scheduler: leaving a node out of the run, and remembering it, is all that can be done."""

    name = "local"
    verb = "drain"

    async def isolate(self, node: str, reason: str) -> Reply:
        return Reply(status="unneeded", text="no scheduler gives this machine out")

    async def release(self, node: str) -> Reply:
        return Reply(status="unneeded", text="no scheduler gives this machine out")

    async def describe(self, nodes: Sequence[str]) -> dict[str, NodeState]:
        return {}

    async def topology(self) -> Topology:
        return ()

    def exclude_list(self, nodes: Iterable[str]) -> str:
        return ",".join(nodes)

    def by_hand(self, node: str, reason: str) -> str:
        return ""


def driver_for(kind: SchedulerKind, *, slurm_conf: str = "", labels: Sequence[str] = ()) -> Driver:
    """The scheduler that gives a machine out.

    Args:
        kind: That this process runs under, or that gave out the machine in question.
        slurm_conf: Path of Slurm's configuration, where the environment names one.
        labels: Of Kubernetes' nodes, that say what hangs together; none: the usual ones.
    """
    if kind == "slurm" and shutil.which("scontrol"):
        from midwatch.cluster.slurm import SlurmDriver

        return SlurmDriver(slurm_conf)
    if kind == "kubernetes":
        from midwatch.cluster.kubernetes import KubernetesDriver

        return KubernetesDriver(labels)
    return LocalDriver()
