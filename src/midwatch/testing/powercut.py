"""What a power cut leaves: everything that was not synced may be gone, even when the operation had returned.

``PowerCut`` watches the operations like ``IoShim`` and, after the death, undoes on the real folder what the kernel was
still free to forget. Two extremes are modelled: the disk forgot all of it, or the names arrived and the bytes did not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from midwatch.testing.ioshim import Injury, IoShim, Operation

Forgets = Literal["everything", "bytes"]


_Identity = tuple[int, int]
"""Device and inode: a file keeps it when its folder is renamed."""


class PowerCut(IoShim):
    """Dies at operation ``at`` on every thread; ``cut`` then makes the folder look as after the power came back.

    Undoing is done in reverse order, so a folder whose own name was not durable takes its contents with it.
    """

    def __init__(self, at: int, *, watched: Path, graveyard: Path) -> None:
        """``graveyard`` is a folder outside ``watched`` on the same file system: removed files wait there."""
        super().__init__(Injury(at=at, how="death"), is_everywhere=True)
        self._watched = watched
        self._graveyard = graveyard
        self._graves = 0
        self._undo: list[tuple[_Identity, Callable[[], object]]] = []
        self._dirty: dict[_Identity, int] = {}
        """Files with bytes that were not synced, and how many had been."""

    def observed(self, operation: Operation) -> None:
        """Note how to undo the operation that is about to be done, or forget what it makes durable."""
        source, _, target = operation.path.partition(" -> ")
        handler = getattr(self, f"_on_{operation.name}")
        handler(Path(source), Path(target)) if target else handler(Path(source))

    def cut(self, forgets: Forgets) -> None:
        """Apply the loss."""
        if forgets == "everything":
            for _, undo in reversed(self._undo):
                undo()
        for path in self._watched.rglob("*"):
            if path.is_file() and not path.is_symlink() and (durable := self._dirty.get(_identity(path))) is not None:
                os.truncate(path, durable)

    def _pend(self, folder: Path, undo: Callable[[], object]) -> None:
        self._undo.append((_identity(folder), undo))

    def _on_create(self, path: Path) -> None:
        self._pend(path.parent, lambda: path.unlink(missing_ok=True))

    def _on_write(self, path: Path) -> None:
        self._dirty.setdefault(_identity(path), 0)

    _on_allocate = _on_write

    def _on_append(self, path: Path) -> None:
        self._dirty.setdefault(_identity(path), path.stat().st_size)

    def _on_truncate(self, path: Path) -> None:
        """Taken to last at once: what the kernel could bring back was torn anyway."""

    def _on_fsync_file(self, path: Path) -> None:
        self._dirty.pop(_identity(path), None)

    def _on_fsync_dir(self, path: Path) -> None:
        durable = _identity(path)
        self._undo = [(folder, undo) for folder, undo in self._undo if folder != durable]

    def _on_rename(self, source: Path, target: Path) -> None:
        kept = self._keep(target)

        def undo() -> None:
            target.rename(source)
            if kept is not None:
                kept.rename(target)

        self._pend(target.parent, undo)

    def _on_link(self, source: Path, target: Path) -> None:
        if not target.exists():
            self._pend(target.parent, lambda: target.unlink(missing_ok=True))

    def _on_symlink(self, path: Path) -> None:
        self._pend(path.parent, lambda: path.unlink(missing_ok=True))

    def _on_mkdir(self, path: Path) -> None:
        if not path.exists():
            self._pend(path.parent, lambda: shutil.rmtree(path, ignore_errors=True))

    def _on_unlink(self, path: Path) -> None:
        kept = self._keep(path)
        if kept is not None:
            self._pend(path.parent, lambda: _restore(kept, path))

    def _on_rmdir(self, path: Path) -> None:
        self._pend(path.parent, lambda: path.mkdir(exist_ok=True))

    def _keep(self, path: Path) -> Path | None:
        """A second name for what is about to vanish: a hard link, or a copy of a symlink."""
        if not path.is_symlink() and not path.is_file():
            return None
        self._graves += 1
        kept = self._graveyard / str(self._graves)
        if path.is_symlink():
            kept.symlink_to(path.readlink())
        else:
            kept.hardlink_to(path)
        return kept


def _restore(kept: Path, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    kept.rename(path)


def _identity(path: Path) -> _Identity:
    stat = path.stat()
    return stat.st_dev, stat.st_ino
