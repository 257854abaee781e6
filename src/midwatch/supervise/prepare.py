"""What a launcher settles before it starts anything: who holds the folder, the token, what its children are told."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit import ensure_run
from midwatch.cluster import Topology, check_client, load_topology
from midwatch.config import (
    Config,
    IsolateConfig,
    MetricsConfig,
    OutsidePlace,
    RunPaths,
    SecureConfig,
    canonical_json,
    expand_path,
    inherited_environment,
    is_in_pod,
    kubernetes_node,
    redact,
    redact_list,
    resolve_paths,
    scheduler_kind,
    scheduler_node,
    slurm_peers,
)
from midwatch.core import ConfigError
from midwatch.storage import newest_attempt, sha256_hex
from midwatch.supervise.address import listen
from midwatch.supervise.decide import Rules
from midwatch.supervise.failover import FolderLock
from midwatch.supervise.node_view import view_path
from midwatch.supervise.procs import SHM
from midwatch.supervise.protocol import create_token
from midwatch.supervise.spawn import NodeSetup, rank_environment, resolve_command
from midwatch.supervise.specs import AgentSpec, CarrySpec, CoordinatorSpec
from midwatch.supervise.wire import StartRanks

_NODE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""It becomes part of file names, and is shown to people: nothing that leaves a folder or moves a cursor."""


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``midwatch run`` was asked for."""

    command: tuple[str, ...]
    nproc: int = 1
    nnodes: int = 1
    max_nodes: int = 0
    """Nodes beyond ``nnodes``, up to this many in all, wait as spares; 0: none."""
    config: Config
    has_config: bool = False
    """The user named a file or set keys, so ranks are given the result."""
    node_name: str = ""
    bind: str = ""
    """Where to listen; empty: this machine alone for one node, else the address that the other nodes reach."""
    place: OutsidePlace | None = None
    """Another launcher started us for this one rank; ``nnodes`` is then the number of such launchers."""

    @property
    def most_nodes(self) -> int:
        """Those that train, and the spares."""
        return max(self.nnodes, self.max_nodes)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: from here on starting can fail only for the machine's reasons."""

    request: LaunchRequest
    paths: RunPaths
    command: tuple[str, ...]
    """Resolved."""
    command_hash: str
    tag: str
    """Unique per invocation; everything that carries it is ours."""
    node: str
    topology: Topology = ()
    """The user's file; empty: ask the scheduler."""
    certificate: str = ""
    """What this node's coordinator shows, as PEM; empty: connections are not encrypted."""


def plan(request: LaunchRequest) -> Plan:
    """Check what can be checked without starting or writing anything.

    Raises:
        SuperviseError: SV101 the command cannot be started. ConfigError: CF102 a name that cannot be a node's, paths
            that cannot be expanded, text that is not UTF-8, a topology or a certificate that cannot be used, a node
            that cannot be cordoned for want of its name. CF107 one that cannot be cordoned for want of a library.
    """
    paths = resolve_paths(request.config)
    for word in (str(paths.run_dir), str(paths.checkpoint_dir), *request.command):
        _check_text(word)
    _check_metrics(request.config.metrics)
    _check_scheduler(request.config.isolate)
    return Plan(
        request=request,
        paths=paths,
        command=resolve_command(request.command),
        command_hash=sha256_hex(canonical_json(list(request.command))),
        tag=secrets.token_hex(8),
        # By the scheduler's name, so that its topology and its commands mean the same node.
        node=_node_name(request.node_name or scheduler_node() or socket.gethostname()),
        topology=load_topology(Path(file).expanduser()) if (file := request.config.grade.topology) else (),
        certificate=_certificate(request.config),
    )


def _certificate(config: Config) -> str:
    if config.secure == SecureConfig():
        return ""
    # Only who asks for encryption pays for the import.
    from midwatch.supervise.tls import read_certificate

    return read_certificate(config.secure)


def _check_scheduler(isolate: IsolateConfig) -> None:
    """Whoever lets us cordon must not learn when a node is bad that we cannot."""
    if isolate.drain != "do":
        return
    kind = scheduler_kind(isolate.scheduler)
    if kind == "kubernetes":
        check_client('isolate.drain = "do" in Kubernetes')
    is_kubernetes = kind == "kubernetes" or (is_in_pod() and kind == "none" and isolate.scheduler == "auto")
    if is_kubernetes and not kubernetes_node():
        raise ConfigError(
            "CF102",
            'isolate.drain is "do", and nobody has said which node of Kubernetes this is',
            key="isolate.drain",
            hint="Pass spec.nodeName on as MIDWATCH_K8S_NODE (docs/how-to/kubernetes.md), or set isolate.drain to ask.",
        )


def _check_metrics(metrics: MetricsConfig) -> None:
    """Raises ConfigError for addresses and paths that nobody could use: the processes for them are started later."""
    push = metrics.push
    if metrics.index_dir:
        expand_path("metrics.index_dir", metrics.index_dir)
    if not (metrics.listen or push.url):
        return
    # Only who asks for it pays for the import.
    from midwatch.audit.exporters import Listen, sink_of

    if metrics.listen:
        Listen(metrics.listen)
    if push.url:
        token = expand_path("metrics.push.token_file", push.token_file) if push.token_file else None
        sink_of(push.url, token, push.kind).close()


def _check_text(word: str) -> None:
    """What the ledger and the messages between our processes cannot carry is refused here."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ConfigError("CF102", f"{word!a} on the command line: must be UTF-8") from None


def _node_name(name: str) -> str:
    if not _NODE_NAME.fullmatch(name):
        raise ConfigError(
            "CF102",
            f"node name {name[:40]!r}: must be letters, digits, '.', '_' and '-', at most 128, not '.' or '-' first",
            hint="Set another one with --node-name.",
        )
    return name


class Host:
    """The hosting node's part: the seat, token, listening socket, the coordinator's task.

    Args:
        plan: Of this launcher.
        seat: Released by ``close``, or here when an error is raised.
        takes_over: Another node hosted this run and is gone.
        is_seized: That node may still exist.
    """

    def __init__(self, plan: Plan, seat: FolderLock, *, takes_over: bool = False, is_seized: bool = False) -> None:
        self._seat = seat
        self._plan = plan
        self._takes_over = takes_over
        self._is_seized = is_seized
        self._is_closed = False
        try:
            self._settle()
        except BaseException:
            seat.release()
            raise

    def _settle(self) -> None:
        plan, place = self._plan, self._plan.request.place
        # However many agents they have, ranks on one host need not be reached from another.
        hosts = 1 if place is not None and place.is_one_host else plan.request.most_nodes
        folder = plan.paths.supervisor_dir
        for stale in ("coordinator.json", "token"):
            (folder / stale).unlink(missing_ok=True)
        self.run = ensure_run(plan.paths.run_dir, name=plan.request.config.run.name).run
        self.token = create_token(folder / "token").hex()
        self.listener, self.address = listen(plan.request.bind, hosts, slurm_peers())

    @property
    def url(self) -> str:
        return f"{'https' if self._plan.certificate else 'http'}://{self.address}:{self.listener.getsockname()[1]}"

    def task(self) -> CoordinatorSpec:
        plan, config = self._plan, self._plan.request.config
        return CoordinatorSpec(
            carry=CarrySpec(
                run=self.run,
                run_dir=str(plan.paths.run_dir),
                checkpoint_dir=str(plan.paths.checkpoint_dir),
                checkpoint_local_dir=str(plan.paths.checkpoint_local_dir or ""),
                tag=plan.tag,
                confirm_s=config.watch.confirm_s,
                max_restarts=config.restart.max_restarts,
                isolate=config.isolate,
                is_adopted=plan.request.place is not None,
            ),
            nnodes=plan.request.nnodes,
            command_hash=plan.command_hash,
            command=tuple(str(word) for word in redact_list(plan.request.command)),
            token=self.token,
            socket_fd=self.listener.fileno(),
            host=self.address,
            secure=config.secure,
            certificate=plan.certificate,
            rules=Rules(
                watch=config.watch,
                restart=config.restart,
                grade=config.grade,
                isolate=config.isolate,
                max_nodes=plan.request.most_nodes,
                can_probe=True,
                topology=plan.topology,
                adopt=config.adopt if plan.request.place is not None else None,
            ),
            takes_over=self._takes_over,
            is_seized=self._is_seized,
            config_digest=sha256_hex(canonical_json(redact(msgspec.to_builtins(config))))[:16],
        )

    def keep(self) -> bool:
        """Stamp the seat; False when another node has taken it."""
        self._seat.stamp()
        return self._seat.is_ours

    def close(self) -> None:
        """Nobody can join here any more; may be called again. What a successor published stays."""
        if self._is_closed:
            return
        self._is_closed = True
        self.listener.close()
        if not self._seat.is_ours:
            self._seat.release()
            return
        for name in ("coordinator.json", "token"):
            (self._plan.paths.supervisor_dir / name).unlink(missing_ok=True)
        self._seat.release()


def agent_task(plan: Plan, *, url: str, token: str, run: str, address: str, config_path: Path | None) -> AgentSpec:
    """What this node's agent is told."""
    request = plan.request
    setup = NodeSetup(
        command=plan.command,
        node=plan.node,
        nproc=request.nproc,
        tag=plan.tag,
        run=run,
        run_dir=str(plan.paths.run_dir),
        config_path=str(config_path or ""),
        log_limit_mb=request.config.logs.max_mb,
        probes=request.config.isolate.probes,
        checkpoint_dirs=_elsewhere(plan.paths),
        place=request.place,
    )
    return AgentSpec(
        setup=setup,
        is_name_fixed=bool(request.node_name),
        nnodes=request.nnodes,
        command_hash=plan.command_hash,
        url=url,
        token=token,
        address=address,
        watch=request.config.watch,
        # Nothing is started a second time under another launcher.
        is_warm=request.config.restart.warm and request.place is None,
        patience_s=request.config.restart.join_timeout_s,
        view_path=str(view_path(plan.tag)) if request.config.metrics.listen else "",
    )


def _elsewhere(paths: RunPaths) -> tuple[str, ...]:
    """Where checkpoints lie, unless that is in the run folder, which is looked at anyway."""
    folders = [paths.checkpoint_dir, *([paths.checkpoint_local_dir] if paths.checkpoint_local_dir else [])]
    return tuple(str(folder) for folder in folders if not folder.is_relative_to(paths.run_dir))


def write_rank_config(plan: Plan) -> Path | None:
    """The resolved configuration for the ranks: in memory, mode 0600, removed with everything else of this invocation.

    Not in the run folder, because ``[train]`` may hold what must not be kept.
    """
    if not plan.request.has_config:
        return None
    path = (SHM if SHM.is_dir() else plan.paths.supervisor_dir) / f"midwatch-{plan.tag}-config.json"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        # The standard library's writer keeps infinity and NaN; msgspec's turns them into null.
        json.dump(msgspec.to_builtins(plan.request.config), file, default=str)
    return path


def planned_environments(plan: Plan) -> list[dict[str, str]]:
    """What would be added to each local rank's environment, as far as it is known before all nodes have joined."""
    request, base = plan.request, inherited_environment()
    setup = agent_task(plan, url="", token="", run="(of run.json)", address="", config_path=None).setup
    start = StartRanks(
        attempt=newest_attempt(plan.paths.run_dir) + 1,
        world_size=request.nproc * request.nnodes,
        ranks=tuple(range(request.nproc)) if request.place is None else (request.place.rank,),
        group_rank=0,
        group_world_size=request.nnodes,
        master_addr="(of the first node)",
        master_port=0,
        restart_count=0,
        max_restarts=request.config.restart.max_restarts,
    )
    paths = {"pulse": "(in /dev/shm)", "error": "(in the run folder)"}
    environments: list[dict[str, str]] = []
    for local_rank in range(request.nproc):
        whole = rank_environment(base, setup, start, local_rank, paths)
        if request.place is None:
            whole["MASTER_PORT"] = "(a free one, new for each attempt)"
        environments.append({name: value for name, value in whole.items() if base.get(name) != value})
    return environments
