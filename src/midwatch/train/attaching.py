"""``attach``: from settings and environment to a ``Run``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midwatch.audit import EarlyLook
from midwatch.config import plain_data, read_rank_env
from midwatch.pulse import writer_from_env
from midwatch.train.run import Run
from midwatch.train.session import Declared
from midwatch.train.settings import load_settings


def attach(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
) -> Run:
    """Connect this rank to its run; the first of the five lines.

    Args:
        config: A TOML or JSON file, a nested dict, or nothing for the defaults (run folder ``midwatch-run``).
        params: The script's own hyper-parameters; with the ``[train]`` table they make the config hash. A resume with
            other ones is refused, unless a reason is given.
        layout: How the work is spread, as far as it is not seen anyway: ``{"tensor_parallel": 4}``. A resume with
            another layout is noted.

    Raises:
        ConfigError: CF101 to CF106.
        StorageError: ST102, ST104 the supervisor's slot file cannot be used.
    """
    env = read_rank_env()
    _be_heard(env.rank)
    declared = Declared(
        params=dict(params or {}),
        layout=plain_data(layout or {}, "layout"),
        early=EarlyLook() if env.rank == 0 else None,
    )
    return Run(load_settings(config, env), env, declared, writer_from_env())


def _be_heard(rank: int) -> None:
    """Say who speaks, where the script has not set up logging itself."""
    ours = logging.getLogger("midwatch")
    if not ours.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[midwatch rank {rank}] %(levelname)s: %(message)s"))
        ours.addHandler(handler)
