"""What the end-to-end tests need of the machine, and what happens where it is absent: a loud skip, in CI a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

LAB = Path(__file__).with_name("lab")


def is_forced() -> bool:
    """Where CI is root on its machine, every test must run."""
    return os.environ.get("CI", "").lower() == "true" and os.geteuid() == 0


def absent(reason: str) -> NoReturn:
    """Skip with the reason, or fail with it in CI."""
    if is_forced():
        pytest.fail(f"must run in CI, but {reason}")
    pytest.skip(reason)


def install(*wanted: str) -> None:
    """See that commands are there; ``COMMAND:PACKAGE``, as in ``lab/install``."""
    done = subprocess.run([LAB / "install", *wanted], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        absent(f"{' '.join(wanted)} cannot be installed: {done.stderr.strip()[-500:]}")


def need_namespaces() -> None:
    """Root that may make network namespaces, as a container's root often may not."""
    if os.geteuid() != 0:
        absent("virtual nodes need root (network namespaces)")
    install("ip:iproute2", "unshare:util-linux")
    assert shutil.which("unshare")
    done = subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True, check=False)
    if done.returncode != 0:
        absent(f"this root may not make namespaces: {done.stderr.decode().strip()}")
