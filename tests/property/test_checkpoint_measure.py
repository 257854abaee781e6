"""However a shard is cut into pieces, its tensors measure the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy")

from midwatch.checkpoint.image import ITEM_SIZES, TensorSpec, plan_image
from midwatch.checkpoint.measure import ShardMeter
from midwatch.checkpoint.stats import TensorStats, merge_stats

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0")

specs = st.lists(st.tuples(st.sampled_from([*FLOATS, "I64", "U8", "BOOL"]), st.integers(0, 40)), min_size=1, max_size=8)


@given(layout=specs, data=st.data())
def test_the_cuts_between_chunks_do_not_matter(layout: list[tuple[str, int]], data: st.DataObject) -> None:
    plan = plan_image(
        [
            TensorSpec(key=f"w{n}", dtype=dtype, shape=(count,), offsets=(0,), global_shape=(count,))
            for n, (dtype, count) in enumerate(layout)
        ],
        metadata={},
    )
    size = plan.size_bytes - plan.data_start
    body = data.draw(st.binary(min_size=size, max_size=size))
    cuts = sorted(data.draw(st.lists(st.integers(0, plan.size_bytes), max_size=12)))
    image = plan.header + body
    whole, pieces = (ShardMeter(plan.entries, plan.data_start) for _ in range(2))
    whole.feed(memoryview(image))
    for begin, end in zip([0, *cuts], [*cuts, len(image)], strict=True):
        pieces.feed(memoryview(image)[begin:end])
    expected, found = whole.result(), pieces.result()
    assert set(found) == {f"w{n}" for n, (dtype, _) in enumerate(layout) if dtype in FLOATS}
    for key, stats in found.items():
        same = expected[key]
        assert (stats.count, stats.amax, stats.nonfinite) == (same.count, same.amax, same.nonfinite)
        assert stats.sum_squares == pytest.approx(same.sum_squares, rel=1e-12)
    counts = {entry.key: (entry.end - entry.begin) // ITEM_SIZES[entry.dtype] for entry in plan.entries}
    assert all(stats.count == counts[key] for key, stats in found.items())


parts = st.builds(
    TensorStats,
    count=st.integers(0, 1000),
    sum_squares=st.floats(0, 1e308),
    amax=st.floats(0, 1e300),
    nonfinite=st.integers(0, 1000),
)


@given(one=parts, two=parts)
def test_parts_join_in_any_order(one: TensorStats, two: TensorStats) -> None:
    assert merge_stats([{"w": one}, {"w": two}]) == merge_stats([{"w": two}, {"w": one}])
    assert merge_stats([{"w": one}, {"v": two}]) == {"w": one, "v": two}
