"""What a pod is told about the node under it; empty outside of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from midwatch.config.slurm import slurm_node

SchedulerKind = Literal["slurm", "kubernetes", "none"]


def is_in_pod(environ: Mapping[str, str] | None = None) -> bool:
    """Kubernetes sets this in every container; whether the pod may ask the API is another question."""
    return bool((os.environ if environ is None else environ).get("KUBERNETES_SERVICE_HOST"))


def kubernetes_node(environ: Mapping[str, str] | None = None) -> str:
    """Kubernetes' name for the machine: the pod spec must pass it on, a pod cannot know it by itself.

    ``NODE_NAME`` is what most pod specs call it. Outside of pods other programs call other things that, so there only
    our own variable counts.
    """
    source: Mapping[str, str] = os.environ if environ is None else environ
    return source.get("MIDWATCH_K8S_NODE", "") or (source.get("NODE_NAME", "") if is_in_pod(source) else "")


def scheduler_kind(
    named: Literal["auto", "slurm", "kubernetes", "none"] = "auto", environ: Mapping[str, str] | None = None
) -> SchedulerKind:
    """Who gave us this machine, unless it is named. Slurm comes first: its daemons, too, may run in pods."""
    if named != "auto":
        return named
    if slurm_node(environ):
        return "slurm"
    return "kubernetes" if kubernetes_node(environ) else "none"


def scheduler_node(environ: Mapping[str, str] | None = None) -> str:
    """The scheduler's name for this machine; empty without one."""
    return slurm_node(environ) or kubernetes_node(environ)


def kubeconfig(environ: Mapping[str, str] | None = None) -> str:
    """The credentials that somebody has named for kubectl and its like; empty for their default."""
    return (os.environ if environ is None else environ).get("KUBECONFIG", "")
