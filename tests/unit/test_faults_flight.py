"""A flight recorder's dump is a pickle that any rank could have written: read it without running it."""

from __future__ import annotations

import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midwatch.faults.flight import MAX_FLIGHT_BYTES, FlightError, decode_plain, read_flight

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def entry(sequence: int, **more: Any) -> dict[str, Any]:
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "train", "filename": "/home/ada/train.py", "line": 88},
        ],
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 32]],
        "input_dtypes": ["Float"],
        "state": "started",
        "retired": False,
        "is_p2p": False,
        **more,
    }


def dump(*entries: dict[str, Any], protocol: int = 2) -> bytes:
    return pickle.dumps({"version": "2.10", "pg_config": {}, "entries": list(entries)}, protocol)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_calls_come_out_in_order_with_operation_size_and_the_users_line(protocol: int) -> None:
    calls = read_flight(dump(entry(8), entry(7, state="completed", retired=True), protocol=protocol))
    assert [call.sequence for call in calls] == [7, 8]
    last = calls[-1]
    assert (last.group, last.operation, last.state, last.size) == ("0", "all_reduce", "started", "Float[4,32]")
    assert last.frame is not None
    assert (last.frame.function, last.frame.line) == ("train", 88)
    assert calls[0].state == "completed"


def test_only_the_newest_are_kept_and_messages_between_two_ranks_are_left_out() -> None:
    calls = read_flight(dump(*(entry(n) for n in range(100)), entry(100, is_p2p=True)), last=3)
    assert [call.sequence for call in calls] == [97, 98, 99]


def test_what_gloo_has_taken_off_its_list_is_over() -> None:
    (call,) = read_flight(dump(entry(1, profiling_name="gloo:barrier", state="scheduled", retired=True)))
    assert (call.operation, call.state) == ("barrier", "completed")


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_something_is_refused_and_runs_nothing(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlightError, match="not plain data"):
        read_flight(dump(entry(1, state=Hostile()), protocol=protocol))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02}q\x00.trailing",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x02Nr\xff\xff\xff\xff.",  # asks the interpreter's own decoder for 32 GiB of memo
        b"\x80\x04\x96" + struct.pack("<Q", 2**62) + b".",
        b"\x80\x02(" * 10_000,
        b"\x80\x02(e.",
        b"\x80\x02]}s.",
        b"\x80\x02}((tNu.",
        b"\x80\x02h\x05.",
        b"\x80\x02\x87.",
        b"I1" + b"0" * 5000 + b"\n.",
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_damaged_and_crooked_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FlightError):
        read_flight(data)


def test_lists_that_hold_each_other_do_not_grow() -> None:
    nest: list[Any] = ["x" * 1000]
    for _ in range(200):
        nest = [nest, nest]
    (call,) = read_flight(dump(entry(1, input_sizes=[nest] * 100, input_dtypes=nest, profiling_name=nest, frames=nest)))
    assert len(call.size) < 1000


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    assert decode_plain(pickle.dumps(value, protocol)) == value


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_flight(b"\x80\x02" + data)
    except FlightError:
        pass


@given(st.data())
def test_a_dump_with_a_changed_byte_is_read_or_refused(data: st.DataObject) -> None:
    image = bytearray(dump(entry(1), entry(2)))
    image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_flight(bytes(image))
    except FlightError:
        pass


def collisions(count: int) -> bytes:
    """A dict whose keys all have the same hash: inserting them takes the square of their number."""
    items = b"".join(b"\x8a\x0d" + (number * (2**61 - 1)).to_bytes(13, "little") + b"N" for number in range(count))
    return b"\x80\x02}(" + items + b"u."


@pytest.mark.parametrize(
    "data",
    [
        collisions(100_000),
        b"\x80\x02N" + b"".join(b"r" + struct.pack("<I", 2**31 + n * 2**21) for n in range(1000)) + b".",
        b"\x80\x02}" + bytes(MAX_FLIGHT_BYTES),
    ],
    ids=["collisions", "places", "bytes"],
)
def test_a_file_made_to_take_time_takes_little(data: bytes) -> None:
    began = time.process_time()
    with pytest.raises(FlightError):
        read_flight(data)
    assert time.process_time() - began < 5.0
