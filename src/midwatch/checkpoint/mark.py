"""``VERIFIED.json``: the word of those who read every byte back that a checkpoint is what was staged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from midwatch.checkpoint.manifest import VERIFIED_FILE, Manifest, VerifiedMark, encode_record, seal
from midwatch.checkpoint.signing import SigningKey, sign_mark
from midwatch.core import SYSTEM_CLOCK
from midwatch.storage import write_atomic


def write_mark(folder: Path, manifest: Manifest, ranks: Sequence[int], key: SigningKey | None) -> None:
    """Say that these ranks' shards were proven; replaces an older mark.

    Durability: the mark is whole or absent, and survives power loss when this returns.
    """
    mark = VerifiedMark(
        name=manifest.name,
        manifest_digest=manifest.digest,
        verified_ns=SYSTEM_CLOCK.wall_ns(),
        ranks=tuple(ranks),
    )
    mark = msgspec.structs.replace(mark, digest=seal(mark))
    mark = mark if key is None else sign_mark(mark, key)
    write_atomic(folder / VERIFIED_FILE, encode_record(mark))
