"""Files and folders that survive: atomic writes, digests, read-back, fencing, free space. No torch."""

from midwatch.storage import ops
from midwatch.storage.atomic import (
    canonical_json,
    create_exclusive,
    read_json,
    replace_symlink,
    write_atomic,
    write_json_atomic,
)
from midwatch.storage.fence import (
    AttemptClaim,
    Fence,
    Holder,
    claim_attempt,
    late_commits,
    newest_attempt,
    read_claims,
)
from midwatch.storage.hashing import (
    CHUNK_BYTES,
    FAST_KIND,
    chunk_digest,
    is_secure,
    new_digest,
    root_digest,
    secure_kind,
    sha256_hex,
)
from midwatch.storage.locked import locked, locked_if_possible
from midwatch.storage.pace import Pace
from midwatch.storage.reading import open_regular, read_chunks, read_regular, read_uncached
from midwatch.storage.space import NEED_INODES, RESERVE_BYTES, Space, as_storage_error, check_space, free_space

__all__ = [
    "CHUNK_BYTES",
    "FAST_KIND",
    "NEED_INODES",
    "RESERVE_BYTES",
    "AttemptClaim",
    "Fence",
    "Holder",
    "Pace",
    "Space",
    "as_storage_error",
    "canonical_json",
    "check_space",
    "chunk_digest",
    "claim_attempt",
    "create_exclusive",
    "free_space",
    "is_secure",
    "late_commits",
    "locked",
    "locked_if_possible",
    "new_digest",
    "newest_attempt",
    "open_regular",
    "ops",
    "read_chunks",
    "read_claims",
    "read_json",
    "read_regular",
    "read_uncached",
    "replace_symlink",
    "root_digest",
    "secure_kind",
    "sha256_hex",
    "write_atomic",
    "write_json_atomic",
]
