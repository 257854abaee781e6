"""What happened, with which code and settings: ledger, metrics journal, provenance."""

from midwatch.audit.journal import Journal, read_journal
from midwatch.audit.ledger import Ledger, Seal, seal_of
from midwatch.audit.line import GENESIS, LedgerLine
from midwatch.audit.provenance import Provenance, code_hash, collect_provenance, entry_script, git_state
from midwatch.audit.reading import known_checkpoints, ledger_files, merged, read_ledger
from midwatch.audit.runfile import RunInfo, ensure_run, read_run
from midwatch.audit.verify import LedgerProblem, LedgerReport, RunLedgerReport, verify_ledger, verify_run

__all__ = [
    "GENESIS",
    "Journal",
    "Ledger",
    "LedgerLine",
    "LedgerProblem",
    "LedgerReport",
    "Provenance",
    "RunInfo",
    "RunLedgerReport",
    "Seal",
    "code_hash",
    "collect_provenance",
    "ensure_run",
    "entry_script",
    "git_state",
    "known_checkpoints",
    "ledger_files",
    "merged",
    "read_journal",
    "read_ledger",
    "read_run",
    "seal_of",
    "verify_ledger",
    "verify_run",
]
