"""Of all tests: properties are looked for however long an example takes, for a machine may be busy."""

from __future__ import annotations

from hypothesis import Phase, settings

# What fails is made small, but not explained as well: that takes minutes, and ends in a time-out without the example.
PHASES = [phase for phase in Phase if phase is not Phase.explain]
settings.register_profile("midwatch", deadline=None, phases=PHASES)
settings.load_profile("midwatch")
