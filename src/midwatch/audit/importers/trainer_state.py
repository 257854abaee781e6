"""The Hugging Face Trainer's ``trainer_state.json``: a list of what was logged, each with its step.

The Trainer hides NaN and infinity in the loss unless ``logging_nan_inf_filter=False``: an exact zero there, or a
``grad_norm`` of NaN beside a good loss, is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from midwatch.audit.importers.numbers import LARGEST_STEP, number_of, truth_of
from midwatch.audit.importers.rows import Notes, Row
from midwatch.audit.importers.textfile import TextFile, UnfitFileError
from midwatch.storage import read_regular

KEY: Final = '"log_history"'
_SHOWN: Final = 80
NAMES: Final = {"learning_rate": "lr"}


def read_trainer_state(path: Path, notes: Notes) -> Iterator[Row]:
    """A row for each entry that has a step. Of a file that is cut, the whole entries before the cut.

    Raises:
        OSError: The file cannot be read. UnfitFileError: There is no list of entries.
    """
    text = read_regular(path).decode(TextFile(path).encoding, "replace")
    notes.read(len(text))
    for number, entry in enumerate(_entries(text, path, notes), 1):
        step = _step(entry.get("step"))
        if step is None:
            notes.pass_over("entries without a step", f"entry {number}")
            continue
        values: dict[str, float] = {}
        for name, value in entry.items():
            told = _number(value)
            if told is not None and name != "step":
                values[NAMES.get(name, name)] = told
            elif told is None and value is not None:
                notes.pass_over(f"values without a number in {name[:_SHOWN]}", f"entry {number}")
        if values:
            yield Row(step, 0, values)


def _entries(text: str, path: Path, notes: Notes) -> Iterator[dict[str, Any]]:
    """The entries one after the other, whatever stands before and after them."""
    at = text.find(KEY)
    at = text.find("[", at) + 1 if at >= 0 else 0
    if not at:
        raise UnfitFileError(f"{path} has no {KEY}: it is no trainer_state.json")
    decoder = json.JSONDecoder(parse_int=_whole)
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if text[at : at + 1] == "]":
            return
        try:
            entry, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            notes.pass_over("the file is cut or damaged within its entries", f"character {at}")
            return
        if isinstance(entry, dict):
            yield cast("dict[str, Any]", entry)
        else:
            notes.pass_over("entries that are no objects", f"character {at}")


def _whole(text: str) -> int | float:
    """Thousands of digits are refused by ``int``: it takes long to convert them."""
    return int(text) if len(text) < 400 else float(text)


def _step(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < LARGEST_STEP else None


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    if not isinstance(value, str):
        return None
    number = number_of(value)
    return truth_of(value) if number is None else number
