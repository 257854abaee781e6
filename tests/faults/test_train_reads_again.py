"""Real runs that say what they read: a loader that went back, one that did not, and ranks that read the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch_worlds import run_world

import midwatch
from midwatch.audit import read_journal, read_ledger

pytestmark = [pytest.mark.torch, pytest.mark.procs]

ROWS = 4
KILLED_AT = 27


class Loader:
    """Rows in order; ``start`` is where a rank begins, ``stride`` how far apart its batches are."""

    def __init__(self, rank: int, stride: int, *, forgets: bool) -> None:
        self.batch = rank
        self._rank = rank
        self._stride = stride
        self._forgets = forgets

    def next(self) -> Any:
        import torch

        batch, self.batch = self.batch, self.batch + self._stride
        return torch.arange(ROWS)[:, None] * 3 + batch * 1000 + torch.arange(16)

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = self._rank if self._forgets else state["batch"]


def train(rank: int, world_size: int, run_dir: str, steps: int, how: dict[str, Any]) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    config: dict[str, Any] = {
        "run": {"dir": run_dir, "log_every": 1},
        "checkpoint": {"interval": 10, "async_save": False},
        "guards": {"action": "warn", "inspect": {"updates": False}},
    }
    run = midwatch.attach(config)
    model: Any = torch.nn.Linear(16, 1)
    if how.get("is_averaged"):
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stride = how.get("stride", world_size)
    loader = Loader(rank if stride > 1 else 0, stride, forgets=how.get("forgets", False))
    run.track(model=model, optimizer=optimizer, data=loader)
    for step in run.steps(run.resume(), steps):
        rows = loader.next()
        run.batch(loader.batch, tokens=rows, source="web")
        if step == how.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model(rows.float()).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=2.0 + 0.01 * (step % 3))
    run.close()


def notes(run_dir: Path) -> list[tuple[int, str, str]]:
    """(step, kind, text) of what the ledgers of all attempts tell."""
    found: list[tuple[int, str, str]] = []
    for path in sorted((run_dir / "ledger").glob("a*-r00000.jsonl")):
        lines = [line for line in read_ledger(path) if line.event == "guard.found"]
        assert {line.data["tier"] for line in lines} <= {"note"}
        found += [(line.step or 0, line.data["kind"], line.data["text"]) for line in lines]
    return found


def journal(run_dir: Path, attempt: int) -> dict[int, dict[str, Any]]:
    records: dict[int, dict[str, Any]] = {}
    for record in read_journal([run_dir / "metrics" / f"a{attempt:04d}.jsonl"]):
        records.setdefault(record["step"], {}).update(record)
    return records


@pytest.mark.parametrize("forgets", [False, True], ids=["goes on where it was", "begins again"])
def test_a_killed_run_reads_what_it_has_read_only_where_its_loader_went_back(tmp_path: Path, forgets: bool) -> None:
    run_dir = tmp_path / "run"
    run_world(train, 1, tmp_path / "one", str(run_dir), 40, {"kill_at": KILLED_AT}, exits=(-9,))
    run_world(train, 1, tmp_path / "two", str(run_dir), 40, {"forgets": forgets})
    records = journal(run_dir, 2)
    assert min(records) == 21, "steps 21 to 26 are done again"
    shares = [records[step]["seen_share"] for step in sorted(records)]
    if forgets:
        assert shares == [1.0] * 19
        assert notes(run_dir) == [
            (21, "data_repeated", "100% of the batch was read before: a loader that went back, or another epoch")
        ]
    else:
        assert shares == [0.0] * 19
        assert notes(run_dir) == []
    assert all(0 <= record["token_distance"] <= 1 and record["token_entropy"] > 3 for record in records.values())
    assert not any("same_rows_ranks" in record for record in records.values())


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ({"is_averaged": True}, 0.0),
        ({"is_averaged": True, "stride": 1}, 2.0),
        ({"stride": 1}, None),
    ],
    ids=["each its own rows", "both the same", "the same on purpose, for all one knows"],
)
def test_two_ranks_that_read_the_same_rows(tmp_path: Path, how: dict[str, Any], ranks: float | None) -> None:
    run_dir = tmp_path / "run"
    run_world(train, 2, tmp_path / "w", str(run_dir), 12, how)
    records = journal(run_dir, 1)
    assert [records[step].get("same_rows_ranks") for step in range(12)] == [ranks] * 12
    expected = [(1, "data_shared", "ranks 0, 1 read the same rows as another one")] if ranks else []
    assert notes(run_dir) == expected
    assert [records[step]["seen_share"] for step in range(12)] == [0.0] * 12


def test_one_rank_of_two_whose_loader_went_back_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_world(train, 2, tmp_path / "one", str(run_dir), 11, {"is_averaged": True})
    run_world(train_one_forgets, 2, tmp_path / "two", str(run_dir), 22)
    records = journal(run_dir, 2)
    first = records[11]
    assert (first["seen_share"], first["seen_share_max"], first["seen_share_max_rank"]) == (0.5, 1.0, 1)
    assert [kind for _, kind, _ in notes(run_dir)] == ["data_repeated"]


def train_one_forgets(rank: int, world_size: int, run_dir: str, steps: int) -> None:
    train(rank, world_size, run_dir, steps, {"is_averaged": True, "forgets": rank == 1})
