"""One line of a ledger: its bytes, its hash, its link to the line before.

    {"attempt":1,"data":{...},"event":"checkpoint.committed",...,"prev":"<64 hex>","seq":7,...,"hash":"<64 hex>"}

All keys but ``hash`` are sorted and spelled without white space; ``hash`` comes last and is the SHA-256 of the line as
it would read without it. The hash is over bytes, not over meaning, so even an edit that changes no value is found.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any, cast

import msgspec

from midwatch.config import redact
from midwatch.core import UNREADABLE, Event

GENESIS = "0" * 64
"""``prev`` of the first line."""

MAX_LINE_BYTES = 2 * 1024 * 1024
"""Larger data is replaced by its size: one event must not fill the disk, and a line must fit into one write."""

MAX_TEXT = 16 * 1024
"""One text of an event; whole logs lie beside the ledger, not in it."""

_TAIL = re.compile(rb',"hash":"([0-9a-f]{64})"\}\Z')
_TAIL_BYTES = len(',"hash":""}') + 64
_DEPTH = 16


class LedgerLine(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An event as it stands in a ledger."""

    seq: int
    """Counts from 0 within one file."""
    prev: str
    hash: str
    writer: str = ""
    """The ledger file's stem; filled in by the reader, not on disk."""


def encode_line(event: Event, seq: int, prev: str) -> tuple[bytes, str]:
    """The line with its newline, and its hash. Secrets in ``data`` are replaced."""
    body = _encode_body(event, seq, prev, plain_data(event.data))
    if len(body) > MAX_LINE_BYTES:
        body = _encode_body(event, seq, prev, {"omitted_bytes": len(body)})
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + b',"hash":"' + digest.encode() + b'"}\n', digest


def decode_line(raw: bytes) -> LedgerLine | None:
    """The line's content, without its newline; None when its hash does not fit or it is no line of ours."""
    stored = stored_hash(raw)
    if stored is None or hashlib.sha256(raw[:-_TAIL_BYTES] + b"}").hexdigest() != stored:
        return None
    try:
        return msgspec.json.decode(raw, type=LedgerLine)
    except UNREADABLE:
        return None


def stored_hash(raw: bytes) -> str | None:
    """The hash a line claims for itself."""
    match = _TAIL.search(raw)
    return match[1].decode() if match else None


def plain_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data as JSON can hold it, without secrets: a recorder must not fail on what it is told."""
    if all(_is_plain_number(value) and type(key) is str and _stays(key) for key, value in data.items()):
        return dict(data)  # what a training loop records in nearly all steps
    return redact(_plain(data, 0))


def _is_plain_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


@functools.lru_cache(maxsize=4096)
def _stays(name: str) -> bool:
    """A number by this name is no secret, and the name is as JSON can hold it."""
    return redact(_plain({name: 0}, 0)) == {name: 0}


def _encode_body(event: Event, seq: int, prev: str, data: dict[str, Any]) -> bytes:
    fields = {name: getattr(event, name) for name in Event.__struct_fields__ if name not in ("schema", "data")}
    kept = {name: _plain(value, 0) for name, value in fields.items() if value is not None and value != ""}
    line = {"schema": event.schema, "seq": seq, "prev": prev, **kept}
    if data:
        line["data"] = data
    return msgspec.json.encode(line, order="sorted")


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value if value is None or isinstance(value, bool) else int(value)
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            value = f"{value[:MAX_TEXT]}... ({len(value)} characters)"
        # Log lines and file names may hold bytes that are no text; JSON cannot.
        return str(value) if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if depth > _DEPTH:
        return "..."
    return _plain_container(value, depth)


def _plain_container(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_plain(str(key), depth): _plain(item, depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in cast("list[Any]", value)]
    if isinstance(value, Set):
        return sorted((_plain(item, depth + 1) for item in cast("Set[Any]", value)), key=repr)
    if isinstance(value, Enum):
        return _plain(value.value, depth + 1)
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name), depth + 1) for name in value.__struct_fields__}
    # numpy and torch scalars, without importing either.
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return _plain(value.item(), depth + 1)
    return _plain(str(value)[:1000], depth)
