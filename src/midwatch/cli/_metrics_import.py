"""``midwatch metrics import``: what other frameworks wrote, as journals of a run."""

from __future__ import annotations

from pathlib import Path

import click

from midwatch.audit.importers import FORMATS, Imported, import_metrics
from midwatch.cli._by_hand import record_by_hand, who
from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.cli._places import Place
from midwatch.cli._progress import ByteCounter


@click.command(
    "import",
    epilog=exits(
        2, 65, 73, 74, e2="metrics are there already, or wrong usage", e65="a file cannot be read, or is mixed"
    )
    + " Example: midwatch metrics import runs/exp7 --run-dir exp7",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--run-dir", type=click.Path(path_type=Path), required=True, help="The run folder; made if it is not there."
)
@click.option(
    "--format",
    "name",
    type=click.Choice(["auto", *FORMATS]),
    default="auto",
    show_default=True,
    help="Of all files; auto looks into each.",
)
@click.option("--step-column", default="", metavar="NAME", help="The column of steps in a table, if it is an odd one.")
@click.option(
    "--run-name", default="", metavar="NAME", help="The run to take, of a table with a column that names runs."
)
@click.option("--replace", is_flag=True, help="Remove what was imported before; never what midwatch recorded.")
@click.option("--dry-run", is_flag=True, help="Read everything, say what would be imported, write nothing.")
@json_option
def import_command(
    files: tuple[Path, ...],
    *,
    run_dir: Path,
    name: str,
    step_column: str,
    run_name: str,
    replace: bool,
    dry_run: bool,
    is_json: bool,
) -> None:
    """Bring metrics of other frameworks into a run folder: TensorBoard event files (or a folder of them), logs of
    Megatron-LM and torchtitan, the Hugging Face trainer_state.json, and tables (CSV).

    Where the steps of a metric go back a new attempt begins, as after a restart; files of one run may be given
    together.
    """
    with ByteCounter("reading") as counter:
        done = import_metrics(
            list(files),
            run_dir,
            format=name,
            step_column=step_column,
            run_name=run_name,
            is_replacing=replace,
            is_rehearsal=dry_run,
            progress=counter.add,
        )
    if not dry_run:
        _record(done)
    if is_json:
        show_json(done)
    else:
        _show(done)


def _record(done: Imported) -> None:
    run_dir = Path(done.run_dir)
    with record_by_hand(Place(root=run_dir / "checkpoints", run_dir=run_dir)) as recorder:
        recorder.record(
            "metrics.imported",
            by=who(),
            files=done.files,
            attempts=len(done.attempts),
            points=done.points,
            replaced=done.replaced,
        )


def _show(done: Imported) -> None:
    verb = "would import" if done.dry_run else "imported"
    formats = ", ".join(sorted({file["format"] for file in done.files}))
    what = f"{done.points} values of {done.rows} rows from {len(done.files)} files ({formats})"
    say(f"{verb} {what} into {plain(done.run_dir)}", fg=None if done.dry_run else "green")
    rows = [(one.attempt, one.start, f"{one.first}-{one.last}", one.rows) for one in done.attempts]
    table(("attempt", "began at", "steps", "rows"), rows)
    for note in done.notes:
        say(plain(note), fg="yellow")
