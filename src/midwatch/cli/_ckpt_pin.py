"""``midwatch ckpt pin`` and ``unpin``: a person's word outlives every rule."""

from __future__ import annotations

from pathlib import Path

import click

from midwatch.checkpoint.format import CheckpointInfo, pin_checkpoint, unpin_checkpoint
from midwatch.cli._by_hand import facts, record_by_hand
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import Place, find_place, path_argument, pick, selection_argument

_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
_EXITS = exits(65, 73, 74, e65="no such checkpoint, or it is torn")


def _label(_context: click.Context, _option: click.Parameter, value: str) -> str:
    if not value.strip() or len(value) > 200 or not value.isprintable():
        raise click.BadParameter("must be 1 to 200 printable characters")
    return value.strip()


@click.command("pin", epilog=_EXITS + " Example: midwatch ckpt pin RUN 500 --label 'paper, table 2'")
@path_argument
@selection_argument
@click.option("--label", required=True, callback=_label, metavar="TEXT", help="Why it is kept, for whoever asks.")
@_dry_run
@json_option
def pin(path: Path | None, selection: str | None, label: str, dry_run: bool, is_json: bool) -> None:
    """Keep one checkpoint whatever the rules say, until it is unpinned. It may be done while the run trains.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    place, info = _choose(path, selection)
    if not dry_run:
        with record_by_hand(place) as recorder:
            pin_checkpoint(Path(info.path), label)
            recorder.record("checkpoint.pinned", **facts(info.name, info.step, label=label))
    _tell(info, {"label": label, "was": info.pin, "dry_run": dry_run}, is_json=is_json)
    if not is_json:
        before = f" (before: {info.pin})" if info.pin else ""
        say(f"{plain(info.name)} {'would be' if dry_run else 'is'} pinned: {plain(label)}{plain(before)}")


@click.command("unpin", epilog=_EXITS + " Example: midwatch ckpt unpin RUN 500")
@path_argument
@selection_argument
@_dry_run
@json_option
def unpin(path: Path | None, selection: str | None, dry_run: bool, is_json: bool) -> None:
    """Let the rules decide about one checkpoint again: the next pruning may remove it.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    place, info = _choose(path, selection)
    if info.pin and not dry_run:
        with record_by_hand(place) as recorder:
            unpin_checkpoint(Path(info.path))
            recorder.record("checkpoint.unpinned", **facts(info.name, info.step, label=info.pin))
    _tell(info, {"was": info.pin, "dry_run": dry_run}, is_json=is_json)
    if not is_json:
        done = "would no longer be pinned" if dry_run else "is no longer pinned"
        say(f"{plain(info.name)} {done}" if info.pin else f"{plain(info.name)} was not pinned")


def _choose(path: Path | None, selection: str | None) -> tuple[Place, CheckpointInfo]:
    place = find_place(path)
    info = pick(place, selection)
    if info is None:
        raise click.UsageError("say which one: its name, its step or latest")
    return place, info


def _tell(info: CheckpointInfo, document: dict[str, object], *, is_json: bool) -> None:
    if is_json:
        show_json({"name": info.name, "step": info.step, **document})
