"""Finding what is wrong with a configuration, all of it at once, and saying it in the reader's words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

import msgspec

from midwatch.config.alerts import AlertsConfig
from midwatch.config.env import real_path
from midwatch.config.redact import redact
from midwatch.config.schema import CheckpointConfig, Config, GuardsConfig
from midwatch.config.secret import is_reference

Table = type[msgspec.Struct]


def _tables(kind: Table, prefix: str = "") -> Iterator[tuple[str, Table]]:
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield f"{prefix}{field.name}", field.type
            yield from _tables(field.type, f"{prefix}{field.name}.")


TABLES: dict[str, Table] = dict(_tables(Config))
"""Every table of ours by its dotted name, an outer one before its inner ones."""
KEYS: dict[str, msgspec.structs.FieldInfo] = {
    f"{name}.{field.name}": field
    for name, table in TABLES.items()
    for field in msgspec.structs.fields(table)
    if f"{name}.{field.name}" not in TABLES
}
"""Every value of ours by its dotted name, in the order of the schema."""
_TOP = [*(name for name in TABLES if "." not in name), "train"]

_EXPECTED = re.compile(
    r"Expected `(?P<kind>[a-z]+)`(?:, got `(?P<got>[a-z]+)`| (?P<range>.*?))?(?: - at `\$(?P<at>.*)`)?$"
)
_KINDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list"}
_GOT = {**_KINDS, "int": "a whole number", "object": "a table", "null": "nothing"}


class Problem(NamedTuple):
    """One thing that is wrong: ``message`` without its place, which the loader knows."""

    code: str
    key: str
    message: str
    hint: str = ""


def unknown_table(name: str) -> Problem:
    """A top-level name that is no table of ours."""
    near = _near(name, _TOP) or _anywhere(name) or _anywhere(_near(name, map(_last, [*KEYS, *TABLES])))
    hint = f"Did you mean {near}?" if near else f"Known tables: {', '.join(_TOP)}."
    return Problem("CF101", name, f"unknown table {name!r}" + (f"; did you mean {near}?" if near else ""), hint)


def unknown_key(table: str, name: str) -> Problem:
    """A name inside a table of ours that the table does not have."""
    own = [_last(key) for key in _inside(table)]
    near = _near(name, own)
    suggestion = f"{table}.{near}" if near else _anywhere(name) or _anywhere(_near(name, map(_last, _below(table))))
    hint = f"Did you mean {suggestion}?" if suggestion else f"Keys of [{table}]: {', '.join(own)}."
    tail = f"; did you mean {suggestion}?" if suggestion else ""
    return Problem("CF101", f"{table}.{name}", f"unknown key {table}.{name}{tail}", hint)


def not_a_table(name: str, value: Any) -> Problem:
    """A table's name with a plain value behind it."""
    own = [key for key in _inside(name) if key in KEYS]
    message = f"{name} = {_shown(name, value)}: must be a table, written [{name}]"
    outer, _, last = name.rpartition(".")
    # Beside the table there may be a value of almost its name: keep and keep_last.
    beside = _near(last, (_last(key) for key in _inside(outer) if key in KEYS)) if outer else ""
    near = f"{outer}.{beside}" if beside else ""
    if near:
        message += f"; did you mean {near}?"
    hint = f"Did you mean {near}, or one of {', '.join(own)}?" if near else f"Keys of [{name}]: {', '.join(own)}."
    return Problem("CF103", name, message, hint if own else "")


def _inside(table: str) -> list[str]:
    """What stands directly in a table: its values and its inner tables."""
    return [key for key in (*KEYS, *TABLES) if key.rpartition(".")[0] == table]


def _below(table: str) -> list[str]:
    return [key for key in (*KEYS, *TABLES) if key.startswith(f"{table}.")]


def _anywhere(name: str) -> str:
    """The dotted key or table whose last word is ``name``."""
    return next((key for key in (*KEYS, *TABLES) if name and _last(key) == name), "")


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def convert(key: str, value: Any) -> tuple[Any, Problem | None]:
    """The value in its field's type, or why it does not fit."""
    try:
        converted: Any = msgspec.convert(value, KEYS[key].type)
    except msgspec.ValidationError as error:
        return None, _misfit(key, value, str(error))
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, float) and not math.isfinite(number):
            return None, Problem("CF102", key, f"{key} = {_shown(key, value)}: must be finite")
    if isinstance(converted, str) and "\0" in converted:
        return None, Problem("CF102", key, f"{key} = {_shown(key, value)}: must not contain a zero byte")
    return converted, None


def train_problems(value: Mapping[Any, Any], path: str = "train", depth: int = 0) -> list[Problem]:
    """What in the user's own table cannot be written down."""
    found: list[Problem] = []
    for key, item in value.items():
        if not isinstance(key, str):
            found.append(Problem("CF103", path, f"{path}: key {_shown(path, key)} is not text"))
            continue
        found += _train_value(item, f"{path}.{key}", depth + 1)
    return found


def contradictions(config: Config) -> Iterable[Problem]:
    """Values that are each fine and do not go together."""
    watch = config.watch
    if watch.confirm_s > watch.floor_s:
        yield _pair("watch.confirm_s", watch.confirm_s, "watch.floor_s", watch.floor_s, "must not exceed")
    if watch.floor_s > watch.phase_timeout_s:
        yield _pair("watch.floor_s", watch.floor_s, "watch.phase_timeout_s", watch.phase_timeout_s, "must not exceed")
    yield from _of_checkpoints(config.checkpoint, config.checkpoint.dir or f"{config.run.dir}/checkpoints")
    yield from _of_guards(config.guards)
    yield from _of_alerts(config.alerts)
    if (url := config.metrics.push.url) and not url.startswith(("http://", "https://", "tensorboard:")):
        # Not quoted: there may be a password in it.
        yield Problem("CF102", "metrics.push.url", "metrics.push.url must begin with http://, https:// or tensorboard:")


def _of_checkpoints(checkpoint: CheckpointConfig, shared: str) -> Iterable[Problem]:
    local, keep, key_file = checkpoint.local_dir, checkpoint.keep, checkpoint.trust.signing_key
    if local and real_path(local).is_relative_to(real_path(shared)):
        # The shared tier would list the local tier's folders as its own and the copy would overwrite its source.
        yield _pair("checkpoint.local_dir", local, "checkpoint.dir", shared, "must lie outside")
    if key_file and real_path(key_file).is_relative_to(real_path(shared)):
        # Whoever gets a copy of the checkpoints would get the power to sign others.
        yield _pair("checkpoint.trust.signing_key", key_file, "checkpoint.dir", shared, "must lie outside")
    if checkpoint.staging.overlap and not checkpoint.async_save:
        yield _pair("checkpoint.staging.overlap", True, "checkpoint.async_save", False, "does not go with")
    if keep.best and keep.best_mode == "max" and _is_loss(keep.best_metric):
        # It would keep the worst ones, and nobody would notice before the good ones are gone.
        yield _pair("checkpoint.keep.best_mode", "max", "checkpoint.keep.best_metric", keep.best_metric, "is wrong for")


def _of_guards(guards: GuardsConfig) -> Iterable[Problem]:
    plan, tiers, mix = guards.schedule, guards.spike_z, guards.data.mix
    if mix and not 0 < sum(mix.values()) < math.inf:
        message = f"guards.data.mix = {_shown('guards.data.mix', mix)}: the weights must add up to more than 0"
        yield Problem("CF106", "guards.data.mix", message)
    if list(tiers) != sorted(tiers):
        yield Problem(
            "CF106", "guards.spike_z", f"guards.spike_z = {list(tiers)}: each must be at least the one before"
        )
    if guards.breaker.probation_z > tiers[0]:
        yield _pair(
            "guards.breaker.probation_z", guards.breaker.probation_z, "guards.spike_z", tiers[0], "must not exceed"
        )
    if plan.kind == "unknown":
        return
    if plan.peak_lr == 0:
        yield _pair("guards.schedule.kind", plan.kind, "guards.schedule.peak_lr", plan.peak_lr, "does not go with")
    if plan.kind != "constant" and plan.total_steps <= max(plan.warmup_steps, plan.decay_start):
        end, begin = plan.total_steps, max(plan.warmup_steps, plan.decay_start)
        yield _pair("guards.schedule.total_steps", end, "guards.schedule.warmup_steps", begin, "must exceed")


def _of_alerts(alerts: AlertsConfig) -> Iterable[Problem]:
    to, smtp = alerts.to, alerts.smtp
    kept = {"webhook": to.webhook, "slack": to.slack, "pagerduty": to.pagerduty, "apprise": to.apprise}
    for name, references in kept.items():
        if not all(map(is_reference, references)):
            yield _not_a_reference(f"alerts.to.{name}")
    if smtp.password and not is_reference(smtp.password):
        yield _not_a_reference("alerts.smtp.password")
    if to.email and not smtp.host:
        yield _pair("alerts.to.email", list(to.email), "alerts.smtp.host", smtp.host, "does not go with")
    if not to.pagerduty_url.startswith(("http://", "https://")):
        yield Problem("CF102", "alerts.to.pagerduty_url", "alerts.to.pagerduty_url must begin with https://")


def _not_a_reference(key: str) -> Problem:
    # Not quoted: it may be the secret itself.
    message = f"{key} must say where the secret is kept: file:PATH or env:NAME"
    return Problem("CF102", key, message, "Write it into a file of mode 0600 and name that file.")


def _is_loss(metric: str) -> bool:
    words = [word for word in re.split(r"[^a-z0-9]+", metric.lower()) if word]
    return bool(words) and words[-1] == "loss" and not words[0].startswith("neg")


def _pair(key: str, value: Any, other: str, other_value: Any, relation: str) -> Problem:
    message = f"{key} = {_as_toml(value)} {relation} {other} = {_as_toml(other_value)}"
    return Problem("CF106", key, message, f"Change {key} or {other}.")


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _misfit(key: str, value: Any, error: str) -> Problem:
    match = _EXPECTED.match(error)
    shown = f"{key}{match['at'] or '' if match else ''} = {_shown(key, value)}"
    if match is None and (words := _words(KEYS[key].type)):
        return Problem("CF102", key, f"{shown}: must be {words}")
    if match is None:
        return Problem("CF103", key, f"{shown}: {error}")
    kind = _KINDS.get(match["kind"], match["kind"])
    if match["range"]:
        return Problem("CF102", key, f"{shown}: {_range(match['range'])}")
    got = _GOT.get(match["got"] or "", match["got"] or "something else")
    return Problem("CF103", key, f"{shown}: must be {kind}, not {got}")


def _words(kind: Any) -> str:
    """The words that a field takes, where it takes only certain ones: ``'a', 'b' or 'c'``."""
    if get_origin(kind) is not Literal:
        return next(filter(None, map(_words, get_args(kind))), "")
    *most, last = sorted(map(repr, get_args(kind)))
    return f"{', '.join(most)} or {last}" if most else last


def _range(bound: str) -> str:
    if exact := re.search(r"length (\d+)", bound):
        return f"must have {exact[1]} entries"
    if "length" in bound:
        return "must not be empty"
    number = re.sub(r"\.0\b", "", bound)
    return f"must be {number}"


def _shown(key: str, value: Any) -> str:
    if key.startswith("alerts.to.") or key == "alerts.smtp.password":
        return "(not shown)"  # people write addresses with tokens here, instead of where they are kept
    # Our own keys hold no secrets: what is called a key is the path of its file.
    shown = repr(redact(value, "" if key in KEYS else _last(key)))
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _train_value(item: Any, path: str, depth: int) -> list[Problem]:
    if depth > 64:
        return [Problem("CF103", path, f"{path}: nested deeper than 64 levels")]
    if isinstance(item, Mapping):
        return train_problems(cast("Mapping[Any, Any]", item), path, depth)
    if isinstance(item, (list, tuple)):
        items = cast("list[Any]", item)
        return [found for i, inner in enumerate(items) for found in _train_value(inner, f"{path}[{i}]", depth + 1)]
    if item is None or isinstance(item, (str, int, float, bool, date, time)):
        return []
    return [Problem("CF103", path, f"{path}: a {type(item).__name__} cannot be written down as a setting")]


def _near(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name.replace("-", "_").lower(), list(names), n=1, cutoff=0.6)
    return matches[0] if matches else ""
