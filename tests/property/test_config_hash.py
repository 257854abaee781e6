"""Equal settings, equal hash; other settings, other hash."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midwatch.config import canonical_json, config_hash, redact
from midwatch.core import ConfigError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
TABLES = st.dictionaries(st.text(max_size=8), TREES, max_size=5)


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(list(value))}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


def floated(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    if isinstance(value, dict):
        return {key: floated(item) for key, item in value.items()}
    return [floated(item) for item in value] if isinstance(value, list) else value


@given(TABLES)
def test_order_and_spelling_of_numbers_do_not_matter(table: dict[str, Any]) -> None:
    assert config_hash(table, {}) == config_hash(shuffled(table), {}) == config_hash(floated(table), {})


@given(TABLES)
def test_hashing_is_repeatable_and_survives_json(table: dict[str, Any]) -> None:
    written = json.loads(canonical_json(table))
    assert canonical_json(written) == canonical_json(table)


@given(TABLES, TABLES)
def test_the_hash_tells_settings_apart(one: dict[str, Any], two: dict[str, Any]) -> None:
    is_same = canonical_json(redact(one)) == canonical_json(redact(two))
    assert (config_hash(one, {}) == config_hash(two, {})) is is_same


@given(TABLES)
def test_redacting_twice_changes_nothing(table: dict[str, Any]) -> None:
    assert redact(redact(table)) == redact(table)


def test_parameters_and_train_table_are_not_exchangeable() -> None:
    assert config_hash({"lr": 1}, {}) != config_hash({}, {"lr": 1})


def test_the_hash_is_16_hex_digits_and_stays_the_same_for_ever() -> None:
    assert config_hash({"lr": 3e-4, "layers": 12}, {"name": "tiny"}) == "0ba07ff8fd9591c6"
    assert config_hash({}, {}) == "7ca6212bc5e1dc39"


@pytest.mark.parametrize(("one", "two"), [(1, True), (1, "1"), (0, None), (0, False), ([1], 1), ("NaN", "nan")])
def test_what_is_different_hashes_differently(one: Any, two: Any) -> None:
    assert config_hash({"x": one}, {}) != config_hash({"x": two}, {})


class Kind(enum.Enum):
    ADAM = "adam"


@dataclass
class Inner:
    depth: int = 2


def test_richer_values_hash_as_what_they_mean() -> None:
    rich = {"kind": Kind.ADAM, "inner": Inner(), "path": Path("/x"), "pair": (1, 2), "set": {"b", "a"}, "big": math.inf}
    plain = {"kind": "adam", "inner": {"depth": 2}, "path": "/x", "pair": [1, 2], "set": ["a", "b"], "big": "Infinity"}
    assert config_hash(rich, {}) == config_hash(plain, {})


def test_a_path_that_is_no_text_is_hashed_by_its_escapes() -> None:
    assert config_hash({"path": Path("/caf\udce9")}, {}) == config_hash({"path": "/caf\\udce9"}, {})


def test_an_object_with_an_address_is_refused_by_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        config_hash({"model": {"layers": [1, object()]}}, {})
    assert caught.value.code == "CF103"
    assert "params.model.layers[1]" in caught.value.message


def test_a_cycle_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["x"] = loop
    with pytest.raises(ConfigError):
        config_hash(loop, {})


def test_two_keys_of_one_spelling_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        config_hash({1: "a", "1": "b"}, {})  # type: ignore[dict-item]
    assert caught.value.code == "CF106"
