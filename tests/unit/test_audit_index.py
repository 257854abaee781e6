"""The index of metrics: roll-backs, spikes, damage, kills, and two processes at once."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from metrics_jobs import journal_lines, write_journal

from midwatch.audit.index import MetricIndex, index_folder
from midwatch.audit.index import place as places
from midwatch.core import MetricsError, StorageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "indexes"


@pytest.fixture
def index(run: Path, folder: Path) -> Iterator[MetricIndex]:
    with MetricIndex(run, folder) as opened:
        yield opened


def live(index: MetricIndex, metric: str = "loss", **how: int) -> list[tuple[int, int]]:
    """(attempt, step) of the live values."""
    return [(int(value), step) for step, value in index.series(metric, **how)]


# --- which values count ---------------------------------------------------------------------------------------------


def test_a_later_attempt_counts_from_its_start_on(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(0, 40, 10), start=0)
    write_journal(run, 2, [20, 30], start=15)
    write_journal(run, 3, [], start=25)
    index.sync()
    assert live(index) == [(1, 0), (1, 10), (2, 20)]
    assert [(one.attempt, one.start, one.stop) for one in index.branches()] == [(1, 0, 15), (2, 15, 25), (3, 25, None)]
    dead = [(branch.attempt, [point.step for point in branch.points]) for branch in index.dead("loss")]
    assert dead == [(1, [20, 30]), (2, [30])]


def test_the_journals_may_come_in_any_order(run: Path, index: MetricIndex) -> None:
    write_journal(run, 3, [25], start=25)
    index.sync()
    write_journal(run, 1, range(0, 40, 10), start=0)
    index.sync()
    write_journal(run, 2, [20, 30], start=15)
    index.sync()
    assert live(index) == [(1, 0), (1, 10), (2, 20), (3, 25)]


def test_a_loop_that_goes_back_within_an_attempt(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(4), start=0)
    write_journal(run, 1, [2], start=2)
    index.sync()
    assert [step for step, _ in index.series("loss")] == [0, 1, 2]
    assert [point.step for point in index.dead("loss")[0].points] == [2, 3]


def test_without_a_stated_start_the_lowest_step_counts(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(4))
    write_journal(run, 2, [3, 2, 4])
    index.sync()
    assert live(index) == [(1, 0), (1, 1), (2, 2), (2, 3), (2, 4)]


def test_what_is_told_of_before_the_start_of_an_attempt_does_not_count(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(4), start=0)
    write_journal(run, 2, [0, 3], start=3)
    index.sync()
    assert live(index) == [(1, 0), (1, 1), (1, 2), (2, 3)]


def test_a_restart_rolls_every_rank_back(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(4), start=0)
    write_journal(run, 1, range(4), start=0, rank=7)
    write_journal(run, 2, [2], start=2)
    index.sync()
    assert live(index, rank=7) == [(1, 0), (1, 1)]
    assert live(index) == [(1, 0), (1, 1), (2, 2)]


def test_values_keep_what_they_are(run: Path, index: MetricIndex) -> None:
    values = {"nan": "nan", "high": "inf", "low": "-inf", "true": True, "text": "warm-up", "none": None, "big": 10**400}
    write_journal(run, 1, [5], start=0, **values)
    index.sync()
    found = {one.metric: one.value for one in index.newest()}
    assert math.isnan(found.pop("nan"))
    assert found == {"high": math.inf, "low": -math.inf, "true": 1.0, "loss": 1.000005, "big": math.inf}


def test_the_newest_value_is_of_the_newest_live_step(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(10), start=0)
    write_journal(run, 2, [5], start=5)
    index.sync()
    (newest,) = index.newest()
    assert (newest.attempt, newest.step) == (2, 5)
    assert newest.ts_ns == 1_700_002_000_005_000_000


def test_the_last_of_two_records_of_a_step_counts(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, [1], start=0)
    (run / "metrics" / "a0001.jsonl").open("ab").close()
    with (run / "metrics" / "a0001.jsonl").open("ab") as file:
        file.write(journal_lines([{"step": 1, "loss": 9.0}]))
    index.sync()
    assert index.series("loss") == [(1, 9.0)]


# --- buckets --------------------------------------------------------------------------------------------------------


def test_no_spike_is_averaged_away(run: Path, index: MetricIndex) -> None:
    path = write_journal(run, 1, [], start=0)
    records = [{"step": step, "loss": 900.0 if step == 7777 else 2.0} for step in range(20_000)]
    path.write_bytes(journal_lines(records))
    index.sync()
    width, buckets = index.buckets("loss", 100)
    assert (width, len(buckets)) == (208, 97), "whole blocks"
    assert [(one.high, one.high_step) for one in buckets if one.high > 2] == [(900.0, 7777)]
    assert all(one.low == 2.0 and one.points == 208 for one in buckets[:-1])
    assert sum(one.points for one in buckets) == 20_000


def test_a_bucket_over_a_roll_back_and_one_of_nothing_finite(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(10), start=0)
    path = write_journal(run, 2, [], start=5)
    told = [(5, "nan"), (6, "inf"), (7, 1e308), (8, 1e308), (9, 4.0), (10, "nan"), (11, "nan")]
    with path.open("ab") as file:
        file.write(journal_lines([{"step": step, "loss": value} for step, value in told]))
    index.sync()
    width, buckets = index.buckets("loss", 3, first=0, last=11)
    assert width == 4
    assert [(one.first, one.last, one.points, one.nonfinite) for one in buckets] == [
        (0, 3, 4, 0),
        (4, 7, 4, 2),
        (8, 11, 4, 2),
    ]
    assert (buckets[1].low, buckets[1].low_step, buckets[1].high, buckets[1].high_step) == (1 + 4e-6, 4, 1e308, 7)
    assert buckets[2].mean == pytest.approx(5e307)
    _, (alone,) = index.buckets("loss", 1, first=10)
    assert (alone.nonfinite, math.isnan(alone.low), math.isnan(alone.mean)) == (2, True, True)


def test_the_ends_of_the_steps_do_not_overflow(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, [-(2**63) + 1, 0, 2**63 - 2])
    index.sync()
    assert [step for step, _ in index.series("loss")] == [-(2**63) + 1, 0, 2**63 - 2]
    assert sum(one.points for one in index.buckets("loss", 10)[1]) == 3
    assert index.buckets("nothing", 10) == (1, [])


# --- journals that are being written, cut and exchanged -------------------------------------------------------------


def test_a_line_that_is_being_written_waits(run: Path, index: MetricIndex) -> None:
    path = write_journal(run, 1, [0], start=0)
    whole = journal_lines([{"step": 1, "loss": 1.5}])
    with path.open("ab") as file:
        file.write(whole[:-9])
    assert index.sync().records == 1
    with path.open("ab") as file:
        file.write(whole[-9:])
    assert index.sync().records == 1
    assert index.series("loss")[-1] == (1, 1.5)
    assert index.sync().records == 0


@pytest.mark.parametrize(
    "rubbish", [b'{"step": 3, "lo\n', b"\0\0\0\n", b"[1]\n", b"\xff\n", b'{"step": 1.5}\n', b'{"a":"\\ud800"}\n']
)
def test_damaged_lines_are_passed_over_and_counted(run: Path, index: MetricIndex, rubbish: bytes) -> None:
    path = write_journal(run, 1, [0], start=0)
    with path.open("ab") as file:
        file.write(rubbish + b'\n{"step":null,"ts_ns":1,"loss":1}\n')
    write_journal(run, 1, [4])
    assert index.sync().damaged == 1
    assert live(index) == [(1, 0), (1, 4)]
    assert index.damaged_lines() == {"a0001.jsonl": 1}


def test_a_journal_that_was_replaced_or_removed(run: Path, index: MetricIndex) -> None:
    path = write_journal(run, 1, range(100), start=0)
    write_journal(run, 2, [50], start=50)
    index.sync()
    path.unlink()
    write_journal(run, 1, range(3), start=0)
    assert index.sync().forgotten == ("a0001.jsonl",)
    assert live(index) == [(1, 0), (1, 1), (1, 2), (2, 50)]
    (run / "metrics" / "a0002.jsonl").unlink()
    assert index.sync().forgotten == ("a0002.jsonl",)
    assert live(index) == [(1, 0), (1, 1), (1, 2)]
    assert index.metrics()[0].rolled_back == 0


def test_a_run_folder_that_is_not_mounted_for_a_while(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(3), start=0)
    index.sync()
    run.rename(run.with_name("elsewhere"))
    with pytest.raises(StorageError, match="cannot read"):
        index.sync()
    assert len(index.series("loss")) == 3
    run.with_name("elsewhere").rename(run)
    assert index.sync().records == 0


def test_a_full_disk_is_told_and_loses_nothing(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(5000), start=0)
    index._db.execute("PRAGMA max_page_count = 20")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(MetricsError, match="full") as caught:
        index.sync()
    assert caught.value.code == "MT105"
    index._db.execute("PRAGMA max_page_count = 100000")  # pyright: ignore[reportPrivateUsage]
    index.sync()
    assert len(index.series("loss")) == 5000


def test_files_of_other_names_are_no_journals(run: Path, index: MetricIndex) -> None:
    write_journal(run, 1, [0], start=0)
    for name in ("a1.jsonl", "a0002.jsonl.torn", "a0001-r7.jsonl", "b0001.jsonl", "a0003-r00000.jsonl"):
        shutil.copy(run / "metrics" / "a0001.jsonl", run / "metrics" / name)
    assert index.sync().files == 1


def test_a_line_without_an_end_does_not_fill_the_memory(run: Path, index: MetricIndex) -> None:
    path = write_journal(run, 1, [0], start=0)
    with path.open("ab") as file:
        file.write(b"x" * (9 << 20) + b"\n")
    write_journal(run, 1, [1])
    assert index.sync().damaged >= 1
    assert live(index) == [(1, 0), (1, 1)]


def test_a_look_ends_when_its_time_is_up(run: Path, index: MetricIndex) -> None:
    count = 20_000
    write_journal(run, 1, range(count), start=0)
    report = index.sync(budget_s=0.0)
    assert not report.is_complete
    assert 0 < report.records < count
    while not index.sync(budget_s=0.0).is_complete:
        pass
    assert len(index.series("loss")) == count


# --- an index is never trusted --------------------------------------------------------------------------------------


def damage(kind: str, path: Path) -> None:
    raw = path.read_bytes()
    if kind == "rubbish":
        path.write_bytes(b"\x17" * len(raw))
    elif kind == "cut":
        path.write_bytes(raw[: len(raw) // 2 + 100])
    elif kind == "zeroed":
        path.write_bytes(raw[:4096] + bytes(len(raw) - 4096))
    elif kind == "no tables":
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE point")
        db.close()
    else:
        path.unlink()
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE cats (name TEXT)")
        db.close()


KINDS = ("rubbish", "cut", "zeroed", "no tables", "another program's")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_index_is_made_anew(run: Path, folder: Path, kind: str) -> None:
    write_journal(run, 1, range(2000), start=0)
    with MetricIndex(run, folder) as index:
        index.sync()
    damage(kind, index.path)
    with MetricIndex(run, folder) as index:
        index.sync()
        assert len(index.series("loss")) == 2000
        assert index.rebuilt
    assert [path.name for path in folder.glob("*.sqlite")] == [index.path.name]


@pytest.mark.parametrize("kind", ["rubbish", "zeroed", "no tables"])
def test_an_index_that_is_damaged_while_it_is_open(run: Path, index: MetricIndex, kind: str) -> None:
    write_journal(run, 1, range(5000), start=0)
    index.sync()
    index._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # pyright: ignore[reportPrivateUsage]
    index._db.execute("PRAGMA cache_size = 1")  # pyright: ignore[reportPrivateUsage]
    damage(kind, index.path)
    assert len(index.series("loss")) == 5000
    assert sum(one.points for one in index.buckets("loss", 10)[1]) == 5000


def test_the_index_of_another_run_is_not_taken(run: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_journal(other, 1, range(5), start=0)
    write_journal(run, 1, range(3), start=0)
    with MetricIndex(other, folder) as theirs:
        theirs.sync()
    with MetricIndex(run, folder) as ours:
        name = ours.path
    shutil.copy(theirs.path, name)
    with MetricIndex(run, folder) as ours:
        ours.sync()
        assert "another run" in ours.rebuilt
        assert len(ours.series("loss")) == 3


def test_an_older_index_stays_readable_for_whoever_has_it_open(run: Path, folder: Path, index: MetricIndex) -> None:
    write_journal(run, 1, range(3), start=0)
    index.sync()
    with MetricIndex(run, folder) as other:
        other.start_anew("to see")
        other.sync()
        assert other.path != index.path
        assert len(index.series("loss")) == len(other.series("loss")) == 3
        write_journal(run, 1, [3])
        index.sync()
        other.sync()
        assert len(index.series("loss")) == len(other.series("loss")) == 4


# --- other processes ------------------------------------------------------------------------------------------------

CHILD = """
import os, sys
from pathlib import Path
from midwatch.audit.index import MetricIndex, fill
lines, decode = 0, fill.decode_journal_line
def dying(raw, path):
    global lines
    lines += 1
    if lines == int(sys.argv[3]):
        os._exit(9)
    return decode(raw, path)
fill.decode_journal_line = dying
with MetricIndex(Path(sys.argv[1]), Path(sys.argv[2])) as index:
    print("open", flush=True)
    sys.stdin.readline()
    index.sync()
    print(len(index.series("loss")))
"""


def child(run: Path, folder: Path, dies_at: int = 0) -> subprocess.Popen[str]:
    """A process that indexes the run when it is told to, and may die in the middle of a transaction."""
    command = [sys.executable, "-c", CHILD, str(run), str(folder), str(dies_at)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.procs
def test_processes_that_index_at_once_after_one_that_was_killed(run: Path, folder: Path) -> None:
    count = 20_000
    write_journal(run, 1, range(count), start=0)
    victim = child(run, folder, dies_at=10_000)
    assert victim.communicate("go\n", timeout=60)[0] == "open\n"
    assert victim.returncode == 9
    children = [child(run, folder), child(run, folder)]
    for one in children:
        assert one.stdout is not None
        assert one.stdout.readline() == "open\n"
    for one in children:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    assert [one.communicate(timeout=60)[0].strip() for one in children] == [str(count), str(count)]
    with MetricIndex(run, folder) as index:
        assert index.sync().records == 0
        assert not index.rebuilt
        assert len(index.series("loss")) == count


# --- where it lies --------------------------------------------------------------------------------------------------

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:31 / /home rw,relatime shared:1 - nfs4 filer:/home rw,vers=4.2
31 30 254:1 / /home/local\\040disk rw - xfs /dev/vdb rw
32 22 0:40 / /scratch rw - lustre 10.0.0.1@o2ib:/s rw
33 22 0:41 / /mnt/s3 rw,nosuid - fuse.s3fs s3fs rw
34 22 0:42 / /scratch rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me/x", "nfs4"),
        ("/homes", "ext4"),
        ("/home/local disk/x", "xfs"),
        ("/scratch/x", "tmpfs"),
        ("/mnt/s3", "fuse.s3fs"),
    ],
)
def test_the_kind_of_file_system_below_a_path(path: str, kind: str) -> None:
    assert places.mounted_kind(path, MOUNTS) == kind


def test_a_folder_that_hosts_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path / 'share'} rw - nfs4 filer:/x rw\n")
    monkeypatch.setattr(places, "_MOUNTS", mounts)
    with pytest.raises(MetricsError, match="nfs4") as caught:
        index_folder(tmp_path / "share" / "indexes")
    assert caught.value.code == "MT105"
    assert not (tmp_path / "share").exists()
    assert index_folder(tmp_path / "local") == tmp_path / "local"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(MetricsError, match="cannot be written"):
        index_folder(tmp_path / "open")


@pytest.mark.parametrize("trick", ["writable parent", "link"])
def test_a_folder_that_somebody_else_prepared_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trick: str
) -> None:
    trap, own = tmp_path / "trap" / "metrics", tmp_path / "own" / "metrics"
    trap.parent.mkdir()
    if trick == "link":
        (tmp_path / "target").mkdir()
        trap.symlink_to(tmp_path / "target")
    else:
        trap.parent.chmod(0o777)
    monkeypatch.setattr(places, "_candidates", lambda: iter([trap, own]))
    assert index_folder(None) == own


def test_without_a_word_it_is_a_local_folder_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "_candidates", lambda: iter([tmp_path / "shared", tmp_path / "own"]))
    monkeypatch.setattr(places, "shared_kind", lambda path: "nfs" if path.name == "shared" else "")
    assert index_folder(None) == tmp_path / "own"
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "own").stat().st_uid == os.getuid()
