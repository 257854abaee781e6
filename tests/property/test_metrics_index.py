"""Whatever attempts did and however a journal arrives, the index says what a plain reading of the journals says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.audit import read_journal
from midwatch.audit.index import MetricIndex

STEPS = st.integers(0, 12)
ATTEMPT = st.tuples(STEPS | st.none(), st.lists(STEPS, max_size=8, unique=True).map(sorted))


def journal(attempt: int, start: int | None, steps: list[int]) -> bytes:
    lines = [] if start is None else [f'{{"schema":1,"start":{start}}}']
    # What an attempt tells of before its start is no business of a sound run.
    told = [step for step in steps if start is None or step >= start]
    return "".join(line + "\n" for line in [*lines, *(f'{{"step":{step},"x":{attempt}}}' for step in told)]).encode()


@settings(max_examples=30)
@given(st.lists(ATTEMPT, min_size=1, max_size=5), st.lists(st.integers(1, 60), max_size=12), st.randoms())
def test_the_index_agrees_with_a_plain_reading(attempts: list[Any], cuts: list[int], order: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        (run / "metrics").mkdir(parents=True)
        rest = {number: journal(number, *attempt) for number, attempt in enumerate(attempts, 1)}
        with MetricIndex(run, Path(folder, "indexes")) as index:
            # The files grow by pieces, cut anywhere, in any order, and the index looks in between.
            for cut in cuts:
                number = order.choice(sorted(rest))
                with (run / "metrics" / f"a{number:04d}.jsonl").open("ab") as file:
                    file.write(rest[number][:cut])
                rest[number] = rest[number][cut:]
                index.sync()
            for number, left in rest.items():
                with (run / "metrics" / f"a{number:04d}.jsonl").open("ab") as file:
                    file.write(left)
            index.sync()
            found = [(step, value) for step, value in index.series("x")]
            width, buckets = index.buckets("x", 4)
            dead = sum(len(branch.points) for branch in index.dead("x"))
        expected = [(r["step"], float(r["attempt"])) for r in read_journal((run / "metrics").glob("*.jsonl"))]
        assert found == expected
        assert sum(bucket.points for bucket in buckets) == len(expected)
        assert max((bucket.high for bucket in buckets), default=0) == max((value for _, value in expected), default=0)
        assert all(bucket.last - bucket.first < width for bucket in buckets)
        assert dead + len(found) == sum(journal(n, *a).count(b'"x"') for n, a in enumerate(attempts, 1))
