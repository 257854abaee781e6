"""Bad nodes are cordoned at a real Kubernetes API, also when it was down, and only our own cordons are lifted."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_lab import Kube, need_apiserver
from prerequisites import absent, install, need_namespaces

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from supervised import MIDWATCH, TRAINER, Supervised

from midwatch.cluster import KubernetesDriver, check_client
from midwatch.core import ConfigError

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.procs,
    # The first test builds the server where no earlier run has.
    pytest.mark.timeout(1800, method="signal"),
]

END_S = 120.0
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md"
SICK = TRAINER.replace(
    'if step == 12 and rank == world - 1 and (attempt == 1 or fault == "determ"):',
    'if step == 12 and os.environ["MIDWATCH_NODE"] == fault and (fault := "kill9"):',
)
"""Each process that starts on the node of this name dies a moment later."""
PAGES = """
from midwatch.cluster import kubernetes_child as child
child._PAGE = 2
print(len(child.main(["labels", "topology.kubernetes.io/zone"]).labels))
"""

POD = """
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$1/token" "$1/ca.crt" /run/secrets/kubernetes.io/serviceaccount/ && shift && exec "$@"
"""
"""/var/run is /run. What the kubelet mounts into a pod, in a mount namespace of its own."""
ISOLATE = """
import asyncio, sys
from midwatch.cluster import KubernetesDriver
reply = asyncio.run(KubernetesDriver().isolate(sys.argv[1], "midwatch r1: XID 79"))
print(reply.status, reply.text)
"""


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    try:
        check_client("the test")
    except ConfigError as error:
        absent(error.message)
    need_apiserver()
    install("etcd:etcd-server", "openssl:openssl", "curl:curl")
    kube = Kube()
    try:
        kube.up()
        _grant(kube)
        yield kube
    finally:
        kube.down()


def _grant(kube: Kube) -> None:
    """The rights of the documentation, and nothing beside them, also for the user midwatch."""
    import yaml

    blocks = re.findall(r"```yaml\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    documents = [one for block in blocks for one in yaml.safe_load_all(textwrap.dedent(block)) if one]
    (account,) = [one for one in documents if one.get("kind") == "ServiceAccount"]
    (role,) = [one for one in documents if one.get("kind") == "ClusterRole"]
    (binding,) = [one for one in documents if one.get("kind") == "ClusterRoleBinding"]
    binding["subjects"].append({"kind": "User", "name": "midwatch", "apiGroup": "rbac.authorization.k8s.io"})
    namespace, base = account["metadata"]["namespace"], "/apis/rbac.authorization.k8s.io/v1"
    kube.ask("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    kube.ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    kube.ask("POST", f"{base}/clusterroles", role)
    kube.ask("POST", f"{base}/clusterrolebindings", binding)


@pytest.fixture(autouse=True)
def as_midwatch(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", kube.kubeconfig("midwatch"))
    for name in ("KUBERNETES_SERVICE_HOST", "NODE_NAME", "MIDWATCH_K8S_NODE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    supervised.script.write_text(SICK)
    yield supervised
    supervised.close()


def start(
    run: Supervised, monkeypatch: pytest.MonkeyPatch, nodes: str, *names: str, sick: str = "none"
) -> dict[str, subprocess.Popen[str]]:
    """A launcher for each pod, as on a machine of that name; the last ones are spares."""
    launchers: dict[str, subprocess.Popen[str]] = {}
    settings = ["isolate.drain=do", "isolate.gate=false", "restart.backoff_s=[0]", "watch.agent_timeout_s=20"]
    options = ["--nnodes", nodes, "--nproc-per-node", "1", *(f"--set={setting}" for setting in settings)]
    for name in names:
        monkeypatch.setenv("MIDWATCH_K8S_NODE", name)
        command = [str(run.script), str(run.home), "100000", sick, "attached"]
        launchers[name] = run.start_command(command, *options)
        run.until(f"{name} to join", lambda name=name: name in _joined(run), END_S)
    monkeypatch.delenv("MIDWATCH_K8S_NODE")
    return launchers


def _joined(run: Supervised) -> set[str]:
    return {line["data"]["node"] for line in run.events("node.joined")}


def _placed(run: Supervised) -> list[str]:
    return [node for node, _ in run.events("attempt.launched")[-1]["data"]["placements"]]


def stop(run: Supervised) -> None:
    for launcher in run.launchers:
        launcher.send_signal(signal.SIGTERM)
    assert {run.wait(launcher, END_S) for launcher in run.launchers} == {75}, run.story()


def node(run: Supervised, *words: str) -> dict[str, Any]:
    """``midwatch node VERB RUN NODE ...``, as a person types it on some machine with a kubeconfig."""
    verb, name, *options = words
    done = subprocess.run(
        [MIDWATCH, "node", verb, str(run.run_dir), name, *options, "--json"],
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{run.story()}"
    return json.loads(done.stdout)


def output(run: Supervised) -> str:
    return "".join(path.read_text() for path in run.folder.glob("launcher-*.log"))


def test_nodes_that_share_a_label_share_a_domain(kube: Kube) -> None:
    zone, block = "topology.kubernetes.io/zone", "cloud.provider.com/topology-block"
    for name, labels in {
        "t-0": {zone: "z1", block: "b1"},
        "t-1": {zone: "z1", block: "b1"},
        "t-2": {zone: "z1", block: "b2"},
        "t-3": {"team.example/rack": "r9"},
    }.items():
        kube.add_node(name, labels)
    found = dict(asyncio.run(KubernetesDriver().topology()) or ())
    assert {name: found.get(name) for name in ("t-0", "t-1", "t-2", "t-3")} == {
        "t-0": ("topology-block:b1", "zone:z1"),
        "t-1": ("topology-block:b1", "zone:z1"),
        "t-2": ("topology-block:b2", "zone:z1"),
        "t-3": None,
    }
    ours = dict(asyncio.run(KubernetesDriver(["team.example/rack"]).topology()) or ())
    assert {name: domains for name, domains in ours.items() if name.startswith("t-")} == {"t-3": ("rack:r9",)}
    done = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, timeout=END_S, check=True)
    assert int(done.stdout) == len(kube.ask("GET", "/api/v1/nodes")["items"]), "page by page"


def test_a_node_that_fails_twice_is_cordoned_and_given_back(
    kube: Kube, run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gpu-0", "gpu-1", "gpu-2"):
        kube.add_node(name)
    start(run, monkeypatch, "2:3", "gpu-0", "gpu-1", "gpu-2", sick="gpu-1")
    run.until("the cordon", lambda: kube.is_cordoned("gpu-1"), END_S)
    (isolated,) = run.events("node.isolated")
    reason = kube.reason("gpu-1")
    assert reason.startswith("midwatch "), reason
    assert isolated["data"]["reason"] in reason
    assert f"{run.events('run.started')[0]['run']} " in reason
    since = kube.node("gpu-1")["metadata"]["annotations"]["midwatch/cordoned"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", since)
    assert not kube.is_cordoned("gpu-0")
    assert not kube.is_cordoned("gpu-2")
    run.until("the fact", lambda: run.events("node.drained"))
    run.until("the word", lambda: "kubernetes: node gpu-1 is cordoned" in output(run))
    run.until("the spare", lambda: "gpu-2" in _placed(run), END_S)
    assert sorted(_placed(run)) == ["gpu-0", "gpu-2"]
    foreseen = node(run, "release", "gpu-1", "--reason", "a new board", "--dry-run")
    assert foreseen["state"].endswith("kubernetes would be asked to give back node gpu-1")
    assert kube.is_cordoned("gpu-1"), "a dry run asks nobody"
    node(run, "release", "gpu-1", "--reason", "a new board")
    run.until("the end of the cordon", lambda: not kube.is_cordoned("gpu-1"), END_S)
    assert kube.reason("gpu-1") == ""
    stop(run)
    assert [line["data"]["node"] for line in run.events("node.undrained")] == ["gpu-1"], run.story()


def test_an_api_that_is_down_hears_of_it_later(kube: Kube, run: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("late-0", "late-1"):
        kube.add_node(name)
    start(run, monkeypatch, "1:2", "late-0", "late-1")
    run.until_training(step=8)
    kube.stop_server()
    try:
        node(run, "isolate", "late-1", "--reason", "the fan is broken")
        run.until("a first try", lambda: "asking again to cordon node late-1" in output(run), END_S)
        requests = json.loads((run.run_dir / "supervisor" / "requests.json").read_text())["requests"]
        assert [(one["verb"], one["node"]) for one in requests] == [("isolate", "late-1")]
        before = run.number("at-a1-r0")
        run.until("training to go on", lambda: run.number("at-a1-r0") > before + 5)
    finally:
        kube.start_server()
    drained = run.until("the cordon", lambda: run.events("node.drained"), END_S)
    assert drained[0]["data"]["tries"] > 1
    assert kube.is_cordoned("late-1")
    assert "the fan is broken" in kube.reason("late-1")
    assert run.events("fault.judged") == [], "training did not notice"
    stop(run)
    # The run is over; its folder says who gave its machines out.
    foreseen = node(run, "release", "late-1", "--reason", "a new fan", "--dry-run")
    assert "kubernetes would be asked to give back node late-1" in foreseen["state"]
    assert "in service in kubernetes" in node(run, "release", "late-1", "--reason", "a new fan")["state"]
    assert not kube.is_cordoned("late-1")


def test_what_a_person_cordoned_stays_cordoned(kube: Kube) -> None:
    driver = KubernetesDriver()
    kube.add_node("rma-1")
    kube.cordon("rma-1")
    reply = asyncio.run(driver.isolate("rma-1", "midwatch r1: XID 79"))
    assert (reply.status, reply.text) == ("unneeded", "cordoned already by somebody else (kubectl-cordon)")
    assert asyncio.run(driver.release("rma-1")).status == "refused"
    kube.uncordon("rma-1")
    assert asyncio.run(driver.release("rma-1")).status == "unneeded"
    # Ours, lifted by a person, and cordoned again by a person: our annotations are still there.
    assert asyncio.run(driver.isolate("rma-1", "midwatch r1: XID 79")).status == "done"
    kube.uncordon("rma-1")
    kube.cordon("rma-1")
    assert kube.reason("rma-1") == "midwatch r1: XID 79"
    reply = asyncio.run(driver.release("rma-1"))
    assert (reply.status, reply.text) == ("refused", "cordoned by somebody else (kubectl-cordon)")
    assert kube.is_cordoned("rma-1")


def test_asking_twice_changes_nothing(kube: Kube) -> None:
    driver = KubernetesDriver()
    kube.add_node("twice-1")
    assert asyncio.run(driver.isolate("twice-1", "midwatch r1 i1: XID 79")).status == "done"
    version = kube.node("twice-1")["metadata"]["resourceVersion"]
    assert asyncio.run(driver.isolate("twice-1", "midwatch r1 i1: XID 79")).status == "done"
    reply = asyncio.run(driver.isolate("twice-1", "midwatch r2 i7: XID 48"))
    assert (reply.status, reply.text) == ("unneeded", "cordoned already: midwatch r1 i1: XID 79")
    assert kube.node("twice-1")["metadata"]["resourceVersion"] == version
    described = asyncio.run(driver.describe(["twice-1", "no-such"]))
    assert list(described) == ["twice-1"]
    assert (described["twice-1"].state, described["twice-1"].is_drained) == ("NotReady,SchedulingDisabled", True)
    assert asyncio.run(driver.release("twice-1")).status == "done"
    assert asyncio.run(driver.release("twice-1")).status == "unneeded"


def test_a_pod_asks_by_its_service_account(kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_namespaces()
    kube.add_node("pod-1")
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    token = kube.ask("POST", "/api/v1/namespaces/training/serviceaccounts/midwatch/token", request)["status"]["token"]
    (tmp_path / "token").write_text(token)
    (tmp_path / "ca.crt").write_bytes(kube.certificate.read_bytes())
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(kube.port))
    words = ["unshare", "--mount", "sh", "-c", POD, "pod", str(tmp_path), sys.executable, "-c", ISOLATE, "pod-1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.stdout.strip() == "done", (done.stdout, done.stderr)
    assert kube.reason("pod-1") == "midwatch r1: XID 79"


def test_a_refusal_says_what_is_missing(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    kube.add_node("closed-1")
    assert "there is none of that name" in asyncio.run(KubernetesDriver().isolate("no-such", "x")).text
    monkeypatch.setenv("KUBECONFIG", kube.kubeconfig("stranger"))
    reply = asyncio.run(KubernetesDriver().isolate("closed-1", "midwatch r1: XID 79"))
    assert reply.status == "refused"
    assert reply.text.startswith("may not get node closed-1: the service account or user lacks the right"), reply
    assert 'cannot get resource "nodes"' in reply.text
    with pytest.raises(ConfigError, match="may not list nodes"):
        asyncio.run(KubernetesDriver().topology())
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    reply = asyncio.run(KubernetesDriver().isolate("closed-1", "x"))
    assert (reply.status, reply.text.partition(":")[0]) == ("refused", "there are no credentials for it here")
    assert not kube.is_cordoned("closed-1")


def test_doctor_tries_it_without_doing_it(kube: Kube, run: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    kube.add_node("well-1")
    before = kube.node("well-1")
    monkeypatch.setenv("MIDWATCH_K8S_NODE", "well-1")
    for user, state in (("midwatch", "ok"), ("stranger", "problem")):
        monkeypatch.setenv("KUBECONFIG", kube.kubeconfig(user))
        words = [MIDWATCH, "doctor", str(run.run_dir), "--set", "isolate.drain=do", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=False)
        (found,) = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "scheduler"]
        assert found["state"] == state, found
    assert "may not get node well-1" in found["found"]
    assert kube.node("well-1") == before


def test_an_api_that_hangs_is_silent(kube: Kube) -> None:
    kube.signal_server(signal.SIGSTOP)
    try:
        reply = asyncio.run(KubernetesDriver().isolate("any-1", "x"))
        assert reply.status == "silent", reply
        assert asyncio.run(KubernetesDriver().topology()) is None
    finally:
        kube.signal_server(signal.SIGCONT)
