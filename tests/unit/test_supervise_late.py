"""What is collected behind a restart completes the evidence, and never changes what the verdict rests on."""

from __future__ import annotations

from midwatch.faults import Evidence, RankEvidence
from midwatch.supervise.late import completed

JUDGED = Evidence(
    incident="a0001-i01",
    trigger="exit",
    ranks=(
        RankEvidence(rank=0, node="n0", stderr_tail=("step 12",)),
        RankEvidence(rank=1, node="n0", exit_code=-9),
    ),
    kernel_lines=(("n0", "early"),),
)


def test_texts_are_completed_and_exits_stay_as_they_were_judged() -> None:
    late = Evidence(
        incident="a0001-i01",
        trigger="exit",
        ranks=(
            RankEvidence(
                rank=0, node="n0", exit_code=1, signalled_by_us=True, stderr_tail=("step 12", "closed by peer")
            ),
            RankEvidence(rank=1, node="n0", exit_code=-9, oom_killed=True, error_file={"message": "x"}),
        ),
        kernel_lines=(("n0", "early"), ("n0", "Out of memory: Killed process 17")),
    )
    full = completed(JUDGED, late)
    assert full.ranks[0].stderr_tail == ("step 12", "closed by peer")
    assert full.ranks[0].exit_code is None
    assert (full.ranks[1].oom_killed, full.ranks[1].error_file) == (True, {"message": "x"})
    assert len(full.kernel_lines) == 2


def test_a_node_that_did_not_answer_leaves_the_evidence_as_it_was() -> None:
    assert completed(JUDGED, Evidence(incident="a0001-i01", trigger="exit")) == JUDGED
