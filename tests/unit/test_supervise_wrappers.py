"""Agents of single ranks that another launcher has started: what they are called, and which are not let in."""

from __future__ import annotations

import pytest
from test_supervise_members import SECOND, join

from midwatch.config import OutsidePlace
from midwatch.core import SuperviseError
from midwatch.supervise.flight import files_of
from midwatch.supervise.members import Members, NotYet
from midwatch.supervise.spawn import NodeSetup, rank_environment
from midwatch.supervise.wire import StartRanks


def wrappers() -> Members:
    known = Members(2, "c", "b", is_adopted=True)
    known.admit(join("n7", "t0", ranks=(0,), machine="vm/1"), 0)
    known.admit(join("n7", "t1", ranks=(1,), machine="vm/1", command="the same with --local-rank=1"), 0)
    return known


def refusal(known: Members, **changes: object) -> SuperviseError:
    with pytest.raises(SuperviseError) as caught:
        known.admit(join(**changes), 0)  # type: ignore[arg-type]
    return caught.value


def test_several_on_one_host_are_called_by_host_and_rank() -> None:
    known = wrappers()
    assert [(member.name, member.host) for member in known.live] == [("n7.r0", "n7"), ("n7.r1", "n7")]
    assert known.named("n7") == known.named("n7.r1") == known.named("vm") == "n7"
    assert known.known("n7") is known.at("n7.r0")


def test_a_rank_that_comes_twice_is_refused_wherever_it_comes_from() -> None:
    known = wrappers()
    known.live[1].polls = 1
    error = refusal(known, node="n8", tag="t2", ranks=(1,))
    assert (error.code, "rank 1 is taken by process 1 on n7" in error.message) == ("SV102", True)


def test_a_rank_that_is_started_again_waits_until_the_agent_whose_connection_broke_is_given_up() -> None:
    known = wrappers()
    with pytest.raises(NotYet):
        known.admit(join("n7", "t2", ranks=(1,)), 0)
    known.lose(known.live[1])
    assert known.admit(join("n7", "t2", ranks=(1,)), 0)[0].name == "n7.r1"


def test_a_rank_that_has_been_silent_may_be_about_to_be_replaced() -> None:
    with pytest.raises(NotYet):
        wrappers().admit(join("n8", "t2", ranks=(1,)), 10 * SECOND)


def test_a_restarted_agent_of_the_same_wrapper_takes_its_own_place() -> None:
    known = wrappers()
    member, is_new = known.admit(join("n7", "t1", ranks=(1,), agent="another"), 0)
    assert (member.name, is_new, len(known.live)) == ("n7.r1", True, 2)


def test_ranks_of_another_world_are_refused() -> None:
    error = refusal(wrappers(), tag="t2", ranks=(2,), nnodes=4)
    assert (error.code, "is told of 4 ranks, the run has 2" in error.message) == ("SV111", True)


@pytest.mark.parametrize("is_adopted", [True, False])
def test_wrappers_and_nodes_do_not_mix(is_adopted: bool) -> None:
    known = Members(2, "c", "b", is_adopted=is_adopted)
    assert refusal(known, ranks=() if is_adopted else (0,)).code == "SV111"


def test_nothing_that_the_launcher_set_is_changed() -> None:
    place = OutsidePlace(rank=5, world_size=8, local_rank=1, local_world_size=2)
    setup = NodeSetup(
        command=("train",), node="n7", nproc=1, tag="t", run="r", run_dir="/run", config_path="", place=place
    )
    start = StartRanks(
        attempt=3,
        world_size=8,
        ranks=(5,),
        group_rank=5,
        group_world_size=8,
        master_addr="10.0.0.1",
        master_port=1,
        restart_count=0,
        max_restarts=0,
    )
    theirs = {
        "SLURM_PROCID": "5",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/tmp/theirs.json",
        "PYTHONUNBUFFERED": "0",
    }
    env = rank_environment(theirs, setup, start, 0, {"pulse": "/dev/shm/p", "error": "/run/logs/e.json"})
    assert {name: env[name] for name in theirs} == theirs
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK"}.isdisjoint(env)
    assert (env["MIDWATCH_RANK"], env["MIDWATCH_SLOT"], env["MIDWATCH_ATTEMPT"]) == ("5", "0", "3")
    assert files_of(env).rank == 5
