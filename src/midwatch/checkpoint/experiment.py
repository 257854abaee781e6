"""Was a checkpoint written by the experiment that asks for it? By its parameters; by its script, where it has none.

Parameters decide: other ones are another experiment (CK207), whatever the script is called, and with the same ones a
renamed script is only worth a warning. Where neither side declares any, the script is all there is to tell two
experiments apart by, and another one is refused as well.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from midwatch.checkpoint.candidate import Candidate
from midwatch.checkpoint.manifest import read_manifest
from midwatch.core import Change, CheckpointError, Provenance, Section, changed_entry, changed_section, changes_text

_log = logging.getLogger(__name__)


class OtherExperiment(msgspec.Struct, frozen=True, kw_only=True):
    """Why it is another one."""

    message: str
    differs: str
    """For the ledger, when it is taken all the same."""
    hint: str = ""
    changes: tuple[Change, ...] = ()
    """Parameters by name; empty where nobody kept them."""
    context: dict[str, Any] = {}


def other_experiment(candidate: Candidate, config_hash: str, mine: Provenance | None) -> OtherExperiment | None:
    """None when it is the same one, or nobody can tell.

    Args:
        config_hash: Of the run that asks; empty: it does not know.
        mine: All that it knows of itself.
    """
    theirs = _provenance(candidate)
    if candidate.config_hash and config_hash and candidate.config_hash != config_hash:
        return _other_parameters(candidate, config_hash, theirs, mine)
    if theirs is None or mine is None:
        return None
    entry = changed_entry(theirs.code, mine.code)
    if entry is None:
        return None
    is_undeclared = not theirs.semantic.values and not mine.semantic.values
    if not is_undeclared or theirs.code.is_entry_installed or mine.code.is_entry_installed:
        _log.warning("%s was written by another script: %s", candidate.name, entry)
        return None
    return OtherExperiment(
        message=f"{candidate.name} was written by {entry.old}, this is {entry.new}, and neither declares parameters",
        differs=str(entry),
        changes=(entry,),
        hint="Give each script a run folder of its own (run.dir), declare attach(params=...), or, if it is the same "
        "experiment, say why: run.resume(accept='why') or checkpoint.resume.accept.",
        context={"entry_before": entry.old, "entry": entry.new},
    )


def _other_parameters(
    candidate: Candidate, config_hash: str, theirs: Provenance | None, mine: Provenance | None
) -> OtherExperiment:
    differs = f"configuration {candidate.config_hash}, not {config_hash}"
    message = f"{candidate.name} was written with configuration {candidate.config_hash}, this is {config_hash}"
    context: dict[str, Any] = {"config_hash": config_hash, "config_hash_before": candidate.config_hash}
    hint, changes = "", ()
    # Values count only if they belong to the very hashes that differ.
    before = _section(theirs, candidate.config_hash)
    after = _section(mine, config_hash)
    if before is not None and after is not None:
        changes = changed_section(before, after)
        differs += f": {changes_text(changes)}"
        message += f": {changes_text(changes)}"
        context["changes"] = [msgspec.to_builtins(change) for change in changes]
    elif before is None:
        hint = "It was written before parameters were kept, so the change has no name here; restore the parameters, or "
        hint += "say why: run.resume(accept='why') or checkpoint.resume.accept."
    return OtherExperiment(message=message, differs=differs, hint=hint, changes=changes, context=context)


def _provenance(candidate: Candidate) -> Provenance | None:
    try:
        return read_manifest(Path(candidate.folder)).provenance
    except CheckpointError:
        return None  # gone or damaged since it was listed: whoever takes it finds that


def _section(provenance: Provenance | None, wanted: str) -> Section | None:
    section = provenance.semantic if provenance is not None else None
    return section if section is not None and section.hash == wanted else None
