"""Libraries that only some installations have: loaded when they are needed, and missed with a sentence."""

from __future__ import annotations

import importlib
from typing import Any

from midwatch.core.errors import ConfigError


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """A library of an extra, imported now.

    Args:
        module: Its name for Python.
        extra: The extra of midwatch that installs it.
        purpose: What it is wanted for, as the subject of a sentence.

    Raises:
        ConfigError: CF107 it is not installed, or something it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        lacking = error.name or module
        raise ConfigError(
            "CF107",
            f"{purpose} needs {module}, which cannot be imported: {lacking} is not installed",
            hint=f"pip install 'midwatch[{extra}]'",
            module=module,
            extra=extra,
        ) from error
