"""The one door to the environment (the pulse has its own): what a launcher told this process, and where things lie.

Nothing else in midwatch reads ``os.environ``. torchrun's variables are understood as they are, so a script runs
unchanged under torchrun, under ``midwatch run`` and on a laptop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from midwatch.config.schema import Config
from midwatch.core import ConfigError


class RankEnv(msgspec.Struct, frozen=True, kw_only=True):
    """What this process is told about itself; the defaults are a laptop: rank 0 of 1, nobody watching."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: str = ""
    run_dir: Path | None = None
    run: str = ""
    attempt: int = 0
    """0: unsupervised."""
    tag: str = ""
    """Unique per launcher invocation: everything that carries it belongs to it."""
    pulse_path: Path | None = None
    config_path: Path | None = None
    is_gated: bool = False
    """Wait for the go flag between resume and the first step."""
    is_supervised: bool = False


class RunPaths(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run keeps what; absolute. ``checkpoint_local_dir`` is None without a node-local tier, ``signing_key``
    without signatures."""

    run_dir: Path
    checkpoint_dir: Path
    checkpoint_local_dir: Path | None
    signing_key: Path | None = None

    @property
    def ledger_dir(self) -> Path:
        return self.run_dir / "ledger"

    @property
    def metrics_dir(self) -> Path:
        return self.run_dir / "metrics"

    @property
    def logs_dir(self) -> Path:
        return self.run_dir / "logs"

    @property
    def incidents_dir(self) -> Path:
        return self.run_dir / "incidents"

    @property
    def supervisor_dir(self) -> Path:
        return self.run_dir / "supervisor"


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv:
    """This process's place in the job.

    Raises:
        ConfigError: CF103 for a variable that is not a whole number, CF106 for ranks outside their world.
    """
    source: Mapping[str, str] = os.environ if environ is None else environ
    attempt = _integer(source, "MIDWATCH_ATTEMPT", 0)
    run_dir = _path(source, "MIDWATCH_RUN_DIR")
    env = RankEnv(
        rank=_place(source, "RANK", 0),
        local_rank=_place(source, "LOCAL_RANK", 0),
        world_size=_place(source, "WORLD_SIZE", 1),
        local_world_size=_place(source, "LOCAL_WORLD_SIZE", 1),
        node=source.get("MIDWATCH_NODE", "") or os.uname().nodename,
        run_dir=run_dir,
        run=source.get("MIDWATCH_RUN", ""),
        attempt=attempt,
        tag=source.get("MIDWATCH_TAG", ""),
        pulse_path=_path(source, "MIDWATCH_PULSE"),
        config_path=_path(source, "MIDWATCH_CONFIG"),
        is_gated=source.get("MIDWATCH_GATE", "") == "1",
        is_supervised=attempt > 0 and run_dir is not None,
    )
    _check_ranks("RANK", env.rank, "WORLD_SIZE", env.world_size)
    if source.get("LOCAL_WORLD_SIZE", "").strip():  # some launchers number the ranks of a node without counting them
        _check_ranks("LOCAL_RANK", env.local_rank, "LOCAL_WORLD_SIZE", env.local_world_size)
    return env


def inherited_environment() -> dict[str, str]:
    """A copy of this process's whole environment, to start a child with. Never write it to a disk."""
    return dict(os.environ)


def resolve_paths(config: Config, env: RankEnv | None = None) -> RunPaths:
    """Absolute paths for a configuration: ``~`` and ``$VARIABLES`` expanded, relative ones taken from here.

    A launcher's run folder (``MIDWATCH_RUN_DIR``) wins over ``run.dir``: all ranks of an attempt share one folder.

    Raises:
        ConfigError: CF102 for a variable that is not set.
    """
    told = env.run_dir if env is not None else None
    run_dir = told.absolute() if told is not None else expand_path("run.dir", config.run.dir)
    shared, local, key = config.checkpoint.dir, config.checkpoint.local_dir, config.checkpoint.trust.signing_key
    return RunPaths(
        run_dir=run_dir,
        checkpoint_dir=expand_path("checkpoint.dir", shared) if shared else run_dir / "checkpoints",
        checkpoint_local_dir=expand_path("checkpoint.local_dir", local) if local else None,
        signing_key=expand_path("checkpoint.trust.signing_key", key) if key else None,
    )


def expand_path(key: str, text: str) -> Path:
    """One configured path, absolute.

    Raises:
        ConfigError: CF102 naming the key when a variable in it is not set.
    """
    expanded = os.path.expandvars(text)
    if "$" in expanded:
        raise ConfigError("CF102", f"{key} = {text!r}: must not use a variable that is not set", key=key, value=text)
    try:
        return Path(expanded).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError("CF102", f"{key} = {text!r}: must not name a home that is not there", key=key) from error


def real_path(text: str) -> Path:
    """Where a configured path leads on this machine, links followed; what cannot be expanded stays as it is."""
    path = Path(os.path.expandvars(text))
    try:
        path = path.expanduser()
    except RuntimeError:
        pass  # nobody's home; using the path refuses it
    return Path(os.path.realpath(path))


def _place(source: Mapping[str, str], name: str, default: int) -> int:
    """A launcher's word for it; else ours, for a rank that another launcher started and told in words of its own."""
    is_told = source.get(name, "").strip()
    return _integer(source, name if is_told else f"MIDWATCH_{name}", default)


def _integer(source: Mapping[str, str], name: str, default: int) -> int:
    text = source.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigError("CF103", f"environment: {name}={text!r}: must be a whole number, 0 or more", key=name)
    return int(text)


def _path(source: Mapping[str, str], name: str) -> Path | None:
    text = source.get(name, "")
    return Path(text) if text else None


def _check_ranks(name: str, rank: int, world_name: str, world: int) -> None:
    if rank >= world:
        message = f"environment: {name}={rank} but {world_name}={world}: ranks count from 0 to {world_name} - 1"
        raise ConfigError("CF106", message, keys=[name, world_name])
