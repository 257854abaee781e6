"""Who is behind, and in which operation: what the ranks' flight recorders say when they are laid side by side.

The numbers of a group's collectives are the same on all members, so the one whose list ends early is the one the others
wait for, and two that call different operations by the same number have gone different ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from midwatch.faults.types import CollectiveCall, RankEvidence


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """What one group's lists say."""

    group: str
    sequence: int
    """The first collective in which the members differ."""
    operation: str
    """What the others called there, with its sizes."""
    ranks: tuple[int, ...]
    """Those that did not come, or came with something else."""
    is_different: bool
    """They called something else; otherwise they have not called it yet."""
    others: tuple[int, ...]

    @property
    def phrase(self) -> str:
        """Completes "rank 1 ..."."""
        what = f"{self.operation} (number {self.sequence} of group {self.group})"
        return f"called something else than its peers' {what}" if self.is_different else f"never came to {what}"


def compare_calls(ranks: Sequence[RankEvidence]) -> Lag | None:
    """The clearest difference between the ranks' lists; None where they agree or fewer than two of a group are known.

    A different operation under the same number is clearer than a missing one, for a slow rank is behind, too, for a
    moment; of several groups the one with the fewest ranks to blame is clearest.
    """
    found = [lag for group in _groups(ranks) for lag in (_in_group(group, ranks),) if lag is not None]
    return min(found, key=lambda lag: (not lag.is_different, len(lag.ranks), lag.group), default=None)


def _groups(ranks: Sequence[RankEvidence]) -> list[str]:
    return sorted({call.group for rank in ranks for call in rank.calls})


def _in_group(group: str, ranks: Sequence[RankEvidence]) -> Lag | None:
    lists: dict[int, dict[int, CollectiveCall]] = {}
    for rank in ranks:
        mine = {call.sequence: call for call in rank.calls if call.group == group}
        if mine:
            lists[rank.rank] = mine
    if len(lists) < 2:
        return None
    return _different(group, lists) or _behind(group, lists)


def _different(group: str, lists: dict[int, dict[int, CollectiveCall]]) -> Lag | None:
    """The first number under which all that know it do not agree."""
    for number in sorted({number for mine in lists.values() for number in mine}):
        said = {rank: what(mine[number]) for rank, mine in lists.items() if number in mine}
        (most, _), *others = Counter(said.values()).most_common()
        if others:
            odd = tuple(rank for rank, call in said.items() if call != most)
            return _lag(group, number, most, odd, lists, is_different=True)
    return None


def _behind(group: str, lists: dict[int, dict[int, CollectiveCall]]) -> Lag | None:
    ends = {rank: max(mine) for rank, mine in lists.items()}
    first = min(ends.values()) + 1
    behind = tuple(rank for rank, end in ends.items() if end < first)
    ahead = next((mine[first] for mine in lists.values() if first in mine), None)
    if first > max(ends.values()) or ahead is None:
        return None
    return _lag(group, first, what(ahead), behind, lists, is_different=False)


def _lag(
    group: str,
    number: int,
    operation: str,
    ranks: tuple[int, ...],
    lists: dict[int, dict[int, CollectiveCall]],
    *,
    is_different: bool,
) -> Lag:
    others = tuple(rank for rank in lists if rank not in ranks)
    return Lag(group=group, sequence=number, operation=operation, ranks=ranks, is_different=is_different, others=others)


def what(call: CollectiveCall) -> str:
    """The operation and its sizes, to compare and to show.

    The sizes of all-to-all and of gathers of uneven pieces rightly differ between ranks, so there only the name counts.
    """
    is_even = not any(word in call.operation for word in ("all_to_all", "alltoall", "gather", "scatter", "broadcast"))
    return f"{call.operation} {call.size}".strip() if is_even else call.operation
