"""The configuration of a rank: the script's own, and over it what the launcher was told explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from midwatch.config import CheckpointConfig, Config, RankEnv, RunPaths, load_config


def load_settings(source: str | Path | Mapping[str, Any] | None, env: RankEnv) -> Config:
    """Defaults, then ``source``, then the values in which the launcher's configuration departs from the defaults.

    The launcher's file (``MIDWATCH_CONFIG``) is a whole configuration; its defaults must not undo the script's file.

    Raises:
        ConfigError: CF101 to CF106.
    """
    if source is None or env.config_path is None:
        return load_config(source)
    merged = msgspec.to_builtins(load_config(source))
    told = msgspec.to_builtins(load_config(env.config_path))
    plain = msgspec.to_builtins(Config())
    for section, table in told.items():
        departs = {key: value for key, value in table.items() if value != plain[section].get(key)}
        merged[section].update(departs)
    return load_config(merged)


def fix_paths(config: CheckpointConfig, paths: RunPaths) -> CheckpointConfig:
    """The same settings with the folders as they were understood at ``attach``: a later ``chdir`` changes nothing."""
    local = paths.checkpoint_local_dir
    return msgspec.structs.replace(
        config, dir=str(paths.checkpoint_dir) if config.dir else "", local_dir="" if local is None else str(local)
    )
