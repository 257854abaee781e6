"""What this rank holds of a tensor, and how it comes to the host behind the device's other work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, once what ``Copied`` of its device says is waited for; a tensor of the host is handed back."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class Copied:
    """The moment behind all copies that were begun on some devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [_event(device) for device in set(devices) if device.type == "cuda"]

    def wait(self) -> None:
        """For those copies, and for nothing that was begun after them. Blocking: the devices' work until then."""
        for event in self._events:
            event.synchronize()


def _event(device: torch.device) -> Any:
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it; call it where no gradients are recorded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
