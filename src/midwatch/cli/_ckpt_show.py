"""``midwatch ckpt show``: what one checkpoint holds, from its records alone."""

from __future__ import annotations

from pathlib import Path

import click

from midwatch.checkpoint.format import (
    CheckpointInfo,
    GroupStats,
    Manifest,
    TensorStats,
    group_stats,
    read_manifest,
    read_stats,
)
from midwatch.cli._output import exits, json_option, pairs, plain, say, show_json, table, when
from midwatch.cli._places import find_place, path_argument, pick_or_newest, selection_argument
from midwatch.core import CheckpointError, CodeState, format_bytes

MAX_NAMED = 16


@click.command("show", epilog=exits(65, e65="no such checkpoint") + " Example: midwatch ckpt show RUN latest --tensors")
@path_argument
@selection_argument
@click.option("--tensors", is_flag=True, help="List every tensor with its type, shape and statistics.")
@json_option
def show(path: Path | None, selection: str | None, tensors: bool, is_json: bool) -> None:
    """Show what one checkpoint holds, from its manifest: the newest verified one if none is named.

    Norm, largest magnitude and non-finite values were taken when it was read back after writing.

    PATH is a run folder, a folder of checkpoints or one checkpoint; without it, the run folder configured here.
    """
    info = pick_or_newest(find_place(path), selection)
    try:
        manifest = read_manifest(Path(info.path))
    except CheckpointError:
        manifest = None  # torn or damaged: what the listing knows is all there is
    stats, notes = read_stats(Path(info.path), manifest) if manifest else ({}, [])
    if is_json:
        statistics = {"groups": group_stats(stats), "tensors": dict(stats), "notes": notes}
        show_json({"checkpoint": info, "manifest": manifest, "statistics": statistics})
        return
    pairs([(name, value) for name, value in _facts(info, manifest) if value != ""])
    if manifest is None:
        return
    say("")
    kind = manifest.digest_kind
    pairs([(file.name, f"{format_bytes(file.size_bytes)}, {kind} {file.digest}") for file in manifest.files])
    _show_statistics(group_stats(stats), notes)
    if tensors:
        say("")
        table(("tensor", "dtype", "shape", "norm", "largest", "non-finite"), _rows(manifest, dict(stats)))
    else:
        say(f"\n{len(manifest.tensors)} tensors; --tensors lists them")


def _show_statistics(groups: list[GroupStats], notes: list[str]) -> None:
    say("")
    if groups:
        columns = ("section", "tensors", "values", "norm", "largest", "in", "non-finite")
        rows = [
            (g.name, g.tensors, g.count, f"{g.norm:.6g}", f"{g.amax:.6g}", g.amax_tensor, g.nonfinite) for g in groups
        ]
        table(columns, rows)
    else:
        say("no statistics were taken")
    for note in notes:
        say(f"note: {plain(note)}", fg="yellow")
    sick = [key for group in groups for key in group.nonfinite_tensors]
    if sick:
        more = f" and {len(sick) - MAX_NAMED} more" if sick[MAX_NAMED:] else ""
        say(f"non-finite values in {plain(', '.join(sick[:MAX_NAMED]))}{more}", fg="red")


def _rows(manifest: Manifest, stats: dict[str, TensorStats]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for key, record in manifest.tensors.items():
        shape = "x".join(map(str, record.global_shape)) or "scalar"
        found = stats.get(key)
        figures = ("", "", "") if found is None else (f"{found.norm:.6g}", f"{found.amax:.6g}", found.nonfinite)
        rows.append((key, record.dtype, shape, *figures))
    return rows


def _origin(manifest: Manifest | None) -> list[tuple[str, object]]:
    known = manifest.provenance if manifest else None
    if known is None:
        return []
    dirty = f" and uncommitted changes{_where(known.code)}" if known.code.is_dirty else ""
    return [
        ("script", " ".join((known.code.entry, *known.command))),
        ("commit", f"{known.code.commit}{dirty}" if known.code.commit else ""),
        ("parameters", f"{len(known.semantic.values)}; --json shows them, `midwatch diff` compares them"),
    ]


def _where(code: CodeState) -> str:
    named = code.changed_files[:MAX_NAMED]
    more = f" and {code.changed_count - len(named)} more" if code.changed_count > len(named) else ""
    return f" in {', '.join(named)}{more}" if named else ""


def _facts(info: CheckpointInfo, manifest: Manifest | None) -> list[tuple[str, object]]:
    held = ", ".join(name for name, has in info.sections.items() if has)
    lacks = ", ".join(name for name, has in info.sections.items() if not has)
    return [
        ("name", info.name),
        ("path", info.path),
        ("state", f"{info.state}, suspect" if info.is_suspect else info.state),
        ("pinned", info.pin),
        ("remark", info.reason),
        ("run", info.run),
        ("step", info.step),
        ("attempt", info.attempt),
        ("world size", info.world_size),
        ("loss", "" if info.loss is None else info.loss),
        ("size", format_bytes(info.size_bytes)),
        ("written (UTC)", when(info.created_ns)),
        ("sections", held),
        ("without", lacks),
        ("config hash", info.config_hash),
        ("code hash", info.code_hash),
        *_origin(manifest),
        ("parent", info.parent),
        ("digest", info.digest),
        ("signed with key", manifest.key_id if manifest else ""),
    ]
