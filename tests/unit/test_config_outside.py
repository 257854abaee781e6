"""A rank's place as launchers say it: what is understood, and what is refused in words that help."""

from __future__ import annotations

import pytest

from midwatch.config import OutsidePlace, read_outside_place, read_rank_env
from midwatch.config.outside import tasks_on
from midwatch.core import SuperviseError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}


def test_torchruns_words() -> None:
    assert read_outside_place(TORCHRUN) == OutsidePlace(rank=3, world_size=4, local_rank=1, local_world_size=2)


def test_slurms_words_and_the_number_of_tasks_here() -> None:
    place = read_outside_place({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2),2"})
    assert place == OutsidePlace(rank=5, world_size=6, local_rank=1, local_world_size=2)
    assert read_outside_place(SRUN).local_world_size == 0
    assert read_outside_place({**SRUN, "SLURM_TASKS_PER_NODE": "many"}).local_world_size == 0


def test_torchruns_words_go_before_slurms() -> None:
    assert read_outside_place({**SRUN, **TORCHRUN}).rank == 3


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "missing RANK, WORLD_SIZE, LOCAL_RANK; or SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID"),
        ({"RANK": "0"}, "missing WORLD_SIZE, LOCAL_RANK; or"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 but WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one': must be a whole number"),
    ],
)
def test_what_is_missing_or_cannot_be_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(SuperviseError, match="SV117") as caught:
        read_outside_place(environ)
    assert words in caught.value.message


def test_one_host_is_known_only_where_the_launcher_says_so() -> None:
    assert read_outside_place({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).is_one_host
    assert not read_outside_place(TORCHRUN).is_one_host
    assert not read_outside_place({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}).is_one_host
    assert read_outside_place({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}).local_world_size == 0, "less than this rank needs"


@pytest.mark.parametrize(
    ("text", "number", "tasks"), [("8", 0, 8), ("8(x2),4", 1, 8), ("8(x2),4", 2, 4), ("8", 1, 0), ("", 0, 0)]
)
def test_tasks_of_a_node(text: str, number: int, tasks: int) -> None:
    assert tasks_on(text, number) == tasks


def test_the_five_lines_take_our_word_where_the_launcher_has_none_they_know() -> None:
    values = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    ours = {f"MIDWATCH_{name}": value for name, value in values.items()}
    env = read_rank_env(ours)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (3, 8, 1, 2)
    env = read_rank_env({**ours, "RANK": "0", "WORLD_SIZE": "2"})
    assert (env.rank, env.world_size) == (0, 2)
