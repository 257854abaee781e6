"""Does a checkpoint load? Asked after the read-back, before it may be called verified.

``sample`` opens this rank's shard as a foreign reader would. ``full`` also loads every tensor into fresh memory in a
process of its own, ``python -m midwatch.checkpoint.load_test FOLDER --rank R``, so that neither the time nor the
memory nor a crash of it is training's.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from midwatch.checkpoint.image import ITEM_SIZES
from midwatch.checkpoint.manifest import Manifest, Receipt, decode_receipt, receipt_file
from midwatch.checkpoint.parent import follow_parent
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.sample import sample_problems
from midwatch.checkpoint.signing import load_key, signature_fault
from midwatch.config import TrustConfig
from midwatch.core import CheckpointError, MidwatchError
from midwatch.storage import read_regular

FULL_BASE_S = 120.0
"""Start of Python and torch on a busy host with a cold disk: seconds normally, a minute has been seen."""
FULL_BYTES_S = 20e6
"""Slower than this, at the lowest priority behind training, the storage is ill."""
BATCH_BYTES = 256 * 2**20
"""Tensors loaded at a time: the child needs no more memory than this or its largest tensor."""
NICE = 19
MAX_STDERR = 2000
"""The end of it, where the reason is."""


def load_test_problems(folder: Path, receipt: Receipt, manifest: Manifest, trust: TrustConfig) -> list[Problem]:
    """This rank's share of the load test of a committed folder.

    Raises:
        OSError: The medium cannot be read, or no process can be started.

    Blocking: for a full one ``FULL_BASE_S`` and its bytes over ``FULL_BYTES_S``.
    """
    problems = sample_problems(folder / receipt.file, receipt, manifest.tensors)
    if problems or trust.load_test != "full" or not _is_whole(folder, manifest):
        return problems
    return full_problems(folder, receipt.rank, manifest, signing_key=trust.signing_key)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """A node-local folder holds its node's ranks alone: a tensor that is sharded over nodes cannot be loaded there."""
    return all((folder / receipt_file(file.rank)).exists() for file in manifest.files)


def full_problems(folder: Path, rank: int | None, manifest: Manifest, *, signing_key: str = "") -> list[Problem]:
    """Load ``rank``'s share of all tensors, or all of them, in a child process. Raises and blocks as above."""
    shares = 1 if rank is None else manifest.world_size
    timeout_s = FULL_BASE_S + manifest.size_bytes / shares / FULL_BYTES_S
    command = [sys.executable, "-m", "midwatch.checkpoint.load_test", str(folder), "--parent", str(os.getpid())]
    command += ([] if rank is None else ["--rank", str(rank)]) + (["--key", signing_key] if signing_key else [])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return [_failed(f"loading it in a process of its own took more than {timeout_s:.0f} s")]
    if done.returncode == 0:
        return []
    how = f"died of signal {-done.returncode}" if done.returncode < 0 else f"ended with code {done.returncode}"
    said = done.stderr.decode(errors="replace").strip()[-MAX_STDERR:]
    return [_failed(f"the process that loaded it {how}: {said or 'without a word'}")]


def folder_load_problems(folder: Path, manifest: Manifest, trust: TrustConfig) -> list[Problem]:
    """The load test of a checkpoint as a whole, whose bytes were verified. Raises and blocks as above.

    Raises:
        CheckpointError: A receipt went bad meanwhile.
    """
    problems: list[Problem] = []
    for file in manifest.files:
        receipt = decode_receipt(read_regular(folder / receipt_file(file.rank)))
        problems += sample_problems(folder / file.name, receipt, manifest.tensors)
    if problems or trust.load_test != "full":
        return problems
    return full_problems(folder, None, manifest, signing_key=trust.signing_key)


def _failed(message: str) -> Problem:
    return Problem(code="CK110", file="", message=message)


# --- in the child -----------------------------------------------------------------------------------------------------


def load_share(folder: Path, rank: int | None, *, signing_key: str = "") -> int:
    """Load every world-size-th tensor whole into fresh memory, and the rank's state; returns the tensors loaded.

    Over all ranks each tensor is loaded exactly once, its parts from whichever shards hold them. None: all at once.

    Raises:
        CheckpointError: CK109, or whatever the loading finds.
    """
    import torch

    from midwatch.checkpoint.load import VerifyingReader, load_tensors

    torch.set_num_threads(1)
    reader = VerifyingReader(folder)
    manifest = reader.manifest
    if signing_key and (fault := signature_fault(manifest, load_key(signing_key))):
        raise CheckpointError("CK109", f"{folder}: {fault}")
    for one in range(manifest.world_size) if rank is None else (rank,):
        _check_state(reader.state(one), manifest)
    keys = sorted(manifest.tensors)[rank or 0 :: 1 if rank is None else manifest.world_size]
    for batch in _batches(keys, manifest):
        load_tensors(reader, {key: _fresh(key, manifest) for key in batch})
    reader.close()
    return len(keys)


def _check_state(state: dict[str, Any], manifest: Manifest) -> None:
    from midwatch.checkpoint import values

    def restore(tag: str, payload: Any) -> Any:
        if tag not in ("$tensor", "$array") or payload not in manifest.tensors:
            raise CheckpointError("CK106", f"saved state tells of {tag} {payload!r}, which is not there")
        return payload

    values.decode(state, restore)
    lost = [key for key in state["shared"].get("aliases", {}).values() if key not in manifest.tensors]
    if lost:
        raise CheckpointError("CK106", f"tied weights are stored under {lost[0]}, which is not there")


def _fresh(key: str, manifest: Manifest) -> Any:
    import torch

    from midwatch.checkpoint.layout import dtype_of

    record = manifest.tensors[key]
    return torch.empty(record.global_shape, dtype=dtype_of(record.dtype))


def _batches(keys: Sequence[str], manifest: Manifest) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for key in keys:
        batch.append(key)
        record = manifest.tensors[key]
        size += math.prod(record.global_shape) * ITEM_SIZES[record.dtype]
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def main(arguments: Sequence[str] | None = None) -> int:
    """Code 0 when all of it loads; the reason on stderr when not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--key", default="")
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args(arguments)
    follow_parent(options.parent)
    os.nice(NICE)
    try:
        load_share(options.folder, options.rank, signing_key=options.key)
    except (MidwatchError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
