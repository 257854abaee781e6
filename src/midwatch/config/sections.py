"""Sections of settings as records keep them: a hash over all of it, and values that are flat, redacted and bounded.

A value that is too long to keep becomes a remark with its digest, and where all of them together are too long, the
largest tables do. So a difference always has a name, and a record never grows beyond its bound.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from midwatch.config.hashing import plain_data, section_hash, semantic_data
from midwatch.config.redact import redact, redact_text
from midwatch.core import Section

MAX_VALUE_BYTES = 200
"""Of one value as JSON: a path or a name in full, not a chat template."""
MAX_SEMANTIC_BYTES = 48 * 1024
"""Names and values: more than a thousand of them. Every manifest carries them."""
MAX_SECTION_BYTES = 12 * 1024
"""Of each other section: midwatch's own settings take a third of it."""
MAX_PACKAGES_BYTES = 24 * 1024
"""Names and versions of a thousand packages; a usual environment has a hundred or two."""
_MAX_NAME = 160
_HEAD = 60
"""Characters of a long text that are kept."""
_WORD = re.compile(r"[\w-]+")
_INT_LIMIT = 2**63
"""Beyond it JSON readers disagree about whole numbers; such a one is kept as text."""


def semantic_section(params: Mapping[str, Any], train: Mapping[str, Any]) -> Section:
    """What decides the result of training. Its hash is the config hash.

    Raises:
        ConfigError: CF103, CF106 as ``canonical_json``.
    """
    plain = semantic_data(params, train)
    # Without the names of empty tables: a script that declares nothing has no values.
    declared = {name: table for name, table in plain.items() if table}
    return Section(hash=section_hash("config", plain), values=_bounded(declared, MAX_SEMANTIC_BYTES))


def make_section(name: str, table: Mapping[str, Any]) -> Section:
    """Any other section. Raises as ``semantic_section``."""
    plain = redact(plain_data(table, name))
    return Section(hash=section_hash(name, plain), values=_bounded(plain, MAX_SECTION_BYTES))


def packages_section(packages: Mapping[str, str]) -> Section:
    """Name to version. No word of them is a secret, whatever it looks like (``google-auth``); none at all: empty."""
    if not packages:
        return Section()
    is_long = len(msgspec.json.encode(packages)) > MAX_PACKAGES_BYTES
    return Section(hash=section_hash("packages", packages), values={} if is_long else dict(packages))


def _bounded(plain: Mapping[str, Any], limit_bytes: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in _leaves(plain, ""):
        unique = name
        while unique in values:
            unique += "'"
        values[unique] = _kept(value)
    # The innermost tables first: what is left out should be as little as possible.
    for depth in (3, 2, 1, 0):
        values = _fitted(values, depth, limit_bytes)
    return values


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Values by dotted name. A list of plain values is one value; tables in a list count from 0."""
    if isinstance(value, dict) and (value or not name):
        for key, item in sorted(cast("dict[str, Any]", value).items()):
            yield from _leaves(item, _joined(name, key))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in cast("list[Any]", value)):
        for number, item in enumerate(cast("list[Any]", value)):
            yield from _leaves(item, f"{name}[{number}]")
    else:
        yield _shortened(name), value


def _joined(name: str, key: str) -> str:
    # Names are written down as well as values.
    key = redact_text(key)
    if _WORD.fullmatch(key):
        return f"{name}.{key}" if name else key
    return f"{name}[{json.dumps(key, ensure_ascii=False)}]"


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 12]}…{_digest(name)[:8]}"


def _kept(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _INT_LIMIT:
        # A float of this size is whole, and was made a whole number of hundreds of digits.
        text = str(value)
        is_long = len(text) > MAX_VALUE_BYTES // 2
        value = f"{text[:12]}… ({len(text)} digits, sha256 {_digest(text)})" if is_long else text
    if isinstance(value, list) and any(_is_huge(item) for item in cast("list[Any]", value)):
        value = [str(item) if _is_huge(item) else item for item in cast("list[Any]", value)]
    if len(msgspec.json.encode(value)) <= MAX_VALUE_BYTES:
        return value
    if isinstance(value, str):
        return f"{value[:_HEAD]}… ({len(value)} characters, sha256 {_digest(value)})"
    return f"list of {len(cast('list[Any]', value))} (sha256 {_digest(value)})"


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= _INT_LIMIT


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]


def _fitted(values: dict[str, Any], depth: int, limit_bytes: int) -> dict[str, Any]:
    """Sum up the largest tables, ``depth`` names deep, until the rest fits."""
    sizes = {name: len(name) + len(msgspec.json.encode(value)) + 4 for name, value in values.items()}
    total = sum(sizes.values())
    if total <= limit_bytes:
        return values
    tables: dict[str, list[str]] = {}
    for name in values:
        tables.setdefault(_table(name, depth), []).append(name)
    kept = dict(values)
    for table in sorted(tables, key=lambda table: (-sum(sizes[name] for name in tables[table]), table)):
        inside = tables[table]
        if total <= limit_bytes or len(inside) == 1:
            continue
        remark = f"{len(inside)} values, not kept (sha256 {_digest({name: kept.pop(name) for name in inside})})"
        kept[table] = remark
        total += len(table) + len(remark) + 4 - sum(sizes[name] for name in inside)
    return kept


def _table(name: str, depth: int) -> str:
    return "".join(re.split(r"(?=[.\[])", name)[:depth]) or "everything"
