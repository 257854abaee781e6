"""The rows that need two ranks: shards exchanged, stale, of another run, or never written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from trust_formats import Format, state_of, step_of
from trust_midwatch import DcpSharded, DcpShardedTwoThreads, Midwatch
from trust_trial import Answer, copy_tree, ranks

RANKS = 2
SHARDED = {"DCP": DcpSharded, "DCP 2 threads": DcpShardedTwoThreads}


class RankBench:
    """Two ranks, two runs, steps 1 and 2 each; each trial damages a copy of run one."""

    def __init__(self, column: Format, folder: Path) -> None:
        self.column = SHARDED[column.name]() if column.name in SHARDED else column
        self.folder = folder
        self.notes: list[str] = []

    def prepare(self) -> None:
        for run in ("one", "other"):
            root = self.folder / run
            root.mkdir(parents=True)
            for step in (1, 2):
                answer = ranks(lambda rank, root=root, run=run, step=step: self._save(root, run, step, rank))
                self._must(answer)
        answer = self.read(self.folder / "one")
        if self.verdict(answer) != "harmless":
            raise RuntimeError(f"unharmed, two ranks load {answer}")

    @staticmethod
    def _must(answer: Answer) -> None:
        bad = [a for a in answer.get("ranks", [answer]) if not a.get("saved")]
        if bad:
            raise RuntimeError(str(bad)[:400])

    def _column(self, run: str, rank: int) -> Format:
        if isinstance(self.column, Midwatch):
            self.column.run, self.column.rank, self.column.world_size = run, rank, RANKS
        return self.column

    def _save(self, root: Path, run: str, step: int, rank: int) -> Answer:
        self._column(run, rank).save(root, step, state_of(step, rank=rank, run=run, world_size=RANKS))
        return {"saved": True}

    def read(self, root: Path) -> Answer:
        def work(rank: int) -> Answer:
            column = self._column("one", rank)
            state = column.read_damaged(root, state_of(1, rank=rank, world_size=RANKS))
            return {"step": step_of(state, rank=rank, world_size=RANKS), "told": column.told}

        return ranks(work)

    def verdict(self, answer: Answer) -> str:
        """As for one rank; right is only what all ranks have of the same step."""
        answers = answer.get("ranks", [answer])
        failed = [a for a in answers if "step" not in a]
        if failed:
            self.notes.append(str(failed[0].get("error", failed[0]))[:160])
            return "lost" if isinstance(self.column, Midwatch) else "detected"
        steps = {a["step"] for a in answers}
        if steps == {2}:
            return "harmless"
        if steps == {1} and isinstance(self.column, Midwatch):
            return "recovered" if answers[0]["told"] else "older"
        return "SILENT"

    def place(self, root: Path, step: int) -> Path:
        if isinstance(self.column, Midwatch):
            return self.column.folder(root, step)
        return self.column.place(root, step)

    def files(self, root: Path, step: int, rank: int) -> list[Path]:
        return self.column.rank_files(self.place(root, step), rank)

    def copy(self) -> Path:
        return copy_tree(self.folder / "one", self.folder / "work")

    def groups(self, step: int, rank: int) -> list[list[int]]:
        """Which of a rank's files to exchange: the data alone, then all its files with their records."""
        count = len(self.files(self.folder / "one", step, rank))
        data = [n for n, p in enumerate(self.files(self.folder / "one", step, rank)) if not _is_record(p)]
        return [data] if len(data) == count else [data, list(range(count))]


def _is_record(path: Path) -> bool:
    return path.suffix == ".json"


def exchange(bench: RankBench) -> Iterator[str]:
    for group in bench.groups(2, 0):
        root = bench.copy()
        one, two = bench.files(root, 2, 0), bench.files(root, 2, 1)
        for number in group:
            aside = one[number].read_bytes()
            shutil.copyfile(two[number], one[number])
            two[number].write_bytes(aside)
        yield bench.verdict(bench.read(root))


def _replace(bench: RankBench, run: str, step: int) -> Iterator[str]:
    for rank in range(RANKS):
        for group in bench.groups(2, rank):
            root = bench.copy()
            theirs, ours = bench.files(bench.folder / run, step, rank), bench.files(root, 2, rank)
            for number in group:
                shutil.copyfile(theirs[number], ours[number])
            yield bench.verdict(bench.read(root))


def stale(bench: RankBench) -> Iterator[str]:
    return _replace(bench, "one", 1)


def foreign(bench: RankBench) -> Iterator[str]:
    return _replace(bench, "other", 2)


def never_wrote(bench: RankBench) -> Iterator[str]:
    for rank in range(RANKS):
        root = bench.copy()
        for path in bench.files(root, 2, rank):
            path.unlink()
        yield bench.verdict(bench.read(root))
