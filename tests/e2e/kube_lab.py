"""A real Kubernetes API with its store on this machine, and what administrators and controllers do there."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prerequisites import LAB, absent

BUILD_S = 1500.0
"""Two idle cores need 210 s, once a machine."""
UP_S = 180.0
HOST = "kubernetes.io/hostname"
"""Set by every kubelet."""


def need_apiserver() -> None:
    """Build it once a machine; no package carries it."""
    build = subprocess.Popen(
        [LAB / "kube-build"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = build.communicate(timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        os.killpg(build.pid, signal.SIGKILL)
        build.communicate()
        absent(f"kube-apiserver was not built within {BUILD_S:.0f} s")
    if build.returncode != 0:
        absent(f"no kube-apiserver can be built here: {said.strip()[-500:]}")


def _free_ports() -> int:
    """The first of three."""
    for port in range(26443, 30000, 3):
        try:
            for number in (port, port + 1, port + 2):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port
    raise AssertionError("no three free ports")


class Kube:
    """Comes with ``up``, goes with ``down``, also when this process is killed in between."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="e2e-kube-"))
        self._state = self.folder / "kube"
        self.certificate = self._state / "certs" / "apiserver.crt"
        self.port = 0
        self._server: subprocess.Popen[bytes] | None = None
        script = 'cat; "$1" -d "$2"; rm -rf --one-file-system "$3"'
        self._guard = subprocess.Popen(
            ["bash", "-c", script, "guard", str(LAB / "kube-down"), str(self._state), str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def up(self) -> None:
        self.port = _free_ports()
        command = [LAB / "kube-up", "-d", self._state, "-p", str(self.port)]
        # Files, not pipes: the servers inherit them.
        with (self.folder / "up.log").open("w") as log:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=UP_S, check=False)
        assert done.returncode == 0, f"the API did not come up:\n{(self.folder / 'up.log').read_text()}"

    def down(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        assert self._guard.wait(60) == 0
        if self._server is not None:
            self._server.wait(10)

    def kubeconfig(self, user: str) -> str:
        return str(self._state / f"{user}.kubeconfig")

    def signal_server(self, number: signal.Signals) -> None:
        os.kill(self._server_pid(), number)

    def stop_server(self) -> None:
        """As when its machine dies."""
        pid = self._server_pid()
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists() and _state(pid) not in "ZX":
            time.sleep(0.01)

    def start_server(self) -> None:
        if self._server is not None:
            self._server.wait(10)
        self._server = subprocess.Popen([self._state / "start-apiserver"], start_new_session=True)
        end = time.monotonic() + UP_S
        while True:
            try:
                self.ask("GET", "/readyz")
                return
            except (OSError, AssertionError):
                assert time.monotonic() < end, (self._state / "apiserver.log").read_text()[-2000:]
                time.sleep(0.1)

    def _server_pid(self) -> int:
        lines = (self._state / "pids").read_text().splitlines()
        return next(int(line.split()[0]) for line in reversed(lines) if line.endswith(" apiserver"))

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """As the administrator."""
        token = (self._state / "tokens.csv").read_text().split(",")[0]
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
        )
        context = ssl.create_default_context(cafile=str(self.certificate))
        try:
            with urllib.request.urlopen(request, context=context, timeout=20) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from None
        return json.loads(text) if text.startswith(b"{") else text.decode()

    def add_node(self, name: str, labels: dict[str, str] | None = None) -> None:
        """Applied, not created: of such an object also this old server notes who writes which field."""
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {HOST: name, **(labels or {})}},
        }
        self.ask("PATCH", f"/api/v1/nodes/{name}?fieldManager=lab", body, "application/apply-patch+yaml")

    def node(self, name: str) -> dict[str, Any]:
        return self.ask("GET", f"/api/v1/nodes/{name}")

    def is_cordoned(self, name: str) -> bool:
        return bool(self.node(name)["spec"].get("unschedulable"))

    def reason(self, name: str) -> str:
        return (self.node(name)["metadata"].get("annotations") or {}).get("midwatch/reason", "")

    def cordon(self, name: str) -> None:
        """As ``kubectl cordon`` does."""
        self._patch(name, {"spec": {"unschedulable": True}}, "kubectl-cordon")

    def uncordon(self, name: str) -> None:
        self._patch(name, {"spec": {"unschedulable": None}}, "kubectl-uncordon")

    def _patch(self, name: str, body: Any, manager: str) -> None:
        path = f"/api/v1/nodes/{name}?fieldManager={manager}"
        self.ask("PATCH", path, body, "application/strategic-merge-patch+json")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
