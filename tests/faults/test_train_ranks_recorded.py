"""Several real ranks: what the record of the run says of them all, and what a rank says of itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch_worlds import run_world

import midwatch
from midwatch.audit import read_journal, read_ledger
from midwatch.audit.importers import import_metrics
from midwatch.audit.index import MetricIndex

pytestmark = [pytest.mark.torch, pytest.mark.procs]

SLOW_S = 0.05


def train(rank: int, world_size: int, run_dir: str, ranks_at_once: int) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from midwatch.train import agreement

    agreement.RANKS_AT_ONCE = ranks_at_once  # type: ignore[misc]
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "run": {"dir": run_dir, "log_every": 4},
        "checkpoint": {"interval": 1000},
        "metrics": {"every": 3},
        "guards": {"action": "warn"},
    }
    run = midwatch.attach(config)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.resume(), 9):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        if rank == 1:
            time.sleep(SLOW_S)
        torch.distributed.barrier()
        is_sick = step == 7 and rank == 1
        run.log(loss=float("nan") if is_sick else 2.0 + rank, tokens=10)
        if rank == 1 and step == 4:
            run.log_rank(expert_load=0.5)
        if rank == 1:
            run.log(grad_norm=4.0)


def joined(run_dir: Path, name: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for record in read_journal([run_dir / "metrics" / name]):
        found.setdefault(record["step"], {}).update(record)
    return found


@pytest.mark.parametrize("ranks_at_once", [64, 1], ids=["all numbers", "sums and maxima"])
def test_the_record_speaks_for_all_ranks(tmp_path: Path, ranks_at_once: int) -> None:
    run_dir = tmp_path / "run"
    run_world(train, 2, tmp_path / "w", str(run_dir), ranks_at_once)
    records = joined(run_dir, "a0001.jsonl")
    assert sorted(records) == list(range(9))
    for step in (0, 3, 6):
        line = records[step]
        assert (line["loss"], line["loss_max"], line["loss_max_rank"]) == (2.5, pytest.approx(3.0), 1)
        assert (line["grad_norm"], "grad_norm_max" in line) == (4.0, False), "of one rank alone"
        # The first step is longer for whom it is, and says nothing of the ranks.
        assert step == 0 or (line["own_s_max_rank"] == 1 and line["own_s_max"] >= SLOW_S)
        assert line["communication_s"] > SLOW_S / 2, "rank 0 has waited for it"
        assert 0 < line["tokens_per_s"] < 20 / SLOW_S
        assert line["memory_rss_bytes_max"] > 10e6
        assert line["lr"] == pytest.approx(0.1)
    assert records[8]["loss"] == 2.5
    assert str(records[7]["loss"]) == str(records[7]["loss_max"]) == "nan"
    assert records[7]["loss_max_rank"] == 1
    assert records[6]["ddp_wait_s"] >= 0
    check_the_odd_rank(run_dir)


def check_the_odd_rank(run_dir: Path) -> None:
    own = joined(run_dir, "a0001-r00001.jsonl")
    assert own[4]["expert_load"] == 0.5
    assert sorted(own) == list(range(9)), "what it remembers, and what comes after"
    assert [own[step]["rank_loss"] for step in (0, 6, 8)] == [3.0] * 3
    lines = list(read_ledger(run_dir / "ledger" / "a0001-r00000.jsonl"))
    (found,) = [line.data for line in lines if line.event == "guard.found" and line.step == 7]
    assert (found["kind"], found["ranks"], found["highest"]) == ("nonfinite", [1], {"rank": 1, "value": "nan"})
    assert found["rank_values"] == {"1": "nan"}
    with MetricIndex(run_dir, run_dir.parent / "indexes") as index:
        index.sync()
        assert [point.value for point in index.series("rank_loss", rank=1)][:3] == [3.0] * 3
        assert index.series("expert_load", rank=1) == [(4, 0.5)]
        assert len(index.series("loss")) == 9


def test_what_was_imported_before_does_not_mix_with_what_the_run_records(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("step,loss\n" + "".join(f"{step},300\n" for step in range(50)))
    import_metrics([tmp_path / "other.csv"], tmp_path / "run")
    run_world(train, 2, tmp_path / "w", str(tmp_path / "run"), 64)
    records = joined(tmp_path / "run", "a0001.jsonl")
    assert sorted(records) == list(range(9))
    assert records[0]["loss"] == 2.5
    (said,) = [
        line
        for line in read_ledger(tmp_path / "run" / "ledger" / "a0001-r00000.jsonl")
        if line.event == "metrics.import_set_aside"
    ]
    assert sorted(path.name for path in Path(said.data["path"]).iterdir()) == ["a0001.jsonl"]
