"""Where settings come from: a TOML or JSON file, a mapping, ``key=value`` overrides. Each becomes a ``Layer``."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from midwatch.config.redact import is_secret_name, redact_text
from midwatch.config.schema import Config
from midwatch.core import ConfigError

OriginKind = Literal["default", "file", "dict", "environment", "override"]

_TOML_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
_MAX_BYTES = 4 * 2**20
"""A larger file is a mistake (a checkpoint, a log), not a configuration."""


class Layer(msgspec.Struct, frozen=True):
    """Settings of one origin; later layers win over earlier ones."""

    kind: OriginKind
    where: str
    """For messages: the file's path, ``dict``, ``--set``, the variable's name."""
    values: dict[str, Any]
    text: str = ""
    """The file's text, to find line numbers in."""

    def place(self, key: str) -> str:
        """Where in this layer the dotted key is written, as precisely as can be said."""
        line = None
        while self.text and key and not line:
            # A key of an inline table has no line of its own: the line of the table it stands in.
            line = line_of(self.text, key)
            key = key.rpartition(".")[0]
        return f"{self.where}:{line}" if line else self.where


def read_file(path: Path, kind: OriginKind = "file") -> Layer:
    """A TOML file, or a JSON file by its suffix.

    Raises:
        ConfigError: CF104 when it cannot be read, CF105 with the line when it cannot be understood.
    """
    text = _decode(path, _read_bytes(path))
    values = _parse_json(path, text) if path.suffix == ".json" else _parse_toml(path, text)
    return Layer(kind, str(path), values, text if path.suffix != ".json" else "")


def from_mapping(values: Mapping[str, Any] | Config) -> Layer:
    """A plain dict, or a whole configuration."""
    if isinstance(values, Config):
        return Layer("dict", "dict", msgspec.to_builtins(values))
    return Layer("dict", "dict", dict(values))


def from_overrides(overrides: Sequence[str]) -> list[Layer]:
    """One layer an override, so that each is named in messages.

    Raises:
        ConfigError: CF101 for text that is not ``section.key=value``.
    """
    return [_override(text) for text in overrides]


def line_of(text: str, key: str) -> int | None:
    """The line (from 1) of a TOML text that sets the dotted key or opens the table of that name."""
    section, _, name = key.rpartition(".")
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            table = header[1].replace('"', "").replace(" ", "")
            if table == key:
                return number
        elif assigned := re.match(r"\s*([A-Za-z0-9_\".\- ]+?)\s*=", line):
            spelled = assigned[1].replace('"', "").replace(" ", "")
            if (f"{table}.{spelled}" if table else spelled) == key or (table == section and spelled == name):
                return number
    return None


def _read_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise ConfigError("CF104", f"{path}: is a folder, not a configuration file", path=str(path))
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError("CF104", f"{path}: no such file", path=str(path)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("CF104", f"{path}: cannot be read: {reason}", path=str(path)) from error
    if len(data) > _MAX_BYTES:
        raise ConfigError("CF104", f"{path}: larger than 4 MiB, not a configuration file", path=str(path))
    return data


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError("CF105", f"{path}:{line}: not UTF-8 text", path=str(path), line=line) from error


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.search(str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        what = _TOML_PLACE.sub("", str(error)).replace("(at end of document)", "").strip()
        lines = text.splitlines()
        shown = _harmless(lines[line - 1]) if 0 < line <= len(lines) else ""
        message = f"{path}:{line}: {what}: {shown[:120]}" if shown else f"{path}:{line}: {what}"
        raise ConfigError("CF105", message, path=str(path), line=line) from error


def _harmless(line: str) -> str:
    # A broken line cannot be parsed for its value, so a secret's whole line stays hidden.
    return "" if is_secret_name(line.partition("=")[0]) else redact_text(line.strip())


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        values: Any = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"{path}:{error.lineno}: {error.msg}"
        raise ConfigError("CF105", message, path=str(path), line=error.lineno) from error
    if not isinstance(values, dict):
        raise ConfigError("CF105", f"{path}:1: the top must be an object", path=str(path), line=1)
    return cast("dict[str, Any]", values)


def _override(text: str) -> Layer:
    key, sign, value = text.partition("=")
    key = key.strip()
    if not sign or not all(key.split(".")) or "." not in key:
        shown = key if sign and is_secret_name(key) else redact_text(text)
        raise ConfigError(
            "CF101",
            f"--set {shown}: must be section.key=value",
            hint="For example: --set checkpoint.interval=200",
            override=shown,
        )
    nested: Any = _override_value(value.strip())
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return Layer("override", f"--set {key}", nested, "")


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # Text with line breaks may parse as several assignments: then it is text.
    return RawText(text, parsed["value"]) if len(parsed) == 1 and "\n" not in text else text


class RawText(msgspec.Struct, frozen=True):
    """An override that reads as a TOML value, with its spelling: a field of text takes ``run.name=007`` literally."""

    text: str
    value: Any
