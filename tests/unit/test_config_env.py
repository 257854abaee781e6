"""A process that misreads its place in the job trains on the wrong data; so nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from midwatch.config import Config, RankEnv, RunConfig, expand_path, load_config, read_rank_env, resolve_paths
from midwatch.core import ConfigError

SUPERVISED = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MIDWATCH_RUN_DIR": "/runs/a",
    "MIDWATCH_RUN": "r1",
    "MIDWATCH_ATTEMPT": "2",
    "MIDWATCH_NODE": "node7",
    "MIDWATCH_PULSE": "/dev/shm/midwatch-t-a0002",
    "MIDWATCH_TAG": "t",
    "MIDWATCH_CONFIG": "/runs/a/config.json",
    "MIDWATCH_GATE": "1",
}


def test_a_laptop_is_rank_0_of_1_and_nobody_watches() -> None:
    env = read_rank_env({})
    assert (env.rank, env.world_size, env.attempt) == (0, 1, 0)
    assert not env.is_supervised
    assert not env.is_gated
    assert env.run_dir is None
    assert env.node


def test_the_launchers_word_is_taken() -> None:
    env = read_rank_env(SUPERVISED)
    assert env == RankEnv(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node="node7",
        run_dir=Path("/runs/a"),
        run="r1",
        attempt=2,
        tag="t",
        pulse_path=Path("/dev/shm/midwatch-t-a0002"),
        config_path=Path("/runs/a/config.json"),
        is_gated=True,
        is_supervised=True,
    )


def test_plain_torchrun_is_not_supervised() -> None:
    env = read_rank_env({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert (env.rank, env.world_size) == (1, 2)
    assert not env.is_supervised


@pytest.mark.parametrize("text", ["x", "-1", "1.0", "٣", "1 2"])
def test_a_rank_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_env({"RANK": text, "WORLD_SIZE": "4"})
    assert caught.value.code == "CF103"
    assert "RANK" in caught.value.message


@pytest.mark.parametrize("prefix", ["", "LOCAL_"])
def test_a_rank_outside_its_world_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_env({f"{prefix}RANK": "4", f"{prefix}WORLD_SIZE": "4"})
    assert caught.value.code == "CF106"
    assert f"{prefix}RANK=4" in caught.value.message


def test_a_launcher_need_not_count_the_ranks_of_a_node() -> None:
    env = read_rank_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    assert env.local_rank == 3


def test_paths_follow_the_run_folder() -> None:
    paths = resolve_paths(Config(run=RunConfig(dir="/runs/b")))
    assert paths.checkpoint_dir == Path("/runs/b/checkpoints")
    assert paths.ledger_dir == Path("/runs/b/ledger")
    assert paths.checkpoint_local_dir is None


def test_the_launchers_run_folder_wins() -> None:
    paths = resolve_paths(Config(run=RunConfig(dir="/runs/b")), read_rank_env(SUPERVISED))
    assert paths.run_dir == Path("/runs/a")


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = load_config({"run": {"dir": "out"}, "checkpoint": {"local_dir": "$SCRATCH/x", "dir": "~/c"}})
    paths = resolve_paths(config)
    assert paths.run_dir == tmp_path / "out"
    assert paths.checkpoint_local_dir == Path("/scratch/x")
    assert paths.checkpoint_dir == Path.home() / "c"


def test_a_variable_that_is_not_set_does_not_become_a_folder_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCRATCH", raising=False)
    with pytest.raises(ConfigError) as caught:
        resolve_paths(Config(run=RunConfig(dir="$SCRATCH/run")))
    assert caught.value.code == "CF102"


def test_a_home_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        expand_path("checkpoint.dir", "~nobody-of-this-name/x")
    assert caught.value.code == "CF102"
    assert "checkpoint.dir" in caught.value.message


def test_a_local_tier_inside_the_shared_one_is_found_through_variables_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to("shared")
    monkeypatch.setenv("MIDWATCH_TEST_PLACE", str(tmp_path / "shared"))
    for local in ("$MIDWATCH_TEST_PLACE/local", str(tmp_path / "link")):
        with pytest.raises(ConfigError) as caught:
            load_config({"checkpoint": {"dir": str(tmp_path / "shared"), "local_dir": local}})
        assert caught.value.code == "CF106"
