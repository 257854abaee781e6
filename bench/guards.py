#!/usr/bin/env python3
"""What the guards cost and what they make of recorded curves.

guards.py cost                 microseconds a step: run.log and all guards; the exit code says whether the bar holds
guards.py curves [FOLDER]      incidents and notes on each curve of a folder with an index.jsonl; the exit code says
                               whether the bars hold on the healthy ones, 77 that there are no curves here
guards.py variants FOLDER      the same, written as other loggers would: thinned, rounded, in bits, with restarts
guards.py big [--rows N]       `midwatch triage` on a made-up file: the right answer, in bounded memory, or 1
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from guard_variants import VARIANTS, Record, read, write

from midwatch.config import GuardsConfig, ScheduleConfig
from midwatch.guards import TIERS, Breaker, Guards, Sample, judged
from midwatch.triage import read_facts, replay, report

BAR_US = 200.0
STEPS = 20_000
RANKS = (8, 64)
"""The second is the most whose own values are exchanged."""
CURVES = Path(__file__).resolve().parents[2] / "shared" / "cases" / "curves" / "real"
"""Beside a checkout, where somebody has put them: curves of real runs are their owners'."""
INCIDENTS_BAR, NOTES_BAR = 1.0, 500.0
"""Per 100,000 points of healthy curves; trips count as incidents, and all findings as notes."""
BIG_MEMORY_BAR_MB = 200.0
"""Peak of the whole process, of which the interpreter and its modules take some 25."""
BIG_LIMIT_S = 3600.0
SKIPPED = 77
"""Exit code: nothing to judge here. ``accept.py`` says so."""


def samples(steps: int, ranks: int) -> list[Sample]:
    source = random.Random(1)
    made: list[Sample] = []
    for step in range(steps):
        loss = 10 * (step + 10) ** -0.2 * (1 + source.gauss(0, 0.01))
        norm = 0.5 + 0.1 * source.random()
        made.append(
            Sample(
                step=step,
                loss=loss,
                grad_norm=norm,
                lr=(3e-4, 3e-4),
                loss_scale=65536.0,
                param_norm=20 + step * 1e-4,
                update_ratio=0.003 * (1 + 0.1 * source.random()),
                unchanged_share=0.0 if step % 100 == 0 else None,
                rank_losses={rank: loss * (1 + source.gauss(0, 0.02)) for rank in range(ranks)},
                rank_norms={rank: norm * (1 + source.gauss(0, 0.02)) for rank in range(ranks)},
                checksums=dict.fromkeys(range(ranks), "abc") if step % 100 == 0 else None,
                token_entropy=4.5 + 0.1 * source.random(),
                seen_share=0.0,
                repeated_share=0.0,
                token_distance=0.2 + 0.01 * source.random(),
                same_rows_ranks=0.0,
                source_z=2 * source.random(),
            )
        )
    return made


def cost() -> int:
    """With few ranks and with many; 1 where the bar is broken."""
    figures = [_cost(ranks) for ranks in RANKS]
    return int(any(one["all_p50_us"] > BAR_US for one in figures))


def _cost(ranks: int) -> dict[str, float]:
    """Every rule at every step, the ranks' own values included; and what a script's ``run.log`` costs beside."""
    from midwatch.audit import Journal
    from midwatch.train.metrics import MetricLog

    plan = ScheduleConfig(kind="constant", peak_lr=3e-4)
    guards, breaker = Guards(GuardsConfig(schedule=plan)), Breaker()
    took: dict[str, list[int]] = {"run_log": [], "guards": [], "usual": [], "all": []}
    usual = Guards(GuardsConfig(schedule=plan))
    with tempfile.TemporaryDirectory() as folder:
        log = MetricLog(Journal(Path(folder) / "a0001.jsonl"), every=10)
        for sample in samples(STEPS, ranks):
            start = time.perf_counter_ns()
            log.add(sample.step, {"loss": sample.loss, "grad_norm": sample.grad_norm, "lr": 3e-4, "tokens": 4096})
            logged = time.perf_counter_ns()
            breaker.handle(judged(guards.observe(sample), logged))
            end = time.perf_counter_ns()
            usual.observe(Sample(step=sample.step, loss=sample.loss, grad_norm=sample.grad_norm, lr=3e-4))
            took["usual"].append(time.perf_counter_ns() - end)
            took["run_log"].append(logged - start)
            took["guards"].append(end - logged)
            took["all"].append(end - start)
        log.close()
    figures: dict[str, float] = {"ranks": ranks}
    figures |= {
        f"{name}_{label}_us": round(sorted(values)[int(share * (len(values) - 1))] / 1e3, 1)
        for name, values in took.items()
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }
    figures |= {f"{name}_mean_us": round(sum(values) / len(values) / 1e3, 1) for name, values in took.items()}
    start = time.perf_counter_ns()
    state = json.dumps(guards.state_dict())
    figures |= {"state_ms": (time.perf_counter_ns() - start) / 1e6, "state_kb": len(state) / 1024}
    print(json.dumps(figures))
    return figures


def curves(folder: Path) -> int:
    """A line a curve; rates over all that are labelled healthy, held to their bars."""
    index = folder / "index.jsonl"
    if not index.exists():
        print(f"SKIPPED: there are no recorded curves of real runs at {folder}; nothing was judged")
        return SKIPPED
    labels = [json.loads(line) for line in index.read_text().splitlines()]
    points = incidents = notes = 0
    accused: list[str] = []
    print(f"{'curve':34}{'points':>8}{'trips':>6}{'incidents':>10}{'notes':>6}  cause")
    for label in labels:
        path = folder / label["file"]
        facts = folder / label["facts"] if label.get("facts") else None
        found = report(replay(path, read_facts(facts) if facts else None))
        counts = [found.count(tier) for tier in ("trip", "incident", "note")]
        cause = found.verdict.cause
        print(f"{path.stem:34}{found.curve['rows']:8}{counts[0]:6}{counts[1]:10}{counts[2]:6}  {cause}")
        if label["healthy"]:
            points += found.curve["rows"]
            incidents += counts[0] + counts[1]
            notes += sum(counts)
            accused += [f"{path.stem}: {cause}"] if cause not in ("none", "undecided") else []
    rates = [1e5 * count / max(1, points) for count in (incidents, notes)]
    print(f"healthy: {points} points, {incidents} incidents or trips ({rates[0]:.2f} per 100k), ", end="")
    print(f"{notes} findings ({rates[1]:.0f} per 100k)")
    missed = missed_bars(points, incidents, notes, accused)
    print("\n".join(f"BROKEN: {line}" for line in missed) or "all bars hold")
    return int(bool(missed))


def missed_bars(points: int, incidents: int, notes: int, accused: list[str]) -> list[str]:
    """Of healthy curves: too many alarms, too many notes, a cause where nothing happened; and nothing to judge."""
    if not points:
        return ["no point of a healthy curve"]
    missed: list[str] = []
    for word, count, bar in (("incidents or trips", incidents, INCIDENTS_BAR), ("findings", notes, NOTES_BAR)):
        rate = 1e5 * count / points
        missed += [f"{rate:.2f} {word} per 100,000 points (bar {bar:g})"] if rate > bar else []
    return missed + [f"a cause is named for a healthy curve, {text}" for text in accused]


def variants(folder: Path, names: list[str]) -> int:
    """A line a way of writing them; spikes are looked for where the curve still has the point."""
    labels = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    labels = [label for label in labels if label["healthy"] or label.get("spikes")]
    curves = {label["file"]: read(folder / label["file"]) for label in labels}
    print(f"{'as':18}{'points':>9}{'incidents':>10}{'per 100k':>9}{'notes':>7}{'per 100k':>9}{'spikes noted':>14}")
    for name in names:
        points = alarms = notes = seen = spikes = 0
        worst: list[str] = []
        for label in labels:
            counted = _variant(name, label, curves[label["file"]])
            seen, spikes = seen + counted["seen"], spikes + counted["spikes"]
            if label["healthy"]:
                points, alarms, notes = points + counted["rows"], alarms + counted["alarms"], notes + counted["notes"]
                worst += [f"{Path(label['file']).stem} {counted['what']}"] if counted["alarms"] else []
        rates = [1e5 * count / max(1, points) for count in (alarms, notes)]
        print(
            f"{name:18}{points:9}{alarms:10}{rates[0]:9.2f}{notes:7}{rates[1]:9.0f}{seen:9} of {spikes}",
            "; ".join(worst),
            flush=True,
        )
    return 0


def _variant(name: str, label: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "curve.csv"
        changed = VARIANTS[name](records)
        write(path, changed)
        found = report(replay(path))
    steps = [one.step for one in found.incidents]
    there = {int(record["step"]) for record in changed}
    wanted = [spike for spike in label.get("spikes", []) if any(step in there for step in range(spike - 5, spike + 11))]
    alarms = [one for one in found.incidents if one.tier != "note"]
    return {
        "rows": found.curve["rows"],
        "alarms": found.count("incident") + found.count("trip"),
        "notes": sum(found.count(tier) for tier in TIERS),
        "seen": sum(any(spike - 60 <= step <= spike + 60 for step in steps) for spike in wanted),
        "spikes": len(wanted),
        "what": ", ".join(f"{one.kind} at {one.step}" for one in alarms[:3]),
    }


def big(rows: int) -> int:
    """One process of its own, so that the peak memory is that of the command."""
    source = random.Random(2)
    noise = [source.gauss(0, 0.01) for _ in range(9973)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.csv"
        with path.open("w") as file:
            file.write("step,loss,grad_norm,lr\n")
            for step in range(rows):
                loss = 10 * (step + 10) ** -0.1 * math.exp(noise[step % 9973])
                file.write(f"{step},{loss:.5f},{0.5 + abs(noise[step * 7 % 9973]):.4f},0.0003\n")
        start = time.monotonic()
        code, peak_mb, said = _watched([sys.executable, "-m", "midwatch", "triage", "--csv", str(path), "--json"])
        seconds = time.monotonic() - start
    if code != 0:
        print(f"BROKEN: exit code {code}\n{said[-2000:]}")
        return 1
    found = json.loads(said)
    is_right = found["curve"]["rows"] == rows and found["verdict"]["cause"] == "none"
    is_small = peak_mb <= BIG_MEMORY_BAR_MB
    print(f"{rows} rows in {seconds:.0f} s ({rows / seconds:.0f} a second), {len(found['incidents'])} findings")
    print(f"all rows read, nothing made of noise: {'holds' if is_right else 'BROKEN'}")
    print(f"peak {peak_mb:.0f} MB (bar {BIG_MEMORY_BAR_MB:.0f} MB): {'holds' if is_small else 'BROKEN'}")
    return 0 if is_right and is_small else 1


def _watched(command: list[str]) -> tuple[int, float, str]:
    """Exit code, most memory in MB that this process had, and what it wrote to its standard output."""
    end, peak_mb = time.monotonic() + BIG_LIMIT_S, 0.0
    with tempfile.TemporaryFile() as output, subprocess.Popen(command, stdout=output) as process:
        # Asked as it runs: what is told of a child that has ended counts the process that it was forked from.
        while process.poll() is None:
            peak_mb = max(peak_mb, _peak_mb(process.pid))
            if time.monotonic() > end:
                process.kill()
            time.sleep(0.02)
        output.seek(0)
        return process.returncode, peak_mb, output.read().decode()


def _peak_mb(pid: int) -> float:
    """So far; 0 of one that has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("cost")
    verbs.add_parser("curves").add_argument("folder", type=Path, nargs="?", default=CURVES)
    other = verbs.add_parser("variants")
    other.add_argument("folder", type=Path)
    other.add_argument("--only", default=",".join(VARIANTS), help="of the ways of writing")
    verbs.add_parser("big").add_argument("--rows", type=int, default=10_000_000)
    given = parser.parse_args()
    if given.verb == "cost":
        return cost()
    if given.verb == "variants":
        return variants(given.folder, given.only.split(","))
    return curves(given.folder) if given.verb == "curves" else big(given.rows)


if __name__ == "__main__":
    sys.exit(main())
