"""A fixed sample of an optimizer's parameters: the same elements at every step, read with one kernel.

Of each tensor every s-th element is taken, s odd so that a matrix is crossed on a slant and not down one column.
Nothing is drawn by chance: the sample follows from the shapes and the order of the parameters, and is so the same on
all ranks that hold the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from midwatch.train.tensors import local_part

MOST_OF_ONE: Final = 1024
"""Elements of one tensor: a share of 1 % is then told from none."""
LEAST_OF_ONE: Final = 16
MOST_OF_ALL: Final = 1 << 18
"""Elements of one optimizer: a megabyte."""


class _Pick(NamedTuple):
    begin: int
    stride: int
    size: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """As a view where the memory has the order of the elements."""
        if tensor.is_contiguous():
            return tensor.as_strided((self.size,), (self.stride,), tensor.storage_offset() + self.begin)
        places = torch.arange(self.begin, self.begin + self.size * self.stride, self.stride, device=tensor.device)
        return tensor.take(places)


class Batch:
    """Sampled parameters of one device and one type.

    Attributes:
        stands_for: For each sampled element, how many elements of the whole model it speaks for.
        shares: For each parameter, 1 divided by the number of ranks that hold it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], shares: Sequence[float], most: int) -> None:
        locals_ = [local_part(parameter) for parameter in parameters]
        first = locals_[0]
        self.wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        self._parameters = parameters
        self._picks = [_pick(local.numel(), number, most) for number, local in enumerate(locals_)]
        self.shares = torch.tensor(shares, dtype=self.wide, device=first.device)
        speaks = [
            share * local.numel() / pick.size for share, local, pick in zip(shares, locals_, self._picks, strict=True)
        ]
        counts = torch.tensor([pick.size for pick in self._picks], device=first.device)
        self.stands_for = torch.tensor(speaks, dtype=self.wide, device=first.device).repeat_interleave(
            counts, output_size=sum(pick.size for pick in self._picks)
        )

    def read(self) -> torch.Tensor:
        """The sample as it is now, a copy."""
        return torch.cat([pick.of(local_part(p)) for pick, p in zip(self._picks, self._parameters, strict=True)])

    def norms(self) -> torch.Tensor:
        """Of each whole tensor, as far as this rank holds it."""
        wide = self.wide
        return torch.stack([torch.linalg.vector_norm(local_part(p), dtype=wide) for p in self._parameters])

    def with_gradient(self, is_moving: Callable[[torch.Tensor], bool]) -> torch.Tensor:
        """Which sampled elements have a gradient that is not zero.

        Args:
            is_moving: Whether a parameter's learning rate would move it at all.
        """
        pairs = zip(self._picks, self._parameters, strict=True)
        return torch.cat([self._has_gradient(pick, p, is_moving(p)) for pick, p in pairs])

    def _has_gradient(self, pick: _Pick, parameter: torch.Tensor, is_moving: bool) -> torch.Tensor:
        gradient = parameter.grad
        # A sparse gradient says which rows it has, and would have to be spread out to be asked for one element.
        if gradient is None or gradient.is_sparse or not is_moving:
            return torch.zeros(pick.size, dtype=torch.bool, device=self.stands_for.device)
        return pick.of(local_part(gradient)) != 0


def batches_of(optimizer: Any, shares: Mapping[int, float]) -> list[Batch]:
    """The parameters of an optimizer that can be sampled, by device and type.

    Args:
        shares: By ``id`` of the parameter; 1 where it is not known.
    """
    known = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and _is_plain(local_part(parameter))
    ]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in known:
        local = local_part(parameter)
        by_kind.setdefault((local.device, local.dtype), []).append(parameter)
    most = max(LEAST_OF_ONE, min(MOST_OF_ONE, MOST_OF_ALL // max(1, len(known))))
    return [Batch(some, [shares.get(id(p), 1.0) for p in some], most) for some in by_kind.values()]


def _is_plain(tensor: torch.Tensor) -> bool:
    # Subclasses (quantized weights) have other bytes than they show.
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_known and tensor.is_floating_point() and tensor.numel() > 0 and tensor.layout == torch.strided


def _pick(size: int, number: int, most: int) -> _Pick:
    if size <= most:
        return _Pick(0, 1, size)
    stride = size // most | 1
    # The first place differs from tensor to tensor, and always leaves room for half of the elements at least.
    begin = (number * 7919) % stride
    return _Pick(begin, stride, (size - 1 - begin) // stride + 1)
