"""An import of metrics dies, or loses its power, at operation k, for all k: readers see the old journals or the new."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from midwatch.audit.importers import import_metrics
from midwatch.audit.index import MetricIndex
from midwatch.audit.journals import edition_of
from midwatch.testing.ioshim import Injury, IoShim, SimulatedDeath
from midwatch.testing.powercut import Forgets, PowerCut

OLD = "attempt,step,loss\n" + "".join(f"{attempt},{attempt},1.0\n" for attempt in (1, 2, 3))
NEW = "attempt,step,loss\n" + "".join(f"{attempt},{attempt},2.0\n" for attempt in (2, 3, 4, 5))
STEPS = {1.0: [1, 2, 3], 2.0: [2, 3, 4, 5]}


def tables(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True)
    (folder / "old.csv").write_text(OLD)
    (folder / "new.csv").write_text(NEW)
    return folder / "old.csv", folder / "new.csv"


def before(folder: Path) -> tuple[Path, Path]:
    """A run with three attempts that were imported; four others are to take their place."""
    old, new = tables(folder)
    import_metrics([old], folder / "run")
    return folder / "run", new


def replace(run: Path, new: Path) -> None:
    import_metrics([new], run, is_replacing=True)


def seen(run: Path) -> float:
    """The value that all live steps have; they are those of one import, whole."""
    with MetricIndex(run, run.parent / "indexes") as index:
        index.sync()
        points = index.series("loss")
    (value,) = {point.value for point in points}
    assert [point.step for point in points] == STEPS[value]
    return value


def check(run: Path, new: Path, clue: str) -> None:
    value = seen(run)
    assert edition_of(run) == value, f"{clue}: trackers would mix old and new"
    replace(run, new)
    assert (seen(run), edition_of(run)) == (2.0, 2), clue
    hidden = [path.name for path in (run / "metrics").iterdir() if path.name not in (".import.lock", "edition.json")]
    assert sorted(hidden) == [f"a{attempt:04d}.jsonl" for attempt in (2, 3, 4, 5)], f"{clue}, after {value}"


def ready(run: Path) -> Path:
    return run / "metrics" / ".import-ready"


def operations(folder: Path) -> int:
    run, new = before(folder)
    with IoShim(is_everywhere=True) as counter:
        replace(run, new)
    return len(counter.operations)


def test_death(tmp_path: Path) -> None:
    values: list[float] = []
    for k in range(1, operations(tmp_path / "dry") + 1):
        run, new = before(tmp_path / f"k{k}")
        with IoShim(Injury(at=k, how="death"), is_everywhere=True) as shim, pytest.raises(SimulatedDeath):
            replace(run, new)
        values.append(seen(run))
        check(run, new, f"death at {k}: {shim.fired_at}")
        shutil.rmtree(tmp_path / f"k{k}")
    assert values == sorted(values), "from one moment on it is the new"
    assert set(values) == {1.0, 2.0}


@pytest.mark.parametrize("forgets", ["everything", "bytes"])
def test_power_cut(tmp_path: Path, forgets: Forgets) -> None:
    for k in range(1, operations(tmp_path / "dry") + 1):
        folder, graves = tmp_path / f"k{k}", tmp_path / f"graves-{k}"
        run, new = before(folder)
        graves.mkdir()
        with PowerCut(k, watched=folder / "run", graveyard=graves) as cut, pytest.raises(SimulatedDeath):
            replace(run, new)
        cut.cut(forgets)
        check(run, new, f"power cut at {k}: {cut.fired_at}")
        shutil.rmtree(folder)


def test_an_import_that_died_at_its_end_is_finished_by_the_next(tmp_path: Path) -> None:
    run, new = before(tmp_path / "first")
    with IoShim(is_everywhere=True) as counter:
        replace(run, new)
    at = [number for number, one in enumerate(counter.operations, 1) if one.path.endswith("-> " + str(ready(run)))]
    assert len(at) == 1
    run, new = before(tmp_path / "again")
    with IoShim(Injury(at=at[0] + 3, how="death"), is_everywhere=True), pytest.raises(SimulatedDeath):
        replace(run, new)
    assert ready(run).is_dir()
    assert seen(run) == 2.0
    check(run, new, "finished")
