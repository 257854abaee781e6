"""The public face of checkpoints without torch: layout, records, listing, verification, retention, the writer process."""

from midwatch.checkpoint.image import (
    FORMAT_VERSION,
    ITEM_SIZES,
    ImagePlan,
    ShardHeader,
    ShardIdentity,
    TensorEntry,
    TensorSpec,
    parse_header,
    plan_image,
    read_header,
    shard_metadata,
)
from midwatch.checkpoint.jobs import SaveEvent, SaveJob
from midwatch.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ManifestDraft,
    Receipt,
    TensorRecord,
    VerifiedMark,
    decode_manifest,
    decode_receipt,
    receipt_file,
    sections_of,
    shard_file,
)
from midwatch.checkpoint.writer import WriterClient

__all__ = [
    "FORMAT_VERSION",
    "ITEM_SIZES",
    "FileRecord",
    "ImagePlan",
    "Manifest",
    "ManifestDraft",
    "Receipt",
    "SaveEvent",
    "SaveJob",
    "ShardHeader",
    "ShardIdentity",
    "TensorEntry",
    "TensorRecord",
    "TensorSpec",
    "VerifiedMark",
    "WriterClient",
    "decode_manifest",
    "decode_receipt",
    "parse_header",
    "plan_image",
    "read_header",
    "receipt_file",
    "sections_of",
    "shard_file",
    "shard_metadata",
]
