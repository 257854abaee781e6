"""The random number generators of one rank: Python, NumPy (when loaded), torch on CPU and on the device in use.

They are per rank: restoring rank 0's on every rank would give all of them the same dropout masks.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import torch

from midwatch.core import CheckpointError


def capture_rng() -> dict[str, Any]:
    """The state of every generator this process can be using, as values and uint8 tensors; takes no random number."""
    version, words, gauss = random.getstate()
    packed = struct.pack(f"<{len(words)}I", *words)
    state: dict[str, Any] = {"python": (version, packed, gauss), "torch_cpu": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, pos, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = (kind, keys, int(pos), int(has_gauss), float(cached))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["torch_cuda"] = torch.cuda.get_rng_state()
    return state


def check_rng(state: dict[str, Any]) -> None:
    """Try a saved state on generators of no consequence; the real ones stay as they are.

    Raises:
        CheckpointError: CK106 naming the generator whose state is none.
    """
    if not {"python", "torch_cpu"} <= set(state):
        raise CheckpointError("CK106", f"saved random state holds {sorted(map(str, state))} only")
    for name, saved in state.items():
        try:
            _try_out(name, saved)
        except (TypeError, ValueError, LookupError, RuntimeError, OverflowError, struct.error) as error:
            message = f"saved random state rng.{name} is none: {type(error).__name__}: {error}"
            raise CheckpointError("CK106", message, path=f"rng.{name}") from error


def _try_out(name: str, saved: Any) -> None:
    match name:
        case "python":
            random.Random().setstate(_python_state(saved))
        case "torch_cpu":
            torch.Generator().set_state(saved)
        case "numpy":
            import numpy as np

            np.random.RandomState().set_state(saved)
        case "torch_cuda":
            if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
                raise TypeError("not a tensor of bytes")
        case _:
            raise ValueError("a generator nobody knows")


def _python_state(saved: Any) -> tuple[Any, ...]:
    version, packed, gauss = saved
    return version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss


def restore_rng(state: dict[str, Any]) -> list[str]:
    """Put the generators back; returns the names of those that could not be (no device, NumPy gone).

    Must be the last act of a resume: loading, warm-ups and user code in between may draw numbers.
    """
    skipped: list[str] = []
    random.setstate(_python_state(state["python"]))
    torch.set_rng_state(state["torch_cpu"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "torch_cuda" in state:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["torch_cuda"])
        else:
            skipped.append("torch_cuda")
    return skipped
