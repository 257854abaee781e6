"""``midwatch config``: what midwatch understood, and who said so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from midwatch.cli._output import exits, json_option, plain, say, show_json, table
from midwatch.config import Origin, config_hash, flatten_config, read_rank_env, resolve_paths, trace_config


@click.group("config", short_help="Show the configuration midwatch would use.")
def command() -> None:
    """Show the configuration midwatch would use."""


@command.command(
    "show", epilog=exits(78) + " Example: midwatch config show midwatch.toml --set checkpoint.interval=200 --origin"
)
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key; may be repeated.")
@click.option("--origin", is_flag=True, help="Also say where each value comes from.")
@json_option
def show(file: Path | None, overrides: Sequence[str], origin: bool, is_json: bool) -> None:
    """Load FILE by the rules of a real run and print every key, secrets hidden. All mistakes are told at once.

    Without FILE: what the environment says, else the defaults.
    """
    env = read_rank_env()
    loaded = trace_config(file, overrides, env=env)
    values = flatten_config(loaded.config)
    paths = resolve_paths(loaded.config, env)
    if is_json:
        document = {
            "values": values,
            "origins": {key: msgspec.structs.asdict(found) for key, found in loaded.origins.items()},
            "paths": {"run_dir": str(paths.run_dir), "checkpoint_dir": str(paths.checkpoint_dir)},
            "train_hash": config_hash({}, loaded.config.train),
        }
        show_json(document)
        return
    if origin:
        rows = [(key, _shown(value), *_where(loaded.origins[key])) for key, value in values.items()]
        table(("key", "value", "from", "where"), rows)
    else:
        for key, value in values.items():
            say(f"{plain(key)} = {plain(_shown(value))}")
    say(f"\nrun folder: {plain(paths.run_dir)}\ncheckpoints: {plain(paths.checkpoint_dir)}")


def _shown(value: object) -> str:
    plain_value = list(value) if isinstance(value, tuple) else value
    return json.dumps(plain_value, ensure_ascii=False, default=str)


def _where(found: Origin) -> tuple[str, str]:
    return found.kind, found.where
