"""The configuration as a tree of small typed leaves, in the field's own words.

Every leaf is a frozen struct; a bound on a value is written beside it and enforced by ``load_config``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from midwatch.config.alerts import AlertsConfig
from midwatch.config.data import DataConfig
from midwatch.config.leaf import Count, NotNegative, Positive, Steps
from midwatch.config.leaf import Leaf as _Leaf


class RunConfig(_Leaf, frozen=True, kw_only=True):
    """Where the run lives and what it is called."""

    dir: Annotated[str, Meta(min_length=1)] = "midwatch-run"
    """The run folder: ledger, logs, metrics, incidents and, by default, checkpoints. Shared by all nodes."""
    name: str = ""
    """A label for people; the run id is made by midwatch."""
    log_every: Steps = 10
    """Steps between two metric records on disk (every step is kept in memory until then)."""
    keep_code: bool = True
    """Keep the text of the script, of the project's modules and of uncommitted changes in ``<run.dir>/provenance``.
    False: only their hashes."""


class KeepConfig(_Leaf, frozen=True, kw_only=True):
    """Which checkpoints outlive ``checkpoint.keep_last``; a checkpoint stays when any one rule wants it."""

    every_steps: Count = 0
    """Keep the first verified checkpoint at or after every multiple of this many steps, for good. 0: none."""
    every_hours: NotNegative = 0.0
    """Keep one verified checkpoint of every so many hours, for good. 0: none."""
    best: Count = 0
    """Keep this many with the best metric. 0: none."""
    best_metric: Annotated[str, Meta(min_length=1)] = "loss"
    """A name given to ``run.log``."""
    best_mode: Literal["min", "max"] = "min"
    """Whether less or more is better."""


class StagingConfig(_Leaf, frozen=True, kw_only=True):
    """How the state gets from training's memory into the staging buffer."""

    overlap: bool = False
    """Copy parameters and optimizer state during the next forward and backward; ``optimizer.step`` waits for the copy.
    Only for scripts that change weights in optimizers alone; a snapshot that changed meanwhile is detected and dropped.
    """
    slots: Annotated[int, Meta(ge=1, le=2)] = 2
    """Staging buffers a rank. With one, a save waits until the one before is written; each takes the local state's size
    in shared memory."""


class TrustConfig(_Leaf, frozen=True, kw_only=True):
    """What a checkpoint must pass before it counts as verified, and how often it is looked at again."""

    load_test: Literal["sample", "full"] = "sample"
    """After the read-back, load some tensors, or all of them in a process of its own."""
    statistics: bool = True
    """Norm, largest magnitude and number of non-finite values of each tensor, taken while reading back."""
    nonfinite: Literal["suspect", "warn"] = "suspect"
    """A model tensor that has non-finite values and had none in the checkpoint before: flag the checkpoint suspect, so
    that no resume takes it by default, or only say so."""
    scrub_hours: NotNegative = 24.0
    """Read every kept checkpoint again this often. 0: never."""
    read_limit_mb_s: NotNegative = 0.0
    """Read-back, scrub and copy to the shared tier stay below this many megabytes a second and rank. 0: no limit."""
    signing_key: str = ""
    """A file with a secret: shards are then hashed with BLAKE3 (or SHA-256) and manifests signed, and an unsigned or
    wrongly signed checkpoint is refused. Empty: hashes find accidents, not attackers."""


class ResumeConfig(_Leaf, frozen=True, kw_only=True):
    """What a resume takes, and what it refuses."""

    max_attempts: Steps = 4
    """Attempts that may start from one checkpoint without reaching a newer verified one; after that an older one is
    chosen, where there is one."""
    accept: str = ""
    """The reason why a checkpoint of another run or another configuration is meant; it goes to the ledger. Empty:
    such a checkpoint is refused."""


class CheckpointConfig(_Leaf, frozen=True, kw_only=True):
    """When and how to save (the five words every framework shares come first)."""

    interval: Steps = 500
    """Steps between two saves: after step N is done, for every N that is a multiple; the last step always saves."""
    async_save: bool = True
    """Only the copy into the staging buffer blocks training; writing happens behind it."""
    shard: bool = True
    """Each rank writes its own part. False: rank 0 writes full tensors (small models, few ranks)."""
    keep_last: Steps = 3
    """Verified checkpoints to keep; unverified ones do not count, the newest verified one is never removed."""
    save_optimizer: bool = True
    """False loses momentum on resume: warned about at save time, not at resume."""
    dir: str = ""
    """Shared tier. Empty: ``<run.dir>/checkpoints``."""
    local_dir: str = ""
    """Node-local fast tier, written first and copied to ``dir`` behind training. Empty: write to ``dir`` directly."""
    commit_timeout_s: Positive = 600.0
    """How long the committer waits for every rank's receipt; names the missing ranks when it gives up."""
    max_failed_saves: Count = 2
    """Consecutive failed background saves that are reported before the next one is raised in training."""
    absent_on_purpose: tuple[Literal["optimizer", "scheduler", "scaler", "data"], ...] = ()
    """Parts this run does not have, so that their absence from its checkpoints is not warned about."""
    keep: KeepConfig = KeepConfig()
    staging: StagingConfig = StagingConfig()
    trust: TrustConfig = TrustConfig()
    resume: ResumeConfig = ResumeConfig()


class DetectConfig(_Leaf, frozen=True, kw_only=True):
    """What is looked at besides silence; each can be switched off where it does not fit a script."""

    collectives: bool = True
    """Count the collectives of each rank and compare the counts at equal steps while training runs."""
    zero_code: bool = True
    """Learn how often a script without the five lines computes and writes lines, and suspect it when it stops."""
    straggler_factor: Annotated[float, Meta(gt=1)] = 1.5
    """A rank whose main thread needs this many times its peers' median for a step is reported; never killed."""
    low_disk_mb: Count = 1024
    """Warn when less is free in the run folder, /tmp or /dev/shm. 0: never."""


class WatchConfig(_Leaf, frozen=True, kw_only=True):
    """When silence becomes suspicion. Learned deadlines only replace these; see docs/explanation/supervision.md."""

    init_timeout_s: Positive = 1800.0
    """From process start to the end of the first step (imports, process groups, compilation, loading)."""
    phase_timeout_s: Positive = 600.0
    """A step or phase before enough of them are known."""
    floor_s: Positive = 5.0
    """No learned deadline is shorter than this."""
    learned_after: Steps = 20
    """Steps until the learned deadline holds."""
    confirm_s: Positive = 0.5
    """Between the two evidence samples that turn a suspicion into a fault."""
    agent_timeout_s: Positive = 8.0
    """A node agent that is silent this long is lost."""
    grace_s: Positive = 5.0
    """From SIGTERM to SIGKILL when an attempt is torn down after a fault."""
    stop_grace_s: Positive = 120.0
    """From a stop request (preemption, time limit) to SIGTERM: time for the last save."""
    resume_timeout_s: Positive = 600.0
    """From the first rank's resume report to the last one's."""
    detect: DetectConfig = DetectConfig()


class LimitsConfig(_Leaf, frozen=True, kw_only=True):
    """How often each kind of fault may restart the run without progress in between, below ``max_restarts`` for all."""

    code: Count = 1
    """A failure of the script that was not seen before: one restart to confirm it."""
    memory: Count = 2
    """Out of memory, of the host or a GPU."""
    crash: Count = 3
    """Native crashes and unexplained ends."""
    hang: Count = 3
    """Hangs, stopped and stuck ranks."""
    node: Count = 10
    """A node, its GPU or its surroundings."""
    network: Count = 3
    """Ranks that lost each other and nobody is to blame."""


class GradeConfig(_Leaf, frozen=True, kw_only=True):
    """When a fault counts as wide, and what is done about it then."""

    window_s: Positive = 120.0
    """Faults of different nodes within this time are looked at together."""
    fleet_nodes: Steps = 3
    """So many nodes failing by themselves within the window are one wide cause..."""
    fleet_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """...if they are also this share of all nodes."""
    silent_share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """So many agents silent at once look like a network partition: hold, and ask whether it is us."""
    exclude_share: Annotated[float, Meta(gt=0, le=1)] = 0.02
    """At most this share of the nodes, but always one, is excluded by itself in an hour."""
    probe_s: Positive = 30.0
    """Between two rounds of probes while the run is held."""
    green_rounds: Steps = 3
    """Rounds of good probes in a row after which a held run goes on by itself."""
    hold_max_s: NotNegative = 0.0
    """A run that is held this long ends with the requeue code. 0: it waits for green probes or a person."""
    topology: str = ""
    """A TOML file that says which nodes share a switch, rack or power feed. Empty: what the scheduler knows."""
    topology_labels: tuple[str, ...] = ()
    """In Kubernetes: the node labels whose values nodes share when they hang together. Empty: the usual ones."""


class IsolateConfig(_Leaf, frozen=True, kw_only=True):
    """What happens to a node that caused faults."""

    drain: Literal["off", "ask", "do"] = "ask"
    """Beyond leaving it out of this run: say which machine an operator should drain, or let the scheduler drain it."""
    scheduler: Literal["auto", "slurm", "kubernetes", "none"] = "auto"
    """Who is asked. ``auto``: whoever started us, by the environment."""
    ledger: str = ""
    """The file in which suspicions against nodes are kept from job to job. Empty: ``<run.dir>/supervisor/nodes.json``.
    """
    half_life_days: Positive = 7.0
    """A suspicion weighs half as much after this time."""
    quarantine_s: NotNegative = 86400.0
    """How long a node stays out after it was excluded. 0: until a person releases it."""
    gate: bool = True
    """Probe a suspect node, and every spare, before ranks start on it."""
    probes: tuple[str, ...] = ()
    """Executables of the site, run beside our own probes with the run folder as argument: exit code 0 well, 1 worth a
    word, 2 unfit."""


GuardKind = Literal[
    "nonfinite",
    "zero_loss",
    "low_loss",
    "spike",
    "too_good",
    "level_rise",
    "plateau",
    "slow_start",
    "grad_spike",
    "grad_climb",
    "lr_off_plan",
    "scale_collapse",
    "scale_runaway",
    "update_jump",
    "weights_jump",
    "weights_stalled",
    "rank_apart",
    "replicas_split",
    "resume_shift",
    "data_repeated",
    "data_changed",
    "data_shared",
    "data_off_mix",
]
"""What the guards look for, one word a rule; ``docs/explanation/guards.md`` explains each."""


class ScheduleConfig(_Leaf, frozen=True, kw_only=True):
    """The planned learning rate of the first parameter group, which the logged one is held against."""

    kind: Literal["unknown", "constant", "linear", "cosine", "wsd"] = "unknown"
    """The course after the warm-up; ``wsd`` is constant until ``decay_start``, then linear. unknown: not looked at."""
    peak_lr: NotNegative = 0.0
    """The highest learning rate."""
    warmup_steps: Count = 0
    """Linear from nothing to the peak; statistical rules are armed 128 steps later."""
    total_steps: Count = 0
    """The step at which the decay ends."""
    decay_start: Count = 0
    """Where the decay of ``wsd`` begins."""
    floor_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The learning rate in the end, as a share of the peak."""


class BreakerConfig(_Leaf, frozen=True, kw_only=True):
    """What happens after a trip; see docs/explanation/guards.md."""

    hold_s: Positive = 3600.0
    """How long a paused run keeps its machines while nobody decides; then it ends and must be looked at."""
    rewinds_per_day: Count = 3
    """Rewinds without a person in 24 hours."""
    rewind_steps: Steps = 100
    """How far before the first outlier the checkpoint must lie; doubled each time the trouble comes back."""
    probation_steps: Steps = 256
    """Steps after a rewind in which less is allowed..."""
    probation_z: Positive = 5.0
    """...than in other times."""


class InspectConfig(_Leaf, frozen=True, kw_only=True):
    """What is read from the model itself, whatever the script logs."""

    gradients: bool = True
    """Whether each rank's own gradients are finite, before they are reduced."""
    updates: bool = True
    """How far steps move the weights, the norm of the weights, and the share that a step leaves as it was."""
    replicas: bool = True
    """Whether ranks that should hold the same parameters do."""
    every: Steps = 100
    """Steps between two comparisons of replicas, and between two looks at the weights that stayed."""


class GuardsConfig(_Leaf, frozen=True, kw_only=True):
    """Watching loss, gradient norm and learning rate."""

    action: Literal["off", "warn", "pause", "rewind"] = "pause"
    """What a trip does: nothing is watched, say so, stop before the next optimizer step and wait for a decision, or go
    back by itself and skip the data."""
    off: tuple[GuardKind, ...] = ()
    """Kinds of findings that are not reported and stop nothing."""
    spike_z: tuple[Positive, Positive, Positive] = (6.0, 8.0, 20.0)
    """Robust standard deviations of an outlier (noted; three of five steps are an incident), of a large one (two of
    three), and of one that is an incident alone."""
    trip_after: Steps = 5
    """Outliers of the loss in a row that are a trip."""
    entropy_floor: NotNegative = 0.05
    """A mean loss below this many nats is an incident: no text is so easy to predict. 0: not looked at."""
    schedule: ScheduleConfig = ScheduleConfig()
    inspect: InspectConfig = InspectConfig()
    data: DataConfig = DataConfig()
    breaker: BreakerConfig = BreakerConfig()


class RestartConfig(_Leaf, frozen=True, kw_only=True):
    """How often to try again."""

    max_restarts: Count = 10
    """Restarts without a new verified checkpoint in between; progress refills the budget."""
    same_failure_limit: Steps = 2
    """The same fingerprint at the same step this many times without progress stops the run (exit 93)."""
    backoff_s: Annotated[tuple[NotNegative, ...], Meta(min_length=1)] = (0.0, 10.0, 30.0, 90.0, 300.0)
    """Wait before the n-th restart in a row without progress; the last value repeats."""
    join_timeout_s: Positive = 300.0
    """How long the coordinator waits for all nodes."""
    spare_wait_s: NotNegative = 300.0
    """How long to wait for another node when one is lost and no spare is there."""
    warm: bool = True
    """Keep one process a node that has imported the script's libraries, and fork the next attempt's ranks from it."""
    limits: LimitsConfig = LimitsConfig()


class AdoptConfig(_Leaf, frozen=True, kw_only=True):
    """Under another launcher (`midwatch run --adopt`)."""

    end_hung: bool = True
    """End a job that hangs, so that its launcher can start it again. False: the hang is written down and said."""
    kill_after_s: Positive = 30.0
    """What that launcher gives between SIGTERM and SIGKILL; midwatch is done some seconds before."""


class LogsConfig(_Leaf, frozen=True, kw_only=True):
    """The ranks' output in ``<run.dir>/logs``."""

    max_mb: Count = 256
    """Of one stream of one rank and attempt: the head and the tail are kept, the middle is given back. 0: no limit."""


class PushConfig(_Leaf, frozen=True, kw_only=True):
    """Where metrics are sent: by `midwatch run` while it lives, by `midwatch metrics push` on request."""

    url: str = ""
    """Of the receiver, such as ``http://victoria:8428/api/v1/write``. Empty: nothing is sent."""
    kind: Literal["auto", "remote_write", "otlp"] = "auto"
    """The protocol. auto: OTLP for an address that ends in ``/v1/metrics``, else Prometheus remote write."""
    token_file: str = ""
    """A file whose content is sent as a bearer token. Empty: none."""
    every_s: Positive = 5.0
    """Between two deliveries of a live run."""
    drain_s: NotNegative = 10.0
    """How long the end of a run waits for a receiver that is away. What is left stays in the run folder."""


class MetricsConfig(_Leaf, frozen=True, kw_only=True):
    """What is recorded beside the numbers given to ``run.log``, and what becomes of them beside the journal."""

    every: Steps = 10
    """Steps between two records of what midwatch measures itself: where the time goes, memory, tokens a second."""
    index_dir: str = ""
    """Where indexes lie, on a disk of this host. Empty: a folder of this user's in /var/tmp."""
    listen: str = ""
    """Where each node of a live run answers Prometheus: ``HOST:PORT``, or a port on loopback; port 0 takes a free one.
    Empty: nowhere."""
    push: PushConfig = PushConfig()


class SecureConfig(_Leaf, frozen=True, kw_only=True):
    """Messages between nodes are signed in any case; with a certificate nobody else on the network reads them."""

    tls_cert: str = ""
    """A PEM file with the certificate of the node that hosts the coordinator; clients trust exactly this one."""
    tls_key: str = ""
    """Its private key, mode 0600. Empty: it is in ``tls_cert``."""


class Config(_Leaf, frozen=True, kw_only=True):
    """The whole tree. ``train`` is the user's own table: hyper-parameters that make the config hash."""

    run: RunConfig = RunConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    restart: RestartConfig = RestartConfig()
    grade: GradeConfig = GradeConfig()
    isolate: IsolateConfig = IsolateConfig()
    adopt: AdoptConfig = AdoptConfig()
    guards: GuardsConfig = GuardsConfig()
    logs: LogsConfig = LogsConfig()
    metrics: MetricsConfig = MetricsConfig()
    alerts: AlertsConfig = AlertsConfig()
    secure: SecureConfig = SecureConfig()
    train: dict[str, Any] = field(default_factory=dict[str, Any])
