"""Node health: small questions with an answer each, every one asked in a process of its own and with a deadline.

    results = await run_probes(run_dir, cap_s=10.0)

A probe that hangs (a driver, a mount) is killed and its answer is ``unknown``; it never holds anybody up.
"""

from midwatch.probes.answers import Answer, Status
from midwatch.probes.checks import CHECKS
from midwatch.probes.runner import run_probes

__all__ = ["CHECKS", "Answer", "Status", "run_probes"]
