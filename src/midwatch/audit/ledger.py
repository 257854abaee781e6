"""The ledger: what happened, in order, so that nobody can quietly change it afterwards.

Each file has one writer. Every line carries the hash of the line before, so an edited, removed, inserted or moved line
breaks the chain at a place that can be named. A cut-off end cannot be seen from the chain alone; it is seen from
outside: ``ledger.sealed`` events and checkpoint manifests repeat a file's head.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit.appendfile import AppendFile
from midwatch.audit.line import GENESIS, LedgerLine, decode_line, encode_line
from midwatch.core import SYSTEM_CLOCK, Clock, Event, StorageError
from midwatch.storage import ops, sha256_hex

_WINDOW_BYTES = 64 * 1024


class _Batch(msgspec.Struct):
    """Lines that become durable together."""

    is_open: bool = False
    is_fenced: bool = False
    """The fence was asked for this batch."""


class Ledger:
    """One open ledger file; a ``core.Recorder``. Safe to call from several threads of one process.

    Opening cuts a torn last line off (kept beside the file as ``<file>.torn-<n>``) and says so in ``ledger.repaired``.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        attempt: int = 0,
        node: str = "",
        rank: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
        fence: Callable[[], None] | None = None,
    ) -> None:
        """Raises LedgerError LG102 when another writer holds the file, StorageError, and what ``fence`` raises.

        Args:
            fence: Called before every append; raises FencedError when a newer attempt holds the run.
        """
        self._blank = Event(event="", ts_ns=0, mono_ns=0, run=run, attempt=attempt, node=node, rank=rank)
        self._clock = clock
        self._fence = fence
        self._guard = threading.RLock()
        self._batch = _Batch()
        ops.make_dirs(path.parent)
        is_new = not path.exists()
        self._file = AppendFile(path)
        try:
            if is_new:
                ops.fsync_dir(path.parent)
            self._pick_up()
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def head(self) -> str:
        """The hash of the last line; 64 zeros before the first."""
        return self._head

    @property
    def lines(self) -> int:
        """How many lines the file has."""
        return self._seq

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        """Append a fact.

        Raises:
            FencedError: CK401 from the fence; nothing was written.
            StorageError: ST101 or ST103; nothing of the line remains in the file.

        Durability: survives power loss when it returns, or when the ``together`` around it ends.
        """
        with self._guard:
            if self._fence is not None and not self._batch.is_fenced:
                self._fence()
                self._batch.is_fenced = self._batch.is_open
            entry = msgspec.structs.replace(
                self._blank,
                event=event,
                ts_ns=self._clock.wall_ns(),
                mono_ns=self._clock.monotonic_ns(),
                step=step,
                cause=cause,
                data=data,
            )
            raw, digest = encode_line(entry, self._seq, self._head)
            self._file.append(raw, is_durable=not self._batch.is_open)
            self._seq, self._head = self._seq + 1, digest

    @contextmanager
    def together(self) -> Generator[None]:
        """What is recorded inside is made durable when this ends, by one sync for all of it; may be nested.

        Other threads wait meanwhile, so nothing slow belongs inside. The fence is asked once.

        Raises:
            StorageError: ST101 or ST103; nothing of the lines remains in the file.
        """
        with self._guard:
            if self._batch.is_open:
                yield
                return
            start = self._seq, self._head, self._file.size_bytes
            self._batch = _Batch(is_open=True)
            try:
                yield
            finally:
                self._batch = _Batch()
                self._make_durable(*start)

    def _make_durable(self, seq: int, head: str, size_bytes: int) -> None:
        if self._file.size_bytes == size_bytes:
            return
        try:
            self._file.sync(size_bytes)
        except StorageError:
            self._seq, self._head = seq, head
            raise

    def close(self) -> None:
        """Release the file; closing twice is fine."""
        with self._guard:
            self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _pick_up(self) -> None:
        last, end = _find_last_line(self._file)
        self._seq, self._head = (last.seq + 1, last.hash) if last else (0, GENESIS)
        if end < self._file.size_bytes:
            if self._fence is not None:
                self._fence()
            self._set_aside(end)

    def _set_aside(self, end: int) -> None:
        torn = self._file.read(end, self._file.size_bytes)
        aside = next(
            name for n in range(1, 10_000) if not (name := self.path.with_name(f"{self.path.name}.torn-{n}")).exists()
        )
        # The copy is durable before the original is cut: dying between the two leaves both.
        ops.write_file(aside, torn)
        ops.fsync_dir(aside.parent)
        self._file.cut(end)
        self.record("ledger.repaired", bytes=len(torn), aside=aside.name, sha256=sha256_hex(torn))


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """How far a ledger had got; recorded in another one as ``ledger.sealed``, so that a cut-off end is noticed."""

    writer: str
    head: str
    lines: int


def seal_of(path: Path) -> Seal | None:
    """The seal of a ledger nobody writes any more: ``record("ledger.sealed", **msgspec.structs.asdict(seal))``.

    Returns:
        None when there is no such file or no whole line in it.
    """
    if not path.is_file():
        return None
    last = _last_line_of(path.read_bytes())
    return Seal(writer=path.stem, head=last.hash, lines=last.seq + 1) if last else None


def _find_last_line(file: AppendFile) -> tuple[LedgerLine | None, int]:
    """The last line whose hash fits, and the offset behind it; what follows that offset is torn."""
    window = _WINDOW_BYTES
    while True:
        begin = max(0, file.size_bytes - window)
        found, end = _search_back(file.read(begin, file.size_bytes), is_whole=begin == 0)
        if found is not None or begin == 0:
            return found, begin + end
        window *= 4


def _last_line_of(data: bytes) -> LedgerLine | None:
    return _search_back(data, is_whole=True)[0]


def _search_back(data: bytes, *, is_whole: bool) -> tuple[LedgerLine | None, int]:
    end = data.rfind(b"\n") + 1
    while end > 0:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        if begin == 0 and not is_whole:
            break
        line = decode_line(data[begin : end - 1])
        if line is not None:
            return line, end
        end = begin
    return None, 0
