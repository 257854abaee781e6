"""What lies in a checkpoint folder, and which one to trust."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from midwatch.checkpoint.lineage import Lineage
from midwatch.checkpoint.manifest import (
    MANIFEST_FILE,
    PIN_FILE,
    REASON_FILE,
    SUSPECT_FILE,
    Manifest,
    read_manifest,
)
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.verify import read_mark
from midwatch.core import UNREADABLE, CheckpointError, CheckpointName, parse_checkpoint_name
from midwatch.storage import late_commits, read_regular

PARTIAL_SUFFIX = ".partial"
LATEST = "latest"
QUARANTINE = "quarantine"

State = Literal["committed", "verified", "torn", "quarantined", "fenced"]

USABLE = ("verified", "committed")
"""States that a resume can begin from."""


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a listing, from the manifest alone: no data are read. ``digest`` is the manifest's."""

    name: str
    path: str
    state: State
    step: int
    attempt: int
    run: str = ""
    loss: float | None = None
    config_hash: str = ""
    code_hash: str = ""
    parent: str = ""
    world_size: int = 0
    size_bytes: int = 0
    created_ns: int = 0
    digest: str = ""
    sections: dict[str, bool] = {}
    metrics: dict[str, float | None] = {}
    is_suspect: bool = False
    pin: str = ""
    """The label a person gave it; empty: not pinned. A pinned one is never pruned."""
    is_abandoned: bool = False
    """A later attempt was resumed from an older one on purpose: this is the branch that was given up."""
    reason: str = ""
    """Why it cannot be used, in words; empty for a good one."""

    @property
    def is_trusted(self) -> bool:
        """Whether nothing but its state can keep a resume from it."""
        return not (self.is_suspect or self.is_abandoned)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts checkpoints from old to new: the newest attempt's line counts, not the highest step.

        After a roll-back to an older checkpoint the abandoned branch still holds higher steps; it must not come back.
        """
        return self.attempt, self.step

    @property
    def preference(self) -> tuple[tuple[int, int], bool]:
        """Sorts checkpoints by how gladly a resume takes them: the newest first, of equal copies the verified one.

        A merely committed one is read in full before it is taken: that costs less than the steps since the one before.
        """
        return self.order, self.state == "verified"


class QuarantineReason(msgspec.Struct, frozen=True, kw_only=True):
    """``REASON.json`` in a quarantined folder."""

    name: str
    reason: str
    quarantined_ns: int
    problems: tuple[Problem, ...] = ()


def list_checkpoints(root: Path, *, run_dir: Path | None = None) -> list[CheckpointInfo]:
    """Everything of ours in the folder, newest first; foreign files and folders are passed over.

    Args:
        run_dir: Where the attempts' claims and resumes are, to recognise fenced and abandoned ones. None looks beside
            ``root`` (the default place of the shared tier); a node-local tier has neither.
    """
    found = [info for path in folders_in(root) if (info := _describe(path))]
    found += [_quarantined(path) for path in folders_in(root / QUARANTINE) if parse_folder(path.name)]
    books_dir = run_dir if run_dir is not None else root.absolute().parent
    late = late_commits(books_dir, {info.name: info.run for info in found if info.state in USABLE})
    lineage = Lineage.of(books_dir)
    listed = [_placed(info, late, lineage) if info.state in USABLE else info for info in found]
    return sorted(listed, key=lambda info: (info.order, info.name), reverse=True)


def folders_in(root: Path) -> list[Path]:
    """Real folders, links left out; none where there is no such place."""
    try:
        return [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def parse_folder(name: str) -> CheckpointName | None:
    """Also understands ``.partial`` and the ``.2`` of a second quarantine of the same name."""
    base, _, suffix = name.partition(".")
    is_ours = not suffix or suffix == PARTIAL_SUFFIX[1:] or suffix.isdecimal()
    return parse_checkpoint_name(base) if is_ours else None


def _describe(path: Path) -> CheckpointInfo | None:
    parsed = parse_folder(path.name)
    if parsed is None or path.suffix not in ("", PARTIAL_SUFFIX):
        return None
    if path.suffix == PARTIAL_SUFFIX:
        return _torn(path, parsed, "being written, or its writer died")
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return _torn(path, parsed, error.message)
    if manifest.name != path.name:
        return _torn(path, parsed, f"its manifest is that of {manifest.name}")
    return info_of(path, manifest)


def _torn(path: Path, parsed: CheckpointName, reason: str) -> CheckpointInfo:
    return CheckpointInfo(
        name=path.name, path=str(path), state="torn", step=parsed.step, attempt=parsed.attempt, reason=reason
    )


class _SuspectRecord(msgspec.Struct):
    reason: str = "unknown"


class _PinRecord(msgspec.Struct):
    label: str = ""


def _suspicion(path: Path) -> str:
    """Why it is suspect; empty when it is not. A flag that cannot be read is a flag."""
    try:
        return msgspec.json.decode(read_regular(path / SUSPECT_FILE), type=_SuspectRecord).reason or "unknown"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, *UNREADABLE):
        return "unknown"


def _pin_label(path: Path) -> str:
    """Under which label it is pinned; empty when it is not. A pin that cannot be read holds all the same."""
    try:
        return msgspec.json.decode(read_regular(path / PIN_FILE), type=_PinRecord).label or "pinned"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, *UNREADABLE):
        return "pinned"


def info_of(path: Path, manifest: Manifest) -> CheckpointInfo:
    """The line of a committed folder, before the run's books are asked."""
    suspicion = _suspicion(path)
    return CheckpointInfo(
        name=path.name,
        path=str(path),
        state="verified" if read_mark(path, manifest) == "valid" else "committed",
        step=manifest.step,
        attempt=manifest.attempt,
        run=manifest.run,
        loss=manifest.loss,
        config_hash=manifest.config_hash,
        code_hash=manifest.code_hash,
        parent=manifest.parent,
        world_size=manifest.world_size,
        size_bytes=manifest.size_bytes,
        created_ns=manifest.created_ns,
        digest=manifest.digest,
        sections=manifest.sections,
        metrics=manifest.metrics,
        is_suspect=bool(suspicion),
        pin=_pin_label(path),
        reason=f"marked suspect: {suspicion}" if suspicion else "",
    )


def _quarantined(path: Path) -> CheckpointInfo:
    parsed = parse_folder(path.name)
    assert parsed is not None
    try:
        reason = msgspec.json.decode(read_regular(path / REASON_FILE), type=QuarantineReason).reason
    except (OSError, *UNREADABLE):
        reason = "unknown"
    return CheckpointInfo(
        name=path.name, path=str(path), state="quarantined", step=parsed.step, attempt=parsed.attempt, reason=reason
    )


def _placed(info: CheckpointInfo, late: set[str], lineage: Lineage) -> CheckpointInfo:
    """What the run's books say of it."""
    if info.name in late:
        reason = f"committed by attempt {info.attempt} after a newer one had taken the run over"
        return msgspec.structs.replace(info, state="fenced", reason=reason)
    if attempt := lineage.abandoned_by(info.name):
        reason = f"abandoned: attempt {attempt} went back to an older one" + (f"; {info.reason}" if info.reason else "")
        return msgspec.structs.replace(info, is_abandoned=True, reason=reason)
    return info


def committed_names(root: Path) -> list[str]:
    """The inventory for ``claim_attempt``: names of all committed folders, readable manifest or not."""
    folders = [path for path in folders_in(root) if parse_checkpoint_name(path.name)]
    return sorted(path.name for path in folders if (path / MANIFEST_FILE).exists())


def newest_verified(root: Path, *, run_dir: Path | None = None) -> CheckpointInfo | None:
    """What ``latest`` means: the newest verified one that is neither suspect nor fenced nor abandoned."""
    return newest_of(list_checkpoints(root, run_dir=run_dir))


def newest_of(listing: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """``newest_verified`` of a listing at hand."""
    sound = [info for info in listing if info.state == "verified" and info.is_trusted]
    return max(sound, key=lambda info: info.order, default=None)


def candidates(root: Path, *, run_dir: Path | None = None) -> list[CheckpointInfo]:
    """What may be resumed from, newest first; merely committed ones are to be verified before they are taken.

    Suspect, abandoned, fenced, torn and quarantined ones are left out.
    """
    listed = list_checkpoints(root, run_dir=run_dir)
    sound = [info for info in listed if info.state in USABLE and info.is_trusted]
    return sorted(sound, key=lambda info: info.preference, reverse=True)
