"""Finding what is wrong with a configuration, all of it at once, and saying it in the reader's words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from datetime import date, time
from typing import Any, NamedTuple, cast

import msgspec

from midwatch.config.env import real_path
from midwatch.config.redact import redact
from midwatch.config.schema import Config

SECTIONS: dict[str, type[msgspec.Struct]] = {
    field.name: field.type for field in msgspec.structs.fields(Config) if field.name != "train"
}
KEYS: dict[str, msgspec.structs.FieldInfo] = {
    f"{name}.{field.name}": field for name, section in SECTIONS.items() for field in msgspec.structs.fields(section)
}

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
    near = _near(name, [*SECTIONS, "train"])
    if not near:
        near = _near(name, (key.partition(".")[2] for key in KEYS))
        near = next((key for key in KEYS if key.endswith(f".{near}")), "") if near else ""
    hint = f"Did you mean {near}?" if near else f"Known tables: {', '.join([*SECTIONS, 'train'])}."
    return Problem("CF101", name, f"unknown table {name!r}" + (f"; did you mean {near}?" if near else ""), hint)


def unknown_key(section: str, name: str) -> Problem:
    """A name inside a table of ours that the table does not have."""
    own = [key.partition(".")[2] for key in KEYS if key.startswith(f"{section}.")]
    near = _near(name, own)
    suggestion = f"{section}.{near}" if near else next((key for key in KEYS if key.endswith(f".{name}")), "")
    hint = f"Did you mean {suggestion}?" if suggestion else f"Keys of [{section}]: {', '.join(own)}."
    tail = f"; did you mean {suggestion}?" if suggestion else ""
    return Problem("CF101", f"{section}.{name}", f"unknown key {section}.{name}{tail}", hint)


def not_a_table(name: str, value: Any) -> Problem:
    """A table's name with a plain value behind it."""
    return Problem("CF103", name, f"{name} = {_shown(name, value)}: must be a table, written [{name}]")


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
    watch, checkpoint = config.watch, config.checkpoint
    if watch.confirm_s > watch.floor_s:
        yield _pair("watch.confirm_s", watch.confirm_s, "watch.floor_s", watch.floor_s, "must not exceed")
    if watch.floor_s > watch.phase_timeout_s:
        yield _pair("watch.floor_s", watch.floor_s, "watch.phase_timeout_s", watch.phase_timeout_s, "must not exceed")
    local, shared = checkpoint.local_dir, checkpoint.dir or f"{config.run.dir}/checkpoints"
    if local and real_path(local).is_relative_to(real_path(shared)):
        # The shared tier would list the local tier's folders as its own and the copy would overwrite its source.
        yield _pair("checkpoint.local_dir", local, "checkpoint.dir", shared, "must lie outside")


def _pair(key: str, value: Any, other: str, other_value: Any, relation: str) -> Problem:
    message = f"{key} = {value!r} {relation} {other} = {other_value!r}"
    return Problem("CF106", key, message, f"Change {key} or {other}.")


def _misfit(key: str, value: Any, error: str) -> Problem:
    match = _EXPECTED.match(error)
    shown = f"{key}{match['at'] or '' if match else ''} = {_shown(key, value)}"
    if match is None:
        return Problem("CF103", key, f"{shown}: {error}")
    kind = _KINDS.get(match["kind"], match["kind"])
    if match["range"]:
        return Problem("CF102", key, f"{shown}: {_range(match['range'])}")
    got = _GOT.get(match["got"] or "", match["got"] or "something else")
    return Problem("CF103", key, f"{shown}: must be {kind}, not {got}")


def _range(bound: str) -> str:
    if "length" in bound:
        return "must not be empty"
    number = re.sub(r"\.0\b", "", bound)
    return f"must be {number}"


def _shown(key: str, value: Any) -> str:
    shown = repr(redact(value, key.rpartition(".")[2]))
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
