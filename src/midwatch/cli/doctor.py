"""``midwatch doctor``: will a run find here what it needs?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from midwatch.checkpoint.format import list_checkpoints, places_of
from midwatch.cli._check_scheduler import check_scheduler
from midwatch.cli._checks import Finding, examine
from midwatch.cli._numbers import FiniteRange
from midwatch.cli._output import exits, json_option, plain, say, show_json
from midwatch.config import load_config, read_rank_env, resolve_paths
from midwatch.core import EXIT_FAILED, EXIT_OK, format_bytes

BYTES_PER_PARAM = 12
"""32-bit weights and Adam's two 32-bit moments; 16-bit weights with a 32-bit master copy need a little more."""

_COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(
    "doctor",
    short_help="Check what a run will need on this machine.",
    epilog=exits(
        1, 78, e0="nothing that would stop a run (warnings are told)", e1="a problem: its line says what to do"
    )
    + " Example: midwatch doctor RUN --model-params 7e9",
)
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="The TOML file of the run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")
@click.option("--model-params", type=FiniteRange(min=1), metavar="N", help="Parameters of the model, such as 7e9.")
@json_option
def command(
    run: Path | None, config_file: Path | None, overrides: Sequence[str], model_params: float | None, is_json: bool
) -> None:
    """Check Python, PyTorch, shared memory, disk, clock, py-spy and scheduler for the run folder RUN, which need not
    exist yet.

    The size of a checkpoint is that of the newest one in RUN, or 12 bytes for each of --model-params.
    """
    config = load_config(config_file, overrides)
    paths = resolve_paths(config, read_rank_env())
    run_dir = run.absolute() if run is not None else paths.run_dir
    checkpoints = paths.checkpoint_dir if config.checkpoint.dir else run_dir / "checkpoints"
    size = int(model_params * BYTES_PER_PARAM) if model_params else _newest_size(checkpoints, run_dir)
    keep_last = places_of(config.checkpoint.keep_last, config.checkpoint.keep)
    findings = list(examine(run_dir, checkpoints, checkpoint_bytes=size, keep_last=keep_last))
    findings.extend(check_scheduler(config.isolate))
    is_ok = all(finding.state != "problem" for finding in findings)
    if is_json:
        show_json({"ok": is_ok, "run_dir": str(run_dir), "checkpoint_bytes": size, "findings": findings})
    else:
        _show(findings, size, is_ok=is_ok)
    sys.exit(EXIT_OK if is_ok else EXIT_FAILED)


def _newest_size(checkpoints: Path, run_dir: Path) -> int:
    listed = list_checkpoints(checkpoints, run_dir=run_dir)
    return next((info.size_bytes for info in listed if info.size_bytes), 0)


def _show(findings: Sequence[Finding], size: int, *, is_ok: bool) -> None:
    for finding in findings:
        say(f"{finding.state.upper():<8} {finding.check}: {plain(finding.found)}", fg=_COLORS[finding.state])
        if finding.todo:
            say(f"         -> {plain(finding.todo)}")
    if size:
        say(f"one checkpoint is counted as {format_bytes(size)}")
    say("ready" if is_ok else "not ready", fg="green" if is_ok else "red")
