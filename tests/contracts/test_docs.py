"""Documents that lie: dead links, codes without a page, keys, commands and versions that the text does not know."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import midwatch
from midwatch.checkpoint.jobs import SaveState
from midwatch.config import Config
from midwatch.core import CODES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
RUNBOOK = DOCS / "runbook"

_FENCE = re.compile(
    r"^(?P<mark>```+)(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=mark)[ \t]*$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\[[^\]\n]*(?:\][^\[\]()\n]*)?\]\((?P<target>[^)\s]+)\)")


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _fences(page: Path) -> Iterator[tuple[str, str]]:
    for match in _FENCE.finditer(page.read_text()):
        yield match["language"], match["body"]


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+?)\s*$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_relative_link_leads_nowhere(page: Path) -> None:
    for match in _LINK.finditer(_prose(page)):
        target, _, anchor = match["target"].partition("#")
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{_id(page)}: {match['target']} does not exist"
        assert found.is_relative_to(ROOT), f"{_id(page)}: {match['target']} leaves the repository"
        if anchor and found.suffix == ".md":
            assert anchor in _anchors(found), f"{_id(page)}: no heading for {match['target']}"


@pytest.mark.parametrize("code", sorted(CODES))
def test_code_without_a_useful_page(code: str) -> None:
    page = RUNBOOK / f"{code}.md"
    assert page.is_file(), f"docs/runbook/{code}.md is missing"
    lines = page.read_text().splitlines()
    assert lines[0] == f"# {code}: {CODES[code].title}"
    assert 15 <= len(lines) <= 45
    text = page.read_text()
    assert re.search(rf"Exit code {CODES[code].exit_code}\b", text), "the exit code is missing or another one"
    for part in ("What it means", "See it", "Causes", "Do this", "Already done", "Prevent"):
        assert f"**{part}" in text, f"{code}: no part '{part}'"


def test_page_without_a_code() -> None:
    assert {page.stem for page in RUNBOOK.glob("*.md")} - {"README"} == set(CODES)


def test_index_forgets_a_code() -> None:
    index = (RUNBOOK / "README.md").read_text()
    for code, row in CODES.items():
        assert f"| [{code}]({code}.md) | {row.title} | {row.exit_code} |" in index


def test_text_names_an_unknown_code() -> None:
    families = "|".join(sorted({code[:2] for code in CODES}))
    for page in PAGES:
        for code in re.findall(rf"\b(?:{families})\d{{3}}\b", page.read_text()):
            assert code in CODES, f"{_id(page)} speaks of {code}"


def _verbs() -> set[str]:
    from midwatch.cli.main import main

    commands: dict[str, object] = getattr(main, "commands", {})
    return set(commands)


def test_command_nobody_explains() -> None:
    reference = (DOCS / "reference" / "cli.md").read_text()
    verbs = _verbs()
    assert verbs, "the command line has no verbs"
    for verb in verbs:
        assert f"midwatch {verb}" in reference, f"docs/reference/cli.md does not mention `midwatch {verb}`"


def test_text_names_an_unknown_command() -> None:
    verbs = _verbs()
    for page in PAGES:
        quoted = re.findall(r"`midwatch ([a-z][a-z-]+)", _prose(page))
        for _, body in _fences(page):
            quoted += re.findall(r"^(?:\$ )?midwatch ([a-z][a-z-]+)", body, re.MULTILINE)
        for verb in quoted:
            assert verb in verbs, f"{_id(page)} speaks of `midwatch {verb}`"


def _keys(kind: type[msgspec.Struct] = Config, prefix: str = "") -> Iterator[tuple[str, object]]:
    for leaf in msgspec.structs.fields(kind):
        if isinstance(leaf.type, type) and issubclass(leaf.type, msgspec.Struct):
            yield from _keys(leaf.type, f"{prefix}{leaf.name}.")
        elif prefix:
            is_made = leaf.default_factory is not msgspec.NODEFAULT
            yield f"{prefix}{leaf.name}", leaf.default_factory() if is_made else leaf.default


@pytest.mark.parametrize(("key", "default"), list(_keys()))
def test_key_nobody_explains(key: str, default: object) -> None:
    row = re.search(
        rf"^\| `{re.escape(key)}` \|[^|]*\| `(?P<default>[^`]*)` \|",
        (DOCS / "reference" / "configuration.md").read_text(),
        re.MULTILINE,
    )
    assert row, f"docs/reference/configuration.md has no row for {key}"
    written = tomllib.loads(f"value = {row['default']}")["value"]
    assert (tuple(written) if isinstance(written, list) else written) == default, f"{key}: another default"


def test_text_names_an_unknown_key() -> None:
    keys = {key for key, _ in _keys()}
    keys |= {key.rpartition(".")[0] for key in keys}  # whole tables
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    tables = {key.partition(".")[0] for key in keys} - {"run"}  # `run.track` and the like are Python
    for page in PAGES:
        for table, name in re.findall(rf"`({'|'.join(sorted(tables))})((?:\.[a-z_]+)+)`", page.read_text()):
            word, name = f"{table}{name}", name[1:]
            is_room = (ROOT / "src" / "midwatch" / table / f"{name}.py").exists()
            is_event = f'"{word}"' in source or (table == "checkpoint" and name in get_args(SaveState))
            assert word in keys or is_room or is_event, f"{_id(page)} speaks of {word}"


def test_fault_class_nobody_explains() -> None:
    classes = tomllib.loads((ROOT / "src" / "midwatch" / "faults" / "classes.toml").read_text())
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (G\d) \| (\w+) \|", (DOCS / "reference" / "fault-classes.md").read_text(), re.M
    )
    assert rows == [(name, row["title"], row["grade"], row.get("action", "restart")) for name, row in classes.items()]


def test_event_nobody_explains() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    recorded = set(re.findall(r"""record\(\s*"([a-z]+\.[a-z_]+)\"""", source))
    page = (DOCS / "reference" / "ledger-format.md").read_text()
    assert len(recorded) > 20
    for event in recorded:
        assert f"`{event}`" in page, f"docs/reference/ledger-format.md does not mention {event}"


def test_changelog_and_package_disagree() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == midwatch.__version__


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_example_that_does_not_parse(page: Path) -> None:
    for language, body in _fences(page):
        if language == "toml":
            tomllib.loads(body)
        elif language == "python":
            compile(body, _id(page), "exec")


def test_configuration_example_is_refused() -> None:
    from midwatch.config import load_config

    for page in PAGES:
        for language, body in _fences(page):
            if language == "toml":
                load_config(tomllib.loads(body))


def test_measured_figures_have_their_place() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- measured:begin -->") == text.count("<!-- measured:end -->") == 1
    assert text.index("<!-- measured:begin -->") < text.index("<!-- measured:end -->")
