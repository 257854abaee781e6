"""The two sides of ``midwatch diff``: an attempt's record, or a checkpoint and the record of the attempt behind it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import msgspec

from midwatch.audit import AttemptRecord, read_record, read_run, read_texts, recorded_attempts
from midwatch.checkpoint.format import CheckpointInfo, read_manifest
from midwatch.cli._places import find_place, pick, run_folder
from midwatch.config import make_section, packages_section
from midwatch.core import CheckpointError, Provenance, Section, StorageError, attempt_name, parse_checkpoint_name
from midwatch.storage import as_storage_error

_ATTEMPT = re.compile(r"a\d{1,8}")
_NAMED = 12


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side. Without ``record`` its diff and texts are not known."""

    name: str
    kind: str
    """``attempt`` or ``checkpoint``."""
    attempt: int
    provenance: Provenance
    step: int | None = None
    record: AttemptRecord | None = None
    texts: dict[str, str] = {}
    remark: str = ""

    @property
    def environment(self) -> Section:
        """Of a record from before provenance had it: made from what the record says beside. Empty: not known."""
        kept, record = self.provenance.environment, self.record
        if kept.hash or record is None or not record.environment:
            return kept
        return make_section("environment", record.environment)

    @property
    def packages(self) -> Section:
        """As ``environment``."""
        kept, record = self.provenance.packages, self.record
        return kept if kept.hash or record is None else packages_section(record.packages)


def find_side(run_dir: Path | None, word: str) -> Side:
    """What a word means: ``a0003``, a checkpoint's name or step, ``latest``, or the path of a checkpoint.

    Raises:
        CheckpointError: CK201 no such attempt or checkpoint, or it has no record of its provenance; CK106 damaged.
        SuperviseError: SV110 no run folder.
    """
    if _ATTEMPT.fullmatch(word):
        return _of_attempt(run_folder(run_dir), int(word[1:]))
    if run_dir is None and Path(word).is_dir():
        place = find_place(Path(word))
        info = pick(place, None if place.checkpoint is not None else "latest")
    else:
        folder = run_folder(run_dir)
        place = find_place(folder)
        try:
            info = pick(place, word)
        except CheckpointError:
            if (parsed := parse_checkpoint_name(word)) is None or read_record(folder, parsed.attempt) is None:
                raise
            # Pruned, but the attempt that wrote it left a record.
            side = _of_attempt(folder, parsed.attempt)
            return msgspec.structs.replace(side, remark=f"{word} is not there any more: this is its attempt's record")
    if info is None:
        raise click.UsageError(f"{word} is not one checkpoint: name it")
    return _of_checkpoint(info, place.run_dir or place.root.absolute().parent)


def _of_attempt(run_dir: Path, attempt: int) -> Side:
    record = read_record(run_dir, attempt)
    if record is None:
        _refuse_unreadable(run_dir / "provenance")
        known = [attempt_name(number) for number in recorded_attempts(run_dir)]
        there = f"it has {', '.join(known[-_NAMED:])}" if known else "no attempt left one"
        raise CheckpointError(
            "CK201",
            f"{run_dir} has no record of what attempt {attempt} ran; {there}",
            hint="A record is written by scripts with midwatch's lines; a checkpoint can be compared as well: name it.",
            path=str(run_dir),
        )
    return Side(
        name=attempt_name(attempt),
        kind="attempt",
        attempt=attempt,
        provenance=record.provenance,
        record=record,
        texts=read_texts(run_dir, record.provenance.code.hash),
    )


def _refuse_unreadable(folder: Path) -> None:
    """A folder that may not be read is another thing than an empty one."""
    try:
        with os.scandir(folder):
            pass
    except FileNotFoundError:
        pass
    except OSError as error:
        raise as_storage_error(error, f"reading {folder}") from error


def _of_checkpoint(info: CheckpointInfo, run_dir: Path) -> Side:
    manifest = read_manifest(Path(info.path))
    if manifest.provenance is None:
        message = f"{info.name} was written before midwatch kept provenance in checkpoints, or without its `attach`"
        hint = "`midwatch ckpt diff` compares what it holds; config_hash and code_hash tell whether they differ."
        raise CheckpointError("CK201", message, hint=hint, path=info.path)
    is_ours = _run_of(run_dir) == manifest.run
    record = read_record(run_dir, manifest.attempt) if is_ours else None
    texts = read_texts(run_dir, manifest.code_hash)
    return Side(
        name=info.name,
        kind="checkpoint",
        attempt=manifest.attempt,
        step=manifest.step,
        provenance=manifest.provenance,
        record=record,
        texts=texts,
        remark="" if record else _alone(manifest.provenance, has_texts=bool(texts)),
    )


def _alone(known: Provenance, *, has_texts: bool) -> str:
    lacking = [] if has_texts else ["lines of code"]
    lacking += ["lines of uncommitted changes"]
    lacking += [] if known.environment.hash else ["environment", "packages"]
    return f"the record of its attempt is not here: no {', no '.join(lacking)}"


def _run_of(run_dir: Path) -> str:
    try:
        info = read_run(run_dir)
    except StorageError:
        return ""
    return info.run if info is not None else ""
