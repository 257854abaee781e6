"""Guards never raise, whatever the numbers; who sees the same decides the same; a saved state goes on the same."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.config import GuardsConfig, ScheduleConfig
from midwatch.guards import Guards, Sample

ANY = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, -0.0, 1.0, 2.0, 1e-320, 1e308, math.inf, math.nan]))
RANKED = st.one_of(st.none(), st.dictionaries(st.integers(0, 3), st.floats(), max_size=4))
WORDS = st.one_of(st.none(), st.dictionaries(st.integers(0, 3), st.sampled_from(["", "a", "b"]), max_size=4))
ODD = st.fixed_dictionaries(
    {},
    optional={
        "loss": ANY,
        "grad_norm": ANY,
        "lr": st.one_of(ANY, st.lists(st.floats(), max_size=3).map(tuple)),
        "loss_scale": ANY,
        "is_skipped": st.booleans(),
        "param_norm": ANY,
        "update_ratio": ANY,
        "unchanged_share": ANY,
        "rank_losses": RANKED,
        "rank_norms": RANKED,
        "rank_gradients": RANKED,
        "checksums": WORDS,
        "repeated_share": ANY,
        "seen_share": ANY,
        "token_entropy": ANY,
        "token_distance": ANY,
        "rank_seen": RANKED,
        "rank_repeated": RANKED,
        "same_rows_ranks": ANY,
        "same_rows": st.lists(st.integers(0, 3), max_size=3, unique=True).map(tuple),
        "source_z": ANY,
    },
)
PLAN = ScheduleConfig(kind="cosine", peak_lr=1e-3, warmup_steps=10, total_steps=600, floor_ratio=0.1)


def ordinary(step: int) -> dict[str, Any]:
    wave = 1 + 0.01 * math.sin(step * 1.3)
    return {
        "loss": 3.0 * wave * (step + 5) ** -0.05,
        "grad_norm": 0.5 * wave,
        "lr": 1e-3,
        "loss_scale": 1024.0,
        "param_norm": 20 + step * 0.01,
        "update_ratio": 0.003 * wave,
        "token_entropy": 4.5 * wave,
        "token_distance": 0.2 * wave,
        "rank_losses": {0: 2.0 * wave, 1: 2.0 / wave},
        "checksums": {0: "a", 1: "a"},
    }


@settings(max_examples=20)
@given(odd=st.dictionaries(st.integers(0, 339), ODD, max_size=40), cut=st.integers(0, 339), resume=st.booleans())
def test_saved_guards_go_on_the_same(odd: dict[int, dict[str, Any]], cut: int, resume: bool) -> None:
    config = GuardsConfig(schedule=PLAN)
    whole, again = Guards(config), Guards(config)
    for step in range(340):
        if step == cut:
            text = json.dumps(again.state_dict(), allow_nan=False)
            again = Guards(config)
            again.load_state_dict(json.loads(text))
            if resume:
                whole.resumed(step)
                again.resumed(step)
        sample = Sample(step=step, **{**ordinary(step), **odd.get(step, {})})
        # Texts, because NaN is not equal to itself.
        assert repr(whole.observe(sample)) == repr(again.observe(sample))


def test_a_state_of_another_version_is_left_aside() -> None:
    guards = Guards()
    guards.load_state_dict({"version": 99, "parts": "of another shape"})
    assert guards.observe(Sample(step=0, loss=3.0)).findings == ()
