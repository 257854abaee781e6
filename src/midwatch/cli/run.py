"""``midwatch run``: the command line of the launcher."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import Literal

import click
import msgspec

from midwatch.config import OutsidePlace, load_config, read_outside_place
from midwatch.core import printable
from midwatch.core.codes import CODES
from midwatch.supervise import LaunchRequest, Plan, Result, launch, plan, planned_environments


class _NodeCount(click.ParamType[tuple[int, int]]):
    """``N`` or ``MIN:MAX``, as (nodes that train, nodes in all)."""

    name = "N|MIN:MAX"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        least, _, most = str(value).partition(":")
        if not least.isdecimal() or not (most or least).isdecimal():
            self.fail(f"{value!r} is not a number of nodes, nor MIN:MAX", param, ctx)
        numbers = int(least), int(most or least)
        if not 1 <= numbers[0] <= numbers[1]:
            self.fail(f"{value!r}: at least one node, and MIN not above MAX", param, ctx)
        return numbers


@click.command(
    "run",
    short_help="Run a training script under supervision.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("--nproc-per-node", "nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks here.")
@click.option(
    "--nnodes",
    "nodes",
    type=_NodeCount(),
    default="1",
    show_default=True,
    help="Nodes; each runs this command. MIN:MAX: MIN train, the others wait as spares.",
)
@click.option("--run-dir", help="The run folder, shared by all nodes. Default: run.dir of the configuration.")
@click.option("--config", "config_file", type=click.Path(), help="TOML file; the ranks get the result, too.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")
@click.option("--max-restarts", type=click.IntRange(min=0), help="Restarts without progress in between.")
@click.option("--node-name", default="", help="This node's name; must differ between nodes. Default: the host name.")
@click.option("--bind", default="", help="Listen here. Default: loopback for one node, else what other nodes reach.")
@click.option("--adopt", is_flag=True, help="Another launcher (srun, torchrun) started this as one of its ranks.")
@click.option("--tee", type=click.Choice(["all", "0", "none"]), help="Ranks to show. Default: 0; with --adopt, this.")
@click.option("--dry-run", is_flag=True, help="Print what would be started, and do nothing.")
@click.option("--json", "is_json", is_flag=True, help="Print how the run ended as JSON on stdout.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    *,
    nproc: int,
    nodes: tuple[int, int],
    run_dir: str | None,
    config_file: str | None,
    overrides: Sequence[str],
    max_restarts: int | None,
    node_name: str,
    bind: str,
    adopt: bool,
    tee: Literal["all", "0", "none"] | None,
    dry_run: bool,
    is_json: bool,
    words: Sequence[str],
) -> None:
    """Run COMMAND (train.py ..., -m module ..., python train.py ..., any program) as ranks under supervision.

    A rank that dies, hangs or freezes is found, the culprit named, and all ranks are started again from the newest
    verified checkpoint. Exit codes: 0 done, 1 failed or restart budget spent, 75 stopped on request (start again to
    resume), 93 the same failure would come again, 2, 73, 76, 78 could not start.

    With --adopt nothing is started again here: the fault is judged, all ranks are ended, and the exit code says to the
    launcher whether to start again (75) or not (1, 93).
    """
    place = _place(nproc, nodes) if adopt else None
    settings = list(overrides)
    if run_dir == "":
        raise click.BadParameter("must not be empty", param_hint="--run-dir")
    # Not escaped to ASCII: TOML has no pairs of surrogates.
    settings += [f"run.dir={json.dumps(run_dir, ensure_ascii=False)}"] if run_dir is not None else []
    settings += [f"restart.max_restarts={max_restarts}"] if max_restarts is not None else []
    request = LaunchRequest(
        command=tuple(words),
        nproc=nproc,
        nnodes=nodes[0] if place is None else place.world_size,
        max_nodes=nodes[1] if place is None else 0,
        config=load_config(config_file, settings),
        has_config=bool(config_file or overrides),
        node_name=node_name,
        bind=bind,
        place=place,
    )
    checked = plan(request)
    if dry_run:
        _show_plan(checked, is_json=is_json)
        return
    mode = ("own" if adopt else "0") if tee is None else tee
    result = launch(checked, _say, tee=mode, out=2 if is_json else 1)
    _show_result(checked, result, is_json=is_json)
    sys.exit(result.exit_code)


def _place(nproc: int, nodes: tuple[int, int]) -> OutsidePlace:
    if (nproc, nodes) != (1, (1, 1)):
        raise click.UsageError("--adopt takes the ranks that there are: leave --nproc-per-node and --nnodes out")
    return read_outside_place()


def _say(sentence: str, level: str) -> None:
    color = {"error": "red", "warning": "yellow"}.get(level)
    # Sentences quote node names and lines that ranks wrote.
    click.secho(f"[midwatch] {printable(sentence)}", err=True, fg=color)


def _show_result(checked: Plan, result: Result, *, is_json: bool) -> None:
    if is_json:
        values = {**msgspec.to_builtins(result), "run_dir": str(checked.paths.run_dir)}
        del values["is_told"]
        click.echo(json.dumps(values, default=str))
    if result.is_told:
        return
    if not result.error:
        _say(result.sentence, "info")
        return
    _say(f"[{result.error}] {result.sentence}", "error")
    if result.error in CODES:
        _say(f"-> {CODES[result.error].hint}", "info")


def _show_plan(checked: Plan, *, is_json: bool) -> None:
    environments = planned_environments(checked)
    if is_json:
        values = {"command": list(checked.command), "run_dir": str(checked.paths.run_dir), "ranks": environments}
        click.echo(json.dumps(values))
        return
    click.echo(f"run folder: {checked.paths.run_dir}")
    click.echo(f"command:    {shlex.join(checked.command)}")
    place = checked.request.place
    for number, environment in enumerate(environments, place.local_rank if place else 0):
        click.echo(f"\nlocal rank {number}:")
        for name, value in sorted(environment.items()):
            click.echo(f"  {name}={value}")
