"""What midwatch tests itself with, for your own tests: a clock moved by hand, planned faults, damage, a dying disk.

Nothing in the product imports this room. Names load on first use, so that one of them does not pull in the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midwatch.testing.clock import FakeClock
    from midwatch.testing.corrupt import (
        Damage,
        add_rank,
        flip_bit,
        remove_shard,
        swap_in_shard,
        swap_ranks,
        truncate,
        zero_block,
    )
    from midwatch.testing.faultplan import Fault, FaultPlan, Firing, load_plan
    from midwatch.testing.ioshim import Injury, IoShim, SimulatedDeath
    from midwatch.testing.notes import Notes

__all__ = [
    "Damage",
    "FakeClock",
    "Fault",
    "FaultPlan",
    "Firing",
    "Injury",
    "IoShim",
    "Notes",
    "SimulatedDeath",
    "add_rank",
    "flip_bit",
    "load_plan",
    "remove_shard",
    "swap_in_shard",
    "swap_ranks",
    "truncate",
    "zero_block",
]

_HOMES = {
    "FakeClock": "clock",
    **dict.fromkeys(
        ("Damage", "add_rank", "flip_bit", "remove_shard", "swap_in_shard", "swap_ranks", "truncate", "zero_block"),
        "corrupt",
    ),
    **dict.fromkeys(("Fault", "FaultPlan", "Firing", "load_plan"), "faultplan"),
    **dict.fromkeys(("Injury", "IoShim", "SimulatedDeath"), "ioshim"),
    "Notes": "notes",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"midwatch.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'midwatch.testing' has no attribute {name!r}")
