"""What is written down and said, and changes nothing."""

from __future__ import annotations

from midwatch.supervise.decide.core import Core
from midwatch.supervise.messages import NodeWarned, RankLagged


def rank_lagged(core: Core, event: RankLagged) -> None:
    """A straggler is an event, never a kill: the run advances, only slower."""
    attempt = core.live_attempt(event.attempt)
    if attempt is None or event.rank not in attempt.ranks:
        return
    node = core.host_of(attempt.ranks[event.rank])
    core.record("rank.lagged", step=event.step, straggler=event.rank, node=node, factor=event.factor)
    core.say(f"rank {event.rank} (node {node}) takes {event.factor:.1f} times its peers' time a step", "warning")


def node_warned(core: Core, event: NodeWarned) -> None:
    node = core.host_of(event.node)
    core.record("node.warned", node=node, what=event.what, sentence=event.sentence)
    core.say(f"node {node}: {event.sentence}", "warning")
