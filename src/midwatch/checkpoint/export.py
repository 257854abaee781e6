"""Leaving midwatch: a checkpoint as plain safetensors files, whole tensors under their own names, without torch."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from midwatch.checkpoint.image import TensorSpec, plan_image
from midwatch.checkpoint.ranges import CheckedTensors
from midwatch.core import CheckpointError
from midwatch.storage import canonical_json, check_space, ops

MAX_FILE_BYTES = 5 * 10**9
"""As large as the files that model hubs take; a tensor is never cut."""

INDEX_FILE = "model.safetensors.index.json"
STATE_FILE = "state.json"
"""What is no tensor: schedulers, counters, the data position, as midwatch tags it."""


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, or would be."""

    target: str
    tensors: int
    size_bytes: int
    files: tuple[str, ...]
    left_out: int
    """Tensors of other sections, and those that belong to one rank (random number generators)."""


class Chosen(msgspec.Struct, frozen=True):
    """Which tensors leave, and under which names."""

    specs: tuple[TensorSpec, ...]
    names: dict[str, str]
    left_out: int

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs)


def choose(tensors: CheckedTensors, sections: Sequence[str] = ()) -> Chosen:
    """The tensors of some sections (none: all that are not one rank's); of one section alone without its prefix.

    Raises:
        CheckpointError: CK206 for a section without tensors.
    """
    specs = tensors.specs()
    have = {spec.key.partition(".")[0] for spec in specs} - {"private"}
    missing = [section for section in sections if section not in have]
    if missing:
        message = f"{tensors.manifest.name} has no tensors of {', '.join(missing)}; it has {', '.join(sorted(have))}"
        raise CheckpointError("CK206", message, hint="Name a section that it has.")
    taken = [spec for spec in specs if spec.key.partition(".")[0] in (sections or have)]
    prefix = f"{sections[0]}." if len(sections) == 1 else ""
    names = {spec.key: spec.key.removeprefix(prefix) for spec in taken}
    return Chosen(tuple(taken), names, len(specs) - len(taken))


def export_safetensors(
    source: Path,
    target: Path,
    sections: Sequence[str] = (),
    *,
    is_dry_run: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportReport:
    """Write whole tensors into a new folder with an index; every byte is checked on its way.

    Raises:
        CheckpointError: CK102 to CK108 the checkpoint is damaged, CK206 no such section.
        StorageError: ST101 no room.
        FileExistsError: The folder is there already.

    Durability: survives power loss when it returns. If we die before, there is no ``target``, only a ``.partial``.
    """
    with CheckedTensors(source) as tensors:
        chosen = choose(tensors, sections)
        files = _group(chosen.specs, max_file_bytes)
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        if not is_dry_run:
            with NewFolder(target, chosen.size_bytes) as folder:
                for name, specs in zip(names, files, strict=True):
                    _write_file(folder / name, specs, tensors, chosen)
                index = _index(dict(zip(names, files, strict=True)), chosen)
                ops.write_file(folder / INDEX_FILE, canonical_json(index) + b"\n")
                ops.write_file(folder / STATE_FILE, tensors.plain_state().encode() + b"\n")
        return report_of(target, chosen, [*names, INDEX_FILE, STATE_FILE])


def report_of(target: Path, chosen: Chosen, files: Sequence[str]) -> ExportReport:
    return ExportReport(
        target=str(target),
        tensors=len(chosen.specs),
        size_bytes=chosen.size_bytes,
        files=tuple(files),
        left_out=chosen.left_out,
    )


def _group(specs: Sequence[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    room = max_file_bytes
    for spec in specs:
        if groups[-1] and spec.size_bytes > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(spec)
        room -= spec.size_bytes
    return groups


def _write_file(path: Path, specs: Sequence[TensorSpec], tensors: CheckedTensors, chosen: Chosen) -> None:
    keys = {chosen.names[spec.key]: spec.key for spec in specs}
    renamed = [msgspec.structs.replace(spec, key=chosen.names[spec.key]) for spec in specs]
    plan = plan_image(renamed, metadata={"format": "pt"})
    with ops.OutputFile(path) as out:
        out.write(plan.header)
        for entry in plan.entries:
            out.write(memoryview(tensors.read(keys[entry.key])))
        out.sync()


def _index(files: dict[str, list[TensorSpec]], chosen: Chosen) -> dict[str, object]:
    weight_map = {chosen.names[spec.key]: name for name, specs in files.items() for spec in specs}
    return {"metadata": {"total_size": chosen.size_bytes}, "weight_map": weight_map}


class NewFolder:
    """A folder that appears whole under its name, or not at all. Never replaces anything.

    Raises:
        FileExistsError: There is something of that name.
        StorageError: ST101 when ``need_bytes`` do not fit.
    """

    def __init__(self, target: Path, need_bytes: int) -> None:
        self._target = target.absolute()
        self._partial = self._target.with_name(f"{self._target.name}.partial-{secrets.token_hex(4)}")
        self._need_bytes = need_bytes

    def __enter__(self) -> Path:
        if self._target.exists() or self._target.is_symlink():
            raise FileExistsError(errno.EEXIST, "exists already, and nothing is overwritten", str(self._target))
        ops.make_dirs(self._target.parent)
        check_space(self._target.parent, self._need_bytes)
        ops.mkdir(self._partial)
        return self._partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is not None:
            ops.remove_tree(self._partial)
            return
        ops.fsync_dir(self._partial)
        ops.rename(self._partial, self._target)
        ops.fsync_dir(self._target.parent)
