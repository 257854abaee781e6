"""Fencing: a superseded attempt may not write, and what it wrote too late is not believed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from midwatch.core import FencedError
from midwatch.storage import Fence, claim_attempt, late_commits, newest_attempt, read_claims


def test_attempts_count_from_one(tmp_path: Path) -> None:
    assert newest_attempt(tmp_path) == 0
    assert claim_attempt(tmp_path, run="r", inventory=[]) == 1
    assert claim_attempt(tmp_path, run="r", inventory=[]) == 2
    assert newest_attempt(tmp_path) == 2
    assert [claim.attempt for claim in read_claims(tmp_path)] == [1, 2]


def test_a_newer_claim_fences_the_older_attempt(tmp_path: Path) -> None:
    first = claim_attempt(tmp_path, run="r", inventory=[])
    fence = Fence(tmp_path, first)
    fence.check()
    claim_attempt(tmp_path, run="r", inventory=[])
    with pytest.raises(FencedError) as caught:
        fence.check()
    assert caught.value.code == "CK401"


@pytest.mark.parametrize("number", [1, 3])
def test_a_taken_or_older_number_is_refused(tmp_path: Path, number: int) -> None:
    claim_attempt(tmp_path, run="r", inventory=[], attempt=3)
    with pytest.raises(FencedError):
        claim_attempt(tmp_path, run="r", inventory=[], attempt=number)


def test_racing_claims_get_different_numbers(tmp_path: Path) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.append(claim_attempt(tmp_path, run="r", inventory=[]))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 9))


def test_a_commit_missing_from_a_newer_inventory_is_late(tmp_path: Path) -> None:
    early, late, own = "step-00000010-a0001", "step-00000020-a0001", "step-00000030-a0002"
    claim_attempt(tmp_path, run="r", inventory=[])
    claim_attempt(tmp_path, run="r", inventory=[early])
    assert late_commits(tmp_path, dict.fromkeys([early, late, own], "r")) == {late}
    # A later claim that lists it does not make it good: attempt 2 had already begun without it.
    claim_attempt(tmp_path, run="r", inventory=[early, late, own])
    assert late_commits(tmp_path, dict.fromkeys([early, late, own], "r")) == {late}


def test_a_damaged_claim_still_fences_but_condemns_nothing(tmp_path: Path) -> None:
    claim_attempt(tmp_path, run="r", inventory=[])
    claim_attempt(tmp_path, run="r", inventory=[])
    (tmp_path / "attempts" / "a0002.json").write_bytes(b"{")
    assert late_commits(tmp_path, {"step-00000010-a0001": "r"}) == set()
    with pytest.raises(FencedError):
        Fence(tmp_path, 1).check()


def test_a_pipe_in_place_of_a_claim_is_skipped_without_waiting(tmp_path: Path) -> None:
    claim_attempt(tmp_path, run="r", inventory=[])
    os.mkfifo(tmp_path / "attempts" / "a0002.json")
    assert [claim.attempt for claim in read_claims(tmp_path)] == [1]
