#!/usr/bin/env python3
"""A real small GPT, trained with the guards on: well and resumed after a kill, then made sick on purpose.

healthy_gpt.py healthy [--seeds 5] [--steps 1500]   the bar: no incident and no trip; also in bf16 and with a loss scale
healthy_gpt.py sick                                 when each fault is seen, beside two published rules
healthy_gpt.py                                      both; the exit code says whether the bar holds and all is seen

Each healthy run is killed once in the middle (SIGKILL, under ``midwatch run``) and goes on from its newest checkpoint.
The sick ones all begin with the same 400 healthy steps. The text is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from healthy_gpt_worker import Case
from published_rules import llm_foundry, olmo_core
from sick_gpt import MUST_BE_SEEN, SICK

from midwatch.audit import merged
from midwatch.audit.index import MetricIndex
from midwatch.checkpoint.format import newest_verified
from midwatch.guards import TIERS

MIDWATCH = str(Path(sys.executable).with_name("midwatch"))
WORKER = Path(__file__).with_name("healthy_gpt_worker.py")
TRUNK_STEPS = 400
STALE_AT = 180
EVENT_AFTER = 40
"""Steps from the resume to a fault that has nothing to do with it: the test of the resume is over by then."""
SICK_STEPS = 160
LIMIT_S = 1800.0
RULES = ("OLMo loss", "OLMo norm", "Foundry")
"""See published_rules.py: flags in a healthy run, or steps from the event to the first one."""
WIDTHS = (8, 9, 10, 8, 6, 6, 10, 6, 10, 10, 8)
SICK_WIDTHS = (20, 6, 18, 18, 18, 11, 11, 9)
AT_ONCE = 2


def healthy(seeds: int, steps: int, folder: Path) -> bool:
    """Print a line a run; whether none of them had an incident or a trip."""
    cases = [
        Case(str(folder / f"seed{seed}"), seed, steps, steps, schedule="wsd" if seed % 2 else "cosine", kill_at=kill)
        for seed in range(seeds)
        for kill in (steps // 2 + 37 * seed % 100,)
    ]
    for precision in ("bf16", "scaled"):
        place = str(folder / precision)
        cases.append(Case(place, seeds, steps, steps, precision=precision, kill_at=steps // 2 + 20))
    print(_row("run", "schedule", "precision", "resumed", "s", "notes", "incidents", "trips", *RULES))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(_healthy, cases))
    bar = "holds" if all(answers) else "BROKEN"
    print(f"no incident and no trip in {len(cases)} healthy runs of {steps} steps, each killed and resumed once: {bar}")
    return all(answers)


def _healthy(case: Case) -> bool:
    began = time.monotonic()
    command = [MIDWATCH, "run", "--run-dir", case.run_dir, "--tee", "none", "--", sys.executable, str(WORKER)]
    done = subprocess.run(
        [*command, json.dumps(dataclasses.asdict(case))],
        env=_surroundings(Path(case.run_dir)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    seconds = time.monotonic() - began
    run_dir = Path(case.run_dir)
    lines = merged(run_dir)
    resumed = [line.step for line in lines if line.event == "run.resumed"]
    tiers = Counter(finding["tier"] for finding in _findings(run_dir))
    losses, norms = _series(run_dir, "loss"), _series(run_dir, "grad_norm")
    is_whole = done.returncode == 0 and len(resumed) == 1 and sorted(losses) == list(range(case.steps))
    flags = [len(olmo_core(list(values.values()))) for values in (losses, norms)]
    flags.append(len(llm_foundry(list(losses.values()), case.steps)))
    counts = [tiers[tier] for tier in TIERS]
    line = _row(run_dir.name, case.schedule, case.precision, *resumed, round(seconds), *counts, *flags)
    if not is_whole:
        line += f"\nNOT AS MEANT: exit {done.returncode}, {len(losses)} steps, resumed {resumed}\n{done.stderr[-2000:]}"
    print(line, flush=True)
    for finding in _findings(run_dir):
        where = f"{finding['tier']} {finding['kind']} at step {finding['step']}"
        print(f"    {where}: {finding.get('text', '')}", flush=True)
    return is_whole and not tiers["incident"] and not tiers["trip"]


def sick(folder: Path) -> bool:
    """Print a line a fault; whether the rule that was built for each saw it in time, and nothing was seen before."""
    weights, trunk = folder / "stale.pt", folder / "trunk"
    _alone(Case(str(trunk), steps=TRUNK_STEPS, stale_weights=str(weights), stale_at=STALE_AT))
    newest = newest_verified(trunk / "checkpoints")
    assert newest is not None, "the healthy beginning left no checkpoint"
    print(_row("fault", "event", "note", "incident", "trip", *RULES, widths=SICK_WIDTHS))

    def one(kind: str) -> bool:
        event = TRUNK_STEPS if kind.startswith("resume") else TRUNK_STEPS + EVENT_AFTER
        case = Case(
            *(str(folder / kind), 0, TRUNK_STEPS + SICK_STEPS),
            action="warn",
            resume_from=str(newest.path),
            sick=kind,
            event=event,
            stale_weights=str(weights),
        )
        _alone(case, world=2 if kind == "nan_rank1" else 1)
        return _report_sick(kind, event, trunk, Path(case.run_dir))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        is_seen = list(pool.map(one, SICK))
    print(f"{sum(is_seen)} of {len(is_seen)} faults are seen as they should be")
    return all(is_seen)


def _report_sick(kind: str, event: int, trunk: Path, run_dir: Path) -> bool:
    found = _findings(run_dir)
    early = [one for one in found if one["step"] < event and one["tier"] != "note"]
    words: list[str] = []
    for tier in TIERS:
        first = next((one for one in found if one["tier"] == tier and one["step"] >= event), None)
        words.append("-" if first is None else f"{first['step'] - event} {first['kind']}")
    rules: list[str] = []
    for metric, rule in (("loss", olmo_core), ("grad_norm", olmo_core), ("loss", _foundry)):
        values = _series(trunk, metric) | _series(run_dir, metric)
        steps = list(values)
        after = [steps[at] for at in rule([values[step] for step in steps]) if steps[at] >= event]
        rules.append(str(after[0] - event) if after else "-")
    is_seen = kind not in MUST_BE_SEEN or _is_seen(found, event, *MUST_BE_SEEN[kind])
    line = _row(kind, event, *words, *rules, widths=SICK_WIDTHS)
    line += ("" if is_seen else "   NOT SEEN") + (f"   EARLY: {early}" if early else "")
    print(line, flush=True)
    return is_seen and not early


def _foundry(values: list[float]) -> list[int]:
    return llm_foundry(values, TRUNK_STEPS + SICK_STEPS)


def _is_seen(found: list[dict[str, Any]], event: int, kind: str, tier: str, within: int) -> bool:
    return any(one["kind"] == kind and one["tier"] == tier and 0 <= one["step"] - event <= within for one in found)


def _row(*cells: object, widths: Sequence[int] = WIDTHS) -> str:
    first, *rest = zip(cells, widths, strict=False)
    return f"{first[0]!s:{first[1]}}" + "".join(f"{cell!s:>{width}}" for cell, width in rest)


def _alone(case: Case, world: int = 1) -> None:
    """Without a supervisor, as a script runs on a laptop."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = _surroundings(Path(case.run_dir)) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(WORKER), json.dumps(dataclasses.asdict(case))]
    ranks = [
        subprocess.Popen(
            command,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=LIMIT_S)
        if rank.returncode != 0:
            raise SystemExit(f"{case.run_dir}: exit {rank.returncode}\n{errors[-3000:]}")


def _surroundings(run_dir: Path) -> dict[str, str]:
    home = run_dir.with_name(f"{run_dir.name}-home")
    home.mkdir(parents=True, exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MIDWATCH", "TORCHELASTIC"))}
    return {**clean, "HOME": str(home), "OMP_NUM_THREADS": "1"}


def _findings(run_dir: Path) -> list[dict[str, Any]]:
    found = [{**line.data, "step": line.step} for line in merged(run_dir) if line.event == "guard.found"]
    return sorted(found, key=lambda one: one["step"])


def _series(run_dir: Path, metric: str) -> dict[int, float]:
    """The live values by step."""
    with MetricIndex(run_dir, run_dir.with_name(f"{run_dir.name}-index")) as index:
        index.sync()
        return {point.step: point.value for point in index.series(metric)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("healthy", "sick", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_healthy_gpt_") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        is_good = args.what == "sick" or healthy(args.seeds, args.steps, folder)
        return 0 if (args.what == "healthy" or sick(folder)) and is_good else 1


if __name__ == "__main__":
    sys.exit(main())
