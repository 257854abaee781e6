"""Megatron-LM's log lines, and those of its relatives (Megatron-DeepSpeed, GPT-NeoX).

     [2026-07-01 05:26:15] iteration  4410/  500000 | consumed samples: 4515840 | lm loss: 2.133473E+00 | ... |
     validation loss at iteration 1000 on validation set | lm loss value: 2.1E+00 | lm loss PPL: 8.1E+00 |

A field counts when the bar behind it is there: of a line that was cut, the number before the cut may be another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from midwatch.audit.importers.lines import log_lines
from midwatch.audit.importers.numbers import is_missing, number_of, plain_name, time_in
from midwatch.audit.importers.rows import Notes, Row

ITERATION: Final = re.compile(r"\biteration\s+(\d{1,18})\s*/\s*\d+\s*\|")
_BEGUN: Final = re.compile(r"\biteration\s+\d+\s*/")
_VALIDATION: Final = re.compile(r"(validation|test) loss at iteration (\d{1,18})\b([^|]*)\|")
NAMES: Final = {
    "lm loss": "loss",
    "grad norm": "grad_norm",
    "learning rate": "lr",
    "loss scale": "loss_scale",
    "number of skipped iterations": "skipped",
    "params norm": "param_norm",
    "global batch size": "global_batch_size",
    "consumed samples": "consumed_samples",
    "consumed tokens": "tokens",
    "number of nan iterations": "nan_iterations",
    "num zeros": "num_zeros",
    "throughput per GPU (TFLOP/s/GPU)": "tflops_per_gpu",
    "TFLOPs": "tflops_per_gpu",
    "samples per second": "samples_per_s",
    "samples/sec": "samples_per_s",
}
"""Megatron-LM's words in midwatch's; others are kept, with ``_`` for spaces."""


def read_megatron(path: Path, notes: Notes) -> Iterator[Row]:
    """A row for each iteration and each validation.

    Raises:
        OSError: The file cannot be read.
    """
    ts_ns = 0
    for line in log_lines(path, notes):
        marks = list(ITERATION.finditer(line.text))
        cut = len(_BEGUN.findall(line.text)) - len(marks)
        if cut:
            notes.pass_over("iterations that cannot be read", f"line {line.number}", cut)
        if marks or "loss at iteration" in line.text:
            # A validation's line has no time of its own.
            ts_ns = time_in(line.text) or ts_ns
        for mark, following in zip(marks, [*marks[1:], None], strict=False):
            body = line.text[mark.end() : following.start() if following else None]
            fields = dict(_fields(body, notes, line.number))
            values = _values(fields) | _values_before(line.text[: mark.start()] if mark is marks[0] else "")
            if values:
                yield Row(int(mark[1]), ts_ns, values, line.rank or 0)
            else:
                notes.pass_over("iterations without a number", f"line {line.number}")
        if not marks and (found := _VALIDATION.search(line.text)):
            name = "test" if "test" in found[1] + found[3] else "validation"
            fields = _fields(line.text[found.end() :], notes, line.number)
            values = {_validation_name(key, name): value for key, value in fields}
            yield Row(int(found[2]), ts_ns, values, line.rank or 0)
        elif not marks and "loss at iteration" in line.text:
            notes.pass_over("validations that cannot be read", f"line {line.number}")


def _values(fields: dict[str, float]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in fields.items():
        if name == "elapsed time per iteration (ms)":
            values["step_s"] = value / 1000
        else:
            values[NAMES.get(name) or plain_name(name)] = value
    return values


def _values_before(text: str) -> dict[str, float]:
    """GPT-NeoX begins its lines with ``samples/sec: 12.3 |``."""
    found = re.search(r"samples/sec:\s*([\d.eE+-]+)\s*\|\s*$", text)
    number = number_of(found[1]) if found else None
    return {} if number is None else {"samples_per_s": number}


def _fields(body: str, notes: Notes, line: int) -> Iterator[tuple[str, float]]:
    """Name and number of each field that is closed by a bar; some relatives leave the colon out."""
    *closed, rest = body.split("|")
    for field in closed:
        name, colon, text = field.rpartition(":")
        if not colon:
            name, _, text = field.strip().rpartition(" ")
        number = number_of(text)
        if name.strip() and number is not None:
            yield name.strip(), number
        elif field.strip() and not is_missing(text):
            notes.pass_over("fields without a number", f"line {line}")
    if rest.strip():
        notes.pass_over("fields that were cut", f"line {line}")


def _validation_name(key: str, prefix: str) -> str:
    key = key.removesuffix(" value")
    if key.endswith(" PPL"):
        return f"{prefix}_ppl" if key == "lm loss PPL" else f"{prefix}_{plain_name(key)}"
    return f"{prefix}_{NAMES.get(key) or plain_name(key)}"
