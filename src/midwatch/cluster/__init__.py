"""Whoever gives out the machines: ask it to take a node out of service, and which machines hang together.

    driver = driver_for(is_slurm=True)
    reply = await driver.isolate("n07", "midwatch: XID 79")

Every question has a deadline, and silence is never an answer: what was not confirmed stays in the ``Outbox``.
"""

from midwatch.cluster.driver import Driver, LocalDriver, NodeState, Reply, driver_for
from midwatch.cluster.outbox import Outbox, Request
from midwatch.cluster.slurm import SlurmDriver
from midwatch.cluster.topology import Topology, load_topology, parse_slurm_topology

__all__ = [
    "Driver",
    "LocalDriver",
    "NodeState",
    "Outbox",
    "Reply",
    "Request",
    "SlurmDriver",
    "Topology",
    "driver_for",
    "load_topology",
    "parse_slurm_topology",
]
