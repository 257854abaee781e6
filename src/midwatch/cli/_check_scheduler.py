"""Part of ``midwatch doctor``: could a bad node be taken out of service from here?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from midwatch.cli._checks import Finding
from midwatch.cluster import KubernetesDriver, check_client, driver_for
from midwatch.config import IsolateConfig, is_in_pod, scheduler_kind, scheduler_node, slurm_conf
from midwatch.core import ConfigError

_HOW_TO = "docs/how-to/kubernetes.md"


def check_scheduler(config: IsolateConfig) -> Iterator[Finding]:
    """Nothing where no scheduler is in sight.

    Blocking: some seconds where Kubernetes is to be asked, 30 s at most. Changes nothing: the change is a dry run.
    """
    kind, node = scheduler_kind(config.scheduler), scheduler_node()
    if kind == "slurm":
        yield _slurm(config, node)
    elif kind == "kubernetes" or (is_in_pod() and config.scheduler != "none"):
        yield _kubernetes(config, node)


def _slurm(config: IsolateConfig, node: str) -> Finding:
    if driver_for("slurm", slurm_conf=slurm_conf()).name == "slurm":
        return Finding(check="scheduler", state="ok", found=f"slurm, node {node or 'not known'}")
    todo = "Put scontrol into PATH: without it no node is drained, and faults are not traced to switches."
    return Finding(
        check="scheduler",
        state="problem" if config.drain == "do" else "warning",
        found="slurm, but its commands are not there",
        todo=todo,
    )


def _kubernetes(config: IsolateConfig, node: str) -> Finding:
    is_wanted = config.drain == "do"
    trouble, todo = "", f"See {_HOW_TO}."
    try:
        check_client("Kubernetes")
    except ConfigError as error:
        trouble, todo = error.message, f"{error.hint} in this environment."
    if not trouble and not node:
        trouble = "this pod was not told which node it is on"
        todo = f"Pass spec.nodeName on as MIDWATCH_K8S_NODE, see {_HOW_TO}."
    if not trouble and is_wanted:
        reply = asyncio.run(KubernetesDriver().rehearse(node))
        trouble = "" if reply.status == "done" else reply.text
    if trouble:
        state = "problem" if is_wanted else "warning"
        return Finding(check="scheduler", state=state, found=f"kubernetes: {trouble}", todo=todo)
    can = "can be cordoned" if is_wanted else f'is not cordoned: isolate.drain = "{config.drain}"'
    return Finding(check="scheduler", state="ok", found=f"kubernetes: node {node} {can}")
