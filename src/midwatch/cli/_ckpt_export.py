"""``midwatch ckpt export``: take a checkpoint away in a form that others read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from midwatch.checkpoint.format import CheckpointInfo, ExportReport, export_safetensors
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.cli._places import find_place, path_argument, pick_or_newest, selection_argument
from midwatch.core import format_bytes


@click.command(
    "export",
    epilog=exits(65, 74, e65="no such checkpoint, or damaged: nothing is left behind", e74="no room, or a disk error")
    + " Example: midwatch ckpt export RUN 500 --to weights --format safetensors --only model",
)
@path_argument
@selection_argument
@click.option("--to", "target", required=True, type=click.Path(path_type=Path), help="A folder that is not there yet.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(("safetensors", "dcp")),
    default="safetensors",
    show_default=True,
    help="safetensors: files and an index, without PyTorch. dcp: for torch.distributed.checkpoint.load.",
)
@click.option("--only", "sections", multiple=True, metavar="SECTION", help="Such as model; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing.")
@json_option
def export(
    path: Path | None,
    selection: str | None,
    target: Path,
    kind: str,
    sections: Sequence[str],
    dry_run: bool,
    is_json: bool,
) -> None:
    """Write whole tensors into a new folder, checking every byte on its way. The newest verified one if none is named.

    With one --only the names lose that section's prefix: what is left are the names of the model itself.
    """
    if target.exists():
        raise click.UsageError(f"{target} exists, and nothing is overwritten: give another folder")
    info = pick_or_newest(find_place(path), selection)
    report = _export(kind)(Path(info.path), target, tuple(sections), is_dry_run=dry_run)
    if is_json:
        show_json({"name": info.name, "step": info.step, "format": kind, "dry_run": dry_run, "report": report})
        return
    _show(info, report, dry_run=dry_run)


def _export(kind: str):
    if kind == "safetensors":
        return export_safetensors
    try:
        from midwatch.checkpoint import export_dcp
    except ImportError as error:
        raise click.UsageError("--format dcp needs PyTorch here; --format safetensors does not") from error
    return export_dcp


def _show(info: CheckpointInfo, report: ExportReport, *, dry_run: bool) -> None:
    done = "would be written" if dry_run else "written, every byte checked"
    where = f"{plain(info.name)} to {plain(report.target)}"
    say(f"{where}: {report.tensors} tensors, {format_bytes(report.size_bytes)} {done}", fg=None if dry_run else "green")
    for name in report.files:
        say(f"  {plain(name)}")
    if report.left_out:
        say(f"{report.left_out} tensors left out: of other sections, or one rank's own (random numbers)")
    if info.is_suspect:
        say(f"mind: {plain(info.reason)}", fg="yellow")
