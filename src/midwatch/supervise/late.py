"""What is collected behind a restart: the last words of ranks that have ended, and what the kernel said by then.

An exit that explains itself is judged from what is there at once. By the time its peers have gone too, their files
hold more (the traceback of a closed connection, a message of the allocator), and the kernel's log has caught up.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from midwatch.faults.types import Evidence, RankEvidence
from midwatch.supervise.ranks import LocalAttempt
from midwatch.supervise.sample import RankView

LATE_CAP_S: Final = 15.0
"""Behind the restart nobody waits for it; a teardown with a long grace is over by then, or its ranks are read as they
are."""
_CATCH_UP_S: Final = 0.3
"""The kernel's messages about an end come a moment after it."""


async def views_after_the_end(attempt: LocalAttempt, cap_s: float) -> list[RankView]:
    """The ranks as they were when it was asked, with how they ended; asked while the attempt still runs.

    Blocking: no; returns after ``cap_s`` at the latest.
    """
    views = attempt.views()
    end = time.monotonic() + cap_s - _CATCH_UP_S
    while not attempt.are_all_ended and time.monotonic() < end:
        await asyncio.sleep(0.05)
    await asyncio.sleep(_CATCH_UP_S)
    for view, proc in zip(views, attempt.ranks, strict=True):
        view.signalled_by_us = proc.signalled_by_us
        if proc.exited is not None:
            view.exit_code, view.exit_mono_ns = proc.exited.exit_code, proc.exited.mono_ns
    return views


def completed(judged: Evidence, late: Evidence) -> Evidence:
    """What was judged, with the texts as they were in the end. What the verdict rests on stays as it was then."""
    by_rank = {rank.rank: rank for rank in late.ranks}
    return msgspec.structs.replace(
        judged,
        ranks=tuple(_completed(rank, by_rank.get(rank.rank)) for rank in judged.ranks),
        kernel_lines=late.kernel_lines or judged.kernel_lines,
    )


def _completed(rank: RankEvidence, late: RankEvidence | None) -> RankEvidence:
    if late is None:
        return rank
    return msgspec.structs.replace(
        rank,
        stderr_tail=late.stderr_tail or rank.stderr_tail,
        error_file=late.error_file if late.error_file is not None else rank.error_file,
        oom_killed=late.oom_killed or rank.oom_killed,
        calls=late.calls or rank.calls,
    )
