"""``midwatch alerts``: what people and programs are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alert_receivers import Hook, Story, alerts
from click.testing import CliRunner, Result

from midwatch.audit.alerts import Bell
from midwatch.cli.main import main
from midwatch.testing import FakeClock

pytestmark = pytest.mark.usefixtures("bare_folder")


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["alerts", *(str(word) for word in words)])


def answer(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.close()


def config_file(folder: Path, **to: Any) -> Path:
    path = folder / "midwatch.json"
    path.write_text(json.dumps({"run": {"name": "llm"}, "alerts": {"to": to}}))
    return path


def test_a_test_says_what_each_target_answered(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", hook.url("/T0/s3cr3t"))
    path = config_file(tmp_path, webhook=["env:HOOK"], slack=["env:NOT_SET"])
    code, document = answer("test", "--config", path)
    assert code == 78
    slack, webhook = document["targets"]
    assert (webhook["is_fine"], webhook["answer"], webhook["where"]) == (True, "200 ok", "127.0.0.1")
    assert not slack["is_fine"]
    assert "CF102" in slack["answer"]
    assert "s3cr3t" not in call("test", "--config", path).output
    assert hook.taken()[0]["subject"] == "[midwatch] llm: a test"


def test_a_dry_run_sends_nothing(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", hook.url())
    path = config_file(tmp_path, webhook=["env:HOOK"])
    code, document = answer("test", "--config", path, "--dry-run")
    assert (code, document["dry_run"], hook.taken()) == (0, True, [])
    assert "would be told" in call("test", "--config", path, "--dry-run").output


def test_a_target_that_is_away(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.status = 404
    monkeypatch.setenv("HOOK", hook.url())
    code, document = answer("test", "--config", config_file(tmp_path, webhook=["env:HOOK"]))
    assert code == 74
    assert "it answered 404" in document["targets"][0]["answer"]


def test_nobody_to_tell_is_an_error(tmp_path: Path) -> None:
    code, document = answer("test", "--config", config_file(tmp_path))
    assert (code, document["error"]) == (78, "AL102")


def test_pagerduty_keeps_no_incident_of_a_test(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "R0UTINGKEY")
    path = config_file(tmp_path, pagerduty=["env:KEY"], pagerduty_url=hook.url("/v2/enqueue"))
    assert answer("test", "--config", path)[0] == 0
    assert [post["event_action"] for post in hook.taken()] == ["trigger", "resolve"]


def test_show_tells_who_was_told_and_who_was_not(tmp_path: Path, hook: Hook) -> None:
    clock = FakeClock()
    story = Story(tmp_path / "run", clock)
    bell = Bell(story.folder, alerts(tmp_path, to={"webhook": hook.url()}), clock=clock)
    story.pause()
    bell.turn()
    hook.status = 503
    story.fault("i1")
    bell.turn()
    story.close()
    code, document = answer("show", story.folder)
    assert code == 0
    assert [one["title"] for one in document["sent"]] == ["the circuit breaker opened"]
    assert [one["left"] for one in document["waiting"]] == [["webhook:1"]]
    output = call("show", story.folder).output
    assert "waits for webhook:1: a fault of grade G2" in output
