"""From when on a machine's incidents are its own doing: not bad luck, but the machine.

Meta's clusters call such machines lemons (HPCA 2025): few, in every job again, and to be found by counting alone.
"""

from __future__ import annotations

from typing import Final

LEMON: Final = 3
LEMON_DAYS: Final = 30.0
"""So many incidents within this time."""
