"""Whoever gives out the machines: ask it to take a node out of service, and which machines hang together.

    driver = driver_for("slurm")
    reply = await driver.isolate("n07", "midwatch: XID 79")

Every question has a deadline, and silence is never an answer: what was not confirmed stays in the ``Outbox``.
"""

from midwatch.cluster.driver import Driver, LocalDriver, NodeState, Reply, driver_for
from midwatch.cluster.kubernetes import KubernetesDriver, check_client
from midwatch.cluster.node_labels import TOPOLOGY_LABELS, topology_from_labels
from midwatch.cluster.outbox import Outbox, Request
from midwatch.cluster.slurm import SlurmDriver
from midwatch.cluster.topology import Topology, load_topology, parse_slurm_topology

__all__ = [
    "TOPOLOGY_LABELS",
    "Driver",
    "KubernetesDriver",
    "LocalDriver",
    "NodeState",
    "Outbox",
    "Reply",
    "Request",
    "SlurmDriver",
    "Topology",
    "check_client",
    "driver_for",
    "load_topology",
    "parse_slurm_topology",
    "topology_from_labels",
]
