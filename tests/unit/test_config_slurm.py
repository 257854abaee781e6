"""A node that cannot find the way to its peers advertises an address that nobody reaches."""

from __future__ import annotations

import socket

import pytest

from midwatch.config import slurm_peers
from midwatch.config.slurm import expand_hosts
from midwatch.core import SuperviseError
from midwatch.supervise.address import listen, reachable_address


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11,7],login", ["n08", "n09", "n10", "n11", "n7", "login"]),
        ("rack[1-2]-gpu[3,5]", ["rack1-gpu3", "rack1-gpu5", "rack2-gpu3", "rack2-gpu5"]),
        ("a[1-2].cluster.example, b", ["a1.cluster.example", "a2.cluster.example", "b"]),
    ],
)
def test_short_forms_of_host_names(text: str, names: list[str]) -> None:
    assert list(expand_hosts(text)) == names


def test_peers_are_the_other_hosts_of_this_step() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-9]", "SLURM_STEP_NODELIST": "n[2-4]", "SLURMD_NODENAME": "n2"}
    assert slurm_peers(environ) == ("n3", "n4")
    assert slurm_peers({**environ, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}) == ("n3", "n4", "10.0.0.1")
    assert slurm_peers({}) == ()


def test_ten_thousand_hosts_are_not_looked_at() -> None:
    assert slurm_peers({"SLURM_STEP_NODELIST": "n[1-9999999999]", "SLURMD_NODENAME": "n1"}) == ("n2", "n3")


def test_a_run_of_one_node_stays_on_loopback() -> None:
    listener, address = listen("", 1, ["192.0.2.7"])
    with listener:
        assert address == listener.getsockname()[0] == "127.0.0.1"


def test_several_nodes_listen_where_they_say() -> None:
    listener, address = listen("", 2, [])
    with listener:
        assert listener.getsockname()[0] == address == reachable_address([])


def test_all_addresses_are_not_an_address_to_give_away() -> None:
    listener, address = listen("0.0.0.0", 2, [])
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        assert address == reachable_address([]) != "0.0.0.0"


def test_the_host_name_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("it may be 127.0.1.1")

    monkeypatch.setattr(socket, "gethostbyname", never)
    assert reachable_address(["127.0.1.1"]) == reachable_address([])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SuperviseError, match=r"cannot listen on 192\.0\.2\.7") as caught:
        listen("192.0.2.7", 2, [])
    assert caught.value.code == "SV106"
