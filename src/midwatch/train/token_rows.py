"""The tokens of a batch, however the script has them, as rows of whole numbers on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

Row = NDArray[np.int64]
_ASKED: Final = "run.batch(tokens=...) wants whole numbers of shape (rows, length)"


class TokenRows:
    """Rows that may have different lengths.

    Attributes:
        count: How many.
        flat: All tokens behind each other.
    """

    def __init__(self, rows: Sequence[Row] | Row, flat: Row) -> None:
        self._rows = rows
        self.count = len(rows)
        self.flat = flat

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def rows_of(tokens: Any) -> TokenRows:
    """Nothing is copied that is there as 64-bit numbers, and nobody waits for a device.

    Args:
        tokens: A tensor on the CPU or an array, of two dimensions or more (the first counts the rows), or a sequence of
            rows. Which type of whole number they have makes no difference.

    Raises:
        TypeError: For everything else.
    """
    if isinstance(tokens, torch.Tensor):
        return _of_array(_on_host(tokens))
    if isinstance(tokens, np.ndarray):
        return _of_array(cast("NDArray[Any]", tokens))
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes)):
        rows = [_of_row(row) for row in cast("Sequence[Any]", tokens)]
        return TokenRows(rows, np.concatenate(rows) if rows else np.empty(0, np.int64))
    raise TypeError(f"{_ASKED}, not a {type(tokens).__name__}")


def _on_host(tokens: torch.Tensor) -> NDArray[Any]:
    if tokens.device.type != "cpu":
        # To copy them back would make the host wait for all that the device has to do before.
        raise TypeError(f"{_ASKED} on the CPU, as the loader made them; these are on {tokens.device}")
    try:
        return tokens.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{_ASKED}: {error}") from error


def _of_array(tokens: NDArray[Any]) -> TokenRows:
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{_ASKED}, not {tokens.dtype}")
    if tokens.ndim < 2:
        raise TypeError(f"{_ASKED}, not of shape {tokens.shape}: one row is tokens[None]")
    flat = np.ascontiguousarray(tokens).astype(np.int64, copy=False).reshape(-1)
    return TokenRows(flat.reshape(len(tokens), -1) if len(tokens) else [], flat)


def _of_row(row: Any) -> Row:
    try:
        array = _on_host(row) if isinstance(row, torch.Tensor) else np.asarray(row)
    except ValueError as error:
        raise TypeError(f"{_ASKED}: {error}") from error
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{_ASKED}, and not a row of {array.dtype}")
    if array.ndim != 1:
        raise TypeError(f"{_ASKED}, and not a row of shape {array.shape}")
    return array.astype(np.int64)
