"""From sources to one checked ``Config``: default < file or dict < environment < override.

Every problem found is in the one error that is raised: nobody should learn of three typos in three runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import msgspec

from midwatch.config import check
from midwatch.config.env import RankEnv, read_rank_env
from midwatch.config.redact import redact
from midwatch.config.schema import Config
from midwatch.config.sources import Layer, OriginKind, RawText, from_mapping, from_overrides, read_file
from midwatch.core import ConfigError


class Origin(msgspec.Struct, frozen=True):
    """Who set a value, and where it is written."""

    kind: OriginKind = "default"
    where: str = ""


class LoadedConfig(msgspec.Struct, frozen=True):
    """A configuration and the origin of each of its dotted keys."""

    config: Config
    origins: dict[str, Origin]


def load_config(source: str | Path | Mapping[str, Any] | Config | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration for this process.

    Args:
        source: A TOML file (or ``.json``), a nested dict, or None: the file a launcher named in ``MIDWATCH_CONFIG``,
            else the defaults.
        overrides: ``"checkpoint.interval=200"``; the value is read as TOML, and as plain text where it is none.

    Raises:
        ConfigError: CF101 unknown key, CF102 range, CF103 type, CF104 unreadable, CF105 not TOML, CF106 contradiction.
            The message names every problem; ``context["problems"]`` lists them.
    """
    return trace_config(source, overrides).config


def trace_config(
    source: str | Path | Mapping[str, Any] | Config | None = None,
    overrides: Sequence[str] = (),
    *,
    env: RankEnv | None = None,
) -> LoadedConfig:
    """Like ``load_config``, with the origin of every value. ``env`` None: this process's environment."""
    env = read_rank_env() if env is None else env
    layers = [*_base_layers(source, env), *from_overrides(overrides)]
    merge = _Merge()
    for layer in layers:
        merge.add(layer)
    config = merge.build()
    merge.refuse(layers)
    return LoadedConfig(config, merge.all_origins(config))


def dump_config(config: Config) -> bytes:
    """The configuration as JSON that ``load_config`` reads back, secrets in ``[train]`` replaced."""
    values = msgspec.to_builtins(config)
    values["train"] = redact(values["train"])
    # The standard library's writer: it keeps NaN and infinity apart from null, and its reader takes them back.
    return json.dumps(values, indent=2, default=str).encode() + b"\n"


def flatten_config(config: Config) -> dict[str, Any]:
    """Dotted keys and values in the order of the schema, ``train.*`` last, secrets replaced."""
    flat: dict[str, Any] = {key: attrgetter(key)(config) for key in check.KEYS}
    for key, value in _flat_train(redact(config.train), "train").items():
        flat[key] = value
    return flat


def _base_layers(source: str | Path | Mapping[str, Any] | Config | None, env: RankEnv) -> list[Layer]:
    layers: list[Layer] = []
    if isinstance(source, (str, Path)):
        layers.append(read_file(Path(source)))
    elif source is not None:
        layers.append(from_mapping(source))
    elif env.config_path is not None:
        layers.append(read_file(env.config_path, "environment"))
    if env.run_dir is not None:
        layers.append(Layer("environment", "MIDWATCH_RUN_DIR", {"run": {"dir": str(env.run_dir)}}))
    return layers


class _Merge:
    """Layers laid over each other, and the problems met while doing it."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {name: {} for name in check.TABLES}
        self.train: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.problems: list[tuple[str, check.Problem]] = []

    def add(self, layer: Layer) -> None:
        for name, table in layer.values.items():
            if name != "train" and name not in check.TABLES:
                self._note(layer, check.unknown_table(str(name)))
            elif name == "train" and isinstance(table, Mapping):
                self._add_train(layer, cast("Mapping[str, Any]", table))
            else:
                self._add_table(layer, name, table)

    def build(self) -> Config:
        built = {name: dict(values) for name, values in self.values.items()}
        for name in reversed(check.TABLES):  # inner ones before the one they lie in
            outer, _, last = name.rpartition(".")
            table = check.TABLES[name](**built[name])
            built.setdefault(outer, {})[last] = table
        return Config(**built[""], train=self.train)

    def refuse(self, layers: Sequence[Layer]) -> None:
        if not self.problems:
            for problem in check.contradictions(self.build()):
                origin = self.origins.get(problem.key, Origin())
                self.problems.append((origin.where or layers[-1].where if layers else "defaults", problem))
        if not self.problems:
            return
        first = self.problems[0][1]
        lines = [f"{where}: {problem.message}" for where, problem in self.problems]
        found = [
            {"code": problem.code, "key": problem.key, "where": where, "message": problem.message}
            for where, problem in self.problems
        ]
        raise ConfigError(first.code, "\n".join(lines), hint=first.hint, key=first.key, problems=found)

    def all_origins(self, config: Config) -> dict[str, Origin]:
        return {key: self._origin(key) for key in flatten_config(config)}

    def _origin(self, key: str) -> Origin:
        # A whole table in [train] may have been set at once: the nearest ancestor knows.
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return self.origins.get(key, Origin())

    def _add_table(self, layer: Layer, name: str, table: Any) -> None:
        if not isinstance(table, Mapping):
            self._note(layer, check.not_a_table(name, _plain(table)))
            return
        for word, raw in cast("Mapping[str, Any]", table).items():
            key = f"{name}.{word}"
            if key in check.TABLES:
                self._add_table(layer, key, raw)
            elif key in check.KEYS:
                self._add_value(layer, key, raw)
            else:
                self._note(layer, check.unknown_key(name, str(word)))

    def _add_value(self, layer: Layer, key: str, raw: Any) -> None:
        value, problem = check.convert(key, _plain(raw))
        if problem is not None and isinstance(raw, RawText):
            value, again = check.convert(key, raw.text)
            problem = problem if again is not None else None
        if problem is not None:
            self._note(layer, problem)
            return
        table, _, word = key.rpartition(".")
        self.values[table][word] = value
        self.origins[key] = Origin(layer.kind, layer.place(key))

    def _add_train(self, layer: Layer, table: Mapping[str, Any]) -> None:
        values = cast("dict[str, Any]", _plain(table))
        for problem in check.train_problems(values):
            self._note(layer, problem)
        _lay_over(self.train, values)
        for key in _flat_train(values, "train"):
            self.origins[key] = Origin(layer.kind, layer.place(key))

    def _note(self, layer: Layer, problem: check.Problem) -> None:
        self.problems.append((layer.place(problem.key), problem))


def _plain(value: Any) -> Any:
    if isinstance(value, RawText):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    return value


def _lay_over(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            _lay_over(cast("dict[str, Any]", below), cast("Mapping[str, Any]", value))
        else:
            base[key] = value


def _flat_train(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}.{name}"
        if isinstance(value, Mapping) and value:
            flat.update(_flat_train(cast("Mapping[str, Any]", value), key))
        else:
            flat[key] = value
    return flat
