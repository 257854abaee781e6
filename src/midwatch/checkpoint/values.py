"""Non-tensor state as JSON: what a ``state_dict()`` holds besides tensors, and nothing that could run code.

A value JSON can say is written as it is; what JSON cannot say becomes an object with one ``$`` key::

    (1, 2)            {"$tuple": [1, 2]}            b"ab"          {"$bytes": "YWI="}
    nan, inf, -inf    {"$float": "nan"}             2**80          {"$int": "1208925819614629174706176"}
    {1, 2}            {"$set": [1, 2]}              {1: "a"}       {"$dict": [[1, "a"]]}
    a tensor          whatever the caller's ``leaf`` returns, e.g. {"$tensor": "private.00000.data.buffer"}

Everything else is refused with CK304 and the path of the value: a checkpoint never needs to execute anything.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from midwatch.core import CheckpointError

Leaf = Callable[[str, Any], dict[str, Any] | None]
"""Called with (path, value) for every value JSON cannot hold; returns its tagged form, or None to refuse it."""
Restore = Callable[[str, Any], Any]
"""Called with (tag, payload) for tags that ``decode`` does not know; the inverse of ``Leaf``."""

MAX_DEPTH = 64
"""Deeper nesting is a cycle: no optimizer, scheduler or loader known nests more than a dozen levels."""
_JSON_INT = 2**63
_PLAIN = frozenset({dict, list, tuple, set, frozenset})


def encode(value: Any, path: str, leaf: Leaf | None = None) -> Any:
    """The value as JSON-ready data, detached from the original (a later change of it is not seen).

    Raises:
        CheckpointError: CK304 with the dotted path of the first value that cannot be saved.
    """
    return _encode(value, path, leaf or _refuse, 0)


def _encode(value: Any, path: str, leaf: Leaf, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError("CK304", f"{path}: nested more than {MAX_DEPTH} levels deep (a cycle?)", path=path)
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value) if -_JSON_INT <= value < _JSON_INT else {"$int": _digits(int(value), path)}
    if isinstance(value, float):
        return _encode_float(float(value))
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    return _encode_container(value, path, leaf, depth)


def _digits(value: int, path: str) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python's own limit, which reading it back would meet as well
        raise CheckpointError("CK304", f"{path}: a number of too many digits cannot be saved", path=path) from error


def _encode_float(value: float) -> Any:
    if value != value:
        return {"$float": "nan"}
    if value in (float("inf"), float("-inf")):
        return {"$float": "inf" if value > 0 else "-inf"}
    return value


def _encode_container(value: Any, path: str, leaf: Leaf, depth: int) -> Any:
    if type(value) not in _PLAIN and (tagged := leaf(path, value)) is not None:
        return tagged  # tensors come this way, thousands of them: before the questions that take long
    if isinstance(value, Mapping):
        return _encode_mapping(cast("Mapping[Any, Any]", value), path, leaf, depth)
    if isinstance(value, list):
        return _encode_items(cast("list[Any]", value), path, leaf, depth)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"$tuple": _encode_items(cast("tuple[Any, ...]", value), path, leaf, depth)}
    if isinstance(value, (set, frozenset)):
        # Sorted by their encoded text, so that equal sets are equal bytes.
        items = _encode_items(list(cast("set[Any]", value)), path, leaf, depth)
        tag = "$frozenset" if isinstance(value, frozenset) else "$set"
        return {tag: sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError("CK304", f"{path}: a value of type {kind} cannot be saved", path=path, type=kind)


def _encode_items(values: Sequence[Any], path: str, leaf: Leaf, depth: int) -> list[Any]:
    return [_encode(item, f"{path}.{index}", leaf, depth + 1) for index, item in enumerate(values)]


def _encode_mapping(value: Mapping[Any, Any], path: str, leaf: Leaf, depth: int) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {str(key): _encode(item, f"{path}.{key}", leaf, depth + 1) for key, item in value.items()}
    pairs = [
        [_encode(key, f"{path}.<key>", leaf, depth + 1), _encode(item, f"{path}.{key}", leaf, depth + 1)]
        for key, item in value.items()
    ]
    return {"$dict": pairs}


def decode(data: Any, restore: Restore | None = None) -> Any:
    """The inverse of ``encode``.

    Raises:
        CheckpointError: CK106 on a tag nobody knows or a payload that does not fit it.
    """
    try:
        return _decode(data, restore)
    except RecursionError as error:
        raise CheckpointError("CK106", "saved state is nested too deep") from error


def _decode(data: Any, restore: Restore | None) -> Any:
    if isinstance(data, list):
        return [_decode(item, restore) for item in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    table = cast("dict[str, Any]", data)
    tag = next(iter(table), "")
    if not tag.startswith("$"):
        return {key: _decode(item, restore) for key, item in table.items()}
    try:
        return _decode_tag(tag, table[tag], restore)
    except (ValueError, TypeError) as error:
        raise CheckpointError("CK106", f"saved value with tag {tag} is malformed: {error}") from error


def _decode_tag(tag: str, payload: Any, restore: Restore | None) -> Any:
    match tag:
        case "$tuple":
            return tuple(_decode(item, restore) for item in payload)
        case "$set":
            return {_decode(item, restore) for item in payload}
        case "$frozenset":
            return frozenset(_decode(item, restore) for item in payload)
        case "$dict":
            return {_decode(key, restore): _decode(item, restore) for key, item in payload}
        case "$bytes":
            return base64.b64decode(payload, validate=True)
        case "$float":
            return float(payload)
        case "$int":
            return int(payload)
        case _ if restore is not None:
            return restore(tag, payload)
        case _:
            raise CheckpointError("CK106", f"saved value has the unknown tag {tag}")


def dumps(data: Any) -> str:
    """Encoded data as compact ASCII JSON; equal data gives equal text.

    Key order is kept, not sorted: some state dicts mean something by it.
    """
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Parse what ``dumps`` wrote.

    Raises:
        CheckpointError: CK106 when it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("CK106", f"saved state is not valid JSON: {error}") from error


def _refuse(_path: str, _value: Any) -> None:
    return None
