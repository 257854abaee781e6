"""A wrong statistic blames a healthy model or hides a sick one: every float format against PyTorch itself."""

from __future__ import annotations

import math
import struct

import pytest

from midwatch.checkpoint.image import ITEM_SIZES, TensorEntry
from midwatch.checkpoint.measure import BLOCK_ITEMS, ShardMeter
from midwatch.checkpoint.stats import TensorStats, group_stats, merge_stats, newly_nonfinite

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def entry(key: str, dtype: str, count: int, begin: int = 0) -> TensorEntry:
    size = count * ITEM_SIZES[dtype]
    return TensorEntry(
        key=key, dtype=dtype, shape=(count,), offsets=(0,), global_shape=(count,), begin=begin, end=begin + size
    )


def measure(
    data: bytes, entries: list[TensorEntry], *, data_start: int = 0, chunk: int = 4096
) -> dict[str, TensorStats]:
    meter = ShardMeter(entries, data_start)
    for begin in range(0, len(data), chunk):
        meter.feed(memoryview(data)[begin : begin + chunk])
    return meter.result()


def truth(values: torch.Tensor) -> TensorStats:
    wide = values.to(torch.float64)
    finite = wide[torch.isfinite(wide)]
    return TensorStats(
        count=wide.numel(),
        sum_squares=float((finite * finite).sum()),
        amax=float(finite.abs().max()) if finite.numel() else 0.0,
        nonfinite=wide.numel() - finite.numel(),
    )


def assert_same(found: TensorStats, expected: TensorStats) -> None:
    assert (found.count, found.nonfinite, found.amax) == (expected.count, expected.nonfinite, expected.amax)
    assert math.isclose(found.sum_squares, expected.sum_squares, rel_tol=1e-12, abs_tol=0.0)


def raw(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("chunk", [4096, 1000, 13, 1 << 20])
def test_every_bit_pattern_counts_as_what_it_is(dtype: str, chunk: int) -> None:
    generator = torch.Generator().manual_seed(7)
    size = ITEM_SIZES[dtype]
    count = 3000 if chunk < 100 else 2 * BLOCK_ITEMS + 4321
    bits = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    if dtype == "F64":  # squares of random patterns leave the range of float64: see the test below
        bits = raw_of_normal(count, generator)
    values = bits.view(FORMATS[dtype])
    found = measure(raw(values), [entry("w", dtype, count)], chunk=chunk)["w"]
    assert_same(found, truth(values))


def raw_of_normal(count: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(count, dtype=torch.float64, generator=generator)
    values[5], values[6], values[-1] = math.nan, math.inf, -math.inf
    values[7] = 5e-324
    return values.view(torch.uint8)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_each_single_value_of_a_small_format(dtype: str) -> None:
    item = ITEM_SIZES[dtype]
    for pattern in range(256**item) if item == 1 else range(0, 65536, 7):
        data = pattern.to_bytes(item, "little")
        value = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(FORMATS[dtype])
        assert_same(measure(data, [entry("w", dtype, 1)])["w"], truth(value))


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_values_are_non_finite(dtype: str) -> None:
    values = torch.full((100,), math.nan).to(FORMATS[dtype])
    assert_same(measure(raw(values), [entry("w", dtype, 100)])["w"], truth(values))


def test_a_square_that_no_float_holds_stops_at_the_largest() -> None:
    data = struct.pack("<2d", 1e300, -1e300)
    found = measure(data, [entry("w", "F64", 2)])["w"]
    assert (found.amax, found.nonfinite) == (1e300, 0)
    assert 1.7e308 < found.sum_squares < math.inf


def test_one_bad_value_behind_a_chunk_border_is_found_in_the_right_tensor() -> None:
    first, second = torch.randn(5000), torch.randn(5001)
    second[-1] = math.nan
    header = b"h" * 4096
    entries = [entry("a", "F32", 5000), entry("b", "F32", 5001, begin=20000), entry("none", "F32", 0, begin=40004)]
    found = measure(header + raw(first) + raw(second), entries, data_start=4096)
    assert_same(found["a"], truth(first))
    assert_same(found["b"], truth(second))
    assert found["none"] == TensorStats()


def test_integers_are_left_out() -> None:
    assert measure(bytes(80), [entry("n", "I64", 10)]) == {}


def test_the_parts_of_a_sharded_tensor_make_its_whole() -> None:
    values = torch.randn(999)
    parts = [measure(raw(part), [entry("model.w", "F32", len(part))]) for part in values.split(333)]
    assert_same(merge_stats(parts)["model.w"], truth(values))


def test_only_what_became_non_finite_is_news() -> None:
    sick, well = TensorStats(count=4, nonfinite=1), TensorStats(count=4)
    now = {
        "model.old": sick,
        "model.new": sick,
        "model.ok": well,
        "optimizer.state.w.exp_avg": sick,
        "model.added": sick,
    }
    assert newly_nonfinite(now, {"model.old": sick, "model.new": well}) == ("model.added", "model.new")
    assert newly_nonfinite(now, {}) == ("model.added", "model.new", "model.old")


def test_totals_name_the_tensor_with_the_largest_value() -> None:
    groups = group_stats(
        {
            "model.a": TensorStats(count=2, sum_squares=9.0, amax=3.0),
            "model.b": TensorStats(count=2, sum_squares=16.0, amax=4.0, nonfinite=1),
            "optimizer.state.a.exp_avg": TensorStats(count=2, sum_squares=1.0, amax=1.0),
        }
    )
    assert [(g.name, g.norm, g.amax_tensor, g.nonfinite_tensors) for g in groups] == [
        ("model", 5.0, "model.b", ("model.b",)),
        ("optimizer.exp_avg", 1.0, "optimizer.state.a.exp_avg", ()),
    ]
