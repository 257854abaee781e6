"""The folded view: outliers first, hostile and broken text, holes, ranks without a word, later attempts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midwatch.cli.main import main
from midwatch.supervise import Fold, LogReader, log_files, parse_ranks, rank_ranges
from midwatch.supervise.folding import mask
from midwatch.supervise.logcap import LogCap

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
  File "train.py", line 7, in main
ValueError: bad batch 17
"""


def write(run: Path, rank: int, text: str | bytes, *, attempt: int = 1, stream: str = "out", node: str = "n0") -> Path:
    path = run / "logs" / f"a{attempt:04d}" / f"{node}.r{rank:05d}.{stream}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def steps(rank: int, count: int = 20) -> str:
    return "".join(f"step {step} loss {step * 0.5 + rank:.3f}\n" for step in range(count))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for rank in range(8):
        write(tmp_path, rank, steps(rank), node=f"n{rank // 4}")
        write(tmp_path, rank, TRACEBACK if rank == 3 else "", stream="err", node=f"n{rank // 4}")
    return tmp_path


def show(run: Path, *words: str) -> str:
    done = CliRunner().invoke(main, ["logs", str(run), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def document(run: Path, *words: str) -> dict[str, Any]:
    return json.loads(show(run, "--json", *words))


def test_the_odd_one_comes_first_and_its_traceback_stays_whole(run: Path) -> None:
    output = show(run)
    assert output.index("--- only 3") < output.index("Traceback") < output.index("line 12") < output.index("line 7")
    assert output.index("line 7") < output.index("ValueError: bad batch 17") < output.index("--- all ranks")
    assert output.count("step # loss #") == 1
    assert "160x out  step # loss #" in output
    assert "attempt 1, ranks 0-7 on 2 nodes" in output


def test_trouble_of_some_comes_before_the_chatter_of_one(run: Path) -> None:
    write(run, 0, steps(0) + "wrote the weekly summary\n")
    for rank in (5, 6):
        write(run, rank, steps(rank) + "NCCL error: unhandled system error\n", node="n1")
    sections = document(run)["sections"]
    assert [section["ranks"] for section in sections] == ["3", "5-6", "0", "0-7"]
    assert [section["is_all"] for section in sections] == [False, False, False, True]


def test_equal_lines_are_shown_as_they_are(run: Path) -> None:
    for rank in range(8):
        write(run, rank, "using 2 workers\n", node=f"n{rank // 4}")
    (common,) = [section for section in document(run)["sections"] if section["is_all"]]
    assert common["lines"][0]["text"] == "using 2 workers"
    assert common["lines"][0]["count"] == 8


def test_one_rank_is_not_folded(run: Path) -> None:
    output = show(run, "--rank", "2", "--lines", "3")
    assert "step 19 loss 11.500" in output
    assert "step 16" not in output
    assert "#" not in output


def test_ranks_and_attempts_are_picked(run: Path) -> None:
    write(run, 0, "again\n", attempt=2)
    assert document(run)["attempt"] == 2
    assert document(run, "--attempt", "1", "--rank", "0-1,7")["ranks"] == "0-1,7"


def test_what_a_rank_said_at_the_start_of_a_long_file_is_seen(run: Path) -> None:
    for rank in range(8):
        start = "loaded another tokenizer than the others\n" if rank == 6 else ""
        write(run, rank, start + "".join(f"step {step}\n" for step in range(100_000)), node=f"n{rank // 4}")
    first = document(run)["sections"]
    assert [section["ranks"] for section in first] == ["3", "6", "0-7"]
    write(run, 0, "".join(f"step {step}\n" for step in range(50_000)))
    assert len((run / "logs/a0001/n0.r00000.out").read_bytes()) < 600_000
    lines = [line for section in document(run, "--rank", "0,1")["sections"] for line in section["lines"]]
    assert sum(line["count"] for line in lines) < 200_000


def test_a_rank_without_a_word_is_named(run: Path) -> None:
    write(run, 5, "", node="n1")
    assert document(run)["silent_ranks"] == "5"
    assert "no output at all: 5" in show(run)


def test_text_cannot_move_the_cursor_or_pose_as_markup(run: Path) -> None:
    write(run, 3, b"\x1b]0;owned\x07\x1b[2Jhello [bold]x[/bold] \xff \xe2\x80\xae %s {0}\n", node="n0")
    write(run, 0, "x\n", node="\x1b[31mevil")
    output = show(run)
    assert not {"\x1b", "\x07", "\u202e"} & set(output)
    assert "hello [bold]x[/bold]" in output
    assert "%s {0}" in output


def test_colours_and_progress_bars_do_not_split_equal_lines(run: Path) -> None:
    for rank in range(8):
        bar = "".join(f"\r{n}%|{'#' * n}" for n in range(50))
        write(run, rank, f"{bar}\r100% done\n\x1b[3{rank}mready\x1b[0m\n", node=f"n{rank // 4}")
    lines = [line["text"] for section in document(run)["sections"] if section["is_all"] for line in section["lines"]]
    assert lines == ["100% done", "ready"]


def test_a_middle_that_was_given_back_is_skipped(run: Path) -> None:
    path, cap = write(run, 0, ""), LogCap(1)
    for start in range(0, 200_000, 10_000):
        with path.open("a") as file:
            file.writelines(f"line {number}\n" for number in range(start, start + 10_000))
        cap.look([path])
    cap.close()
    reader = LogReader(next(file for file in log_files(run, 1) if file.path == path), newest_bytes=0)
    lines = list(reader.lines())
    assert lines[0] == "line 0"
    assert lines[-1] == "line 199999"
    assert any("given back" in line for line in lines)
    assert not any("\0" in line for line in lines)


def test_a_line_without_end_does_not_take_the_memory(run: Path) -> None:
    write(run, 3, b"x" * 3_000_000)
    lines = list(LogReader(log_files(run, 1)[6], newest_bytes=0).lines(is_last=True))
    assert max(len(line) for line in lines) <= 4096
    assert len(lines) < 3


def test_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("do not show\n")
    (run / "logs" / "a0001" / "n0.r00009.out").symlink_to(secret)
    assert "do not show" not in show(run)


def test_nothing_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["logs", str(tmp_path)])
    assert done.exit_code == 65
    assert "SV110" in done.output
    assert CliRunner().invoke(main, ["logs", str(tmp_path), "--rank", "x"]).exit_code == 2


def test_noise_is_counted_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midwatch.supervise.folding.MOST_GROUPS", 5)
    fold = Fold([0])
    fold.add(0, [chr(ord("a") + number) * 3 for number in range(20)])
    assert fold.left_out == 15


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("step 12 loss 3.1e-2 lr -1e-4 took 0.5s", "step # loss # lr # took #s"),
        ("tensor at 0x7ffe on cuda:3", "tensor at # on cuda:#"),
        ("commit 9f3ab2c11d facade", "commit # facade"),
        ('  File "a.py", line 12, in f', '  File "a.py", line 12, in f'),
    ],
)
def test_only_numbers_are_masked(line: str, masked: str) -> None:
    assert mask(line) == masked


def test_ranges() -> None:
    assert rank_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert [list(part) for part in parse_ranks("0-2, 5")] == [[0, 1, 2], [5]]
    for wrong in ("", "a", "3-1", "1,,2"):
        with pytest.raises(ValueError):
            parse_ranks(wrong)


@pytest.mark.procs
def test_following_shows_what_comes_and_turns_to_the_next_attempt(run: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    command = [sys.executable, "-m", "midwatch", "logs", str(run), "--follow", "--json"]
    with shown.open("w") as output, subprocess.Popen(command, stdout=output) as viewer:

        def until(attempt: int) -> dict[str, Any]:
            end = time.monotonic() + 30
            while time.monotonic() < end:
                if attempt == 1:
                    # It may not have looked yet: say it again until it is heard.
                    for file in log_files(run, 1):
                        with file.path.open("a") as rank:
                            rank.write("step 7\n")
                lines = [json.loads(line) for line in shown.read_text().splitlines()]
                if found := [line for line in lines if line["attempt"] == attempt]:
                    return found[-1]
                time.sleep(0.05)
            raise AssertionError(shown.read_text())

        first = until(1)
        write(run, 0, "begun\n", attempt=2)
        second = until(2)
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(10) == 0
    assert (first["ranks"], first["text"]) == ("0-7", "step 7")
    assert (second["ranks"], second["text"], second["count"]) == ("0", "begun", 1)
