"""What guards found as a run trained, what the run folder says of it later, and what its curve says as a table: one."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch.nn.parallel import DistributedDataParallel
from torch_worlds import run_world

import midwatch
from midwatch.audit import Desk, read_ledger
from midwatch.cli.main import main
from midwatch.guards import Finding
from midwatch.triage import replay_run, report

pytestmark = [pytest.mark.torch, pytest.mark.procs]

STEPS = 320
SICK = 263
PLAN = {"kind": "constant", "peak_lr": 0.01}

Numbers = dict[str, Any]


class Case(NamedTuple):
    """One way to be ill.

    Attributes:
        kinds: Alarms that it raises.
        ranks: How many.
        is_live_only: No curve of the run has what it shows in.
        late: Steps later that it may be seen in the journal, which has some numbers at each tenth step only.
    """

    kinds: set[str]
    ranks: int = 1
    is_live_only: bool = False
    late: int = 0


CASES = {
    "healthy": Case(set()),
    "spike": Case({"spike"}),
    "nan": Case({"nonfinite"}),
    "rate_of_a_group": Case({"lr_off_plan"}),
    "rate_of_a_group_unlogged": Case({"lr_off_plan"}, late=9),
    "rate_of_a_group_beside_a_logged_one": Case({"lr_off_plan"}, late=9),
    "scale": Case({"scale_collapse"}),
    "ranks": Case({"rank_apart"}, ranks=2, is_live_only=True),
    "replicas": Case({"replicas_split"}, ranks=2, is_live_only=True),
}


def numbers(name: str, step: int, rank: int) -> Numbers:
    """What the script logs."""
    noise = random.Random(1000 * step + rank)
    logged: Numbers = {
        "loss": 5 * (step + 10) ** -0.2 * (1 + noise.gauss(0, 0.01)),
        "grad_norm": 0.5 + 0.05 * noise.random(),
    }
    is_sick = step >= SICK
    if name == "spike" and step in range(SICK, SICK + 7):
        logged["loss"] *= 2
    if name == "nan" and step == SICK:
        logged["loss"] = math.nan
    if name == "rate_of_a_group":
        logged["lr"] = [0.01, 0.08 if is_sick else 0.02]
    if name == "rate_of_a_group_beside_a_logged_one":
        logged["lr"] = 0.01
    if name == "scale":
        logged["loss_scale"] = 2.0 ** max(1, 16 - max(0, step - SICK))
    if name == "ranks" and step >= 180:
        logged["loss"] *= 1.1 if rank == 1 else 0.9
    return logged


def train(rank: int, world_size: int, run_dir: str, name: str) -> None:
    torch.manual_seed(rank)
    run = midwatch.attach(
        {
            "run": {"dir": run_dir},
            "checkpoint": {"interval": 10_000, "absent_on_purpose": ["scheduler", "data", "scaler"]},
            "guards": {"action": "warn", "schedule": PLAN},
        }
    )
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    whole = DistributedDataParallel(model) if world_size > 1 else model
    run.track(model=whole, optimizer=optimizer)
    for step in run.steps(run.resume(), STEPS):
        if name.startswith("rate_of_a_group_") and step == SICK:
            optimizer.param_groups[1]["lr"] *= 4
        optimizer.zero_grad()
        whole(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if name == "replicas" and rank == 1 and step == SICK:
            model.weight.data.view(torch.int32)[0, 0] ^= 1
        run.log(**numbers(name, step, rank))
    run.close()


def midwatch_json(*words: object) -> Any:
    result = CliRunner().invoke(main, [*map(str, words), "--json"])
    return json.loads(result.stdout)


def table_of(run_dir: Path, path: Path) -> Path:
    """The curve of a run as its own command tells it."""
    listed = midwatch_json("metrics", "show", run_dir)
    names = sorted({one["metric"] for one in listed["metrics"] if one["rank"] == 0})
    rows: dict[int, dict[str, Any]] = {}
    for series in midwatch_json("metrics", "show", run_dir, *names)["series"]:
        for step, value in series["points"]:
            rows.setdefault(step, {"step": step})[series["metric"]] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *names])
        writer.writeheader()
        writer.writerows(rows[step] for step in sorted(rows))
    return path


def told(findings: list[dict[str, Any]]) -> list[Any]:
    def plain(value: Any) -> Any:
        return None if value is None or isinstance(value, str) or not math.isfinite(value) else pytest.approx(value)

    return [
        (one["step"], one["kind"], one["tier"], one["metric"], plain(one.get("value")), plain(one.get("z")))
        for one in sorted(findings, key=lambda one: (one["step"], one["kind"]))
    ]


def as_dicts(findings: list[Finding]) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in one.__struct_fields__} for one in findings]


def same_but_late(one: list[Any], other: list[Any], late: int) -> bool:
    """The same, if each is told so many steps later at most."""
    return len(one) == len(other) and all(
        mine[1:] == theirs[1:] and 0 <= mine[0] - theirs[0] <= late for mine, theirs in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_a_run_its_folder_and_its_curve_say_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run_dir = CASES[name], tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    Path("midwatch.json").write_text(json.dumps({"metrics": {"index_dir": str(tmp_path / "indexes")}}))
    run_world(train, case.ranks, tmp_path / "world", str(run_dir), name)
    lines = [line for line in read_ledger(run_dir / "ledger" / "a0001-r00000.jsonl") if line.event == "guard.found"]
    live = told([{**line.data, "step": line.step} for line in lines])
    assert {kind for _, kind, tier, *_ in live if tier != "note"} == case.kinds
    of_run = report(replay_run(run_dir, Desk(run_dir).rules()))
    assert told(as_dicts(of_run.incidents)) == live
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"schedule": PLAN}))
    of_curve = midwatch_json("triage", "--csv", table_of(run_dir, tmp_path / "curve.csv"), "--facts", facts)
    expected = [one for one in live if one[1] not in case.kinds] if case.is_live_only else live
    assert same_but_late(told(of_curve["incidents"]), expected, case.late), of_curve["incidents"]
    check_the_checks(of_run.checks, of_curve["checks"], case)


def check_the_checks(of_run: list[Any], of_curve: list[dict[str, Any]], case: Case) -> None:
    for mine, theirs in zip(of_run, of_curve, strict=True):
        if not case.is_live_only:
            assert mine.result in (theirs["result"], "contradicts"), (mine, theirs)
        assert mine.result != "contradicts" or "nor did the guards" in mine.detail
        assert theirs["result"] != "contradicts" or "nothing in" in theirs["detail"]
