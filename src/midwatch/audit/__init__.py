"""What happened, with which code and settings: ledger, metrics journal, provenance."""

from midwatch.audit.aside import set_imports_aside
from midwatch.audit.desk import Desk
from midwatch.audit.following import new_lines, skip_history
from midwatch.audit.in_force import Batches, InForce, Lift, Lowered, lift_from, outside
from midwatch.audit.journal import Branches, Journal, read_branches, read_journal
from midwatch.audit.journals import journal_name
from midwatch.audit.ledger import Ledger, Seal, seal_of
from midwatch.audit.line import GENESIS, LedgerLine
from midwatch.audit.provenance import (
    EarlyLook,
    Facts,
    code_state,
    collect_provenance,
    environment_section,
    installed_packages,
    library_versions,
)
from midwatch.audit.provenance_code import ProjectCode, entry_script, project_files, shown_texts
from midwatch.audit.provenance_git import GitState, look_at_git
from midwatch.audit.provenance_record import (
    AttemptRecord,
    CodeTexts,
    read_record,
    read_texts,
    recorded_attempts,
    write_record,
    write_texts,
)
from midwatch.audit.reading import known_checkpoints, ledger_files, merged, read_ledger
from midwatch.audit.runfile import RunInfo, ensure_run, read_run
from midwatch.audit.verify import LedgerProblem, LedgerReport, RunLedgerReport, verify_ledger, verify_run

__all__ = [
    "GENESIS",
    "AttemptRecord",
    "Batches",
    "Branches",
    "CodeTexts",
    "Desk",
    "EarlyLook",
    "Facts",
    "GitState",
    "InForce",
    "Journal",
    "Ledger",
    "LedgerLine",
    "LedgerProblem",
    "LedgerReport",
    "Lift",
    "Lowered",
    "ProjectCode",
    "RunInfo",
    "RunLedgerReport",
    "Seal",
    "code_state",
    "collect_provenance",
    "ensure_run",
    "entry_script",
    "environment_section",
    "installed_packages",
    "journal_name",
    "known_checkpoints",
    "ledger_files",
    "library_versions",
    "lift_from",
    "look_at_git",
    "merged",
    "new_lines",
    "outside",
    "project_files",
    "read_branches",
    "read_journal",
    "read_ledger",
    "read_record",
    "read_run",
    "read_texts",
    "recorded_attempts",
    "seal_of",
    "set_imports_aside",
    "shown_texts",
    "skip_history",
    "verify_ledger",
    "verify_run",
    "write_record",
    "write_texts",
]
