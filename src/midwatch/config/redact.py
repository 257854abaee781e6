"""What must never reach a disk, and how it is taken out: by name, by shape, by allow-list for the environment.

Training configurations are full of innocent *tokens* and *keys* (``tokenizer``, ``max_tokens``, ``eos_token``,
``num_key_value_heads``, ``text_key``), so names are judged word by word. In doubt a string is hidden: a hidden value
costs a look into the original file, a leaked one costs an account.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

REDACTED = "[redacted]"

_ALWAYS = frozenset(
    (
        *("password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"),
        *("apikey", "apitoken", "bearer", "authorization", "cookie"),
    )
)
_SUBJECTS = frozenset(("token", "key", "auth", "dsn"))
# What may stand before "token" or "key" in a name that means vocabulary, columns or look-ups.
_INNOCENT = frozenset(
    (
        *("eos", "bos", "pad", "unk", "mask", "sep", "cls", "eot", "per", "special", "start", "end", "stop", "newline"),
        *("placeholder", "prefix", "suffix", "prompt", "response", "text", "label", "image", "input", "output"),
        *("target", "sort", "query", "cache", "partition", "primary", "foreign", "batch", "feature", "column", "group"),
        *("sample", "shard", "index", "lookup", "dict", "state", "metric", "monitor", "num", "n"),
    )
)
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_SHAPES = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | \A(?:(?!-----BEGIN\ )[\s\S])*-----END\ [A-Z ]*PRIVATE\ KEY-----  # the end of a log may begin inside a key
    | \b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}
    | \bhf_[A-Za-z0-9]{16,}
    | \b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bglpat-[A-Za-z0-9_-]{16,}
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b
    | \bAIza[0-9A-Za-z_-]{30,}
    | \bxox[abprs]-[A-Za-z0-9-]{10,}
    | \beyJ[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]*
    | (?<=://)[^\s/@:]*:[^\s/@]+(?=@)
    | (?i:(?<=\bbearer\ ))[A-Za-z0-9._~+/=-]{8,}
    | (?i:(?<=\bauthorization:\ ))[^\n]+
    """,
    re.VERBOSE,
)
_KEY_LINES = ("-----BEGIN ", "-----END ")
_BEGINNINGS = (
    *("sk-", "pk-", "rk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("AKIA", "ASIA", "AIza", "xox", "eyJ", "://"),
)
"""One of them is in every shape that lies within a line; two more, whatever their case."""
_BEGINNINGS_LOWER = ("bearer ", "authorization: ")
# Bounded repeats and a fixed start of each name: log text may be a megabyte without a space.
_ASSIGNED = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>[A-Za-z_][A-Za-z0-9_.-]{0,80})(?P<sign>\s{0,4}[=:]\s{0,4})"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)"
)
_LONG = 16
"""Prose says "unexpected token: )" and "unknown key: x"; what follows a real one is longer."""

_ENVIRONMENT = re.compile(
    r"(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|ROLE_NAME"
    r"|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|MKL_NUM_THREADS|LD_LIBRARY_PATH|LANG|LC_ALL|TZ|HOSTNAME"
    r"|PYTHON(?:UNBUFFERED|FAULTHANDLER|HASHSEED|PATH)"
    r"|(?:CUDA|NVIDIA|NCCL|GLOO|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH|FI|UCX|HIP|ROCR|RCCL|XLA|TRITON)_[A-Z0-9_]+"
    r"|SLURM_(?:JOB_ID|JOB_NAME|JOB_NODELIST|JOB_PARTITION|NNODES|NODEID|NTASKS|PROCID|RESTART_COUNT|CPUS_PER_TASK)"
    r"|MIDWATCH_(?:RUN_DIR|RUN|ATTEMPT|NODE|CONFIG|GATE))"
)


def is_secret_name(name: str) -> bool:
    """Whether a key, flag or variable of this name holds something to hide."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if not _ALWAYS.isdisjoint(words) or {"private", "key"} <= set(words) or {"api", "key"} <= set(words):
        return True
    return words[-1] in _SUBJECTS and _INNOCENT.isdisjoint(words[:-1])


def redact_text(text: str) -> str:
    """The text without what has the shape of a credential, or is assigned to a name that holds one."""
    return _ASSIGNED.sub(_hide_assigned, _hide_shapes(text))


def _hide_shapes(text: str) -> str:
    """``_SHAPES``, tried only where one can be: on megabytes of source code it takes seconds of the interpreter."""
    if any(line in text for line in _KEY_LINES):
        return _SHAPES.sub(REDACTED, text)  # a key of many lines, perhaps
    if not _may_hold_a_shape(text):
        return text
    lines = text.split("\n")
    return "\n".join(_SHAPES.sub(REDACTED, line) if _may_hold_a_shape(line) else line for line in lines)


def _may_hold_a_shape(text: str) -> bool:
    if any(beginning in text for beginning in _BEGINNINGS):
        return True
    lowered = text.lower()
    return any(beginning in lowered for beginning in _BEGINNINGS_LOWER)


def _hide_assigned(match: re.Match[str]) -> str:
    value = match["value"].strip("\"'")
    if not is_secret_name(match["name"]) or not value or value == REDACTED:
        return match[0]
    if match["name"].lower() in _SUBJECTS and ":" in match["sign"] and len(value) < _LONG:
        return match[0]
    return f"{match['name']}{match['sign']}{REDACTED}"


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested plain data with every secret replaced by ``[redacted]``; redacting twice changes nothing."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: redact(item, key if isinstance(key, str) else "") for key, item in items}
    if isinstance(value, (list, tuple)):
        return redact_list(cast("Iterable[Any]", value), name)
    if isinstance(value, (str, bytes)):
        if name and value and is_secret_name(name):
            return REDACTED
        return redact_text(value) if isinstance(value, str) else value
    # Numbers under "token" or "key" are counts and sizes; under "password" they are passwords.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and name and _is_password_name(name):
        return REDACTED
    return value


@functools.lru_cache(maxsize=4096)  # a loop records the same names at every step
def _is_password_name(name: str) -> bool:
    return not _ALWAYS.isdisjoint(word.lower() for word in _WORD.findall(name))


def redact_list(items: Iterable[Any], name: str = "") -> list[Any]:
    """A list without secrets; in a command line the word after ``--api-key`` is one."""
    kept: list[Any] = []
    is_next_secret = False
    for item in items:
        if is_next_secret and isinstance(item, str) and not item.startswith("-"):
            kept.append(REDACTED)
            is_next_secret = False
            continue
        is_flag = isinstance(item, str) and item.startswith("-") and "=" not in item
        is_next_secret = is_flag and is_secret_name(item)
        kept.append(redact(item, name))
    return kept


def redact_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables on the allow-list, sorted, their values without secrets; everything else is left out."""
    return {
        name: redact_text(environ[name])
        for name in sorted(environ)
        if _ENVIRONMENT.fullmatch(name) and not is_secret_name(name)
    }
