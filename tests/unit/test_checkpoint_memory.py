"""Memory that a container or a job may not use does not count as available, whatever the host has."""

from __future__ import annotations

from pathlib import Path

import pytest

from midwatch.checkpoint.memory import Memory, host_memory

MIB = 2**20


class Host:
    """A made-up /proc and /sys/fs/cgroup of a machine with 1024 MiB, 512 of them available."""

    def __init__(self, root: Path, groups: str) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal: {1024 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {512 * 1024} kB\n"
        )
        (self.proc / "self/cgroup").write_text(groups)

    def v2(self, folder: str, limit: str, used: int, cache: int = 0) -> None:
        path = self.cgroups / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.max").write_text(f"{limit}\n")
        (path / "memory.current").write_text(f"{used * MIB}\n")
        (path / "memory.stat").write_text(f"anon 5\ninactive_file {cache * MIB}\nactive_file 0\n")

    def v1(self, folder: str, limit: int, used: int) -> None:
        path = self.cgroups / "memory" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (path / "memory.usage_in_bytes").write_text(f"{used * MIB}\n")
        (path / "memory.stat").write_text("cache 1\ntotal_inactive_file 0\ntotal_active_file 0\n")

    def ask(self) -> Memory:
        return host_memory(self.proc, self.cgroups)


def test_a_limit_of_a_container_counts_where_the_host_has_plenty(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/pod/box\n")
    host.v2("pod/box", str(300 * MIB), used=200, cache=30)
    assert host.ask() == Memory(300 * MIB, 130 * MIB)


def test_a_limit_further_up_counts_too(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/pod/box\n")
    host.v2("pod/box", "max", used=100)
    host.v2("pod", str(256 * MIB), used=250)
    assert host.ask() == Memory(256 * MIB, 6 * MIB)


def test_a_container_that_sees_only_its_own_group_finds_its_limit(tmp_path: Path) -> None:
    host = Host(tmp_path, "5:cpu,memory:/docker/0123\n0::/\n")
    host.v1("", 400 * MIB, used=390)
    assert host.ask() == Memory(400 * MIB, 10 * MIB)


@pytest.mark.parametrize("groups", ["", "0::/\n", "4:memory:/jobs\n0::/\n"], ids=["none", "version 2", "version 1"])
def test_without_a_limit_the_host_is_asked(tmp_path: Path, groups: str) -> None:
    host = Host(tmp_path, groups)
    host.v2("", "max", used=100)
    host.v1("jobs", 2**63 - 4096, used=100)
    assert host.ask() == Memory(1024 * MIB, 512 * MIB)


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/a\n")
    host.v2("a", str(100 * MIB), used=101)
    assert host.ask().available == 0
