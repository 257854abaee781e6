"""``[guards]`` in a file: what contradicts itself is refused, and the words of the rules are those of the findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from midwatch.config import GuardKind, load_config
from midwatch.core import ConfigError

PLAN = {"kind": "cosine", "peak_lr": 3e-4, "warmup_steps": 10, "total_steps": 100}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "guards.md"


@pytest.mark.parametrize(
    ("guards", "code"),
    [
        ({"spike_z": [8, 6, 20]}, "CF106"),
        ({"spike_z": [6, 8]}, "CF102"),
        ({"breaker": {"probation_z": 7}}, "CF106"),
        ({"schedule": {**PLAN, "peak_lr": 0}}, "CF106"),
        ({"schedule": {**PLAN, "total_steps": 10}}, "CF106"),
        ({"schedule": {**PLAN, "kind": "wsd", "decay_start": 100}}, "CF106"),
        ({"off": ["spikes"]}, "CF102"),
        ({"action": "shout"}, "CF102"),
        ({"trip_after": 0}, "CF102"),
    ],
)
def test_refused(guards: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"guards": guards})
    assert caught.value.code == code


def test_a_list_of_the_wrong_length_says_so() -> None:
    with pytest.raises(ConfigError, match="must have 3 entries"):
        load_config({"guards": {"spike_z": [6, 8]}})


def test_taken() -> None:
    config = load_config({"guards": {"schedule": PLAN, "off": ["plateau"], "spike_z": [5, 5, 5]}}).guards
    assert config.schedule.kind == "cosine"
    assert config.off == ("plateau",)


def test_every_kind_is_explained() -> None:
    text = PAGE.read_text()
    assert [kind for kind in get_args(GuardKind) if f"| `{kind}` |" not in text] == []
