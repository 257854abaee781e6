"""What code and which settings made these numbers: hashes for machines, names and values for people."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit.provenance_code import ProjectCode
from midwatch.audit.provenance_git import NO_GIT, GitState, look_at_git
from midwatch.config import (
    Config,
    inherited_environment,
    make_section,
    packages_section,
    plain_data,
    redact_environment,
    redact_list,
    semantic_section,
)
from midwatch.core import CodeState, Provenance, Section

_PATIENCE_S = 1.0
"""Covers git and the list of packages, from the moment that they are needed; what comes later is taken up later."""
_LIBRARIES = ("midwatch", "torch", "numpy", "safetensors")
_MAX_WORDS = 100
_MAX_WORD = 120
_MAX_PACKAGES = 3000


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What only the training process knows."""

    params: Mapping[str, Any] = {}
    """The script's own parameters."""
    config: Config = Config()
    layout: Mapping[str, Any] = {}
    observed: Mapping[str, Any] = {}
    libraries: dict[str, str] = {}
    """Versions of what counts: ``library_versions``, CUDA, NCCL, the driver."""


def collect_provenance(
    facts: Facts, code: ProjectCode, git: GitState = NO_GIT, packages: Mapping[str, str] | None = None
) -> Provenance:
    """All of it, with the modules that ``code`` has seen and this process's environment.

    Raises:
        ConfigError: CF103, CF106 for parameters that cannot be written down.
    """
    settings = msgspec.to_builtins(facts.config)
    train = settings.pop("train")
    return Provenance(
        semantic=semantic_section(facts.params, train),
        layout=make_section("layout", facts.layout),
        operational=make_section("operational", settings),
        observed=make_section("observed", facts.observed),
        code=code_state(code, git),
        command=_command(sys.argv[1:]),
        libraries=facts.libraries,
        environment=environment_section(),
        packages=packages_section(packages or {}),
    )


def environment_section() -> Section:
    """The allow-listed variables of this process as they are now, secrets hidden."""
    return make_section("environment", redact_environment(inherited_environment()))


def code_state(code: ProjectCode, git: GitState, step: int | None = None) -> CodeState:
    """The files seen by now, and where git says that they come from."""
    return CodeState(
        hash=code.hash,
        entry=code.entry_name,
        is_entry_installed=code.is_entry_installed,
        files=code.files,
        count=len(code.digests),
        step=step,
        commit=git.commit,
        is_dirty=git.is_dirty,
        diff_digest=git.diff_digest,
        changed_files=git.changed_files,
        changed_count=git.changed_count,
    )


class EarlyLook:
    """A first look at the code, at git and at the installed packages, in a thread while the script builds its model.

    Args:
        entry: The script; by default this process's.
    """

    def __init__(self, entry: Path | None = None) -> None:
        self.code = ProjectCode(entry)
        self.git = NO_GIT
        self.packages: dict[str, str] = {}
        self._folder = self.code.entry.parent if self.code.entry is not None else Path.cwd()
        self._thread = threading.Thread(target=self._look, name="midwatch-provenance", daemon=True)
        self._thread.start()

    def finish(self) -> EarlyLook:
        """Blocking: until it is done, a second at most; git may answer later still."""
        self._thread.join(_PATIENCE_S)
        return self

    @property
    def is_done(self) -> bool:
        """Nothing more will turn up."""
        return not self._thread.is_alive()

    def _look(self) -> None:
        self.code.look()
        self.packages = installed_packages()
        # Last: it may take seconds.
        self.git = look_at_git(self._folder)


def library_versions() -> dict[str, str]:
    """Python, and the packages that numbers and checkpoints depend on in every run."""
    found = {"python": sys.version.split()[0]}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def installed_packages() -> dict[str, str]:
    """Name to version, from the names of the packages' records: their contents are not read."""
    found: dict[str, str] = {}
    for record in _package_records():
        name, _, version = record.removesuffix(".dist-info").rpartition("-")
        if name and len(found) < _MAX_PACKAGES:
            found.setdefault(_text(name).lower().replace("_", "-"), _text(version))
    return dict(sorted(found.items()))


def _text(name: str) -> str:
    # A folder's name need not be UTF-8; what is written down must be.
    return name.encode("utf-8", "backslashreplace").decode()


def _package_records() -> Iterator[str]:
    # In the order of the path: of a package that is there twice the first one is imported.
    for folder in sys.path:
        if "-packages" not in folder:
            continue
        try:
            with os.scandir(folder) as entries:
                yield from sorted(entry.name for entry in entries if entry.name.endswith(".dist-info"))
        except OSError:
            continue


def _command(words: list[str]) -> tuple[str, ...]:
    kept = tuple(str(word)[:_MAX_WORD] for word in redact_list(plain_data(words[:_MAX_WORDS])))
    return (*kept, f"and {len(words) - _MAX_WORDS} more") if len(words) > _MAX_WORDS else kept
