"""What the training process can tell of its work without being told: how it is spread, what is tracked, the libraries.

Only what costs nothing to ask: no value is copied from a device, and no device is woken.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch.cuda import nccl
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from midwatch.audit import library_versions
from midwatch.core import Recorder, changed_values, changes_text

_log = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")
_MAX_NODES = 8
_MAX_GROUPS = 8
"""Parameter groups told one by one; more of them follow a rule that the defaults and their number tell better."""


def layout_facts(world_size: int, nodes: int, model: Any, declared: Mapping[str, Any]) -> dict[str, Any]:
    """How the work is spread over the ranks; what the script declares counts above what is seen here."""
    seen: dict[str, Any] = {"world_size": world_size, "nodes": nodes}
    meshes = _meshes(model) if isinstance(model, torch.nn.Module) else []
    if meshes:
        seen["meshes"] = meshes
    return {**seen, **declared}


def observed_facts(tracked: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds and settings of the tracked objects, as the script made them: call it before anything is loaded."""
    facts: dict[str, Any] = {}
    for name in ("model", "optimizer", "scheduler", "scaler"):
        if (part := tracked.get(name)) is not None:
            facts[name] = {"class": type(part).__name__}
    if isinstance(model := tracked.get("model"), torch.nn.Module):
        parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
        facts["model"]["parameters"] = sum(parameter.numel() for parameter in parameters)
        facts["model"]["dtypes"] = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    if (optimizer := tracked.get("optimizer")) is not None:
        facts["optimizer"].update(_of_optimizer(optimizer))
    return facts


def library_facts() -> dict[str, str]:
    """Python and packages; CUDA or HIP, NCCL, cuDNN, the driver and the device, as far as they are there."""
    found: dict[str, str | None] = {
        **library_versions(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(),
    }
    if torch.version.cuda:
        found["nccl"] = _nccl()
        found["cudnn"] = str(torch.backends.cudnn.version() or "")
    if torch.cuda.is_initialized():
        found["device"] = torch.cuda.get_device_name()
    return {name: text for name, text in found.items() if text}


def note_other_nodes(answers: Sequence[Mapping[str, Any]], recorder: Recorder) -> None:
    """Nodes that do not have rank 0's libraries train on, and somebody should know.

    Args:
        answers: By rank: ``node``, and ``libraries`` of one rank a node.
    """
    mine: dict[str, str] = answers[0]["libraries"]
    apart = {a["node"]: found for a in answers if a["libraries"] and (found := changed_values(mine, a["libraries"]))}
    if apart:
        named = dict(list(apart.items())[:_MAX_NODES])
        recorder.record(
            "run.nodes_differed",
            nodes={node: [msgspec.to_builtins(change) for change in found] for node, found in named.items()},
            differing_nodes=len(apart),
        )
        told = "; ".join(f"{node}: {changes_text(found)}" for node, found in named.items())
        _log.warning("%d nodes have other libraries than rank 0's: %s", len(apart), told)


def _meshes(model: torch.nn.Module) -> list[str]:
    """``dp=4 tp=2``: the different device meshes of the parameters."""
    found: set[str] = set()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            sizes = tuple(mesh.shape)
            names = mesh.mesh_dim_names or tuple(f"dim{number}" for number in range(len(sizes)))
            found.add(" ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)))
    return sorted(found)


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    defaults: Any = getattr(optimizer, "defaults", None)
    groups: Any = getattr(optimizer, "param_groups", None)
    facts = _plain_settings(cast("Mapping[str, Any]", defaults)) if isinstance(defaults, Mapping) else {}
    if not isinstance(groups, list) or len(cast("list[Any]", groups)) < 2:
        return facts
    listed = [group for group in cast("list[Any]", groups) if isinstance(group, Mapping)]
    facts["groups"] = len(listed)
    for number, group in enumerate(listed if len(listed) <= _MAX_GROUPS else ()):
        own = {key: value for key, value in _plain_settings(group).items() if facts.get(key) != value}
        if own:
            facts[f"group{number}"] = own
    return facts


def _plain_settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words alone: a learning rate that is a tensor may lie on a device. A scheduler's beginning counts,
    not where it stands."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("params", "initial_lr"):
            continue
        value = table.get("initial_lr", value) if key == "lr" else value
        items: tuple[Any, ...] = tuple(cast("Any", value)) if isinstance(value, (tuple, list)) else (value,)
        if all(isinstance(item, (bool, int, float, str)) for item in items):
            found[str(key)] = value
    return found


def _driver() -> str:
    try:
        first = _DRIVER.read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), first[:80])


def _nccl() -> str:
    try:
        version: Any = nccl.version()
    except (AttributeError, RuntimeError):
        return ""
    return ".".join(str(part) for part in cast("tuple[Any, ...]", version) if isinstance(part, int))
