"""Of all tests: properties are looked for however long an example takes, for a machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("midwatch", deadline=None)
settings.load_profile("midwatch")
