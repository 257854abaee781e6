"""Secrets that a configuration only points to, so that none of it is ever one: ``file:PATH`` or ``env:NAME``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from midwatch.config.env import expand_path
from midwatch.core import ConfigError

_FILE: Final = "file:"
_ENV: Final = "env:"
_MOST_BYTES: Final = 64 * 1024


def is_reference(text: str) -> bool:
    """Whether it points to a secret, rather than being one."""
    return any(text.startswith(kind) and len(text) > len(kind) for kind in (_FILE, _ENV))


def read_secret(key: str, reference: str) -> str:
    """What a reference points to, without white space around it. Read anew each time: a file may be exchanged.

    Args:
        key: The configuration key that holds the reference, for messages.

    Raises:
        ConfigError: CF102 no reference, a variable that is not set, or nothing there; CF104 the file cannot be read.
            The message never holds the secret.
    """
    if not is_reference(reference):
        raise ConfigError("CF102", f"{key} must be file:PATH or env:NAME", key=key)
    if reference.startswith(_ENV):
        text = os.environ.get(reference.removeprefix(_ENV), "")
    else:
        text = _read(key, expand_path(key, reference.removeprefix(_FILE)))
    if not text.strip():
        raise ConfigError("CF102", f"{key} = {reference!r}: there is nothing", key=key)
    return text.strip()


def _read(key: str, path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError("CF104", f"{key}: {path} is not a file", key=key, path=str(path))
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode()
    except OSError as error:
        raise ConfigError("CF104", f"{key}: {path}: {error.strerror}", key=key, path=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("CF104", f"{key}: {path} is not UTF-8 text", key=key, path=str(path)) from error
