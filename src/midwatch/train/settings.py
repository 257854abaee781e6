"""The configuration of a rank: the script's own, and over it what the launcher was told explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

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
    _lay_departures(merged, told, msgspec.to_builtins(Config()))
    return load_config(merged)


def _lay_departures(base: dict[str, Any], told: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    for key, value in told.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            inner: Any = plain.get(key)
            _lay_departures(base[key], cast("Mapping[str, Any]", value), inner if isinstance(inner, dict) else {})
        elif key not in plain or value != plain[key]:
            base[key] = value


def fix_paths(config: CheckpointConfig, paths: RunPaths) -> CheckpointConfig:
    """The same settings with the folders as they were understood at ``attach``: a later ``chdir`` changes nothing."""
    local, key = paths.checkpoint_local_dir, paths.signing_key
    return msgspec.structs.replace(
        config,
        dir=str(paths.checkpoint_dir) if config.dir else "",
        local_dir="" if local is None else str(local),
        trust=msgspec.structs.replace(config.trust, signing_key="" if key is None else str(key)),
    )
