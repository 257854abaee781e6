"""Whose cordon it is, what a cordon looks like on the wire, what the API's errors mean, which labels hang together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from midwatch.cluster import KubernetesDriver, LocalDriver, Reply, driver_for, kubernetes, topology_from_labels
from midwatch.cluster.cordon import isolate_patch, refusal, release_patch, state_of
from midwatch.config import kubernetes_node, load_config, scheduler_kind, scheduler_node
from midwatch.core import ConfigError
from midwatch.supervise.prepare import LaunchRequest, plan

NOW = "2026-11-30T06:57:46Z"


def node(*, by: str = "", reason: str = "", is_noted: bool = True) -> dict[str, Any]:
    """As the API shows it. ``by``: the client that has cordoned it; ``reason``: what our annotation says."""
    fields = {"f:spec": {"f:unschedulable": {}}} if by and is_noted else {"f:status": {}}
    return {
        "metadata": {
            "name": "n1",
            "resourceVersion": "7",
            "annotations": {"midwatch/cordoned": NOW, "midwatch/reason": reason} if reason else None,
            "managedFields": [
                {"manager": "kubelet", "fieldsV1": {"f:status": {}}},
                {"manager": by, "operation": "Update", "fieldsV1": fields},
            ],
        },
        "spec": {"unschedulable": True} if by else {},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def test_a_cordon_says_why_and_counts_only_for_the_node_as_it_was_seen() -> None:
    assert isolate_patch(node(), "midwatch r1 i3: XID 79\nrm -rf \x1b[31m", NOW) == {
        "metadata": {
            "resourceVersion": "7",
            "annotations": {"midwatch/cordoned": NOW, "midwatch/reason": "midwatch r1 i3: XID 79 rm -rf  [31m"},
        },
        "spec": {"unschedulable": True},
    }


def test_our_cordon_is_lifted_with_what_we_wrote() -> None:
    assert release_patch(node(by="midwatch", reason="midwatch r1: XID 79")) == {
        "metadata": {"resourceVersion": "7", "annotations": {"midwatch/cordoned": None, "midwatch/reason": None}},
        "spec": {"unschedulable": None},
    }


@pytest.mark.parametrize(
    ("found", "isolated", "released"),
    [
        (node(), None, "unneeded"),
        (node(reason="midwatch r1: XID 79"), None, "unneeded"),
        (node(by="midwatch", reason="midwatch r1: XID 79"), "done", None),
        (node(by="midwatch", reason="midwatch r0: older"), "unneeded", None),
        (node(by="kubectl-cordon"), "unneeded", "refused"),
        (node(by="kubectl-cordon", reason="midwatch r1: XID 79"), "unneeded", "refused"),
        (node(by="x", is_noted=False), "unneeded", "refused"),
        (node(by="x", is_noted=False, reason="midwatch r1: XID 79"), "done", None),
    ],
    ids=[
        "free",
        "ours, lifted by a person",
        "ours, and the answer was lost",
        "ours, for another reason",
        "a person's",
        "a person's after ours",
        "a person's, of a server that notes nobody",
        "ours, of a server that notes nobody",
    ],
)
def test_a_cordon_belongs_to_whoever_set_it_last(
    found: dict[str, Any], isolated: str | None, released: str | None
) -> None:
    for reply, status in (
        (isolate_patch(found, "midwatch r1: XID 79", NOW), isolated),
        (release_patch(found), released),
    ):
        assert (reply.status if isinstance(reply, Reply) else None) == status


def test_a_node_in_kubectls_words() -> None:
    assert state_of(node()).state == "Ready"
    cordoned = state_of(node(by="midwatch", reason="midwatch r1: XID 79"))
    assert (cordoned.state, cordoned.is_drained, cordoned.reason) == (
        "Ready,SchedulingDisabled",
        True,
        "midwatch r1: XID 79",
    )


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (None, "connection refused", "silent"),
        (401, "Unauthorized", "refused"),
        (403, 'nodes "n1" is forbidden: User "x" cannot patch resource "nodes"', "refused"),
        (403, 'forbidden: RBAC: clusterrole.rbac.authorization.k8s.io "m" not found', "silent"),
        (404, 'nodes "n1" not found', "refused"),
        (422, "invalid", "refused"),
        (429, "too many requests", "silent"),
        (500, "etcdserver: leader changed", "silent"),
        (503, "<html>no upstream</html>", "silent"),
    ],
)
def test_a_refusal_is_told_from_silence(code: int | None, text: str, status: str) -> None:
    assert refusal(code, text, "get node n1").status == status


def test_labels_that_end_alike_stay_apart() -> None:
    labels = {"n2": {"a.example/rack": "r1", "b.example/rack": "r1"}, "n1": {"a.example/rack": "r1"}, "n0": {"x": "y"}}
    assert topology_from_labels(labels, ["a.example/rack", "b.example/rack"]) == (
        ("n1", ("a.example/rack:r1",)),
        ("n2", ("a.example/rack:r1", "b.example/rack:r1")),
    )
    assert topology_from_labels(labels, ["a.example/rack"]) == (("n1", ("rack:r1",)), ("n2", ("rack:r1",)))


def test_the_usual_labels_and_no_region() -> None:
    labels = {
        "topology.kubernetes.io/region": "eu",
        "topology.kubernetes.io/zone": "eu-1a",
        "cloud.google.com/gce-topology-block": "b7",
        "network.topology.nvidia.com/leaf": "s1",
        "network.topology.nvidia.com/spine": "",
    }
    assert topology_from_labels({"n1": labels}) == (("n1", ("gce-topology-block:b7", "leaf:s1", "zone:eu-1a")),)


@pytest.mark.parametrize(
    ("environ", "kind", "name"),
    [
        ({}, "none", ""),
        ({"NODE_NAME": "built-in"}, "none", ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "none", ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "n1"}, "kubernetes", "n1"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "n1", "MIDWATCH_K8S_NODE": "n2"}, "kubernetes", "n2"),
        ({"MIDWATCH_K8S_NODE": "n1", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "s1"}, "slurm", "s1"),
    ],
)
def test_who_gave_us_this_machine(environ: dict[str, str], kind: str, name: str) -> None:
    assert (scheduler_kind(environ=environ), scheduler_node(environ)) == (kind, name)
    assert scheduler_kind("none", environ) == "none"


@pytest.mark.parametrize("name", ["N1", "n1,n2", "--all", "n1 n2", "../n1", "-n1", "n1.", ""])
def test_what_is_no_node_of_kubernetes_is_never_asked_for(name: str) -> None:
    driver = driver_for("kubernetes")
    assert isinstance(driver, KubernetesDriver)
    assert asyncio.run(driver.isolate(name, "x")).status == "refused"
    assert driver.by_hand(name, "x") == ""
    assert isinstance(driver_for("none"), LocalDriver)


def test_without_the_library_nobody_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes.importlib.util, "find_spec", lambda name: None)
    reply = asyncio.run(KubernetesDriver().isolate("n1", "x"))
    assert (reply.status, "pip install 'midwatch[k8s]'" in reply.text) == ("refused", True)
    assert KubernetesDriver().by_hand("n1", "x") == "kubectl cordon n1"
    with pytest.raises(ConfigError) as caught:
        asyncio.run(KubernetesDriver().topology())
    assert caught.value.code == "CF107"


@pytest.mark.parametrize(
    ("environ", "drain", "code"),
    [
        ({"MIDWATCH_K8S_NODE": "n1"}, "do", "CF107"),
        ({"MIDWATCH_K8S_NODE": "n1"}, "ask", ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "do", "CF102"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "ask", ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MIDWATCH_K8S_NODE": "n1"}, "off", ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "s1"}, "do", ""),
        ({}, "do", ""),
    ],
)
def test_a_run_that_is_to_cordon_and_cannot_does_not_start(
    environ: dict[str, str], drain: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes.importlib.util, "find_spec", lambda name: None)
    for name in ("KUBERNETES_SERVICE_HOST", "MIDWATCH_K8S_NODE", "NODE_NAME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert kubernetes_node() == environ.get("MIDWATCH_K8S_NODE", "")
    (tmp_path / "train.py").write_text("")
    config = load_config({"run": {"dir": str(tmp_path / "run")}, "isolate": {"drain": drain}})
    request = LaunchRequest(config=config, command=(str(tmp_path / "train.py"),), nproc=1)
    try:
        plan(request)
        found = ""
    except ConfigError as error:
        found = error.code
    assert found == code
