"""A run whose messages nobody else on the network reads: it works, and only the published certificate is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import MIDWATCH, Supervised
from test_run_nodes import end_on_request, lose, start

from midwatch.config import SecureConfig
from midwatch.core import ConfigError, ProtocolError
from midwatch.supervise.endpoint import read_endpoint
from midwatch.supervise.link import Link
from midwatch.supervise.tls import client_context, read_certificate, server_context, trust

pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


def make_certificate(folder: Path, name: str) -> SecureConfig:
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command = [
        "openssl",
        "req",
        "-x509",
        *kind,
        "-days",
        "2",
        "-subj",
        "/CN=midwatch",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    key.chmod(0o600)
    return SecureConfig(tls_cert=str(certificate), tls_key=str(key))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def test_an_encrypted_run_restarts_and_answers(run: Supervised, tmp_path: Path) -> None:
    secure = make_certificate(tmp_path, "one")
    options = ("--set", f"secure.tls_cert={secure.tls_cert}", "--set", f"secure.tls_key={secure.tls_key}")
    launcher = run.start("kill9", *options, steps=100_000)
    run.until_training(attempt=2)
    endpoint = json.loads((run.run_dir / "supervisor" / "coordinator.json").read_text())
    assert "BEGIN CERTIFICATE" in endpoint["certificate"]
    assert "PRIVATE" not in endpoint["certificate"]
    address = endpoint["host"], endpoint["port"]
    assert is_trusted(address, endpoint["certificate"])
    assert not is_trusted(address, read_certificate(make_certificate(tmp_path, "two")))
    assert not is_trusted(address, "")
    with pytest.raises(ProtocolError, match="no answer"):
        asyncio.run(hello(f"http://{address[0]}:{address[1]}"))
    done = subprocess.run(
        [MIDWATCH, "status", str(run.run_dir), "--json"], capture_output=True, text=True, timeout=30, check=False
    )
    assert json.loads(done.stdout)["live"], done.stdout
    launcher.send_signal(signal.SIGTERM)
    assert run.wait(launcher) == 75, run.story()
    run.assert_nothing_left()


def test_a_take_over_stays_encrypted_and_passes_by_a_node_without_a_certificate(
    run: Supervised, tmp_path: Path
) -> None:
    def options(name: str) -> tuple[str, ...]:
        secure = make_certificate(tmp_path, name)
        return ("--set", f"secure.tls_cert={secure.tls_cert}", "--set", f"secure.tls_key={secure.tls_key}")

    launchers = {"n0": start(run, "n0", "2:3", *options("n0"))}
    run.until("the coordinator", lambda: run.events("node.joined"))
    launchers["n1"] = start(run, "n1", "2:3")  # without one
    run.until_training(step=3)
    launchers["n2"] = start(run, "n2", "2:3", *options("n2"))
    run.until("the spare", lambda: any(event["data"]["node"] == "n2" for event in run.events("node.joined")))
    first = read_endpoint(run.run_dir)
    lose(launchers.pop("n0"))
    run.until_training(attempt=2, step=1)
    second = read_endpoint(run.run_dir)
    assert second.url.startswith("https://")
    assert second.certificate not in ("", first.certificate), "the one of the new host"
    assert len(run.events("coordinator.moved")) == 1
    assert "this node cannot host the coordinator" in (run.folder / "launcher-1.log").read_text()
    end_on_request(run, launchers)


def is_trusted(address: tuple[str, int], certificate: str) -> bool:
    context = client_context()
    trust(context, certificate)

    async def connect() -> None:
        async with asyncio.timeout(10):
            _, writer = await asyncio.open_connection(*address, ssl=context)
            writer.close()
            # Without the wait the loop may end first, and the socket with nobody to close it.
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    try:
        asyncio.run(connect())
    except ssl.SSLCertVerificationError:
        return False
    return True


async def hello(url: str) -> None:
    link = Link(url, bytes(32), "somebody")
    try:
        await link.hello(timeout_s=10)
    finally:
        await link.close()


def test_what_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    secure = make_certificate(tmp_path, "one")
    other = make_certificate(tmp_path, "two")
    assert read_certificate(SecureConfig()) == ""
    assert "BEGIN CERTIFICATE" in read_certificate(secure)
    assert server_context(secure).minimum_version == ssl.TLSVersion.TLSv1_3
    for wrong in (
        SecureConfig(tls_key=secure.tls_key),
        SecureConfig(tls_cert=str(tmp_path / "none.pem"), tls_key=secure.tls_key),
        SecureConfig(tls_cert=secure.tls_cert, tls_key=other.tls_key),
        SecureConfig(tls_cert=secure.tls_cert),
    ):
        with pytest.raises(ConfigError) as refused:
            read_certificate(wrong)
        assert refused.value.code == "CF102"
    Path(secure.tls_key).chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        read_certificate(secure)
