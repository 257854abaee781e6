"""Canonical JSON and the config hash: equal settings give equal hashes, whatever their order or spelling.

Numbers are compared as Python compares them: ``1`` and ``1.0`` are the same setting, ``1`` and ``true`` are not. What
cannot be written as plain data is refused rather than hashed by its ``repr``, which may hold an address.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from enum import Enum
from pathlib import PurePath
from typing import Any, cast

import msgspec

from midwatch.config.redact import redact
from midwatch.core import ConfigError

_DEPTH = 64
"""Deeper nesting is a cycle."""


def canonical_json(value: Any) -> bytes:
    """The one spelling of plain data: sorted keys, no spaces, whole numbers without a point.

    Args:
        value: Nested mappings, sequences, sets, strings, numbers, dates, paths, enums, dataclasses and structs.

    Raises:
        ConfigError: CF103 for anything else, CF106 for two keys of one spelling (``1`` and ``"1"``).
    """
    return msgspec.json.encode(plain_data(value), order="sorted")


def config_hash(params: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    """16 hex digits over what decides the result of training: the script's parameters and the ``[train]`` table.

    Paths, intervals and time-outs of midwatch are not in it, nor is the text of a secret.
    """
    return section_hash("config", semantic_data(params, train))


def semantic_data(params: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """What the config hash is taken over: plain data without secrets. Raises as ``canonical_json``."""
    return redact({"params": plain_data(params, "params"), "train": plain_data(train, "train")})


def section_hash(name: str, plain: Any) -> str:
    """16 hex digits over plain data, different for every name of a section."""
    document = msgspec.json.encode(plain, order="sorted")
    return hashlib.sha256(f"midwatch {name} 1\n".encode() + document).hexdigest()[:16]


def plain_data(value: Any, path: str = "", depth: int = 0) -> Any:
    """Tables, lists, texts, numbers, truth values and None, each in its one spelling. Raises as ``canonical_json``."""
    if depth > _DEPTH:
        raise ConfigError("CF103", f"{path or 'value'}: nested deeper than {_DEPTH} levels", path=path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain_data(value.value, path, depth + 1)
    if isinstance(value, (str, int, float, PurePath, datetime, date, time)):
        return _scalar(value)
    if isinstance(value, Mapping):
        return _mapping(cast("Mapping[Any, Any]", value), path, depth)
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(cast("list[Any]", value))]
    if isinstance(value, Set):
        return sorted((plain_data(item, path, depth + 1) for item in cast("Set[Any]", value)), key=msgspec.json.encode)
    return _foreign(value, path, depth)


def _scalar(value: str | float | PurePath | datetime | date | time) -> Any:
    if isinstance(value, (str, PurePath)):
        return str(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return int(value) if value.is_integer() else float(value)
    return value.isoformat()


def _mapping(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise ConfigError("CF103", f"{path or 'value'}: key {key!r} is not a string", path=path)
        name = _scalar(key) if isinstance(key, str) else str(key)
        inner = f"{path}.{name}" if path else name
        if name in plain:
            raise ConfigError("CF106", f"{inner}: given twice, as a number and as a string", path=inner)
        plain[name] = plain_data(item, inner, depth + 1)
    return plain


def _foreign(value: Any, path: str, depth: int) -> Any:
    # numpy and torch scalars, without importing either.
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return plain_data(value.item(), path, depth + 1)
    if is_dataclass(value) and not isinstance(value, type):
        return _mapping({field.name: getattr(value, field.name) for field in fields(value)}, path, depth + 1)
    if isinstance(value, msgspec.Struct):
        return _mapping({name: getattr(value, name) for name in value.__struct_fields__}, path, depth + 1)
    raise ConfigError(
        "CF103",
        f"{path or 'value'}: a {type(value).__name__} cannot be written down as a setting",
        hint="Give strings, numbers, booleans, lists or tables; turn other objects into text first.",
        path=path,
    )
