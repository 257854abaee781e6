"""Is a checkpoint that of this model, this optimizer, this scheduler? Asked before anything is overwritten."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from midwatch.checkpoint.layout import dtype_name
from midwatch.checkpoint.manifest import TensorRecord
from midwatch.core import CheckpointError

_log = logging.getLogger(__name__)

_NAMED = 3
"""How many keys of a kind an error names: enough to recognise the mistake."""


def check_fit(section: str, live: Mapping[str, torch.Tensor], saved: Mapping[str, TensorRecord]) -> None:
    """Raises CheckpointError CK204 naming the tensors that are missing, too many, or of another shape or dtype."""
    missing = [key for key in live if key not in saved]
    unexpected = [key for key in saved if key not in live]
    wrong: list[str] = []
    for key, tensor in live.items():
        record = saved.get(key)
        if record is None:
            continue
        if tuple(tensor.shape) != record.global_shape:
            wrong.append(f"{key} is {tuple(tensor.shape)} here, {record.global_shape} in the checkpoint")
        elif dtype_name(key, tensor.dtype) != record.dtype:
            wrong.append(f"{key} is {dtype_name(key, tensor.dtype)} here, {record.dtype} in the checkpoint")
    if not (missing or unexpected or wrong):
        return
    parts = [
        _listed("the checkpoint lacks", missing),
        _listed("the model lacks", unexpected),
        _listed("they differ:", wrong),
    ]
    message = f"{section}: " + "; ".join(part for part in parts if part)
    raise CheckpointError("CK204", message, missing=missing[:50], unexpected=unexpected[:50], mismatched=wrong[:50])


def match_groups(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]
) -> dict[str, int]:
    """Canonical name to the number the optimizer gives the parameter; groups get numbers in place of names.

    Raises:
        CheckpointError: CK204 when the groups are others, CK106 for groups that are none.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    live = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    saved = [_parameter_names(group) for group in groups]
    if [set(group) for group in live] != [set(group) for group in saved]:
        lost = sorted({n for group in live for n in group} ^ {n for group in saved for n in group})
        what = _listed("only on one side:", lost) or "the same parameters in other groups"
        message = f"optimizer: {len(saved)} parameter groups saved, {len(live)} here; {what}"
        raise CheckpointError("CK204", message, parameters=lost[:50])
    numbers = {name: number for number, name in enumerate(name for group in live for name in group)}
    for group, here in zip(groups, live, strict=True):
        group["params"] = [numbers[name] for name in here]
    return numbers


def _parameter_names(group: Mapping[str, Any]) -> list[str]:
    try:
        return msgspec.convert(group.get("params"), list[str])
    except msgspec.ValidationError as error:
        raise CheckpointError("CK106", f"optimizer.param_groups.params: {error}") from error


def check_kind(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raises CheckpointError CK204 when another kind of optimizer was saved.

    Options on one side only are no proof: versions of PyTorch and schedulers add some.
    """
    saved = {option for group in groups for option in group}
    lacking = sorted(set(optimizer.defaults) - saved)
    foreign = sorted(saved - {option for group in optimizer.param_groups for option in group})
    if lacking and foreign:
        message = f"the checkpoint was written with another optimizer than {type(optimizer).__name__}: "
        message += "; ".join((_listed("it lacks", lacking), _listed("it has", foreign)))
        raise CheckpointError("CK204", f"optimizer: {message}", missing=lacking, unexpected=foreign)


def warn_of_other_kind(section: str, thing: Any, state: Any) -> None:
    """Another scheduler may be meant, and takes what it knows of the state; but nobody should wonder later."""
    live = thing.state_dict()
    if not (isinstance(live, Mapping) and isinstance(state, Mapping)):
        return
    here, saved = ({str(key) for key in cast("Mapping[Any, Any]", table)} for table in (live, state))
    lacking, foreign = (sorted(key for key in keys if not key.startswith("_")) for keys in (here - saved, saved - here))
    if lacking and foreign:
        what = "; ".join((_listed("it lacks", lacking), _listed("it has", foreign)))
        _log.warning("the checkpoint's %s is of another kind than this %s: %s", section, type(thing).__name__, what)


def _listed(title: str, keys: list[str]) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{title} {', '.join(sorted(keys)[:_NAMED])}{more}"
