"""Which files of the project a process runs: the entry script, and every imported module that no package brought.

A module belongs to the project when it lies under the script's folder, or when it is neither of the standard library
nor installed: a checkout on ``PYTHONPATH``, an editable install. Its name is the path below the script's folder, or the
module's dotted name as a path, so the same code in another place has the same hash.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from midwatch.config import redact_text

MAX_NAMED_BYTES = 48 * 1024
"""Names and digests of files that are kept one by one: about a thousand. Every manifest carries them."""
MAX_TEXT_BYTES = 256 * 1024
"""Of one file whose text is kept."""
MAX_ALL_TEXT_BYTES = 4 * 2**20
"""Of all of them together."""
_INSTALLED = ("site-packages", "dist-packages")
_UNREADABLE = "unreadable"


class ProjectCode:
    """The project's files, looked at more than once; a file keeps the digest of the first look.

    The interpreter read a file when it imported it. So the earliest look is the nearest to what runs, whoever edits the
    file meanwhile.
    """

    def __init__(self, entry: Path | None = None) -> None:
        self.entry = entry_script() if entry is None else entry.resolve()
        self.root = None if self.entry is None else root_of(self.entry)
        self.entry_name = ""
        if self.entry is not None and self.root is not None:
            self.entry_name = _name(self.entry.relative_to(self.root).as_posix())
        self.digests: dict[str, str] = {}
        """Name to SHA-256."""
        self._sources: dict[str, bytes] = {}
        self._modules = 0
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        """Files of modules that were looked at, as the modules name them."""

    @property
    def is_entry_installed(self) -> bool:
        return self.entry is not None and _is_installed(self.entry, None)

    @property
    def hash(self) -> str:
        """16 hex digits over names and contents; empty without files."""
        if not self.digests:
            return ""
        total = hashlib.sha256(b"midwatch code 1\n")
        for name in sorted(self.digests):
            total.update(f"{name}\0{self.digests[name]}\n".encode("utf-8", "backslashreplace"))
        return total.hexdigest()[:16]

    @property
    def files(self) -> dict[str, str]:
        """Name to 16 hex digits, as far as ``MAX_NAMED_BYTES`` goes."""
        left, kept = MAX_NAMED_BYTES, dict[str, str]()
        for name in sorted(self.digests):
            left -= len(name.encode("utf-8", "backslashreplace")) + 24
            if left >= 0:
                kept[name] = self.digests[name][:16]
        return kept

    def look(self, modules: Iterable[ModuleType] | None = None) -> list[str]:
        """Take in what was imported since; returns the new names. Nothing is looked at while no module was added."""
        with self._lock:
            return self._look(modules)

    def _look(self, modules: Iterable[ModuleType] | None) -> list[str]:
        if modules is None and len(sys.modules) == self._modules:
            return []
        self._modules = len(sys.modules)
        found = project_files(self.entry, modules, self._seen)
        new = [name for name in found if name not in self.digests]
        for name in new:
            data, self.digests[name] = _read(found[name])
            if self.digests[name] != _UNREADABLE and len(data) <= MAX_TEXT_BYTES:
                self._sources[name] = data
        return new

    def digest_on_disk(self, name: str) -> str:
        """16 hex digits of a file that this process has not imported (yet); empty where there is none."""
        path = None if self.root is None else (self.root / name).resolve()
        if path is None or self.root is None or not path.is_relative_to(self.root) or not path.is_file():
            return ""
        return _read(path)[1][:16]

    def sources(self) -> dict[str, bytes]:
        """Name to contents, as far as the bounds go."""
        kept: dict[str, bytes] = {}
        left = MAX_ALL_TEXT_BYTES
        # The script, then the small ones: of one giant file and a hundred others the hundred are worth more.
        for name in sorted(self._sources, key=lambda name: (name != self.entry_name, len(self._sources[name]), name)):
            if len(self._sources[name]) <= left:
                left -= len(self._sources[name])
                kept[name] = self._sources[name]
        return kept


def shown_texts(sources: Mapping[str, bytes]) -> dict[str, str]:
    """As text, secrets hidden."""
    return {name: redact_text(data.decode("utf-8", "replace")) for name, data in sources.items()}


def entry_script() -> Path | None:
    """The script this process runs; None in an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def project_files(
    entry: Path | None, modules: Iterable[ModuleType] | None = None, seen: set[str] | None = None
) -> dict[str, Path]:
    """Name to path of the script and of the project's imported modules; nothing in an interactive session.

    Args:
        seen: Files that are passed over, because an earlier call looked at them; those looked at now are added.
    """
    seen = set() if seen is None else seen
    if entry is None:
        return {}
    script = entry.resolve()
    root = root_of(script)
    files: dict[str, Path] = {}
    # A copy: another thread may be importing.
    for module in list(sys.modules.values()) if modules is None else modules:
        file = _file_of(module)
        # Looked at as text first: resolving the paths of two thousand installed modules takes a tenth of a second.
        if not isinstance(file, str) or file in seen or not file.endswith(".py") or _is_elsewhere(file):
            continue
        seen.add(file)
        path = Path(file).resolve()
        if path.is_relative_to(root):
            if not _is_installed(path, root):
                files[_name(path.relative_to(root).as_posix())] = path
        elif (name := _outside_name(module, path)) and not _is_installed(path, None):
            files.setdefault(name, path)
    return {**files, _name(script.relative_to(root).as_posix()): script}


def _name(text: str) -> str:
    # A file's name need not be UTF-8; what is written down must be.
    return text.encode("utf-8", "backslashreplace").decode()


def root_of(script: Path) -> Path:
    """The project folder: for ``python -m package.train`` the one that holds the package."""
    root = script.parent
    while (root / "__init__.py").exists() and root != root.parent:
        root = root.parent
    return root


def _file_of(module: object) -> Any:
    # Past the module's own ways: asking a lazy module for an attribute would import it.
    try:
        return object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return None


_PLACES = tuple({f"{Path(os.__file__).parent}/", f"{Path(os.__file__).resolve().parent}/"})
"""Of the standard library."""
_OURS = f"{Path(__file__).resolve().parents[1]}/"
_MARKS = tuple(f"/{name}/" for name in _INSTALLED)


def _is_elsewhere(file: str) -> bool:
    return file.startswith((_OURS, *_PLACES)) or any(mark in file for mark in _MARKS)


def _is_installed(path: Path, root: Path | None) -> bool:
    if not set(_INSTALLED).isdisjoint(path.parts):
        return True
    prefix = Path(sys.prefix).resolve()
    if root is None:
        return any(path.is_relative_to(prefix / place) for place in ("bin", "lib", "lib64"))
    return prefix != root and prefix.is_relative_to(root) and path.is_relative_to(prefix)


def _outside_name(module: ModuleType, path: Path) -> str:
    """The dotted name as a path; empty for what a library wrote itself (compiled kernels, downloaded code)."""
    dotted = module.__name__
    top = sys.modules.get(dotted.partition(".")[0])
    origin = getattr(top, "__file__", None)
    if dotted in ("__main__", "__mp_main__") or (isinstance(origin, str) and _is_elsewhere(origin)):
        return ""
    if any(part.startswith(".") for part in path.parts[1:]):
        return ""
    name = _name(dotted.replace(".", "/"))
    return f"{name}/__init__.py" if path.name == "__init__.py" else f"{name}.py"


def _read(path: Path) -> tuple[bytes, str]:
    try:
        data = path.read_bytes()
    except OSError:
        return b"", _UNREADABLE
    return data, hashlib.sha256(data).hexdigest()
