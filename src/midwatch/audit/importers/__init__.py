"""Metrics that other frameworks wrote, brought into a run's journals, and the reader of tables that triage shares.

Needs no PyTorch and no TensorFlow.
"""

from midwatch.audit.importers.attempts import Attempt
from midwatch.audit.importers.bring import Imported, import_metrics
from midwatch.audit.importers.columns import PLACE_NAMES
from midwatch.audit.importers.detect import FORMATS, format_of
from midwatch.audit.importers.header import STEP_COLUMNS
from midwatch.audit.importers.numbers import is_missing, is_printed_twice
from midwatch.audit.importers.rows import Notes
from midwatch.audit.importers.spellings import SPELLINGS, known_as, plain_words, rate_name
from midwatch.audit.importers.table import Table, TableRow
from midwatch.audit.importers.textfile import Tell, UnfitFileError

__all__ = [
    "FORMATS",
    "PLACE_NAMES",
    "SPELLINGS",
    "STEP_COLUMNS",
    "Attempt",
    "Imported",
    "Notes",
    "Table",
    "TableRow",
    "Tell",
    "UnfitFileError",
    "format_of",
    "import_metrics",
    "is_missing",
    "is_printed_twice",
    "known_as",
    "plain_words",
    "rate_name",
]
