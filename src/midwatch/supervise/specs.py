"""What a launcher tells the processes it starts: the first line on their stdin, never environment or command line."""

from __future__ import annotations

import msgspec

from midwatch.config import IsolateConfig, PushConfig, SecureConfig, WatchConfig
from midwatch.supervise.decide import Rules
from midwatch.supervise.spawn import NodeSetup


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's task."""

    setup: NodeSetup
    is_name_fixed: bool
    is_back: bool = False
    """An agent of this launcher was let in before."""
    nnodes: int
    command_hash: str
    url: str
    token: str
    """Hex; a secret."""
    certificate: str = ""
    """PEM; the coordinator shows it. Empty: connections are not encrypted."""
    address: str
    """Where other nodes reach this one."""
    watch: WatchConfig
    is_warm: bool = True
    """Keep a parked process for the next restart."""
    patience_s: float
    """With nothing running and nobody to talk to, give up after this long."""
    view_path: str = ""
    """Where it shows what it knows, for the page of metrics. Empty: nobody asks."""


class CarrySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What carrying out decisions needs to know about the run."""

    run: str
    run_dir: str
    checkpoint_dir: str
    checkpoint_local_dir: str = ""
    tag: str
    """Of the hosting launcher: its own agent need not repeat our sentences."""
    confirm_s: float
    max_restarts: int
    isolate: IsolateConfig = IsolateConfig()
    is_adopted: bool = False
    """Another launcher shows the output of all wrappers together: one of them speaks for the run."""


class CoordinatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator's task."""

    carry: CarrySpec
    nnodes: int
    command_hash: str
    command: tuple[str, ...]
    """As typed, without secrets; for the ledger."""
    token: str
    """Hex; a secret."""
    socket_fd: int
    """The launcher's listening socket: connections wait in it while a killed coordinator is started again."""
    host: str
    """What other nodes connect to."""
    secure: SecureConfig = SecureConfig()
    certificate: str = ""
    """As clients are told."""
    rules: Rules
    takes_over: bool = False
    """Another node hosted this run and is gone: go on from its ledger."""
    is_seized: bool = False
    """That node stands still or is cut off; it may still exist."""
    config_digest: str
    """Of the resolved configuration; for the ledger."""


class SenderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What sends metrics on must know."""

    run_dir: str
    run: str
    node: str
    push: PushConfig


class PageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What answers Prometheus on a node must know."""

    listen: str
    run_dir: str
    run: str
    node: str
    view: str
    """Where the agent of this launcher shows what it knows."""
    is_shared: bool
    """Other agents of the run are on this host, and this page tells of them, too."""
    index_dir: str
    """Absolute; empty: the default."""
    checkpoint_dir: str
    address: str
    """Where other nodes reach this one."""
