"""What code and which settings made these numbers: hashes for machines, the commit for people."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from midwatch.config import config_hash

_GIT_TIMEOUT_S = 3.0
"""Covers one local git query; a repository on a sick network mount must not hold up the start of training."""

_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = ("midwatch", "torch", "numpy", "safetensors")


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded once an attempt."""

    config_hash: str
    code_hash: str
    entry: str
    """The script, relative to its project folder."""
    files: int
    """How many source files the code hash covers."""
    git_commit: str = ""
    git_dirty: bool | None = None
    """Tracked files differ from the commit; None without git."""
    python: str = ""
    libraries: dict[str, str] = {}


def collect_provenance(params: Mapping[str, Any], train: Mapping[str, Any], entry: Path | None = None) -> Provenance:
    """Everything above, at this moment: modules imported later are not covered.

    Blocking: at most two git queries of 3 s each.
    """
    script = entry_script() if entry is None else entry
    files = project_files(script)
    commit, dirty = git_state(script.parent) if script else ("", None)
    return Provenance(
        config_hash=config_hash(params, train),
        code_hash=_hash_files(files),
        entry=script.name if script else "",
        files=len(files),
        git_commit=commit,
        git_dirty=dirty,
        python=sys.version.split()[0],
        libraries=_versions(),
    )


def code_hash(entry: Path | None = None, modules: Iterable[ModuleType] | None = None) -> str:
    """16 hex digits over the entry script and the project modules imported so far; empty without a script.

    The names count relative to the project folder, so the same code in another place has the same hash.
    """
    return _hash_files(project_files(entry_script() if entry is None else entry, modules))


def entry_script() -> Path | None:
    """The script this process runs; None in an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def project_files(entry: Path | None, modules: Iterable[ModuleType] | None = None) -> dict[str, Path]:
    """Relative name to path of the script and of the imported modules under its folder, without installed packages."""
    if entry is None:
        return {}
    script = entry.resolve()
    root = _root_of(script)
    files = {script.relative_to(root).as_posix(): script}
    for module in list(sys.modules.values()) if modules is None else modules:
        name = getattr(module, "__file__", None)
        # Looked at as text first: resolving the paths of two thousand installed modules takes a tenth of a second.
        if isinstance(name, str) and name.endswith(".py") and set(_INSTALLED).isdisjoint(name.split("/")):
            path = Path(name).resolve()
            if path.is_relative_to(root) and not _is_installed(path, root):
                files[path.relative_to(root).as_posix()] = path
    return files


def git_state(folder: Path) -> tuple[str, bool | None]:
    """The commit checked out around ``folder`` and whether tracked files differ from it; ``("", None)`` without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return "", None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit, None if status is None else bool(status)


def _root_of(script: Path) -> Path:
    # ``python -m package.train``: the project is the folder that holds the package.
    root = script.parent
    while (root / "__init__.py").exists() and root != root.parent:
        root = root.parent
    return root


def _is_installed(path: Path, root: Path) -> bool:
    if not set(_INSTALLED).isdisjoint(path.parts):
        return True
    prefix = Path(sys.prefix).resolve()
    return prefix != root and prefix.is_relative_to(root) and path.is_relative_to(prefix)


def _hash_files(files: Mapping[str, Path]) -> str:
    if not files:
        return ""
    total = hashlib.sha256(b"midwatch code 1\n")
    for name in sorted(files):
        try:
            digest = hashlib.sha256(files[name].read_bytes()).hexdigest()
        except OSError:
            digest = "unreadable"
        total.update(f"{name}\0{digest}\n".encode("utf-8", "backslashreplace"))
    return total.hexdigest()[:16]


def _git(folder: Path, *query: str) -> str | None:
    # No optional locks: looking must not write. No fsmonitor: looking must not start programs the repository names.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *query]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
