"""The configuration: typed leaves, where they come from, their hash, and the one door to the environment."""

from midwatch.config.env import RankEnv, RunPaths, expand_path, inherited_environment, read_rank_env, resolve_paths
from midwatch.config.hashing import canonical_json, config_hash
from midwatch.config.load import LoadedConfig, Origin, dump_config, flatten_config, load_config, trace_config
from midwatch.config.outside import OutsidePlace, read_outside_place
from midwatch.config.redact import REDACTED, is_secret_name, redact, redact_environment, redact_list, redact_text
from midwatch.config.schema import (
    AdoptConfig,
    CheckpointConfig,
    Config,
    DetectConfig,
    GradeConfig,
    IsolateConfig,
    KeepConfig,
    LimitsConfig,
    RestartConfig,
    ResumeConfig,
    RunConfig,
    SecureConfig,
    StagingConfig,
    TrustConfig,
    WatchConfig,
)
from midwatch.config.slurm import expand_hosts, slurm_conf, slurm_node, slurm_peers

__all__ = [
    "REDACTED",
    "AdoptConfig",
    "CheckpointConfig",
    "Config",
    "DetectConfig",
    "GradeConfig",
    "IsolateConfig",
    "KeepConfig",
    "LimitsConfig",
    "LoadedConfig",
    "Origin",
    "OutsidePlace",
    "RankEnv",
    "RestartConfig",
    "ResumeConfig",
    "RunConfig",
    "RunPaths",
    "SecureConfig",
    "StagingConfig",
    "TrustConfig",
    "WatchConfig",
    "canonical_json",
    "config_hash",
    "dump_config",
    "expand_hosts",
    "expand_path",
    "flatten_config",
    "inherited_environment",
    "is_secret_name",
    "load_config",
    "read_outside_place",
    "read_rank_env",
    "redact",
    "redact_environment",
    "redact_list",
    "redact_text",
    "resolve_paths",
    "slurm_conf",
    "slurm_node",
    "slurm_peers",
    "trace_config",
]
