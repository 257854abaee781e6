"""A writer process that injures itself: the real writer's main, with the I/O shim installed from the arguments.

Give ``WriterClient(module="midwatch.testing.crash_writer", arguments=["--at", "17", "--how", "sigkill"])``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from midwatch.checkpoint import persist
from midwatch.testing.ioshim import Injury, IoShim

MODULE = "midwatch.testing.crash_writer"


def main(arguments: Sequence[str] | None = None) -> None:
    """Install the shim, then run the normal writer with the arguments that are not ours."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, required=True)
    parser.add_argument("--how", choices=["exit", "sigkill", "ENOSPC", "EIO"], required=True)
    parser.add_argument("--sticky", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    injury = Injury(at=options.at, how=options.how, is_sticky=options.sticky)
    IoShim(injury, is_everywhere=True).install()
    persist.run(rest)


if __name__ == "__main__":
    main()
