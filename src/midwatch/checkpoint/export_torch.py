"""Leaving midwatch for ``torch.distributed.checkpoint``: one folder that any PyTorch loads, and reshards, by itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from midwatch.checkpoint.export import STATE_FILE, ExportReport, NewFolder, choose, report_of
from midwatch.checkpoint.image import TensorSpec
from midwatch.checkpoint.layout import dtype_of
from midwatch.checkpoint.ranges import CheckedTensors
from midwatch.storage import ops


def export_dcp(source: Path, target: Path, sections: Sequence[str] = (), *, is_dry_run: bool = False) -> ExportReport:
    """Write a DCP folder of whole tensors, in this one process; every byte is checked on its way.

    The whole selection is in memory at once. Raises, and is durable, as ``export_safetensors``.
    """
    with CheckedTensors(source) as tensors:
        chosen = choose(tensors, sections)
        files: list[str] = [STATE_FILE]
        if not is_dry_run:
            with NewFolder(target, chosen.size_bytes) as folder:
                state = {chosen.names[spec.key]: _tensor(tensors.read(spec.key), spec) for spec in chosen.specs}
                _save(state, folder)
                ops.write_file(folder / STATE_FILE, tensors.plain_state().encode() + b"\n")
                files = sorted(path.name for path in folder.iterdir())
        return report_of(target, chosen, files)


def _save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        # It warns of what it was told: one process, no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def _tensor(data: bytearray, spec: TensorSpec) -> torch.Tensor:
    dtype = dtype_of(spec.dtype)
    if not data:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(spec.shape)
