"""Whatever the evidence, there is a verdict, the same each time, and it can be written down."""

from __future__ import annotations

import msgspec
from faults_cases import (
    CLOSED,
    IN_ALL_REDUCE,
    IN_BACKWARD,
    IN_COMPUTE,
    IN_GATE,
    IN_LIBRARY,
    IN_THREAD_WAIT,
    SEGFAULT,
    bad_batch,
    traceback,
)
from hypothesis import given
from hypothesis import strategies as st

from midwatch.faults import CLASSES, CollectiveCall, CollectiveCount, Evidence, RankEvidence, ResumeReport, judge

LINES = (
    *(*bad_batch(), *traceback(0, frames=IN_LIBRARY, error=CLOSED), *SEGFAULT),
    "Traceback (most recent call last):",
    "During handling of the above exception, another exception occurred:",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "  what():  CUDA error: an illegal memory access was encountered",
    "[rank1]:[E905 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ",
    "bash: python: command not found",
    '  File "",, line 99999999999999, in',
    "",
)
KERNEL = ("Out of memory: Killed process 4001 (python)", "NVRM: Xid (PCI:0000:10:00): 79, pid=1", "NVRM: Xid : x")
STEPS = st.none() | st.integers(0, 40)
lines = st.lists(st.sampled_from(LINES) | st.text(max_size=20), max_size=12).map(tuple)
counts = st.lists(
    st.builds(CollectiveCount, st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 12)), max_size=14
).map(tuple)
calls = st.lists(
    st.builds(
        CollectiveCall,
        group=st.sampled_from("01"),
        sequence=st.integers(0, 4),
        operation=st.sampled_from(("all_reduce", "broadcast")),
        state=st.sampled_from(("scheduled", "completed")),
    ),
    max_size=5,
).map(tuple)
stacks = st.lists(
    st.sampled_from((IN_ALL_REDUCE, IN_BACKWARD, IN_COMPUTE, IN_GATE, IN_THREAD_WAIT, ())), max_size=2
).map(tuple)


@st.composite
def ranks(draw: st.DrawFn, number: int) -> RankEvidence:
    return RankEvidence(
        rank=number,
        node=draw(st.sampled_from(("n0", "n1", ""))),
        pid=4000 + number,
        exit_code=draw(st.none() | st.sampled_from((0, 1, 2, 3, 71, 127, 137, 139, -6, -9, -11, -15, -64, 4711))),
        exit_mono_ns=draw(st.none() | st.integers(0, 10**12)),
        signalled_by_us=draw(st.booleans()),
        is_attached=draw(st.booleans()),
        step=draw(STEPS),
        phase=draw(st.sampled_from(("", "step", "eval", "custom:x", "collective"))),
        phase_age_s=draw(st.none() | st.floats(0, 500)),
        is_finished=draw(st.booleans()),
        is_overdue=draw(st.booleans()),
        proc_state=draw(st.sampled_from(("R", "S", "D", "T", "Z", "?"))),
        cpu_delta_s=draw(st.none() | st.floats(0, 2)),
        io_delta=draw(st.none() | st.integers(0, 10**7)),
        state_s=draw(st.none() | st.floats(0, 99)),
        stands_still=draw(st.none() | st.booleans()),
        steps_advanced=draw(st.integers(0, 1)),
        stacks=draw(stacks),
        stderr_tail=draw(lines),
        error_file=draw(st.none() | st.sampled_from(({}, {"message": "x"}, {"message": {"message": "ValueError: y"}}))),
        oom_killed=draw(st.booleans()),
        counts=draw(counts),
        calls=draw(calls),
        position=draw(st.text(max_size=5)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Evidence:
    count = draw(st.integers(0, 4))
    everyone = tuple(draw(ranks(number)) for number in range(count))
    return Evidence(
        incident="a0001-i01",
        trigger=draw(st.sampled_from(("exit", "hang", "agent_lost", "resume_mismatch", "desync"))),
        ranks=everyone,
        kernel_lines=tuple(draw(st.lists(st.tuples(st.just("n0"), st.sampled_from(KERNEL)), max_size=3))),
        window_s=draw(st.sampled_from((0.0, 0.5))),
        lost_nodes=tuple(draw(st.sets(st.sampled_from(("n0", "n1"))))),
        nodes_total=2,
        lived_s=draw(st.none() | st.floats(0, 1000)),
        has_progressed=draw(st.booleans()),
        has_advanced=draw(st.booleans()),
        extensions=draw(st.integers(0, 6)),
        suspected=tuple((number, draw(STEPS)) for number in range(draw(st.integers(0, count)))),
        resumed=tuple(
            ResumeReport(rank=number, step=draw(STEPS), checkpoint="", config_hash=draw(st.sampled_from("ab")))
            for number in range(draw(st.integers(0, count)))
        ),
        clock_error_s=draw(st.sampled_from(((), (("n0", 0.1),)))),
    )


@given(cases())
def test_any_evidence_gets_one_verdict(case: Evidence) -> None:
    verdict = judge(case)
    assert verdict == judge(case)
    assert verdict.fault_class in CLASSES
    assert sum(suspect.weight for suspect in verdict.suspects) <= 1.0001
    assert verdict.root_rank not in verdict.victims
    assert verdict.root_rank is None or verdict.root_rank in {suspect.rank for suspect in verdict.suspects}
    msgspec.json.encode(verdict)
