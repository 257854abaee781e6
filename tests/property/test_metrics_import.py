"""A foreign file that was damaged anywhere gives an answer or a refusal, never a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.audit.importers import FORMATS, import_metrics
from midwatch.core import MetricsError

MEGATRON = b"".join(
    b" [2026-07-01 05:26:%02d] iteration %8d/  500 | elapsed time per iteration (ms): 5.7 | lm loss: 2.1E+00 |\n"
    % (n, n)
    for n in range(1, 6)
)
TITAN = b"".join(
    b"[rank0]:[titan] 2026-02-28 02:08:35,366 - step: %2d  loss:  2.23  memory: 61.2GiB(77.3%%)  tps: 7,350\n" % n
    for n in range(1, 6)
)
STATE = json.dumps({"log_history": [{"loss": 2.5, "step": step} for step in range(5)]}).encode()
TABLE = b"step,loss,text\n" + b"".join(b"%d,2.5,abc\n" % n for n in range(5))
EVENTS = next(Path(__file__).parents[1].joinpath("data", "metrics", "torch").glob("events*")).read_bytes()
SOUND = {"tensorboard": EVENTS, "megatron": MEGATRON, "torchtitan": TITAN, "trainer-state": STATE, "csv": TABLE}

DAMAGE = st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 40)), max_size=6)


def test_all_formats_are_tried() -> None:
    assert set(SOUND) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", ["auto", "named"])
@settings(max_examples=20)
@given(DAMAGE, st.integers(0, 1500))
def test_damage_is_told_in_words(name: str, how: str, damage: list[tuple[int, bytes, int]], cut: int) -> None:
    raw = SOUND[name]
    for at, new, gone in damage:
        at %= len(raw)
        raw = raw[:at] + new + raw[at + gone :] or b"x"
    raw = raw[: len(raw) - cut % len(raw)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(raw)
        code, points = "", 0
        try:
            points = import_metrics([path], Path(folder, "run"), format=name if how == "named" else "auto").points
        except MetricsError as error:
            code = error.code
        assert (code in ("MT101", "MT102")) != (points > 0)
        assert bool(list(Path(folder).glob("run/metrics/a*"))) == (points > 0)
