"""``midwatch ckpt prune``: carry retention out by hand, by the rules of the run, and say why each one stays or goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from midwatch.audit import read_ledger
from midwatch.checkpoint.format import (
    CheckpointInfo,
    RetentionPlan,
    list_checkpoints,
    plan_retention,
    policy_of,
    remove_checkpoint,
)
from midwatch.cli._by_hand import claims_folder, facts, in_use, record_by_hand, run_id
from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.cli._places import Place, find_place, path_argument
from midwatch.config import CheckpointConfig, load_config
from midwatch.core import format_bytes
from midwatch.storage import Fence, newest_attempt


@click.command(
    "prune",
    epilog=exits(
        65, 73, 74, 78, e0="done, or nothing to do", e65="no such folder, or a new attempt began meanwhile: look again"
    )
    + " Example: midwatch ckpt prune RUN --dry-run",
)
@path_argument
@click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="As checkpoint.keep_last.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="The TOML file of the run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")
@json_option
def prune(
    path: Path | None,
    dry_run: bool,
    keep_last: int | None,
    config_file: Path | None,
    overrides: Sequence[str],
    is_json: bool,
) -> None:
    """Remove the checkpoints that no rule keeps. The rules are those the run was last started with, unless told here.

    Whatever the rules say, these stay: the newest verified one that is not suspect, what the newest attempt resumed
    from, pinned ones, other runs' ones, and what is being written or damaged. So it may be done while the run trains.
    """
    place = find_place(path)
    told = [*overrides, *([f"checkpoint.keep_last={keep_last}"] if keep_last else [])]
    rules, source = _rules(place, config_file, told)
    fence = Fence(claims_folder(place), newest_attempt(claims_folder(place)))
    listing = list_checkpoints(place.root, run_dir=place.run_dir)
    run = run_id(place)
    if not run:
        _refuse_several_runs(place, listing)
    policy = policy_of(rules.keep_last, rules.keep)
    plan = plan_retention(listing, policy, in_use(place), run=run, attempt=fence.attempt)
    sizes = {info.name: info.size_bytes for info in listing}
    if not is_json:
        _show(plan, rules, source)
    if not dry_run:
        _carry_out(place, plan, fence)
    freed = sum(sizes[name] for name in plan.doomed)
    if is_json:
        document = {"root": str(place.root), "dry_run": dry_run, "doomed": plan.doomed, "freed_bytes": freed}
        show_json({**document, "note": plan.note, "rules": _facts(rules), "checkpoints": plan.verdicts})
        return
    done = "would be removed" if dry_run else "removed"
    say(f"{len(plan.doomed)} of {len(listing)} {done}, {format_bytes(freed)}", fg="yellow" if plan.doomed else "green")


def _refuse_several_runs(place: Place, listing: Sequence[CheckpointInfo]) -> None:
    """Whose rules are meant? One run's newest would push out all of another's.

    Raises:
        click.UsageError: The folder belongs to no run that is known, and several have saved there.
    """
    runs = sorted({info.run for info in listing if info.run})
    if len(runs) > 1:
        several = f"{plain(place.root)} holds checkpoints of {len(runs)} runs ({plain(', '.join(runs))})"
        raise click.UsageError(f"{several}: name the folder of the run that is meant")


def _rules(place: Place, config_file: Path | None, told: Sequence[str]) -> tuple[CheckpointConfig, str]:
    """The rules, and who said so.

    Raises:
        click.UsageError: Nobody did: the defaults are not a reason to delete.
    """
    if config_file is not None:
        return load_config(config_file, told).checkpoint, str(config_file)
    recorded = _recorded(place)
    if not recorded and not told:
        raise click.UsageError("the rules of this run are not known: give --keep-last, --set or --config")
    source = "the last start of the run" if recorded else "the command line, else the defaults"
    return load_config({"checkpoint": recorded}, told).checkpoint, source


def _recorded(place: Place) -> dict[str, Any]:
    """What rank 0 of the newest attempt wrote down."""
    for path in sorted((claims_folder(place) / "ledger").glob("a*.jsonl"), reverse=True):
        for line in read_ledger(path):
            if line.event == "run.attached" and "keep_last" in line.data:
                return {key: line.data[key] for key in ("keep_last", "keep") if key in line.data}
    return {}


def _carry_out(place: Place, plan: RetentionPlan, fence: Fence) -> None:
    if not plan.doomed:
        return
    steps = {verdict.name: verdict.step for verdict in plan.verdicts}
    with record_by_hand(place) as recorder:
        for name in plan.doomed:
            # A new attempt may be choosing where to resume from: the plan did not know of it.
            fence.check()
            if not (place.root / name).is_dir():
                continue  # the run itself was quicker
            remove_checkpoint(place.root, name)
            recorder.record("checkpoint.pruned", **facts(name, steps[name], pruned=[name]))


def _facts(rules: CheckpointConfig) -> dict[str, Any]:
    return {"keep_last": rules.keep_last, **msgspec.to_builtins(rules.keep)}


def _show(plan: RetentionPlan, rules: CheckpointConfig, source: str) -> None:
    words = [f"keep_last = {rules.keep_last}"]
    keep = rules.keep
    words += [f"keep.every_steps = {keep.every_steps}"] if keep.every_steps else []
    words += [f"keep.every_hours = {keep.every_hours:g}"] if keep.every_hours else []
    words += [f"keep.best = {keep.best} by {keep.best_metric} ({keep.best_mode})"] if keep.best else []
    say(f"rules ({plain(source)}): {plain(', '.join(words))}")
    rows = [("goes" if v.is_doomed else "stays", v.name, v.state, v.step, v.reason) for v in plan.verdicts]
    if rows:
        table(("", "name", "state", "step", "why"), rows)
    if plan.note:
        say(plain(plan.note), fg="yellow")
