"""A node's page of metrics: what agents show, what the run folder says, and storage that does not answer."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from metrics_jobs import write_journal

from midwatch.audit import Desk, Ledger, ensure_run
from midwatch.audit.exporters import Family, Listen, Sample, render
from midwatch.cli.main import main
from midwatch.supervise import folder_families, looker
from midwatch.supervise.folder_families import FolderFamilies
from midwatch.supervise.looker import Looker
from midwatch.supervise.node_families import node_families
from midwatch.supervise.node_view import FRESH_S, NodeView, read_views, write_view
from midwatch.supervise.serving_page import MetricsPage
from midwatch.supervise.wire import RankStatus

RANK = RankStatus(
    rank=3,
    pid=1,
    state="running",
    step=41,
    steps_done=40,
    phase="custom:my phase",
    phase_age_s=2.0,
    verified_step=30,
    is_attached=True,
    own_s=0.25,
    step_s=0.5,
)


def view(*ranks: RankStatus, **other: object) -> NodeView:
    plain = NodeView(run="r1", node="n0", mono_ns=time.monotonic_ns(), attempt=2, unheard_s=0.5, ranks=ranks)
    return msgspec.structs.replace(plain, **other)


def lines(*views: NodeView) -> dict[str, float]:
    """The page without comments and without the labels that all have."""
    text = render(node_families(views, "r1", "n0"))
    plain = text.replace('node="n0",', "").replace(',run="r1"', "").replace('node="n0"', "").replace("midwatch_", "")
    return {line.split(" ")[0]: float(line.split(" ")[1]) for line in plain.splitlines() if not line.startswith("#")}


# --- what agents show -----------------------------------------------------------------------------------------------


def test_what_is_told_of_a_rank() -> None:
    found = lines(view(RANK))
    assert found['rank_step{rank="3"}'] == 41
    assert 2.0 <= found['rank_progress_age_seconds{rank="3"}'] < 4.0
    assert (found['rank_step_seconds{rank="3"}'], found['rank_busy_seconds{rank="3"}']) == (0.5, 0.25)
    assert found['rank_checkpoint_step{rank="3"}'] == 30
    assert found['rank_phase{phase="custom",rank="3"}'] == 1, "a script's words are no labels"
    states = {name: value for name, value in found.items() if name.startswith("rank_state")}
    assert len(states) == 4
    assert [name for name, value in states.items() if value] == ['rank_state{rank="3",state="running"}']


def test_the_age_of_a_rank_grows_with_the_age_of_the_look() -> None:
    found = lines(view(RANK, mono_ns=time.monotonic_ns() - 5 * 10**9))
    assert 7.0 <= found['rank_progress_age_seconds{rank="3"}'] < 9.0
    assert found['agent_up{run="r1"}'] == 1


def test_ranks_that_have_ended_or_say_nothing_of_themselves() -> None:
    ended = msgspec.structs.replace(RANK, rank=4, exit_code=-9)
    mute = msgspec.structs.replace(RANK, rank=5, state="new", step=None, steps_done=0, is_attached=False)
    done = msgspec.structs.replace(RANK, rank=6, state="finished")
    found = lines(view(RANK, ended, mute, done))
    assert (found['ranks{run="r1"}'], found['ranks_up{run="r1"}']) == (4, 3)
    assert (found['rank_up{rank="4"}'], found['rank_up{rank="5"}']) == (0, 1)
    ages = [name for name in found if name.startswith("rank_progress_age_seconds")]
    assert ages == ['rank_progress_age_seconds{rank="3"}'], "no alarm about a rank that is at its end"
    assert 'rank_step{rank="5"}' not in found
    assert 'rank_step_seconds{rank="5"}' not in found, "without steps these are parts of a second"


def test_an_agent_that_stands_still_is_down_and_its_ranks_are_not_guessed_at() -> None:
    found = lines(view(RANK, mono_ns=time.monotonic_ns() - int((FRESH_S + 1) * 1e9)))
    assert found == {'agent_up{run="r1"}': 0}
    assert lines() == {'agent_up{run="r1"}': 0}, "nor is one that never came"


def test_of_several_agents_on_one_node_a_node_is_told_as_a_whole() -> None:
    other = msgspec.structs.replace(RANK, rank=4, exit_code=1)
    found = lines(view(RANK), view(other, unheard_s=9.0))
    assert (found['ranks{run="r1"}'], found['ranks_up{run="r1"}'], found['agent_up{run="r1"}']) == (2, 1, 1)
    assert found['coordinator_unheard_seconds{run="r1"}'] >= 9.0
    still = view(other, mono_ns=time.monotonic_ns() - int((FRESH_S + 1) * 1e9))
    found = lines(view(RANK), still)
    assert (found['ranks{run="r1"}'], found['agent_up{run="r1"}']) == (1, 0)


def test_a_look_goes_through_memory(tmp_path: Path) -> None:
    path = tmp_path / "midwatch-aa-node.json"
    assert read_views(path, "r1", is_shared=False) == []
    write_view(path, view(RANK))
    (read,) = read_views(path, "r1", is_shared=False)
    assert read.ranks == (RANK,)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_views(path, "r2", is_shared=False) == [], "of another run"
    path.write_text("{")
    assert read_views(path, "r1", is_shared=False) == []


def test_where_each_rank_has_an_agent_one_page_tells_of_all(tmp_path: Path) -> None:
    paths = [tmp_path / f"midwatch-{tag}-node.json" for tag in ("aa", "bb", "cc")]
    for path, run in zip(paths, ("r1", "r1", "r2"), strict=True):
        write_view(path, view(RANK, run=run, node=path.name))
    assert [one.node for one in read_views(paths[0], "r1", is_shared=True)] == [path.name for path in paths[:2]]


# --- what the folder says -------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    ensure_run(folder, run="r1")
    write_journal(folder, 1, range(10), start=0)
    write_journal(folder, 1, range(10), start=0, rank=3)
    with Ledger(folder / "ledger" / "coordinator.jsonl", run="r1") as ledger:
        ledger.record("attempt.launched", attempt=1)
        ledger.record("fault.judged", fault_class="hang")
    Desk(folder).keep_memory({"state": "half_open"})
    return folder


def test_the_run_folder_is_told(run: Path, tmp_path: Path) -> None:
    families = FolderFamilies(run, "r1", run / "checkpoints", tmp_path / "indexes")
    page = render(families.look())
    assert 'midwatch_metric{attempt="1",metric="loss",rank="3",run="r1"} 1.000009\n' in page
    assert 'midwatch_step{attempt="1",rank="0",run="r1"} 9\n' in page
    assert 'midwatch_incidents_total{fault_class="hang",run="r1"} 1\n' in page
    assert 'midwatch_breaker_state{run="r1",state="half_open"} 1\n' in page
    assert "midwatch_checkpoint_step" not in page, "there is none"
    write_journal(run, 2, range(5, 7), start=5)
    again = render(families.look(frozenset({0}), is_whole=False))
    assert 'midwatch_step{attempt="2",rank="0",run="r1"} 6\n' in again
    assert 'rank="3"' not in again
    assert "incidents" not in again
    assert render(families.look(frozenset(), is_whole=False)) == "", "a node without ranks reads nothing"
    families.close()


def test_what_is_not_read_to_its_end_is_not_told_as_the_newest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_families, "_SYNC_S", 0.0)
    families = FolderFamilies(run, "r1", run / "checkpoints", tmp_path / "indexes")
    assert "midwatch_metric{" not in render(families.look())
    while "midwatch_metric{" not in (page := render(families.look())):
        pass
    assert 'midwatch_step{attempt="1",rank="3",run="r1"} 9\n' in page
    families.close()


def test_a_part_that_cannot_be_read_is_missing_and_the_rest_is_told(run: Path, tmp_path: Path) -> None:
    (run / "ledger" / "coordinator.jsonl").unlink()
    (run / "ledger" / "coordinator.jsonl").mkdir()
    families = FolderFamilies(run, "r1", run / "checkpoints", tmp_path / "indexes")
    page = render(families.look())
    assert "midwatch_attempts_total" not in page
    assert "midwatch_metric" in page
    families.close()


def test_the_first_checkpoint_is_shown_as_soon_as_it_is_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([None, SimpleNamespace(step=10, created_ns=0), None])
    monkeypatch.setattr(folder_families, "newest_verified", lambda *_, **__: next(found))
    families = FolderFamilies(run, "r1", run / "checkpoints", tmp_path / "indexes")
    pages = [render(families.look()) for _ in range(3)]
    assert ["midwatch_checkpoint_step" in page for page in pages] == [False, True, True], (
        "it is not listed anew at once"
    )
    families.close()


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    families = FolderFamilies(tmp_path / "run", "r1", tmp_path / "run" / "checkpoints", tmp_path / "indexes")
    assert "midwatch_metric" not in render(families.look())
    assert not (tmp_path / "run").exists()
    families.close()


# --- storage that does not answer -----------------------------------------------------------------------------------


class Storage:
    """A look that hangs when told to."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_free.set()
        self.looks = self.ends = 0

    def look(self) -> Sequence[Family]:
        assert self.is_free.wait(30)
        self.looks += 1
        return [Family("looks", "Looks.", "gauge", [Sample(self.looks)])]

    def end(self) -> None:
        self.ends += 1


def test_storage_that_hangs_makes_the_answer_old_and_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looker, "_FRESH_S", 0.0)
    monkeypatch.setattr(looker, "_WAIT_S", 0.2)
    storage = Storage()

    async def run() -> None:
        mine = Looker(storage.look, storage.end, lambda: None)
        first, age_s = await mine.newest()
        assert (first[0].samples[0].value, age_s is not None and age_s < 5) == (1, True)
        storage.is_free.clear()
        began = time.monotonic()
        (found, old_s), _ = await asyncio.gather(mine.newest(), mine.newest())
        assert 0.2 <= time.monotonic() - began < 5
        assert found == first
        assert old_s is not None
        assert old_s >= 0.2
        storage.is_free.set()
        while (await mine.newest())[0][0].samples[0].value < 3:
            await asyncio.sleep(0.01)
        mine.close()
        while not storage.ends:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_bug_in_a_look_is_not_taken_for_slow_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[object] = []
    monkeypatch.setattr(threading, "excepthook", traces.append)

    def broken() -> Sequence[Family]:
        raise ZeroDivisionError

    async def run() -> None:
        failed = asyncio.Event()
        mine = Looker(broken, lambda: None, failed.set)
        asking = asyncio.create_task(mine.newest())
        await failed.wait()
        asking.cancel()
        while not traces:
            await asyncio.sleep(0.01)
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_whole_page(run: Path, tmp_path: Path) -> None:
    families = FolderFamilies(run, "r1", run / "checkpoints", tmp_path / "indexes")

    async def fetch() -> str:
        page = MetricsPage(families, lambda: (None, True), lambda: node_families([view(RANK)], "r1", "n0"))
        address = await page.open(Listen("0"))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        await page.close()
        return text

    text = asyncio.run(asyncio.wait_for(fetch(), 20))
    for name in ("midwatch_metric", "midwatch_rank_step", "midwatch_build_info", "midwatch_folder_read_age_seconds"):
        assert f"\n{name}" in text


@pytest.mark.parametrize(
    "setting",
    ["metrics.listen=nowhere", "metrics.push.url=localhost:8428", "metrics.push.kind=smoke", "metrics.push.every_s=0"],
)
def test_what_nobody_could_use_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    result = CliRunner().invoke(main, ["run", "--dry-run", "--json", "--set", setting, "--", "train.py"])
    assert result.exit_code == 78, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


# --- what the documents say of it -----------------------------------------------------------------------------------

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_family_is_documented_and_every_one_that_is_drawn_exists(run: Path, tmp_path: Path) -> None:
    families = FolderFamilies(run, "r1", run / "checkpoints", tmp_path / "indexes")
    found = {family.name for family in [*families.look(), *node_families([view(RANK)], "r1", "n0")]}
    families.close()
    # Of the page as a whole, and of a run that has a checkpoint.
    found |= {"midwatch_build_info", "midwatch_folder_read_age_seconds"}
    found |= {"midwatch_checkpoint_step", "midwatch_checkpoint_age_seconds"}
    word = re.compile(r"\bmidwatch_[a-z_]+")
    table = (DOCS / "reference" / "metrics-format.md").read_text().partition("## The page")[2]
    assert set(word.findall(table)) == found
    for name in ("metrics-on-a-dashboard.md", "midwatch-grafana.json"):
        assert set(word.findall((DOCS / "how-to" / name).read_text())) <= found, name
    panels = json.loads((DOCS / "how-to" / "midwatch-grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
