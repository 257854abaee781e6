"""Any plain state survives the way to JSON and back; any set of tensors is shared out fairly and alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midwatch.checkpoint import values

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40)
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.binary(max_size=4), max_size=3)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right and repr(left) == repr(right) if isinstance(left, float) else left == right


@given(plain)
def test_plain_state_comes_back_in_value_and_type(value: Any) -> None:
    text = values.dumps(values.encode(value, "x"))
    assert text.isascii()
    assert same(values.decode(values.loads(text)), value)


@pytest.mark.torch
@given(
    st.dictionaries(st.text(min_size=1, max_size=6), st.integers(0, 10**9), max_size=40),
    st.integers(1, 9),
)
def test_tensors_are_shared_out_once_alike_and_in_balance(sizes: dict[str, int], ranks: int) -> None:
    from midwatch.checkpoint.layout import assign_owners

    owners = assign_owners(sizes, ranks)
    assert owners == assign_owners(dict(reversed(sizes.items())), ranks)
    assert set(owners) == set(sizes)
    assert set(owners.values()) <= set(range(ranks))
    loads = [sum(sizes[key] for key in sizes if owners[key] == rank) for rank in range(ranks)]
    # Greedy by size: nobody has more than a fair share and one tensor.
    assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values(), default=0)
