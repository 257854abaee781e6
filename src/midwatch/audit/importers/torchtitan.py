"""torchtitan's log lines.

[rank0]:[titan] 2026-02-28 02:08:35,366 - root - INFO - step:  1  loss:  2.23629  grad_norm:  0.4609
  memory: 61.22GiB(77.30%)  tps: 7,350  tflops: 407.19  mfu: 41.16%     (all in one line)
... validate step: 10  loss:  2.2  memory: 61.22GiB(77.30%)  tps: 7,350
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from midwatch.audit.importers.lines import Line, log_lines
from midwatch.audit.importers.numbers import number_of, time_in
from midwatch.audit.importers.rows import Notes, Row

STEP: Final = re.compile(r"\b(validate )?step:\s*(\d{1,18})\s+(?=\w{1,64}:\s)")
_FIELD: Final = re.compile(
    r"\b(\w{1,64}):\s*([-+\d.,eE]+|[-+]?(?:nan|inf))(GiB|%)?(?:\(([-+\d.,]+|nan|inf)%\))?(?=\s|$)"
)


def read_torchtitan(path: Path, notes: Notes) -> Iterator[Row]:
    """A row for each step and each validation that is printed.

    Raises:
        OSError: The file cannot be read.
    """
    ts_ns = 0
    for line in log_lines(path, notes):
        marks = list(STEP.finditer(line.text))
        if marks:
            ts_ns = time_in(line.text) or ts_ns
        for mark, following in zip(marks, [*marks[1:], None], strict=False):
            body = line.text[mark.end() : following.start() if following else None]
            values = dict(_values(body, line, notes, is_end=following is None))
            if following is not None:
                notes.pass_over("lines that were cut", f"line {line.number}")
            if mark[1]:
                values = {f"validation_{name}": value for name, value in values.items()}
            if values:
                yield Row(int(mark[2]), ts_ns, values, line.rank or 0)
            else:
                notes.pass_over("steps without a number", f"line {line.number}")


def _values(body: str, line: Line, notes: Notes, *, is_end: bool) -> Iterator[tuple[str, float]]:
    for field in _FIELD.finditer(body):
        if is_end and field.end() == len(body) and not line.is_whole:
            # In the middle: the number may go on.
            notes.pass_over("fields that were cut", f"line {line.number}")
            return
        name, text, unit, share = field.groups()
        number = number_of(text.replace(",", ""))
        if number is not None:
            yield (f"{name}_gib" if unit == "GiB" else name), number
        share_number = number_of(share.replace(",", "")) if share else None
        if share_number is not None:
            yield f"{name}_pct", share_number
