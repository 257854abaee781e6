"""What a node's page says of the node: its agent, its ranks, how far they are and how long they have been silent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from midwatch.audit.exporters import Family, Sample
from midwatch.pulse import STATES
from midwatch.supervise.node_view import NodeView
from midwatch.supervise.wire import RankStatus

_CUSTOM: Final = "custom"
"""Phases that a script names are one phase here: a label must not have any number of values."""

_Of = Callable[[RankStatus], float | None]


def node_families(views: Sequence[NodeView], run: str, node: str) -> list[Family]:
    """Families of the agents of this host; with none, that the node's agent does not answer.

    Args:
        views: What the agents wrote last, however old.
        run: Its id.
        node: The node's name until an agent says another one.
    """
    fresh = [view for view in views if view.is_fresh]
    up = _of_nodes(views, "midwatch_agent_up", "1 while the agent of this node is at work.", min, _is_up)
    return [
        up if views else up._replace(samples=[Sample(0, {"run": run, "node": node})]),
        _of_nodes(
            fresh, "midwatch_attempt", "Attempt whose ranks run here, 0 for none.", max, lambda view: view.attempt
        ),
        _of_nodes(
            fresh, "midwatch_ranks", "Ranks that this node has in its attempt.", sum, lambda view: len(view.ranks)
        ),
        _of_nodes(fresh, "midwatch_ranks_up", "Of these, those whose process is alive.", sum, _alive),
        _of_nodes(
            fresh,
            "midwatch_coordinator_unheard_seconds",
            "Since the agent heard of the coordinator.",
            max,
            lambda view: view.unheard_s + view.age_s(),
        ),
        *_rank_families(fresh),
    ]


def _rank_families(views: Iterable[NodeView]) -> list[Family]:
    placed = [(view, rank) for view in views for rank in view.ranks]

    def family(name: str, text: str, value: Callable[[NodeView, RankStatus], float | None]) -> Family:
        found = ((_ranked(view, rank), value(view, rank)) for view, rank in placed)
        return Family(name, text, "gauge", [Sample(number, labels) for labels, number in found if number is not None])

    return [
        family("midwatch_rank_up", "1 while the rank's process is alive.", lambda _, rank: int(rank.exit_code is None)),
        family("midwatch_rank_step", "The step that the rank began last.", lambda _, rank: rank.step),
        family("midwatch_rank_progress_age_seconds", "Since the rank's last sign of progress.", _silent_s),
        family(
            "midwatch_rank_checkpoint_step",
            "Step of the newest verified checkpoint the rank knows of.",
            lambda _, rank: rank.verified_step,
        ),
        family("midwatch_rank_step_seconds", "Time of a step, lately.", lambda _, rank: _per_step(rank, rank.step_s)),
        family(
            "midwatch_rank_busy_seconds",
            "Time of a step in which the rank's main thread ran, lately; the rest it waited.",
            lambda _, rank: _per_step(rank, rank.own_s),
        ),
        Family(
            "midwatch_rank_state",
            "1 for the state of the rank's pulse.",
            "gauge",
            [
                Sample(int(state == rank.state), {**_ranked(view, rank), "state": state})
                for view, rank in placed
                for state in STATES
            ],
        ),
        Family(
            "midwatch_rank_phase",
            "1 for the phase the rank is in.",
            "gauge",
            [
                Sample(1, {**_ranked(view, rank), "phase": rank.phase.partition(":")[0] or _CUSTOM})
                for view, rank in placed
                if _is_watched(rank)
            ],
        ),
    ]


def _of_nodes(
    views: Iterable[NodeView],
    name: str,
    text: str,
    fold: Callable[[list[float]], float],
    value: Callable[[NodeView], float],
) -> Family:
    """One sample a node: where each rank has an agent of its own, a node has several."""
    found: dict[tuple[str, str], list[float]] = {}
    for view in views:
        found.setdefault((view.run, view.node), []).append(value(view))
    samples = [Sample(fold(values), {"run": run, "node": node}) for (run, node), values in found.items()]
    return Family(name, text, "gauge", samples)


def _place(view: NodeView) -> Mapping[str, str]:
    return {"run": view.run, "node": view.node}


def _ranked(view: NodeView, rank: RankStatus) -> dict[str, str]:
    return {**_place(view), "rank": str(rank.rank)}


def _is_up(view: NodeView) -> int:
    return int(view.is_fresh)


def _alive(view: NodeView) -> int:
    return sum(rank.exit_code is None for rank in view.ranks)


def _is_watched(rank: RankStatus) -> bool:
    return rank.is_attached and rank.exit_code is None


def _silent_s(view: NodeView, rank: RankStatus) -> float | None:
    """Nothing of a rank that says nothing of itself, has finished, or has ended."""
    return rank.phase_age_s + view.age_s() if _is_watched(rank) and rank.state != "finished" else None


def _per_step(rank: RankStatus, seconds: float | None) -> float | None:
    """Of ranks that report no steps these are seconds of each second: another thing."""
    return seconds if rank.steps_done else None
