"""Sections: what differs has a name, what is secret has no value, and nothing grows without bound."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from midwatch.config import config_hash, make_section, semantic_section
from midwatch.config.sections import MAX_SECTION_BYTES, MAX_SEMANTIC_BYTES, MAX_VALUE_BYTES
from midwatch.core import NOT_KEPT, changed_section

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True, allow_infinity=True) | st.text()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
TABLES = st.dictionaries(st.text(max_size=8), TREES, max_size=5)


@given(TABLES, TABLES)
def test_two_hashes_that_differ_have_a_named_difference(one: dict[str, Any], two: dict[str, Any]) -> None:
    a, b = semantic_section(one, {}), semantic_section(two, {})
    assert a.hash == config_hash(one, {})
    changes = changed_section(a, b)
    assert bool(changes) is (a.hash != b.hash)
    assert NOT_KEPT not in {change.name for change in changes}


@given(TABLES)
def test_values_survive_json_as_they_are(table: dict[str, Any]) -> None:
    values = make_section("layout", table).values
    assert json.loads(msgspec.json.encode(values)) == values
    encoded = msgspec.json.encode(values, order="sorted")
    assert msgspec.json.encode(msgspec.json.decode(encoded), order="sorted") == encoded


def test_values_have_names_that_a_person_would_write() -> None:
    params = {"optim": {"lr": 3e-4, "betas": [0.9, 0.95]}, "data": [{"name": "web", "weight": 1}, {"name": "code"}]}
    assert semantic_section({**params, "a.b": 1, "none": {}}, {"seed": 1}).values == {
        'params["a.b"]': 1,
        "params.none": {},
        "params.optim.lr": 0.0003,
        "params.optim.betas": [0.9, 0.95],
        "params.data[0].name": "web",
        "params.data[0].weight": 1,
        "params.data[1].name": "code",
        "train.seed": 1,
    }


def test_a_script_that_declares_nothing_has_no_values() -> None:
    section = semantic_section({}, {})
    assert (section.hash, section.values) == ("7ca6212bc5e1dc39", {})


def test_planted_secrets_are_in_no_name_and_no_value() -> None:
    token = "hf_plantedplantedplanted1"
    table = {
        "wandb_api_key": "planted",
        "password": 12345678,
        "url": "s3://key:planted@host/bucket",
        "nested": [{"auth": {"token": "planted planted"}}],
        token: 1,
        "text": f"use {token} here",
        "argv": ["--secret", "planted", "--lr", "1"],
        "long": token + "x" * 1000,
    }
    section = semantic_section(table, table)
    assert "planted" not in str(section)
    assert "12345678" not in str(section)
    assert section.hash == semantic_section({**table, "wandb_api_key": "rotated"}, table).hash


def test_long_values_are_kept_as_a_remark_that_still_tells_them_apart() -> None:
    one = semantic_section({"template": "x" * 5000, "files": list(range(3000)), "big": 1e300}, {})
    two = semantic_section({"template": "x" * 4999 + "y", "files": [*range(2999), 0], "big": 2e300}, {})
    assert all(len(json.dumps(value)) <= MAX_VALUE_BYTES for value in one.values.values())
    assert {change.name for change in changed_section(one, two)} == {"params.template", "params.files", "params.big"}
    assert "5000 characters" in one.values["params.template"]
    assert "list of 3000" in one.values["params.files"]


def test_a_huge_section_keeps_its_bound_and_its_small_tables() -> None:
    huge = {"lr": 0.1, "model": {"layers": 12}, "data": {"weights": {f"shard-{i:05d}": i / 7 for i in range(9000)}}}
    one = semantic_section(huge, {})
    assert len(msgspec.json.encode(one.values)) <= MAX_SEMANTIC_BYTES
    assert one.values["params.lr"] == 0.1
    assert one.values["params.model.layers"] == 12
    huge["data"]["weights"]["shard-04711"] = 0  # type: ignore[index]
    (change,) = changed_section(one, semantic_section(huge, {}))
    assert change.name == "params.data.weights"
    flat = semantic_section({f"key-{i:05d}": i for i in range(9000)}, {})
    assert len(msgspec.json.encode(flat.values)) <= MAX_SEMANTIC_BYTES
    other = make_section("layout", {f"key-{i:05d}": i for i in range(9000)})
    assert len(msgspec.json.encode(other.values)) <= MAX_SECTION_BYTES
