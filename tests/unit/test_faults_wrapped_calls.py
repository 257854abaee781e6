"""What midwatch lays around torch's calls to time and count them changes nothing in what a stack says."""

from __future__ import annotations

import pytest
from faults_cases import IN_ALL_REDUCE, IN_USER_SLEEP, MAIN, TORCH, frame

from midwatch.faults.frames import is_agreement, is_storage, place_of_stack, user_frame
from midwatch.faults.texts import Raised
from midwatch.faults.wordings import is_communication

PACKAGE = "/x/site-packages/midwatch/train"
WAIT = (
    frame("_timed", f"{PACKAGE}/waits.py"),
    frame("_wait_for_peers.<locals>.wait_for_peers", f"{PACKAGE}/waits.py"),
)
NEXT = (frame("_timed", f"{PACKAGE}/waits.py"), frame("_next_batch.<locals>.next_batch", f"{PACKAGE}/waits.py"))
COUNTED = (frame("_MessageNumbers._counted.<locals>.counted", f"{PACKAGE}/collectives.py"),)
LOADER = (frame("_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH}/utils/data/dataloader.py"),)


@pytest.mark.parametrize("wrapper", [WAIT, COUNTED])
def test_a_collective_is_one(wrapper: tuple[object, ...]) -> None:
    assert place_of_stack((*wrapper, *IN_ALL_REDUCE)) == "collective"
    assert not is_agreement((*wrapper, *IN_ALL_REDUCE)), "the script's, not ours"
    assert user_frame((*wrapper, *IN_ALL_REDUCE)) == MAIN[0]


def test_a_script_that_waits_for_a_call_it_began_before_waits_for_others() -> None:
    assert place_of_stack((*WAIT, *MAIN)) == "collective"


def test_our_own_agreement_still_is_ours() -> None:
    between = frame("Gathering.rows", "/x/site-packages/midwatch/checkpoint/group.py")
    assert is_agreement((*WAIT, *IN_ALL_REDUCE[:2], between, *MAIN))


def test_a_loader_waits_for_no_peer() -> None:
    assert place_of_stack((*LOADER, *NEXT, *MAIN)) == place_of_stack((*LOADER, *MAIN)) == "user"
    assert place_of_stack((*NEXT, *IN_USER_SLEEP)) == "user"
    assert is_storage((*NEXT, *LOADER, *MAIN))


def test_an_error_raised_inside_is_torchs() -> None:
    raised = Raised(type="ValueError", message="Connection reset by peer", frames=(*WAIT, *IN_ALL_REDUCE))
    assert is_communication(raised)
