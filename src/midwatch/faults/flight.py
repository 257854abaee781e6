"""What PyTorch's flight recorder dumped, as a list of calls. Pure: bytes in, calls out.

The dump is a pickle, and a pickle is a program: loading one runs what it says. So nothing here loads it. Its bytes are
read by a decoder that knows only the words for plain data (numbers, text, lists, dicts), and refuses a file with any
other word in it. Memory and time grow with the file's length and no faster.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

from midwatch.faults.frames import user_frame
from midwatch.faults.types import CollectiveCall, Frame

MAX_FLIGHT_BYTES: Final = 32 * 1024 * 1024
"""A recorder of 2,000 calls with stacks writes about 5 MB."""
_MAX_WORDS: Final = 3_000_000
"""Such a file has some hundreds of thousands, and a word costs at most a hundred bytes of memory."""
_MAX_KEY: Final = 2**31
_MAX_TEXT: Final = 200
_MAX_FRAMES: Final = 64
_MAX_TENSORS: Final = 4
_MAX_DIMENSIONS: Final = 8
_STATES: Final[dict[object, Literal["scheduled", "started", "completed"]]] = {
    "scheduled": "scheduled",
    "started": "started",
    "completed": "completed",
}


class FlightError(ValueError):
    """This is not a flight recorder's dump, or not only one."""


def read_flight(dump: bytes, *, last: int = 64) -> tuple[CollectiveCall, ...]:
    """The newest collectives, oldest first; point-to-point messages are left out, for only two ranks number those.

    Args:
        dump: The file's bytes.
        last: So many.

    Raises:
        FlightError: The bytes are damaged, too many, or hold more than plain data.
    """
    document = decode_plain(dump)
    entries: Any = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise FlightError("no list of calls in it")
    calls: list[CollectiveCall] = []
    for entry in reversed(cast("list[Any]", entries)):
        if len(calls) >= last:
            break
        call = _call(cast("dict[Any, Any]", entry)) if isinstance(entry, dict) else None
        if call is not None:
            calls.append(call)
    return tuple(sorted(calls, key=lambda call: call.sequence))


def _call(entry: Mapping[Any, Any]) -> CollectiveCall | None:
    sequence = entry.get("collective_seq_id")
    if not isinstance(sequence, int) or isinstance(sequence, bool) or entry.get("is_p2p") is True:
        return None
    group = entry.get("process_group")
    name = group[0] if isinstance(group, (tuple, list)) and group else entry.get("pg_id", "")
    state = _STATES.get(_hashable(entry.get("state")), "scheduled")
    # Gloo's calls stay "scheduled" for ever; what was taken off the list of open ones is over.
    is_over = state == "completed" or entry.get("retired") is True
    return CollectiveCall(
        group=_short(name),
        sequence=sequence if abs(sequence) < 2**63 else 0,
        operation=_short(entry.get("profiling_name", "")).partition(":")[2] or _short(entry.get("profiling_name", "")),
        state="completed" if is_over else state,
        size=_sizes(entry.get("input_sizes"), entry.get("input_dtypes")),
        frame=_frame(entry.get("frames")),
    )


def _sizes(sizes: Any, dtypes: Any) -> str:
    """``Float[4,32] Float[32]``; bounded, for lists that hold each other could go on for ever."""
    if not isinstance(sizes, list):
        return ""
    names = cast("list[Any]", dtypes) if isinstance(dtypes, list) else []
    texts: list[str] = []
    for number, size in enumerate(cast("list[Any]", sizes)[:_MAX_TENSORS]):
        shape = cast("list[Any]", size)[:_MAX_DIMENSIONS] if isinstance(size, list) else []
        numbers = ",".join(str(n) for n in shape if isinstance(n, int) and abs(n) < 2**63)
        texts.append(f"{_short(names[number]) if number < len(names) else ''}[{numbers}]")
    return " ".join(texts)


def _frame(frames: Any) -> Frame | None:
    if not isinstance(frames, list):
        return None
    stack: list[Frame] = []
    for frame in cast("list[Any]", frames)[:_MAX_FRAMES]:
        if isinstance(frame, dict):
            known = cast("dict[Any, Any]", frame)
            line = known.get("line")
            number = line if isinstance(line, int) and 0 <= line < 2**31 else 0
            stack.append(Frame(_short(known.get("name")), _short(known.get("filename")), number))
    return user_frame(stack)


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    return str(value) if isinstance(value, int) and abs(value) < 2**63 else ""


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str) else None


# --- the decoder -----------------------------------------------------------------------------------------------------


def decode_plain(data: bytes) -> Any:
    """Plain data out of pickle bytes, protocols 2 to 5.

    Raises:
        FlightError: Any word that is not about plain data, a cut-off or overlong input, an empty stack.
    """
    if len(data) > MAX_FLIGHT_BYTES:
        raise FlightError(f"{len(data)} bytes: too many")
    try:
        return _Decoder(data).run()
    except (IndexError, KeyError, struct.error) as error:
        raise FlightError(f"damaged: {type(error).__name__}") from error


class _Decoder:
    """A stack machine with the words of plain data only."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        """A dict: a list would let one word ask for gigabytes."""

    def run(self) -> Any:
        data, stack, memo, words = self._data, self._stack, self._memo, _WORDS
        for _ in range(_MAX_WORDS):
            at = self._at
            code = data[at]
            self._at = at + 1
            # Four of five words are one of these three, and each call saved is a third of the time.
            if code == _RECALL:
                stack.append(memo[data[at + 1]])
                self._at = at + 2
            elif code == _REMEMBER:
                memo[data[at + 1]] = stack[-1]
                self._at = at + 2
            elif code == _SMALL:
                stack.append(data[at + 1])
                self._at = at + 2
            elif code == _STOP:
                return stack.pop()
            else:
                word = words.get(code)
                if word is None:
                    raise FlightError(f"word {code:#04x} at byte {at}: not plain data")
                word(self)
        raise FlightError("too many words")

    # Reading.

    def take(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def take_bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise FlightError("cut off")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    # Words.

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def text(self, length: struct.Struct) -> None:
        self.push(self.take_bytes(self.take(length)).decode(errors="replace"))

    def long(self) -> None:
        self.push(int.from_bytes(self.take_bytes(self.take(_U1)), "little", signed=True))

    def remember(self, place: int) -> None:
        if place > _MAX_WORDS:
            raise FlightError("keeps something where nobody would")
        self._memo[place] = self._stack[-1]

    def recall(self, place: int) -> None:
        if place not in self._memo:
            raise FlightError("asks for what it never kept")
        self.push(self._memo[place])

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def tuple_of(self, count: int) -> None:
        if count > len(self._stack):
            raise FlightError("empty stack")
        self._stack[len(self._stack) - count :] = [tuple(self._stack[len(self._stack) - count :])]

    def tuple_from_mark(self) -> None:
        self.push(tuple(self._since_mark()))

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise FlightError("appends to what is no list")
        cast("list[Any]", target).extend(items)

    def put(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise FlightError("sets items of what is no dict")
        known = cast("dict[Any, Any]", target)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Text and small numbers only: the hash of nested tuples could take for ever, and large numbers can be
            # chosen so that all have the same one.
            if not isinstance(key, (str, int)) or (isinstance(key, int) and abs(key) >= _MAX_KEY):
                raise FlightError("a key that is neither text nor a small number")
            known[key] = value

    def appends(self) -> None:
        self.append(self._since_mark())

    def puts(self) -> None:
        self.put(self._since_mark())

    def append_one(self) -> None:
        self.append([self._stack.pop()])

    def put_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.put([key, value])

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        if at > len(self._stack):
            raise FlightError("a mark above the stack")
        items = self._stack[at:]
        del self._stack[at:]
        return items


_U1, _U2, _I4, _U4, _U8 = (struct.Struct(f"<{letter}") for letter in "BHiIQ")
_F8 = struct.Struct(">d")
_STOP, _RECALL, _REMEMBER, _SMALL = (ord(letter) for letter in ".hqK")
_WORDS: Final[dict[int, Callable[[_Decoder], None]]] = {
    0x80: lambda d: d.take(_U1),  # PROTO
    0x95: lambda d: d.take(_U8),  # FRAME
    ord("("): _Decoder.mark,
    ord("}"): lambda d: d.push({}),
    ord("]"): lambda d: d.push([]),
    ord(")"): lambda d: d.push(()),
    ord("N"): lambda d: d.push(None),
    0x88: lambda d: d.push(True),
    0x89: lambda d: d.push(False),
    ord("M"): lambda d: d.push(d.take(_U2)),
    ord("J"): lambda d: d.push(d.take(_I4)),
    ord("G"): lambda d: d.push(d.take(_F8)),
    0x8A: _Decoder.long,
    ord("X"): lambda d: d.text(_U4),
    0x8C: lambda d: d.text(_U1),
    ord("r"): lambda d: d.remember(d.take(_U4)),
    ord("j"): lambda d: d.recall(d.take(_U4)),
    0x94: _Decoder.memoize,
    0x85: lambda d: d.tuple_of(1),
    0x86: lambda d: d.tuple_of(2),
    0x87: lambda d: d.tuple_of(3),
    ord("t"): _Decoder.tuple_from_mark,
    ord("a"): _Decoder.append_one,
    ord("e"): _Decoder.appends,
    ord("s"): _Decoder.put_one,
    ord("u"): _Decoder.puts,
}
