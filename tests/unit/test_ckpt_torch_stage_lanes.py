"""The order of a copy from a GPU, on stand-ins: wait for training, copy, tell training to wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from midwatch.checkpoint import copying  # noqa: E402

pytestmark = pytest.mark.torch


class Device:
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arrived = False

    def stream(self, name: str) -> Any:
        device = self

        class Stream:
            def __init__(self) -> None:
                self.device = "cuda:0"

            def wait_event(self, event: Any) -> None:
                device.calls.append(f"{name} waits for {event.name}")

            def __repr__(self) -> str:
                return name

        return Stream()

    def event(self) -> Any:
        device = self

        class Event:
            def __init__(self) -> None:
                self.name = "?"

            def record(self, stream: Any) -> None:
                self.name = f"mark of {stream}"
                device.calls.append(f"mark on {stream}")

            def query(self) -> bool:
                return device.arrived

            def synchronize(self) -> None:
                device.calls.append(f"host waits for {self.name}")

        return Event()


class Live:
    """A tensor on the device."""

    is_cuda = True
    device = "cuda:0"

    def __init__(self, device: Device) -> None:
        self._device = device

    def record_stream(self, stream: Any) -> None:
        self._device.calls.append(f"kept for {stream}")


class Place:
    """Its place in the arena."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def copy_(self, _tensor: Any, *, non_blocking: bool) -> None:
        self._device.calls.append("copy, not waited for" if non_blocking else "copy, waited for")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    training = device.stream("training")
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device_stream(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: training)

    def device_stream(_name: Any) -> Any:
        return device.stream("side")

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        device.calls.append(f"on {stream}")
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    return device


def test_the_copy_comes_after_training_and_training_after_the_copy(device: Device) -> None:
    pairs: Any = [(Place(device), Live(device)) for _ in range(2)]
    copy = copying.Copy(pairs, copying.Streams())
    copy.begin()
    copy.run()
    assert not copy.is_done
    copy.release()
    copy.finish()
    assert device.calls == [
        "mark on training",
        "on side",
        "side waits for mark of training",
        *["copy, not waited for", "kept for side"] * 2,
        "mark on side",
        "training waits for mark of side",
        "host waits for mark of side",
    ]
    device.arrived = True
    assert copy.is_done


def test_all_copies_of_one_device_share_a_stream(device: Device) -> None:
    streams = copying.Streams()
    pair: Any = (Place(device), Live(device))
    first, again = streams.split([pair]), streams.split([pair, pair])
    assert first[0][0] is again[0][0]
    assert len(again[0][1]) == 2
