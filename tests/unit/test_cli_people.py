"""What a person asks of a run: where there is none, where nobody answers, with files that are rubbish."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midwatch.audit import Ledger, ensure_run, read_ledger, verify_ledger
from midwatch.cli.main import main
from midwatch.config import IsolateConfig
from midwatch.supervise.decide import RunFacts
from midwatch.supervise.failover import FolderLock
from midwatch.supervise.kept_rules import isolate_rules, keep_rules
from midwatch.supervise.link import Link
from midwatch.supervise.protocol import create_token
from midwatch.supervise.suspicion import Reason, SuspicionLedger

JUDGED: dict[str, Any] = {
    "fingerprint": "f1",
    "fault_class": "user_exception",
    "restarts_used": 1,
    "restarts_for": {"code": 1},
}
VERBS = [("hold",), ("resume-run",), ("node", "isolate"), ("node", "release")]


def ask(*words: str) -> tuple[int, Any]:
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, json.loads(done.stdout)


def words(verb: tuple[str, ...], folder: Path, node: str = "n7") -> tuple[str, ...]:
    return (*verb, str(folder), *([node] if verb[0] == "node" else []), "--reason", "x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "supervisor").mkdir()
    return tmp_path


def publish(folder: Path, **other: Any) -> None:
    endpoint = {"host": "127.0.0.1", "port": 1, "pid": 1, "attempt": 1, "hostname": "h", "session": "s", "run": "r"}
    (folder / "supervisor" / "coordinator.json").write_text(json.dumps({**endpoint, **other}))
    create_token(folder / "supervisor" / "token")


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["asked", "dry run"])
def test_a_folder_that_is_not_there(tmp_path: Path, verb: tuple[str, ...], more: tuple[str, ...]) -> None:
    code, answer = ask(*words(verb, tmp_path / "none"), *more)
    assert (code, answer["error"]) == (65, "SV110")


@pytest.mark.parametrize("verb", ["hold", "resume-run"])
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["asked", "dry run"])
def test_what_never_ran_cannot_be_held_and_a_dry_run_says_so(folder: Path, verb: str, more: tuple[str, ...]) -> None:
    code, answer = ask(*words((verb,), folder), *more)
    assert (code, answer["error"]) == (65, "SV110")


def facts(folder: Path) -> RunFacts:
    return RunFacts.from_lines(read_ledger(folder / "ledger" / "coordinator.jsonl")).carried_over()


def test_between_runs_a_person_gives_the_budgets_back_and_holds_the_next_start(folder: Path) -> None:
    run = ensure_run(folder).run
    path = folder / "ledger" / "coordinator.jsonl"
    with Ledger(path, run=run) as ledger:
        ledger.record("run.started")
        ledger.record("fault.judged", step=7, **JUDGED)
        ledger.record("run.finished", exit_code=93, error="SV104", sentence="the same failure came 2 times")
    assert facts(folder).history == (("f1", 7),)
    before = path.read_bytes()
    assert "would be written down" in ask(*words(("resume-run",), folder), "--dry-run")[1]["state"]
    assert path.read_bytes() == before
    state = ask(*words(("resume-run",), folder))[1]["state"]
    assert state == "no run is live; the next start here begins with full restart budgets again"
    assert (facts(folder).restarts_used, facts(folder).history) == (0, ())
    assert ask(*words(("hold",), folder))[1]["state"] == "no run is live; the next start here is held"
    assert facts(folder).hold == ("person", "x")
    assert "held already" in ask(*words(("hold",), folder))[1]["state"]
    assert "begins no longer held" in ask(*words(("resume-run",), folder))[1]["state"]
    assert facts(folder).hold is None
    assert not verify_ledger(path).problems


def test_a_dry_run_between_runs_writes_nothing_and_fails_as_the_wish_would(folder: Path) -> None:
    code, answer = ask(*words(("node", "isolate"), folder), "--dry-run")
    assert code == 0
    assert answer["state"] == "unchanged (dry run): no run is live, so it would be written down for the next one"
    assert ask(*words(("node", "release"), folder), "--dry-run")[1]["error"] == "SV115"
    assert ask(*words(("node", "isolate"), folder, "n[1-3]"), "--dry-run")[1]["error"] == "SV115"
    assert list((folder / "supervisor").iterdir()) == []
    assert ask("node", "list", str(folder)) == (0, [])


@pytest.fixture
def stamped(folder: Path) -> Iterator[Path]:
    """A live launcher's seat, and a coordinator that nobody reaches."""
    publish(folder)
    seat = FolderLock.take(folder / "supervisor", "host")
    assert seat is not None
    over = threading.Event()

    def stamp() -> None:
        while not over.wait(0.1):
            seat.stamp()

    thread = threading.Thread(target=stamp)
    thread.start()
    yield folder
    over.set()
    thread.join()
    seat.release()


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_live_run_that_does_not_answer_is_not_taken_for_one_that_is_over(
    stamped: Path, verb: tuple[str, ...]
) -> None:
    SuspicionLedger.of(stamped, IsolateConfig()).exclude("host7/abc", "n7", Reason(at_s=0.0, text="XID 79"))
    before = (stamped / "supervisor" / "nodes.json").read_bytes()
    code, answer = ask(*words(verb, stamped))
    assert (code, answer["error"]) == (65, "SV110")
    assert "is live, but does not answer; nothing was changed" in answer["message"]
    assert (stamped / "supervisor" / "nodes.json").read_bytes() == before


def test_a_person_reads_and_writes_the_list_that_the_run_uses(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "fleet" / "nodes.json"
    keep_rules(folder, IsolateConfig(ledger=str(other), drain="off", quarantine_s=5.0))
    assert isolate_rules(folder).quarantine_s == 5.0
    ask(*words(("node", "isolate"), folder))
    assert other.exists()
    assert not (folder / "supervisor" / "nodes.json").exists()
    (machine,) = ask("node", "list", str(folder))[1]
    assert machine["node"] == "n7"
    out = CliRunner().invoke(main, ["node", "list", str(folder), "--format", "slurm"])
    assert out.stdout == "n7\n"


def test_a_relative_path_means_the_folder_in_which_the_run_was_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep_rules(folder, IsolateConfig(ledger="lists/nodes.json"))
    monkeypatch.chdir("/")
    assert isolate_rules(folder).ledger == str(tmp_path / "lists" / "nodes.json")


RUBBISH = ["", "{", "[]", '{"machines": {"a": 1}}', "\xff\xfe", "[" * 100_000, '{"schema": 9}']


@pytest.mark.parametrize("name", ["nodes.json", "isolate.json", "coordinator.json", "token", "requests.json"])
@pytest.mark.parametrize("text", [*RUBBISH, None], ids=lambda text: "pipe" if text is None else repr(text[:9]))
def test_files_that_are_rubbish_give_a_code_and_no_traceback(folder: Path, name: str, text: str | None) -> None:
    publish(folder)
    path = folder / "supervisor" / name
    path.unlink(missing_ok=True)
    if text is None:
        os.mkfifo(path)
    else:
        path.write_bytes(text.encode("latin-1"))
    for asked in (("node", "list", str(folder)), *(words(verb, folder) for verb in VERBS), ("status", str(folder))):
        code, answer = ask(*asked)
        assert code in (0, 2, 65, 74, 76), asked
        assert code == 0 or answer["error"], asked


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"port": 70_000}, "SV110"),
        ({"port": -1}, "SV110"),
        ({"host": "no host\n"}, "SV110"),
        ({"certificate": "-----BEGIN rubbish"}, "PR104"),
    ],
)
def test_an_address_that_is_none_is_no_traceback(folder: Path, other: dict[str, Any], error: str) -> None:
    publish(folder, **other)
    assert ask(*words(("hold",), folder))[1]["error"] == error


def test_a_certificate_that_is_rubbish_leaves_the_old_address_in_place() -> None:
    async def story() -> None:
        link = Link("https://127.0.0.1:1", bytes(32), "somebody")
        try:
            with pytest.raises(Exception, match="PR104"):
                link.follow("https://127.0.0.1:2", bytes(32), "-----BEGIN rubbish")
            assert link.url == "https://127.0.0.1:1"
        finally:
            await link.close()

    asyncio.run(story())


@pytest.mark.parametrize("reason", ["", "  \n", "x" * 1001])
def test_a_reason_is_one(folder: Path, reason: str) -> None:
    done = CliRunner().invoke(main, ["hold", str(folder), "--reason", reason])
    assert done.exit_code == 2


def test_the_run_may_be_left_out_and_one_node_is_named_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDWATCH_RUN_DIR", str(folder))
    assert ask("node", "isolate", "n7", "--reason", "x")[0] == 0
    assert ask("node", "list")[1][0]["node"] == "n7"
    assert CliRunner().invoke(main, ["node", "release", str(folder), "n7", "n8", "--reason", "x"]).exit_code == 2


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_nothing_is_written_into_a_folder_that_is_no_run(tmp_path: Path, verb: tuple[str, ...]) -> None:
    code, answer = ask(*words(verb, tmp_path))
    assert (code, answer["error"]) == (65, "SV110")
    assert list(tmp_path.iterdir()) == []
