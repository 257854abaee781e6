"""The rows of the trust matrix: what is done to a column, and how its answer is judged (see ``trust.py``)."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import iotrap
from trust_formats import Format, state_of, step_of
from trust_midwatch import Midwatch
from trust_replay import Disk
from trust_trial import Answer, copy_tree, trial

SECTOR_BYTES = 4096
FLIPS, ZEROED = 16, 10
"""Places drawn over all bytes of the checkpoint, beside one in each file."""


class Bench:
    """One column's folders: ``two`` holds steps 1 and 2, ``one`` step 1 only; each trial works on a copy."""

    def __init__(self, column: Format, folder: Path) -> None:
        self.column = column
        self.folder = folder
        self.like = state_of(1)
        self.notes: list[str] = []

    def prepare(self) -> None:
        """Make the templates.

        Raises:
            RuntimeError: The format does not even work unharmed; the column then says why.
        """
        for name, steps in (("one", (1,)), ("two", (1, 2))):
            root = self.folder / name
            root.mkdir(parents=True)
            for step in steps:
                self.must(trial(lambda step=step, root=root: self.save(root, step)))
            answer = self.read(root)
            if answer.get("step") != steps[-1]:
                raise RuntimeError(f"unharmed, it loads {answer}")

    @staticmethod
    def must(answer: Answer) -> Answer:
        if "error" in answer or "signal" in answer or "hung" in answer:
            raise RuntimeError(str(answer)[:300])
        return answer

    def copy(self, name: str) -> Path:
        return copy_tree(self.folder / name, self.folder / "work")

    def save(self, root: Path, step: int, *, place: int = 0) -> Answer:
        """In a child. ``place``: save the state of ``step`` where the checkpoint of that step lies."""
        self.column.save(root, place or step, state_of(step))
        return {"saved": True, "counted": iotrap.counted(), "fired": iotrap.fired()}

    def read(self, root: Path, *, is_damaged: bool = False, before: Callable[[], None] | None = None) -> Answer:
        """Load as a user would, in a child, and say which step's state it is."""

        def work() -> Answer:
            if before is not None:
                before()
            reader = self.column.read_damaged if is_damaged else self.column.read_newest
            state = reader(root, self.like)
            return {"step": step_of(state), "told": self.column.told}

        return trial(work)

    def can_load(self, root: Path, step: int) -> bool:
        """Whether that step can still be had by asking for it by name."""

        def work() -> Answer:
            return {"step": step_of(self.column.load(self.column.place(root, step), self.like))}

        return trial(work).get("step", 0) > 0

    def judge(self, answer: Answer, root: Path, wanted: tuple[int, ...], *, has_lied: bool = False) -> str:
        """One word for one trial.

        Args:
            wanted: The steps whose state is right here; the last one is the newest.
            has_lied: The save had said that all is well.
        """
        step = answer.get("step")
        if step is None:
            failure = "died" if "signal" in answer or "hung" in answer else "detected"
            self.note(failure, answer)
            if has_lied:
                return "false success"
            others = [old for old in (1, 2) if self.column.place(root, old).exists()]
            is_hopeless = not isinstance(self.column, Midwatch) and not any(self.can_load(root, old) for old in others)
            return "lost" if is_hopeless or isinstance(self.column, Midwatch) else failure
        return "recovered" if step in wanted else "SILENT"

    def passed_over(self, answer: Answer, file: Path) -> str:
        """An older state was handed out: with a word about the newer one, or without."""
        if answer.get("told"):
            return "recovered"
        self.note("older", {"error": f"{file.name} damaged, and nothing was said"})
        return "older"

    def note(self, word: str, answer: Answer) -> None:
        text = str(answer.get("error", answer))[:160]
        if len(self.notes) < 40:
            self.notes.append(f"{word}: {text}")


# --- damage to a finished checkpoint ------------------------------------------------------------------------------


def harmed(bench: Bench, root: Path, file: Path) -> str:
    """``file`` of the newest was damaged: right are its own state, an error, or an older state and a word about why."""
    answer = bench.read(root, is_damaged=True)
    step = answer.get("step")
    if step == 2:
        return "harmless"
    if step == 1:
        return bench.passed_over(answer, file)
    if step is None:
        bench.note(file.name, answer)
        if isinstance(bench.column, Midwatch):
            return "lost"
        return "died" if "signal" in answer else "detected"
    return "SILENT"


def places(files: list[Path], count: int) -> Iterator[tuple[Path, int]]:
    """Offsets drawn over all bytes, then one in each file."""
    dice = random.Random(7)
    sizes = [path.stat().st_size for path in files]
    for path in dice.choices(files, weights=sizes, k=count):
        yield path, dice.randrange(path.stat().st_size)
    for path in files:
        if path.stat().st_size:
            yield path, dice.randrange(path.stat().st_size)


def flip_bits(bench: Bench) -> Iterator[str]:
    for number, (path, offset) in enumerate(places(bench.column.files(bench.folder / "two", 2), FLIPS)):
        root = bench.copy("two")
        with moved(bench, path, root).open("r+b") as file:
            file.seek(offset)
            value = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([value ^ (1 << number % 8)]))
        yield harmed(bench, root, path)


def zero_blocks(bench: Bench) -> Iterator[str]:
    for path, offset in places(bench.column.files(bench.folder / "two", 2), ZEROED):
        root = bench.copy("two")
        with moved(bench, path, root).open("r+b") as file:
            begin = offset // SECTOR_BYTES * SECTOR_BYTES
            file.seek(begin)
            block = file.read(SECTOR_BYTES)
            file.seek(begin)
            file.write(bytes(len(block)))
        if any(block):
            yield harmed(bench, root, path)


def truncate(bench: Bench) -> Iterator[str]:
    for path in bench.column.files(bench.folder / "two", 2):
        root = bench.copy("two")
        victim = moved(bench, path, root)
        with victim.open("r+b") as file:
            file.truncate(victim.stat().st_size // 2)
        yield harmed(bench, root, path)


def remove(bench: Bench) -> Iterator[str]:
    for path in bench.column.files(bench.folder / "two", 2):
        root = bench.copy("two")
        moved(bench, path, root).unlink()
        yield harmed(bench, root, path)


def moved(bench: Bench, path: Path, root: Path) -> Path:
    return root / path.relative_to(bench.folder / "two")


def bad_sectors(bench: Bench) -> Iterator[str]:
    """First, middle and last sector of each file cannot be read: EIO, or SIGBUS where the file is mapped."""
    for path in bench.column.files(bench.folder / "two", 2):
        size = path.stat().st_size
        for offset in sorted({0, size // 2, max(0, size - 1)}):
            root = bench.copy("two")
            begin = offset // SECTOR_BYTES * SECTOR_BYTES
            victim = moved(bench, path, root)

            def break_disk(victim: Path = victim, begin: int = begin, root: Path = root) -> None:
                iotrap.arm(root)
                iotrap.bad_sector(victim, begin, begin + SECTOR_BYTES)

            answer = bench.read(root, is_damaged=True, before=break_disk)
            iotrap.disarm()
            step = answer.get("step")
            if step is None:
                bench.note(path.name, answer)
                yield "died" if "signal" in answer or "hung" in answer else "detected"
            elif step == 1:
                yield bench.passed_over(answer, path)
            else:
                yield "harmless" if step == 2 else "SILENT"


# --- trouble while saving -----------------------------------------------------------------------------------------


def count(bench: Bench, template: str, place: int, classes: int, log: Path | None = None) -> int:
    root = bench.copy(template)

    def work() -> Answer:
        iotrap.arm(root, classes=classes, log=log)
        return bench.save(root, 2, place=place)

    answer = trial(work)
    iotrap.disarm()
    if "counted" not in answer:
        bench.note("unharmed save", answer)
        return -1
    return int(answer["counted"])


def injured(bench: Bench, template: str, place: int, **plan: object) -> tuple[Path, Answer]:
    root = bench.copy(template)

    def work() -> Answer:
        iotrap.arm(root, **plan)
        try:
            return bench.save(root, 2, place=place)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error)[:200]}", "fired": iotrap.fired()}

    return root, trial(work)


def full_disk(bench: Bench, *, is_sticky: bool) -> Iterator[str]:
    """Write ``k`` finds the disk full: alone (smaller ones fit later), or from there on."""
    total = count(bench, "one", 2, iotrap.NEEDS_SPACE)
    for k in range(1, total + 1):
        root, answer = injured(
            bench, "one", 2, at=k, action=iotrap.FAIL, classes=iotrap.NEEDS_SPACE, is_sticky=is_sticky
        )
        yield after_failure(bench, root, answer)


def after_failure(bench: Bench, root: Path, answer: Answer) -> str:
    iotrap.disarm()
    has_lied = bool(answer.get("saved"))
    if not has_lied:
        bench.note("told", answer)
    loaded = bench.read(root)
    if has_lied and loaded.get("step") == 1:
        return "false success"
    return bench.judge(loaded, root, (1, 2), has_lied=has_lied)


def failing_sync(bench: Bench) -> Iterator[str]:
    """The backing store takes nothing more: fsync fails and what was not synced is gone.

    A format that never asks is told nothing, so its save counts as said to be good; its bytes are lost all the same.
    """
    total = count(bench, "one", 2, iotrap.FSYNC | iotrap.FSYNC_DIR)
    for k in range(1, total + 1):
        classes = iotrap.FSYNC | iotrap.FSYNC_DIR
        root, answer = injured(bench, "one", 2, at=k, action=iotrap.FAIL, error=errno.EIO, classes=classes)
        lost = iotrap.fired_path()
        if lost.is_file():
            with lost.open("r+b") as file:
                file.truncate(0)
        yield after_failure(bench, root, answer)
    if total == 0:
        disk, operations = recorded(bench, "one", 2)
        for operation in operations:
            disk.apply(operation)
        root = bench.folder / "work"
        disk.leave(root, forgets_names=False)
        yield after_failure(bench, root, {"saved": True})


def killed(bench: Bench, template: str, place: int) -> Iterator[str]:
    """SIGKILL to the whole process group at operation ``k``; a write is cut in half."""
    total = count(bench, template, place, iotrap.ALL)
    if total < 0:
        yield "refuses"
        return
    for k in range(1, total + 1):
        root, _ = injured(bench, template, place, at=k, action=iotrap.KILL)
        iotrap.disarm()
        yield bench.judge(bench.read(root), root, (1, 2))


def power_cut(bench: Bench, template: str, place: int, *, forgets_names: bool) -> Iterator[str]:
    """The power goes before operation ``k``, and once more when the save has said that all is well."""
    disk, operations = recorded(bench, template, place)
    root = bench.folder / "work"
    known: dict[int, str] = {}
    for k in range(len(operations) + 1):
        print_key = disk.fingerprint(forgets_names=forgets_names)
        if print_key not in known:
            disk.leave(root, forgets_names=forgets_names)
            known[print_key] = bench.judge(bench.read(root), root, (1, 2))
        if k < len(operations):
            yield known[print_key]
            disk.apply(operations[k])
    disk.leave(root, forgets_names=forgets_names)
    last = bench.read(root)
    if last.get("step") == 1 or (last.get("step") is None and known[print_key] != "SILENT"):
        yield "forgotten"
    else:
        yield known[print_key]


def recorded(bench: Bench, template: str, place: int) -> tuple[Disk, list[iotrap.Operation]]:
    """The disk before an unharmed save, and what the save did to it.

    Raises:
        RuntimeError: The log does not explain what the save left, so nothing can be concluded from it.
    """
    log, root = bench.folder / "log", bench.folder / "work"
    log.unlink(missing_ok=True)
    if count(bench, template, place, iotrap.ALL, log) < 0:
        raise RuntimeError("an unharmed save fails")
    operations = iotrap.read_log(log)
    disk = Disk(bench.folder / template, named=root)
    for operation in operations:
        disk.apply(operation)
    operations += disk.explain(root)
    if not disk.agrees_with(root):
        raise RuntimeError("the fault library misses writes of this format: the log does not explain what is there")
    return Disk(bench.folder / template, named=root), operations


def clean(folder: Path) -> None:
    iotrap.disarm()
    shutil.rmtree(folder, ignore_errors=True)
