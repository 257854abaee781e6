"""Which nodes hang together, by their labels in Kubernetes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from midwatch.cluster.topology import Topology

TOPOLOGY_LABELS: Final = (
    *("topology.kubernetes.io/zone", "topology.kubernetes.io/rack"),
    # NVIDIA topograph, by its two generations of names, and the GPU operator's NVLink domain.
    *("network.topology.nvidia.com/accelerator", "network.topology.nvidia.com/block"),
    *("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine", "network.topology.nvidia.com/core"),
    *("accelerator.topograph.run/domain", "accelerator.topograph.run/sub-domain"),
    *("fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1", "fabric.topograph.run/tier-2"),
    "nvidia.com/gpu.clique",
    # As Kueue's documentation has them, and what providers set.
    *("cloud.provider.com/topology-block", "cloud.provider.com/topology-rack"),
    *("cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock"),
    *("topology.k8s.aws/network-node-layer-1", "topology.k8s.aws/network-node-layer-2"),
    "topology.k8s.aws/network-node-layer-3",
    *("oci.oraclecloud.com/rdma.network_block_id", "oci.oraclecloud.com/rdma.local_block_id"),
)
"""Looked for unless ``grade.topology_labels`` names others. A region is too wide to be one cause, and a host is a node.
"""


def topology_from_labels(nodes: Mapping[str, Mapping[str, str]], keys: Sequence[str] = ()) -> Topology:
    """One domain for each value of each label, such as ``rack:r12``; a node without any of the labels is left out.

    Args:
        nodes: Labels by node.
        keys: The labels that count; none: ``TOPOLOGY_LABELS``.
    """
    words = _short(keys or TOPOLOGY_LABELS)
    found: dict[str, set[str]] = {
        name: {f"{word}:{labels[key]}" for key, word in words.items() if labels.get(key)}
        for name, labels in nodes.items()
    }
    return tuple((name, tuple(sorted(found[name]))) for name in sorted(found) if found[name])


def _short(keys: Sequence[str]) -> dict[str, str]:
    """The last part of a label, by the whole label; two that end alike keep all of their names, or unlike things would
    look like one."""
    ends = Counter(_end(key) for key in dict.fromkeys(keys))
    return {key: _end(key) if ends[_end(key)] == 1 else key for key in keys}


def _end(key: str) -> str:
    return key.rsplit("/", 1)[-1]
