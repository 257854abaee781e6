"""What dead launchers leave in shared memory, and what must not be taken from living ones."""

from __future__ import annotations

import os
from pathlib import Path

from midwatch.supervise.presence import Presence, sweep_the_dead
from midwatch.supervise.procs import sweep_shm


def test_the_dead_are_swept_and_the_living_are_not(tmp_path: Path) -> None:
    dead, alive = Presence("dead", tmp_path), Presence("alive", tmp_path)
    for name in ("midwatch-dead-a0001", "midwatch-alive-a0001", "midwatch-deadly", "other"):
        (tmp_path / name).touch()
    dead.close()
    assert sorted(sweep_the_dead(tmp_path)) == ["midwatch-dead-a0001", "midwatch-dead-live"]
    assert sorted(os.listdir(tmp_path)) == ["midwatch-alive-a0001", "midwatch-alive-live", "midwatch-deadly", "other"]
    alive.close()


def test_an_empty_prefix_sweeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    assert sweep_shm("", tmp_path) == []
    assert (tmp_path / "precious").exists()
