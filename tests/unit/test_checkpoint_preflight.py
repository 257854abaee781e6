"""A disk that will not do is found before the first step, not at the first save."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from midwatch.checkpoint import preflight as module
from midwatch.checkpoint.preflight import Place, SpaceWatch, preflight, probe_folder
from midwatch.core import StorageError
from midwatch.storage import Space, ops
from midwatch.testing.saves import SmallRun

GB = 10**9
RESERVE = module.RESERVE_BYTES


@pytest.fixture(autouse=True)
def _no_observer() -> Iterator[None]:
    yield
    ops.set_observer(None)


def roomy(monkeypatch: pytest.MonkeyPatch, free_bytes: int = 10**15, free_inodes: int | None = 10**9) -> None:
    space = Space(free_bytes=free_bytes, free_inodes=free_inodes)
    monkeypatch.setattr(module, "free_space", lambda path: space)


def shared(path: Path, **values: object) -> Place:
    return Place(tier="shared", path=path, **values)


def refusing(operation: str, number: int) -> None:
    def refuse(seen: str, path: str) -> None:
        if seen == operation and module.PROBE_PREFIX in path + module.PROBE_PREFIX * (operation == "fsync_dir"):
            raise OSError(number, "refused", path)

    ops.set_observer(refuse)


def ask(*places: Place, own: int = 0, whole: int = 0, keep: int = 3, in_flight: int = 1) -> list[module.Shortage]:
    return preflight(places, own_bytes=own, all_bytes=whole, keep=keep, in_flight=in_flight)


# --- what cannot work -------------------------------------------------------------------------------------------------


def test_out_of_space_is_found_before_the_first_step_and_not_at_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open_lm#154: the run trained for hours and then could not write its first checkpoint."""
    roomy(monkeypatch, free_bytes=5 * GB)
    with pytest.raises(StorageError) as caught:
        ask(shared(tmp_path), whole=6 * GB)
    assert caught.value.code == "ST101"
    assert "5.0 GB free, not enough for one save of 6.0 GB" in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_out_of_inodes_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch, free_inodes=400)
    with pytest.raises(StorageError) as caught:
        ask(shared(tmp_path, ranks=100))
    assert (caught.value.code, "400 inodes left" in caught.value.message) == ("ST101", True)
    assert ask(shared(tmp_path, ranks=10), keep=1) == []


def test_a_quota_that_df_does_not_show_is_found_by_taking_the_room(tmp_path: Path) -> None:
    refusing("allocate", errno.EDQUOT)
    with pytest.raises(StorageError) as caught:
        ask(shared(tmp_path), own=4096)
    assert caught.value.code == "ST101"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("operation", "number", "code"),
    [
        ("create", errno.EACCES, "ST102"),
        ("create", errno.EROFS, "ST102"),
        ("write", errno.ENOSPC, "ST101"),
        ("write", errno.EDQUOT, "ST101"),
        ("write", errno.EIO, "ST103"),
        ("fsync_file", errno.EIO, "ST103"),
        ("fsync_dir", errno.EIO, "ST103"),
        ("fsync_dir", errno.EINVAL, "ST103"),
    ],
)
def test_a_mount_that_refuses_is_told_by_its_code(tmp_path: Path, operation: str, number: int, code: str) -> None:
    refusing(operation, number)
    with pytest.raises(StorageError) as caught:
        ask(shared(tmp_path))
    assert caught.value.code == code
    ops.set_observer(None)
    assert list(tmp_path.iterdir()) == [], "the trial file is taken away in any case"


def test_a_folder_that_cannot_be_made_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        ask(shared(tmp_path / "file" / "checkpoints"))
    assert caught.value.code in ("ST102", "ST103")
    assert "cannot make the folder of the shared tier" in caught.value.message


# --- what works, but not for long -------------------------------------------------------------------------------------


def test_a_good_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    root = tmp_path / "new" / "checkpoints"
    assert ask(shared(root), own=4096, whole=4096) == []
    assert list(root.iterdir()) == []
    assert probe_folder(root).seconds > 0


def test_what_is_kept_and_in_flight_must_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch, free_bytes=5 * GB + RESERVE - 1)
    (short,) = ask(shared(tmp_path), whole=GB, keep=3, in_flight=2)
    assert (short.tier, short.what, short.needed) == ("shared", "bytes", 5 * GB + RESERVE)
    for part in ("5.0 GB free", "5 more saves (3 kept, 0 of them there already, 2 in flight)", "checkpoint.keep_last"):
        assert part in short.message
    roomy(monkeypatch, free_bytes=5 * GB + RESERVE)
    assert ask(shared(tmp_path), whole=GB, keep=3, in_flight=2) == []


def test_a_resumed_run_does_not_need_the_room_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(tmp_path / "run")
    run.claim()
    for step in (10, 20, 30):
        run.save(step)
    roomy(monkeypatch, free_bytes=GB + RESERVE)
    assert ask(shared(run.root), whole=GB, keep=3) == []
    (short,) = ask(shared(run.root), whole=GB, keep=4)
    assert "2 more saves (4 kept, 3 of them there already, 1 in flight)" in short.message


def test_a_local_tier_holds_what_its_own_ranks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch, free_bytes=20 * GB)
    local = Place(tier="local", path=tmp_path, ranks=8)
    (short,) = ask(local, own=GB, whole=1000 * GB, keep=2)
    assert short.needed == 3 * 8 * GB + RESERVE
    roomy(monkeypatch, free_bytes=7 * GB)
    with pytest.raises(StorageError):
        ask(local, own=GB, keep=2)


def test_few_inodes_are_told_beside_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy(monkeypatch, free_inodes=100)
    (short,) = ask(shared(tmp_path, ranks=10), keep=3)
    assert (short.what, short.free) == ("inodes", 100)
    roomy(monkeypatch, free_inodes=None)
    assert ask(shared(tmp_path, ranks=10), keep=3) == []


# --- before each save -------------------------------------------------------------------------------------------------


def look(watch: SpaceWatch, monkeypatch: pytest.MonkeyPatch, saves: float, inodes: int | None = None) -> list[str]:
    roomy(monkeypatch, free_bytes=int(saves * GB) + RESERVE, free_inodes=inodes)
    return [short.message for short in watch.look(own_bytes=GB, all_bytes=GB, in_flight=1)]


def test_the_alarm_comes_one_save_early_and_once_per_tightening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SpaceWatch([shared(tmp_path)])
    assert look(watch, monkeypatch, 5) == []
    assert look(watch, monkeypatch, 2) == []
    assert len(look(watch, monkeypatch, 1.9)) == 1
    assert look(watch, monkeypatch, 1.5) == [], "said already"
    assert len(look(watch, monkeypatch, 0.5)) == 1, "tighter"
    assert look(watch, monkeypatch, 1.5) == [], "a little better is no news"
    assert look(watch, monkeypatch, 3) == []
    assert len(look(watch, monkeypatch, 1)) == 1, "it was well in between"


def test_the_alarm_says_what_is_short_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = look(SpaceWatch([shared(tmp_path)]), monkeypatch, 1.5)
    assert "room for 1 more saves (1.5 GB free, 1.0 GB each)" in message
    assert "checkpoint.keep_last" in message
    (message,) = look(SpaceWatch([shared(tmp_path)]), monkeypatch, 100, inodes=30)
    assert "30 inodes" in message


def test_looking_writes_nothing_and_survives_a_mount_that_has_gone(tmp_path: Path) -> None:
    operations: list[str] = []
    ops.set_observer(lambda operation, path: operations.append(operation))
    watch = SpaceWatch([shared(tmp_path), shared(tmp_path / "gone")])
    assert watch.look(own_bytes=1, all_bytes=1) == []
    assert operations == []
