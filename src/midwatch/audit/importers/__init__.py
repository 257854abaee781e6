"""Metrics that other frameworks wrote, brought into a run's journals. Needs no PyTorch and no TensorFlow."""

from midwatch.audit.importers.attempts import Attempt
from midwatch.audit.importers.bring import Imported, import_metrics
from midwatch.audit.importers.detect import FORMATS, format_of

__all__ = ["FORMATS", "Attempt", "Imported", "format_of", "import_metrics"]
