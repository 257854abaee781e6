"""How often a run may be restarted without progress: in all, and for each kind of cause."""

from __future__ import annotations

from collections import Counter

from midwatch.config import LimitsConfig, RestartConfig

WORDS = {
    "code": "failures of the script",
    "memory": "want of memory",
    "crash": "crashes",
    "hang": "hangs",
    "node": "failures of nodes",
    "network": "lost connections",
}
"""The kinds, as people read them."""


class Budgets:
    """Counters that only progress or a person takes back to zero."""

    def __init__(self, config: RestartConfig) -> None:
        self.config = config
        self.used = 0
        """0..max_restarts."""
        self.used_for: Counter[str] = Counter()

    def limit(self, kind: str) -> int:
        """Of one kind; ``max_restarts`` for what has no limit of its own."""
        if kind not in LimitsConfig.__struct_fields__:
            return self.config.max_restarts
        limit: int = getattr(self.config.limits, kind)
        # Whoever wants to see the same failure five times must get five tries.
        return max(limit, self.config.same_failure_limit - 1) if limit else 0

    def take(self, kind: str) -> None:
        """One restart is granted; "none" costs nothing."""
        if kind == "none":
            return
        self.used += 1
        self.used_for[kind] += 1

    def spent(self, kind: str) -> str:
        """Why no more is left for this kind, as a clause; empty where some is."""
        if kind == "none":
            return ""
        if self.used >= self.config.max_restarts:
            return f"restart budget of {self.config.max_restarts} spent without progress"
        if self.used_for[kind] >= self.limit(kind):
            most = self.limit(kind)
            return f"restart budget of {most} for {WORDS.get(kind, kind)} spent without progress"
        return ""

    def refill(self) -> bool:
        """True when something had been used."""
        was_used = bool(self.used)
        self.used = 0
        self.used_for.clear()
        return was_used
