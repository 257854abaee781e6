"""Any set of tensors: the layout has no holes, parses back equal, and a stock safetensors reader agrees."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from midwatch.checkpoint.coverage import tiling_fault
from midwatch.checkpoint.format import (
    ITEM_SIZES,
    ShardIdentity,
    TensorEntry,
    TensorSpec,
    parse_header,
    plan_image,
    sections_of,
    shard_metadata,
)
from midwatch.core import CheckpointError

IDENTITY = ShardIdentity(run="r", attempt=3, step=7, rank=1, world_size=2)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    keys = draw(
        st.lists(st.text(min_size=1, max_size=12).filter(lambda k: k != "__metadata__"), unique=True, max_size=8)
    )
    made: list[TensorSpec] = []
    for key in keys:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        offsets = tuple(draw(st.integers(0, 4)) for _ in shape)
        whole = tuple(size + offset + draw(st.integers(0, 3)) for size, offset in zip(shape, offsets, strict=True))
        dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
        made.append(TensorSpec(key=key, dtype=dtype, shape=shape, offsets=offsets, global_shape=whole))
    return made


@given(specs(), st.text(max_size=50))
def test_any_layout_round_trips(tensors: list[TensorSpec], state: str) -> None:
    plan = plan_image(tensors, metadata=shard_metadata(IDENTITY, tensors, state))
    assert plan.data_start % 4096 == 0
    position = 0
    for entry in plan.entries:
        assert entry.begin == position
        assert entry.begin % ITEM_SIZES[entry.dtype] == 0
        position = entry.end
    assert plan.size_bytes == plan.data_start + position
    header = parse_header(plan.header)
    assert sorted(header.entries, key=lambda e: e.key) == sorted(plan.entries, key=lambda e: e.key)
    assert header.identity.owner == IDENTITY.owner
    assert header.metadata["midwatch.state"] == state


@given(specs())
def test_a_stock_reader_opens_it(tensors: list[TensorSpec]) -> None:
    plan = plan_image(tensors, metadata=shard_metadata(IDENTITY, tensors, "{}"))
    found = safetensors.deserialize(plan.header + bytes(plan.size_bytes - plan.data_start))
    assert {key: (item["dtype"], tuple(item["shape"])) for key, item in found} == {
        spec.key: (spec.dtype, spec.shape) for spec in tensors
    }


@given(specs(), st.data())
def test_a_damaged_header_never_escapes_as_another_error(tensors: list[TensorSpec], data: st.DataObject) -> None:
    header = bytearray(plan_image(tensors, metadata=shard_metadata(IDENTITY, tensors, "{}")).header)
    place = data.draw(st.integers(0, len(header) - 1))
    header[place] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(CheckpointError):
        parse_header(bytes(header[: data.draw(st.integers(0, len(header)))]))


@st.composite
def tilings(draw: st.DrawFn) -> list[TensorEntry]:
    """A tensor cut by random planes in each dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = [()]
    for edges in cuts:
        boxes = [(*box, pair) for box in boxes for pair in itertools.pairwise(edges)]
    return [
        TensorEntry(
            key="w",
            dtype="F32",
            shape=tuple(end - begin for begin, end in box),
            offsets=tuple(begin for begin, _ in box),
            global_shape=shape,
            begin=0,
            end=0,
        )
        for box in boxes
    ]


@given(tilings(), st.randoms())
def test_a_tiling_is_whole_and_without_a_part_it_is_not(parts: list[TensorEntry], dice: object) -> None:
    dice.shuffle(parts)
    assert tiling_fault(parts) == ""
    if len(parts) > 1:
        assert "elements present" in tiling_fault(parts[1:])
    assert tiling_fault([*parts, parts[0]]) == "two parts overlap"


@given(tilings(), st.data())
def test_a_tiling_agrees_with_counting_each_element(parts: list[TensorEntry], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=len(parts) + 2))
    counts = np.zeros(parts[0].global_shape, dtype=int)
    for part in chosen:
        counts[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.shape, strict=True))] += 1
    assert (tiling_fault(chosen) == "") == bool((counts == 1).all())


@pytest.mark.parametrize(
    "change",
    [{"dtype": "F4"}, {"offsets": (3,)}, {"global_shape": (1,)}, {"global_shape": (2, 2)}, {"key": "__metadata__"}],
)
def test_an_impossible_tensor_is_refused(change: dict[str, object]) -> None:
    good = {"key": "w", "dtype": "F32", "shape": (2,), "offsets": (0,), "global_shape": (2,)}
    with pytest.raises(CheckpointError) as caught:
        plan_image([TensorSpec(**{**good, **change})], metadata={})
    assert caught.value.code == "CK304"


def test_sections_are_named_by_their_keys() -> None:
    keys = ["model.a.b", "optimizer.state.a.exp_avg", "private.00003.rng.cpu", "private.00003.data.x"]
    assert sections_of(keys) == ("data", "model", "optimizer", "rng")
    assert math.prod(()) == 1
