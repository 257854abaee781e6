"""``midwatch ckpt adopt``: watch over a checkpoint that somebody else wrote."""

from __future__ import annotations

from pathlib import Path

import click

from midwatch.checkpoint.format import Adopted, adopt, look_over, record_file
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.core import format_bytes


@click.command(
    "adopt",
    epilog=exits(65, 74, e65="no checkpoint that is known, or one that is damaged", e74="changed while it was read")
    + " Example: midwatch ckpt adopt old-run/checkpoint-5000",
)
@click.argument("path", metavar="FOLDER", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Its step; otherwise the last number in the name."
)
@click.option("--dry-run", is_flag=True, help="Say what would be read and written; write nothing.")
@json_option
def adopt_command(path: Path, step: int | None, dry_run: bool, is_json: bool) -> None:
    """Write a record of every file's digests beside a foreign checkpoint, so that `ckpt verify` finds damage later.

    FOLDER is a folder of torch.distributed.checkpoint, of safetensors files or of torch.save files, or one such file.
    Its files are read, never changed; nothing in midwatch resumes from it or prunes it.
    """
    where = record_file(path)
    if where.exists():
        raise click.UsageError(f"{path} is adopted already; to begin anew, remove {where}")
    record = look_over(path, step) if dry_run else adopt(path, step)
    if is_json:
        document = {"path": str(path), "kind": record.kind, "step": record.step, "size_bytes": record.size_bytes}
        names = [part.name for part in record.files]
        show_json({**document, "files": names, "record": str(where), "dry_run": dry_run})
        return
    say(_sentence(record, str(where), dry_run=dry_run), fg=None if dry_run else "green")


def _sentence(record: Adopted, where: str, *, dry_run: bool) -> str:
    step = "" if record.step is None else f", step {record.step}"
    what = f"{plain(record.name)} ({record.kind}{step}): {len(record.files)} files, {format_bytes(record.size_bytes)}"
    return f"{what} {'would be read' if dry_run else 'read'}; record: {plain(where)}"
