"""A cluster for each test, torn down whatever happens in it: nodes that one test broke are no other test's concern."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from prerequisites import need_namespaces
from slurm_lab import ClusterRun, Lab

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from breaker_jobs import Job, jobs_in

STEPS = 100


@contextmanager
def cluster() -> Iterator[Lab]:
    need_namespaces()
    lab = Lab()
    try:
        lab.up()
        yield lab
    finally:
        lab.down()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with cluster() as lab:
        yield lab


@pytest.fixture
def run(lab: Lab) -> Iterator[ClusterRun]:
    with closing(ClusterRun(lab, STEPS)) as run:
        yield run


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with jobs_in(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def undisturbed() -> str:
    """The weights at the end of a run on two nodes to which nothing happens."""
    with cluster() as lab, closing(ClusterRun(lab, STEPS)) as run:
        assert run.wait(run.start(), 120) == 0, run.story()
        assert run.events("fault.judged") == [], run.story()
        (launched,) = run.events("attempt.launched")
        assert sorted(node for node, _ in launched["data"]["placements"]) == ["n1", "n2"]
        return run.weights()
