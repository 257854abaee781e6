"""The node that hosts the coordinator is lost: another one goes on sending where it was, and tells of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_run_metrics import MetricsRun
from test_run_nodes import OPTIONS, lose

pytestmark = [pytest.mark.e2e, pytest.mark.procs]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MetricsRun]:
    run = MetricsRun(tmp_path)
    yield run
    run.close()


def test_the_node_that_takes_over_goes_on_sending(run: MetricsRun) -> None:
    listen = ("--set", "metrics.listen=0", "--set", f"metrics.index_dir={run.folder / 'indexes'}")
    launchers = {}
    for name in ("n0", "n1"):
        launchers[name] = run.begin("--nnodes", "1:2", "--node-name", name, *OPTIONS, *listen, nproc=1)
        run.until(f"{name}", lambda name=name: any(e["data"]["node"] == name for e in run.events("node.joined")))
    run.until_points(5)
    assert "midwatch_attempts_total" in run.page("n0")
    spare = run.page("n1")
    assert ("midwatch_attempts_total" in spare, spare["midwatch_agent_up"]) == (False, 1), "the host tells it"
    # Away, so that none is killed between a delivery and its note: that batch would come twice.
    run.receiver.is_away = True
    lose(launchers.pop("n0"))
    run.until("attempt 2", lambda: (run.run_dir / "metrics" / "a0002.jsonl").exists())
    run.receiver.is_away = False
    run.until_points(5, attempt=2)
    run.until("the new host's page", lambda: run.page("n1").get("midwatch_attempts_total") == 2)
    run.stop.touch()
    assert run.wait(launchers["n1"]) == 0, run.story()
    run.assert_all_arrived_once()
