"""Which nodes share a switch, a block, a rack or a power feed: from Slurm, or from a file of the user's.

The file:

    [domains]
    "rack:r12" = ["n[01-16]"]
    "pdu:7" = ["n01", "n02", "n17"]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from midwatch.config import expand_hosts
from midwatch.core import UNREADABLE, ConfigError

Topology = tuple[tuple[str, tuple[str, ...]], ...]
"""(node, domains it shares with others), sorted by node."""

MOST_NODES: Final = 100_000
"""Of one list; a slip of the finger in a range must not fill the memory."""
_NODE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PAIR: Final = re.compile(r"(\w+)=(\S+)")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    domains: dict[str, list[str]]


def load_topology(path: Path) -> Topology:
    """The user's file.

    Raises:
        ConfigError: CF102 it cannot be read, or says something else.
    """
    try:
        file = msgspec.convert(tomllib.loads(path.read_text()), _File)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError("CF102", f"grade.topology: {path} cannot be used: {error}") from error
    return _by_node(
        {name: [node for word in words for node in _named(path, word)] for name, words in file.domains.items()}
    )


def _named(path: Path, word: str) -> list[str]:
    """A slip of the finger would only show when a rack fails and nobody knows that it is one."""
    names = _expand(word)
    if not names or not all(_NODE.fullmatch(name) for name in names):
        raise ConfigError("CF102", f"grade.topology: {path}: {word[:60]!r} is no list of nodes")
    return names


def parse_slurm_topology(text: str) -> Topology:
    """What ``scontrol show topology`` prints, or ``topology.conf``: trees of switches, blocks."""
    nodes: dict[str, set[str]] = {}
    below: dict[str, list[str]] = {}
    for line in _lines(text):
        pairs = {key.lower(): value for key, value in _PAIR.findall(line)}
        for kind in ("switch", "block"):
            name = pairs.get(f"{kind}name")
            if name is not None:
                domain = f"{kind}:{name}"
                nodes.setdefault(domain, set()).update(_expand(pairs.get("nodes", "")))
                below.setdefault(domain, []).extend(f"{kind}:{one}" for one in _expand(pairs.get("switches", "")))
    return _by_node({domain: sorted(_all_below(domain, nodes, below, frozenset())) for domain in nodes})


def _all_below(
    domain: str, nodes: Mapping[str, set[str]], below: Mapping[str, list[str]], seen: frozenset[str]
) -> set[str]:
    """In the file a switch of switches names no nodes. A ring of switches is a mistake, not a reason to hang."""
    found = set(nodes.get(domain, ()))
    for child in below.get(domain, ()):
        if child not in seen:
            found |= _all_below(child, nodes, below, seen | {domain})
    return found


def _lines(text: str) -> Iterator[str]:
    """Without comments, and with lines that a backslash continues put together."""
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        yield line.partition("#")[0].strip()


def _expand(words: str) -> list[str]:
    if words in ("", "(null)"):
        return []
    found: list[str] = []
    for name in expand_hosts(words):
        if len(found) == MOST_NODES:
            raise ConfigError("CF102", f"more than {MOST_NODES} names in {words[:60]!r}")
        found.append(name)
    return found


def _by_node(domains: Mapping[str, list[str]]) -> Topology:
    found: dict[str, set[str]] = {}
    for domain, nodes in domains.items():
        for node in nodes:
            found.setdefault(node, set()).add(domain)
    return tuple((node, tuple(sorted(found[node]))) for node in sorted(found))
