"""Kubernetes, through its official client in a process of its own: cordon a node, lift our own cordon, read labels.

Loading the client takes a second and fifty megabytes, a kubeconfig may name a program that fetches the token, and a
name look-up knows no deadline: so each question is a child that is killed when its time is over, as scontrol is.

Cordoning keeps new pods away and leaves those that run alone, so it never takes anything from our own run.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from midwatch.cluster.command import run_command
from midwatch.cluster.cordon import refusal
from midwatch.cluster.driver import NodeState, Reply
from midwatch.cluster.node_labels import TOPOLOGY_LABELS, topology_from_labels
from midwatch.cluster.topology import Topology
from midwatch.core import UNREADABLE, ConfigError

ASK_S: Final = 30.0
"""Loading the client, which took 12 s on a machine with ten times the load it could bear, and a look and a change of
8 s each at most."""
_LIST_S: Final = 60.0
"""Ten thousand nodes in pages."""
_NODE: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""What Kubernetes takes as a node's name."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the child prints."""

    reply: Reply | None = None
    """Set where a request was made, and always when something went wrong."""
    nodes: tuple[NodeState, ...] = ()
    labels: dict[str, dict[str, str]] = {}


class KubernetesDriver:
    """The API of the cluster that this pod runs in, or that the kubeconfig names.

    Args:
        labels: Which node labels say what hangs together; none: the usual ones.
    """

    name = "kubernetes"
    verb = "cordon"

    def __init__(self, labels: Sequence[str] = ()) -> None:
        self._labels = tuple(labels) or TOPOLOGY_LABELS

    async def isolate(self, node: str, reason: str) -> Reply:
        return await self._request("isolate", node, reason)

    async def release(self, node: str) -> Reply:
        return await self._request("release", node)

    async def rehearse(self, node: str) -> Reply:
        """Whether ``isolate`` would be carried out, asked of the server as a dry run."""
        return await self._request("rehearse", node)

    async def describe(self, nodes: Sequence[str]) -> dict[str, NodeState]:
        names = [node for node in nodes if _NODE.fullmatch(node)]
        answer = await _ask(_LIST_S, "describe", *names)
        return {state.node: state for state in answer.nodes}

    async def topology(self) -> Topology | None:
        """Raises ConfigError CF107 without the client, CF102 when the API refuses: asking again cannot help."""
        check_client("the topology of a Kubernetes cluster")
        answer = await _ask(_LIST_S, "labels", *self._labels)
        if answer.reply is None:
            return topology_from_labels(answer.labels, self._labels)
        if answer.reply.status == "silent":
            return None
        raise ConfigError("CF102", f"grade.topology: kubernetes {answer.reply.text}")

    def exclude_list(self, nodes: Iterable[str]) -> str:
        return ",".join(node for node in nodes if _NODE.fullmatch(node))

    def by_hand(self, node: str, reason: str) -> str:
        return f"kubectl cordon {node}" if _NODE.fullmatch(node) else ""

    async def _request(self, verb: str, node: str, *words: str) -> Reply:
        if not _NODE.fullmatch(node):
            return Reply(status="refused", text=f"{node[:40]!r} is not the name of one node")
        try:
            check_client(f"to {verb} a node")
        except ConfigError as error:
            return Reply(status="refused", text=f"{error.message} ({error.hint})")
        answer = await _ask(ASK_S, verb, node, *words)
        return answer.reply or Reply(status="silent", text="no answer")


def check_client(purpose: str) -> None:
    """Raises ConfigError CF107 where the client is not installed; does not load it."""
    spec = importlib.util.find_spec("kubernetes")
    # A folder "kubernetes" of manifests in the working directory is no library.
    if spec is None or spec.origin is None:
        raise ConfigError(
            "CF107",
            f"{purpose} needs the library kubernetes, which is not installed",
            hint="pip install 'midwatch[k8s]'",
            module="kubernetes",
            extra="k8s",
        )


async def _ask(deadline_s: float, *words: str) -> Answer:
    command = [sys.executable, "-P", "-m", "midwatch.cluster.kubernetes_child", *words]
    answered = await run_command(command, deadline_s=deadline_s)
    if answered.code is None:
        text = f"the Kubernetes API did not answer within {deadline_s:g} s"
        return Answer(reply=refusal(None, text, words[0]))
    try:
        return msgspec.json.decode(answered.out, type=Answer)
    except UNREADABLE:
        last = (answered.err.strip().splitlines() or ["it said nothing"])[-1]
        return Answer(reply=Reply(status="refused", text=f"the Kubernetes client failed: {last[:200]}"))
