"""What a power cut leaves, worked out from the log of a save.

A small model of a file system that promises what POSIX promises and not more: bytes are durable after fsync of the
file, names after fsync of their folder. ``Disk`` starts as a copy of a real folder whose contents are durable, is fed
the logged operations one by one, and can be asked at any point what would be there after the power came back.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import iotrap
from iotrap import Operation


@dataclass(eq=False)
class File:
    live: bytearray
    durable: bytes


@dataclass(eq=False)
class Link:
    target: str


@dataclass(eq=False)
class Folder:
    live: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node = File | Link | Folder


class Disk:
    """Feed it with ``apply``; ``leave`` writes what survives into a real folder."""

    def __init__(self, base: Path, *, named: Path) -> None:
        """``named`` is what the log calls the folder of which ``base`` is the state before."""
        self._base = str(named)
        self._root = _scan(base)

    def apply(self, operation: Operation) -> None:
        handler = getattr(self, f"_on_{_NAMES[operation.kind]}")
        handler(operation)

    def leave(self, target: Path, *, forgets_names: bool) -> None:
        """What is there after the power cut: durable bytes, under durable names or under the latest ones."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        _write(self._root, target, forgets_names)

    def explain(self, folder: Path) -> list[Operation]:
        """Renames at the end that went past the library (a system call without libc): told by names and contents."""
        lived = _files(_scan(folder))
        ours = _files(self._root)
        gone, new = sorted(ours.keys() - lived.keys()), sorted(lived.keys() - ours.keys())
        pairs = [(old, name) for old in gone for name in new if bytes(ours[old].live) == lived[name].durable]
        found = [Operation(iotrap.RENAME, f"{self._base}/{old}", f"{self._base}/{name}", 0, b"") for old, name in pairs]
        for operation in found:
            self.apply(operation)
        return found

    def agrees_with(self, folder: Path) -> bool:
        """Whether the operations fed so far explain a real folder: the proof that the library misses none."""
        return _freeze(_scan(folder), False) == _freeze(_lived(self._root), False)

    def fingerprint(self, *, forgets_names: bool) -> int:
        """Equal for equal outcomes, so that each is tried once."""
        return hash(_freeze(self._root, forgets_names))

    def _find(self, path: str) -> tuple[Folder, str]:
        parts = os.path.relpath(path, self._base).split("/")
        folder = self._root
        for part in parts[:-1]:
            child = folder.live[part]
            assert isinstance(child, Folder)
            folder = child
        return folder, parts[-1]

    def _file(self, operation: Operation) -> File:
        folder, name = self._find(operation.path)
        node = folder.live[name]
        assert isinstance(node, File)
        return node

    def _on_create(self, operation: Operation) -> None:
        folder, name = self._find(operation.path)
        folder.live[name] = File(bytearray(), b"")

    def _on_truncate(self, operation: Operation) -> None:
        file = self._file(operation)
        if operation.offset <= len(file.live):
            del file.live[operation.offset :]
            # Taken to last at once: what the kernel could bring back was to be overwritten anyway.
            file.durable = file.durable[: operation.offset]
        else:
            file.live.extend(bytes(operation.offset - len(file.live)))

    def _on_allocate(self, operation: Operation) -> None:
        file = self._file(operation)
        if operation.other != "keep":
            file.live.extend(bytes(max(0, operation.offset - len(file.live))))

    def _on_write(self, operation: Operation) -> None:
        if operation.path.endswith(" (deleted)"):
            return
        live, begin = self._file(operation).live, operation.offset
        live.extend(bytes(max(0, begin - len(live))))
        live[begin : begin + len(operation.data)] = operation.data

    def _on_fsync(self, operation: Operation) -> None:
        file = self._file(operation)
        file.durable = bytes(file.live)

    def _on_fsync_dir(self, operation: Operation) -> None:
        if operation.path == self._base:
            folder: Node = self._root
        else:
            parent, name = self._find(operation.path)
            folder = parent.live[name]
        assert isinstance(folder, Folder)
        folder.durable = dict(folder.live)

    def _on_rename(self, operation: Operation) -> None:
        source, old = self._find(operation.path)
        target, new = self._find(operation.other)
        target.live[new] = source.live.pop(old)

    def _on_link(self, operation: Operation) -> None:
        source, old = self._find(operation.path)
        target, new = self._find(operation.other)
        target.live[new] = source.live[old]

    def _on_symlink(self, operation: Operation) -> None:
        folder, name = self._find(operation.path)
        folder.live[name] = Link(operation.other)

    def _on_mkdir(self, operation: Operation) -> None:
        folder, name = self._find(operation.path)
        folder.live.setdefault(name, Folder())

    def _on_unlink(self, operation: Operation) -> None:
        folder, name = self._find(operation.path)
        folder.live.pop(name, None)

    _on_rmdir = _on_unlink


_NAMES = {
    iotrap.CREATE: "create",
    iotrap.TRUNCATE: "truncate",
    iotrap.WRITE: "write",
    iotrap.ALLOCATE: "allocate",
    iotrap.FSYNC: "fsync",
    iotrap.FSYNC_DIR: "fsync_dir",
    iotrap.RENAME: "rename",
    iotrap.LINK: "link",
    iotrap.UNLINK: "unlink",
    iotrap.MKDIR: "mkdir",
    iotrap.RMDIR: "rmdir",
    iotrap.SYMLINK: "symlink",
}


def _scan(path: Path) -> Folder:
    found: dict[str, Node] = {}
    for entry in path.iterdir():
        if entry.is_symlink():
            found[entry.name] = Link(os.readlink(entry))
        elif entry.is_dir():
            found[entry.name] = _scan(entry)
        else:
            data = entry.read_bytes()
            found[entry.name] = File(bytearray(data), data)
    return Folder(found, dict(found))


def _lived(folder: Folder) -> Folder:
    """The same with all bytes durable."""
    found: dict[str, Node] = {}
    for name, node in folder.live.items():
        if isinstance(node, Folder):
            found[name] = _lived(node)
        else:
            found[name] = File(node.live, bytes(node.live)) if isinstance(node, File) else node
    return Folder(found, found)


def _files(folder: Folder, prefix: str = "") -> dict[str, File]:
    found: dict[str, File] = {}
    for name, node in folder.live.items():
        if isinstance(node, Folder):
            found.update(_files(node, f"{prefix}{name}/"))
        elif isinstance(node, File):
            found[prefix + name] = node
    return found


def _names(folder: Folder, forgets_names: bool) -> dict[str, Node]:
    return folder.durable if forgets_names else folder.live


def _write(folder: Folder, target: Path, forgets_names: bool) -> None:
    for name, node in _names(folder, forgets_names).items():
        path = target / name
        if isinstance(node, Folder):
            path.mkdir()
            _write(node, path, forgets_names)
        elif isinstance(node, Link):
            path.symlink_to(node.target)
        else:
            path.write_bytes(node.durable)


def _freeze(node: Node, forgets_names: bool) -> object:
    if isinstance(node, Folder):
        return tuple(sorted((n, _freeze(c, forgets_names)) for n, c in _names(node, forgets_names).items()))
    return ("link", node.target) if isinstance(node, Link) else ("file", hash(node.durable))
