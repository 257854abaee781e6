"""The reading verbs: ledger, status, doctor, explain, config; and what every one of them must keep to."""

from __future__ import annotations

import errno
import json
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from midwatch.audit import Ledger, ensure_run
from midwatch.cli import _checks
from midwatch.cli.main import VERBS, main
from midwatch.core import CODES, ProtocolError
from midwatch.storage import ops

READING = ("ckpt", "config", "doctor", "explain", "ledger", "status")

pytestmark = pytest.mark.usefixtures("bare_folder")


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def answer(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    ensure_run(folder, name="mine")
    with Ledger(folder / "ledger" / "coordinator.jsonl", run="r1") as ledger:
        ledger.record("run.started", nnodes=1)
        ledger.record("fault.judged", cause="i1", node="n1", summary="rank 3 hangs")
        ledger.record("run.finished", cause="i2", exit_code=0, sentence="all steps done")
    with Ledger(folder / "ledger" / "a0002-r00000.jsonl", run="r1", attempt=2, rank=0) as ledger:
        ledger.record("checkpoint.verified", step=500, name="step-00000500-a0002")
    return folder


# --- ledger ---------------------------------------------------------------------------------------------------------


def test_ledger_show_is_one_event_a_line(run: Path) -> None:
    result = call("ledger", "show", run)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 4
    assert "fault.judged" in lines[1]
    assert 'summary="rank 3 hangs"' in lines[1]
    assert "a0002" in lines[3]
    assert "step=500" in lines[3]


@pytest.mark.parametrize(
    ("words", "events"),
    [
        (("--event", "run.*"), ["run.started", "run.finished"]),
        (("--event", "run.started", "--event", "fault.*"), ["run.started", "fault.judged"]),
        (("--attempt", "2"), ["checkpoint.verified"]),
        (("--attempt", "0"), ["run.started", "fault.judged", "run.finished"]),
        (("--tail", "1"), ["checkpoint.verified"]),
        (("--cause", "i1"), ["fault.judged"]),
        (("--event", "nothing.*"), []),
    ],
)
def test_ledger_show_filters(run: Path, words: tuple[str, ...], events: list[str]) -> None:
    code, document = answer("ledger", "show", run, *words)
    assert code == 0
    assert [line["event"] for line in document["lines"]] == events


def test_ledger_show_of_one_file(run: Path) -> None:
    assert len(answer("ledger", "show", run / "ledger" / "a0002-r00000.jsonl")[1]["lines"]) == 1


def test_hostile_events_do_not_reach_the_terminal(run: Path) -> None:
    with Ledger(run / "ledger" / "x.jsonl", run="r1", node="n\x1b[2J") as ledger:
        ledger.record("log.seen", line="\x1b]0;owned\x07 [red]x[/red]\nsecond")
    output = call("ledger", "show", run).output
    assert "\x1b" not in output
    assert "\x07" not in output
    assert len(output.splitlines()) == 5


def test_ledger_verify_says_whole_or_names_the_line(run: Path) -> None:
    result = call("ledger", "verify", run)
    assert result.exit_code == 0
    assert "the record is whole" in result.output
    path = run / "ledger" / "coordinator.jsonl"
    path.write_bytes(path.read_bytes().replace(b"rank 3", b"rank 4"))
    result = call("ledger", "verify", run)
    assert result.exit_code == 65
    assert "coordinator.jsonl line 2" in result.output
    code, document = answer("ledger", "verify", run)
    assert code == 65
    assert not document["ok"]
    assert document["problems"][0]["line"] == 2
    assert call("ledger", "verify", path).exit_code == 65
    assert call("ledger", "verify", run / "ledger" / "a0002-r00000.jsonl").exit_code == 0


def test_ledger_of_a_folder_without_one(tmp_path: Path) -> None:
    for verb in ("show", "verify"):
        code, document = answer("ledger", verb, tmp_path)
        assert (code, document["error"]) == (65, "LG103")


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_of_a_run_that_is_over(run: Path) -> None:
    code, document = answer("status", run)
    assert code == 0
    assert document["live"] is False
    assert document["name"] == "mine"
    assert document["ended"]["sentence"] == "all steps done"
    result = call("status", run)
    assert "not running" in result.output
    assert "all steps done" in result.output


def test_status_when_the_coordinator_is_dead(run: Path) -> None:
    (run / "supervisor").mkdir()
    endpoint = {"host": "127.0.0.1", "port": 1, "pid": 1, "attempt": 1, "hostname": "h", "session": "s", "run": "r1"}
    (run / "supervisor" / "coordinator.json").write_text(json.dumps(endpoint))
    token = run / "supervisor" / "token"
    token.write_text("ab" * 32)
    token.chmod(0o600)
    code, document = answer("status", run)
    assert code == 0
    assert document["live"] is False
    assert "no live coordinator" in document["remark"]


def test_status_of_a_live_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from midwatch.supervise import joining

    live = {"state": "training", "attempt": 3, "step": 7, "sentences": ["attempt 3 trains"], "agents": [{"node": "a"}]}
    live |= {"nodes_wanted": 1, "restarts_used": 2, "max_restarts": 10}
    monkeypatch.setattr(joining, "fetch_status", lambda folder: live)
    (run / "supervisor").mkdir()
    (run / "supervisor" / "coordinator.json").touch()
    code, document = answer("status", run)
    assert code == 0
    assert document["live"] is True
    assert document["coordinator"] == live
    output = call("status", run).output
    assert "training" in output
    assert "attempt 3 trains" in output
    assert "2 of 10" in output


def test_status_of_a_run_that_another_answers_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from midwatch.supervise import joining

    def refuse(folder: Path) -> None:
        raise ProtocolError("PR101", "not signed with our token")

    monkeypatch.setattr(joining, "fetch_status", refuse)
    (run / "supervisor").mkdir()
    (run / "supervisor" / "coordinator.json").touch()
    code, document = answer("status", run)
    assert (code, document["error"]) == (76, "PR101")


def test_status_shows_incidents_and_survives_damaged_ones(run: Path) -> None:
    for name, text in (("i1", json.dumps({"incident": "i1", "summary": "\x1b[1mrank 3 hangs"})), ("i2", "{")):
        (run / "incidents" / name).mkdir(parents=True)
        (run / "incidents" / name / "verdict.json").write_text(text)
    assert len(answer("status", run)[1]["incidents"]) == 1
    assert "\x1b" not in call("status", run).output


def test_status_of_no_run(tmp_path: Path) -> None:
    assert answer("status", tmp_path)[1]["error"] == "SV110"
    assert answer("status", tmp_path / "none")[0] == 65
    assert answer("status")[0] == 65


def test_without_a_path_the_configured_run_is_meant(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDWATCH_RUN_DIR", str(run))
    assert answer("status")[1]["run_dir"] == str(run)
    assert answer("ledger", "show")[0] == 0


# --- explain --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_explained(code: str) -> None:
    result = call("explain", code)
    assert result.exit_code == 0
    assert result.output.startswith(f"# {code}: {CODES[code].title}")


def test_explain_is_not_fussy_and_suggests() -> None:
    assert call("explain", "[ck104]").exit_code == 0
    result = call("explain", "CK140")
    assert result.exit_code == 2
    assert "did you mean CK401, CK110" in result.stderr
    assert "CK202" in call("explain", "CK999").stderr
    assert call("explain", "../../etc/passwd").exit_code == 2


def test_explain_lists_all_codes() -> None:
    assert set(answer("explain")[1]) == set(CODES)
    assert "CK104" in call("explain").output
    assert answer("explain", "CK104")[1]["exit_code"] == 65


def test_explain_falls_back_to_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from midwatch.cli import explain

    monkeypatch.setattr(explain, "_SOURCE", tmp_path)
    monkeypatch.setattr(explain, "files", lambda package: tmp_path)
    assert CODES["CK104"].hint in call("explain", "CK104").output


# --- config ---------------------------------------------------------------------------------------------------------


def test_config_show_tells_values_and_origins(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(
        "[checkpoint]\ninterval = 7\n[train]\napi_key = 'planted'\nname = '[red]x[/red]'\n"
    )
    code, document = answer("config", "show", "m.toml", "--set", "run.name=x")
    assert code == 0
    assert document["values"]["checkpoint.interval"] == 7
    assert document["origins"]["checkpoint.interval"] == {"kind": "file", "where": "m.toml:2"}
    assert document["origins"]["run.name"]["kind"] == "override"
    assert document["paths"]["run_dir"] == str(tmp_path / "midwatch-run")
    output = call("config", "show", "m.toml", "--origin").output
    assert "planted" not in output
    assert "m.toml:2" in output
    assert "[red]x[/red]" in output
    assert "checkpoint.interval = 7" in call("config", "show", "m.toml").output


def test_config_show_tells_all_mistakes(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[checkpoint]\ninterval = 0\nkeep = 1\n")
    result = call("config", "show", "m.toml")
    assert result.exit_code == 78
    assert "must be >= 1" in result.stderr
    assert "did you mean checkpoint.keep_last" in result.stderr
    assert result.stdout == ""
    code, document = answer("config", "show", "none.toml")
    assert (code, document["error"]) == (78, "CF104")


# --- doctor ---------------------------------------------------------------------------------------------------------


def findings(*words: object) -> tuple[int, dict[str, dict[str, str]]]:
    code, document = answer("doctor", *words)
    return code, {finding["check"]: finding for finding in document["findings"]}


@pytest.fixture(autouse=True)
def _no_py_spy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "doctor" in request.node.name and "py_spy" not in request.node.name:
        finding = _checks.Finding(check="py-spy", state="ok", found="not asked")
        monkeypatch.setattr(_checks, "check_py_spy", lambda: finding)


def test_doctor_finds_all_well_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, found = findings(tmp_path / "deep" / "run")
    assert code == 0
    assert {finding["state"] for finding in found.values()} <= {"ok", "warning"}
    assert list(tmp_path.iterdir()) == []


def test_doctor_misses_disk_space(tmp_path: Path) -> None:
    code, found = findings(tmp_path, "--model-params", "1e15")
    assert code == 1
    assert found["disk space"]["state"] == "problem"
    assert "keep_last" in found["disk space"]["todo"]
    assert found["shared memory"]["state"] == "warning"
    assert "not ready" in call("doctor", tmp_path, "--model-params", "1e15").output


def test_doctor_misses_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "SHM", tmp_path / "none")
    assert findings(tmp_path)[1]["shared memory"]["state"] == "problem"


def test_doctor_meets_a_disk_that_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    code, found = findings(tmp_path)
    assert code == 1
    assert "Input/output error" in found["run folder"]["found"]


def test_doctor_meets_a_full_or_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(ops, "mkdir", refuse)
    assert findings(tmp_path)[1]["run folder"]["state"] == "problem"


def test_doctor_looks_at_another_checkpoint_folder(tmp_path: Path) -> None:
    _, found = findings(tmp_path / "run", "--set", f"checkpoint.dir={tmp_path / 'shared'}")
    assert "checkpoint folder" in found


def test_doctor_sees_a_clock_that_was_set_back(tmp_path: Path) -> None:
    class Future:
        def wall_ns(self) -> int:
            return 4_000_000_000 * 10**9

        def monotonic_ns(self) -> int:
            return 0

    with Ledger(tmp_path / "ledger" / "coordinator.jsonl", run="r", clock=Future()) as ledger:
        ledger.record("run.started")
    assert findings(tmp_path)[1]["clock"]["state"] == "warning"


def test_doctor_sees_a_file_server_with_another_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Stat = namedtuple("Stat", "st_mtime")
    real = Path.stat

    def ahead(path: Path, **kwargs: Any) -> Any:
        return Stat(real(path).st_mtime + 60) if path.name.startswith(".midwatch-doctor") else real(path, **kwargs)

    monkeypatch.setattr(Path, "stat", ahead)
    assert "60 s behind the file server" in _checks.check_clock(tmp_path).found


@pytest.mark.procs
def test_doctor_tries_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _checks.check_py_spy().state in ("ok", "warning")
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Permission Denied' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr("midwatch.supervise.sample.find_py_spy", lambda: str(refusing))
    finding = _checks.check_py_spy()
    assert finding.state == "warning"
    assert "Permission Denied" in finding.found
    monkeypatch.setattr("midwatch.supervise.sample.find_py_spy", lambda: None)
    assert _checks.check_py_spy().state == "warning"


def test_doctor_without_torch_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise _checks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_checks.metadata, "version", missing)
    assert _checks.check_torch().state == "warning"
    monkeypatch.setattr(_checks.metadata, "version", lambda name: "2.1.0+cu118")
    assert _checks.check_torch().state == "problem"
    monkeypatch.setattr(_checks.metadata, "version", lambda name: "2.13.0a0+git123")
    assert _checks.check_torch().state == "ok"


# --- what all keep to -----------------------------------------------------------------------------------------------


def leaves(name: str) -> list[list[str]]:
    command = main.commands[name]
    inner = getattr(command, "commands", None)
    return [[name, verb] for verb in inner] if inner else [[name]]


ALL = [words for verb in READING for words in leaves(verb)]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_states_exit_codes_json_and_an_example(words: list[str]) -> None:
    result = call(*words, "--help")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "Exit codes: 0" in text
    assert "--json" in text
    assert f"midwatch {' '.join(words)}" in text


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_is_a_command_with_a_line(verb: str) -> None:
    assert isinstance(main.commands[verb], click.Command)
    assert f"  {verb} " in call("--help").output


def test_exit_codes_of_refusals(tmp_path: Path, run: Path) -> None:
    table = {
        ("ckpt", "ls", "none"): 65,
        ("ckpt", "verify", "none"): 65,
        ("ckpt", "show", run): 65,
        ("ckpt", "why-not", run, "7"): 65,
        ("ckpt", "nothing"): 2,
        ("ckpt", "ls", "--nothing"): 2,
        ("ledger", "show", "none"): 65,
        ("ledger", "show", run, "--tail", "0"): 2,
        ("status", "none"): 65,
        ("explain", "XX999"): 2,
        ("config", "show", "none.toml"): 78,
        ("config", "show", "--set", "a"): 78,
        ("doctor", "--config", "none.toml"): 78,
        ("doctor", "--model-params", "0"): 2,
        ("nothing",): 2,
    }
    assert {words: call(*words).exit_code for words in table} == table


@pytest.mark.parametrize("words", [("ckpt", "ls", "none"), ("status", "none"), ("config", "show", "none.toml")])
def test_an_error_in_json_is_one_document_on_stdout(words: tuple[str, ...]) -> None:
    result = call(*words, "--json")
    assert set(json.loads(result.stdout)) == {"error", "title", "message", "hint", "context"}
    assert "Traceback" not in result.stderr


def test_a_file_that_cannot_be_read_is_no_traceback(run: Path) -> None:
    (run / "ledger" / "a0003-r00000.jsonl").mkdir()
    code, document = answer("ledger", "show", run)
    assert (code, document["error"]) == (74, "ST103")
    assert "a0003-r00000.jsonl" in document["message"]
    result = call("ledger", "verify", run)
    assert isinstance(result.exception, SystemExit)
