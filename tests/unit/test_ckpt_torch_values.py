"""Non-tensor state: what is kept exactly, and what is refused with its path. Needs no PyTorch."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from typing import Any

import pytest

from midwatch.checkpoint import values
from midwatch.core import CheckpointError


def round_trip(value: Any) -> Any:
    return values.decode(values.loads(values.dumps(values.encode(value, "x"))))


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, [3, "a"])),
        {1: "a", (2, 3): None, "$odd": 1.5},
        {"$tuple": [1]},
        {1, 2, 3},
        frozenset({"a"}),
        b"\x00\xff",
        [True, 1, 1.0, None],
        2**130,
        -(2**63) - 1,
        float("inf"),
        -0.0,
        5e-324,
        "\ud800 lone surrogate and \x00",
        {},
        (),
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)


def test_nan_comes_back_as_nan() -> None:
    assert math.isnan(round_trip({"loss": [float("nan")]})["loss"][0])


def test_the_saved_value_does_not_follow_the_live_one() -> None:
    live = {"drawn": [1, 2]}
    saved = values.encode(live, "x")
    live["drawn"].append(3)
    assert values.decode(saved) == {"drawn": [1, 2]}


def test_a_dict_subclass_is_saved_as_a_dict() -> None:
    assert round_trip(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert list(round_trip(OrderedDict(b=1, a=2))) == ["b", "a"]


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"groups": [{"anneal": math.cos}]}, "scheduler.groups.0.anneal"),
        ({"a": object()}, "scheduler.a"),
        ({"a": Pair(1, 2)}, "scheduler.a"),
        ([1, 2j], "scheduler.1"),
        ({"lock": {1: lambda: None}}, "scheduler.lock.1"),
    ],
)
def test_a_value_that_would_need_code_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        values.encode(value, "scheduler")
    assert caught.value.code == "CK304"
    assert caught.value.context["path"] == path


def test_a_cycle_is_refused_and_does_not_hang() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="cycle"):
        values.encode(loop, "x")


@pytest.mark.parametrize("text", ['{"$exec": "rm"}', '{"$bytes": "?"}', '{"$int": "x"}', '{"$dict": [1]}', "{", "nul"])
def test_damaged_or_foreign_state_is_an_error_and_is_never_run(text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        values.decode(values.loads(text))
    assert caught.value.code == "CK106"
