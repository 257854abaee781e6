"""``midwatch triage``: what the guards see in a recorded curve, and what can be said about the cause."""

from __future__ import annotations

from pathlib import Path

import click

from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.cli._progress import ByteCounter
from midwatch.guards import TIERS, Tier
from midwatch.triage import Facts, Report, read_facts, replay, report

_SHOWN_NOTES = 20
_COLOURS = {"trip": "red", "incident": "yellow"}


@click.command(
    "triage",
    short_help="Find what is wrong with a recorded curve.",
    epilog=exits(1, 65, e1="an incident or a trip", e65="the file holds nothing that can be judged"),
)
@click.option("--csv", "csv_path", metavar="FILE", required=True, type=click.Path(path_type=Path), help="The metrics.")
@click.option("--facts", "facts_path", metavar="FILE", type=click.Path(path_type=Path), help="JSON: plan and resumes.")
@json_option
@click.pass_context
def command(context: click.Context, csv_path: Path, facts_path: Path | None, *, is_json: bool) -> None:
    """Run the guards over a file of metrics, one row a logged step, as they run during training.

    Columns are known by their usual names (step, loss, grad_norm, lr, loss_scale, ...). Where steps go back, the rows
    before are taken as rolled back. A column that is not there is evidence that is not available, never a guess.
    """
    facts = read_facts(facts_path) if facts_path is not None else Facts()
    with ByteCounter(f"reading {plain(csv_path.name)}, twice") as counter:
        found = report(replay(csv_path, facts, counter.add))
    if is_json:
        show_json(found)
    else:
        _show(found)
    context.exit(1 if found.count("incident") or found.count("trip") else 0)


def _show(found: Report) -> None:
    curve = found.curve
    judged = ", ".join(curve["inputs"])
    say(f"{curve['rows']} rows, steps {curve['first_step']} to {curve['last_step']}; judged: {judged}")
    for remark in found.remarks:
        say(f"  {plain(remark)}", fg="yellow")
    notes = 0
    for one in found.incidents:
        notes += one.tier == "note"
        if one.tier != "note" or notes <= _SHOWN_NOTES:
            say(f"{one.tier:8}  {one.kind:15} step {one.step}: {plain(one.text)}", fg=_COLOURS.get(one.tier))
    if notes > _SHOWN_NOTES:
        say(f"({notes - _SHOWN_NOTES} more notes: --json lists them)")
    counts = ", ".join(_counted(found.count(tier), tier) for tier in reversed(TIERS))
    say(f"\n{counts}; cause: {found.verdict.cause}")
    table(
        ("", "class", "check", "result", "detail"),
        [[c.order, c.cause_class, c.check, c.result, c.detail] for c in found.checks],
    )


def _counted(count: int, word: Tier) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
