"""What the decision core is told once: the parts of the configuration it decides by."""

from __future__ import annotations

import msgspec

from midwatch.config import AdoptConfig, GradeConfig, IsolateConfig, RestartConfig, WatchConfig


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for the life of a launcher; a dump carries them, so that a replay decides alike."""

    watch: WatchConfig = WatchConfig()
    restart: RestartConfig = RestartConfig()
    grade: GradeConfig = GradeConfig()
    isolate: IsolateConfig = IsolateConfig()
    max_nodes: int = 0
    """Nodes beyond those that train wait as spares, up to this many in all; 0: none beyond."""
    can_probe: bool = False
    """Agents answer ``ProbeNodes``; without that there is no gate, and a hold of ours ends by a person only."""
    topology: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(node, domains it shares with others), as ``faults.Evidence`` has it."""
    adopt: AdoptConfig | None = None
    """Another launcher starts the ranks; None: we do."""

    @property
    def is_adopted(self) -> bool:
        """Nothing is started a second time, moved or left out here: the run ends, with advice."""
        return self.adopt is not None
