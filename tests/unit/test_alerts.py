"""Alerts: each event is told once, in words that a rank cannot abuse, and nothing is hurt when that fails."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alert_receivers import Hook, MailServer, Story, alerts

from midwatch.audit.alerts import Alert, Bell, Message, TargetAwayError, delivery, read_state, targets_of
from midwatch.core import ConfigError
from midwatch.storage import ops
from midwatch.testing import FakeClock

RANK = "a0001-r00000"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.close()


@pytest.fixture
def story(tmp_path: Path, clock: FakeClock) -> Iterator[Story]:
    story = Story(tmp_path / "run", clock)
    yield story
    story.close()


def bell_of(story: Story, hook: Hook, clock: FakeClock, **table: Any) -> Bell:
    table.setdefault("to", {"webhook": hook.url()})
    return Bell(story.folder, alerts(story.folder.parent, **table), name="llm", clock=clock)


def titles(hook: Hook) -> list[str]:
    return [post["alert"]["title"] for post in hook.taken()]


# --- what is told --------------------------------------------------------------------------------------------------


def test_a_pause_is_told_with_all_a_person_needs(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    story.pause()
    bell.turn()
    (post,) = hook.taken()
    assert post["severity"] == "critical"
    assert post["subject"] == "[midwatch] llm: the circuit breaker opened"
    text = post["text"]
    assert text.startswith("training is paused: nonfinite at step 40\n")
    assert f"run {story.run}, attempt 1, step 40, rank 0 on node n1, 2026-01-01 00:00:00 UTC" in text
    assert "the run ends at 2026-01-01 01:00:00 UTC" in text
    assert f"Look: midwatch breaker show {story.folder}" in text
    assert "midwatch explain GD101" in text
    bell.turn()
    assert hook.taken() == []


def test_going_on_closes_it_and_ending_does_not(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, min_gap_s=0)
    story.pause()
    story.say(RANK, "breaker.moved", step=40, before="open", after="closed", why="go_on by me: fine")
    bell.turn()
    (post,) = hook.taken()
    assert post["alert"]["title"] == "the circuit breaker closed"
    assert [one["title"] for one in post["earlier"]] == ["the circuit breaker opened"]
    story.pause(80)
    bell.turn()
    story.say(RANK, "breaker.moved", step=80, before="open", after="ended", why="nobody decided within 3600 s")
    story.say(RANK, "breaker.ended", step=80, why="nobody decided within 3600 s")
    story.say("coordinator", "run.finished", exit_code=93, error="GD101", sentence="the breaker ended the run")
    bell.turn()
    assert titles(hook) == ["the circuit breaker opened", "the circuit breaker ended the run"]


def test_numbers_out_of_their_band_are_told_without_a_pause(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    story.say(RANK, "breaker.moved", step=9, before="closed", after="watching", why="an outlier")
    story.say(RANK, "breaker.moved", step=10, before="watching", after="incident", why="spike")
    story.say(RANK, "breaker.moved", step=60, before="incident", after="closed", why="50 steps without an outlier")
    bell.turn()
    assert titles(hook) == ["numbers out of their band"]


def test_faults_are_told_from_the_grade_on_that_is_wanted(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, min_grade="G3", min_gap_s=0)
    story.fault("i1", "G2")
    story.fault("i2", "G3", "hold", summary="a switch is down")
    bell.turn()
    (post,) = hook.taken()
    assert post["alert"]["sentence"] == "a switch is down"
    assert post["alert"]["look"] == f"midwatch incidents show {story.folder} i2"
    assert (post["alert"]["rank"], post["alert"]["node"], post["alert"]["step"]) == (3, "n7", 512)
    assert post["severity"] == "error"


def test_a_hold_begins_and_ends(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, min_gap_s=0)
    story.say("coordinator", "run.held", by="rule", reason="many nodes at once")
    bell.turn()
    story.say("coordinator", "hold.ended", by="probes", reason="three good rounds")
    bell.turn()
    assert titles(hook) == ["the run is held", "the run is no longer held"]


@pytest.mark.parametrize(
    ("exit_code", "error", "told"),
    [
        (0, "", []),
        (75, "SV109", []),
        (1, "SV103", ["the run ended badly"]),
        (75, "SV113", ["the run ended badly"]),
        (93, "SV104", ["the run ended badly"]),
    ],
)
def test_only_a_bad_end_is_told(
    story: Story, hook: Hook, clock: FakeClock, exit_code: int, error: str, told: list[str]
) -> None:
    bell = bell_of(story, hook, clock)
    story.say("coordinator", "run.finished", exit_code=exit_code, error=error, sentence="over")
    bell.turn()
    assert titles(hook) == told


def test_checkpoints_that_are_not_verified_for_long(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, unverified_s=600, min_gap_s=0)
    story.say(RANK, "run.resumed", step=100)
    story.say(RANK, "checkpoint.verified", step=500)
    clock.advance(599)
    bell.turn()
    assert hook.taken() == []
    clock.advance(2)
    bell.turn()
    bell.turn()
    clock.advance(1000)
    bell.turn()
    (post,) = hook.taken()
    assert post["alert"]["sentence"] == (
        "no checkpoint was verified for 10 m 01 s, since that of step 500; training goes on"
    )
    story.say(RANK, "checkpoint.verified", step=1000)
    bell.turn()
    assert titles(hook) == ["a checkpoint was verified again"]


def test_a_run_that_stands_still_on_purpose_lacks_no_checkpoint(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, unverified_s=600, on=["unverified"])
    story.say(RANK, "run.started_fresh")
    story.pause()
    bell.turn()
    clock.advance(3600)
    bell.turn()
    assert hook.taken() == []
    story.say(RANK, "breaker.moved", step=40, before="open", after="closed", why="go_on by me")
    bell.turn()
    clock.advance(599)
    bell.turn()
    assert hook.taken() == [], "the time begins anew"
    clock.advance(2)
    bell.turn()
    assert titles(hook) == ["no checkpoint was verified for too long"]


def test_metrics_that_cannot_be_sent(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, min_gap_s=0)
    story.say("coordinator", "metrics.push_failed", code="MT106", problem="refused", to="http://x")
    story.say("coordinator", "metrics.push_failed", code="MT106", problem="refused", to="http://x")
    bell.turn()
    story.say("coordinator", "metrics.push_recovered", away_s=12.0, to="http://x")
    bell.turn()
    assert titles(hook) == ["metrics cannot be delivered", "metrics are delivered again"]


def test_only_what_was_asked_for_is_told(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, on=["held"])
    story.pause()
    story.fault("i1", "G5")
    story.say("coordinator", "run.held", by="person", reason="maintenance")
    bell.turn()
    assert titles(hook) == ["the run is held"]


# --- once ----------------------------------------------------------------------------------------------------------


def test_history_is_not_told(story: Story, hook: Hook, clock: FakeClock) -> None:
    story.pause()
    story.say(RANK, "breaker.ended", step=40, why="nobody decided")
    bell = bell_of(story, hook, clock)
    bell.turn()
    assert hook.taken() == []


def test_each_event_is_told_once_whoever_tells_it(story: Story, hook: Hook, clock: FakeClock) -> None:
    first = bell_of(story, hook, clock, min_gap_s=0)
    story.fault("i1")
    first.turn()
    # Killed and started again, or taken over by another node, while the old one still lives.
    second = bell_of(story, hook, clock, min_gap_s=0)
    second.turn()
    assert len(hook.taken()) == 1
    for number in range(2, 6):
        story.fault(f"i{number}")
        (second if number % 2 else first).turn()
        (first if number % 2 else second).turn()
    assert [post["alert"]["key"] for post in hook.taken()] == [f"incident/i{number}" for number in range(2, 6)]


def test_what_was_not_told_is_told_by_the_next_process(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    hook.status = 503
    story.pause()
    bell.turn()
    hook.taken()
    hook.status = 200
    clock.advance(3600)
    bell_of(story, hook, clock).turn()
    (post,) = hook.taken()
    assert "This comes 1 h 00 m late." in post["text"]


def test_a_damaged_memory_does_not_tell_everything_again(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell_of(story, hook, clock).turn()
    story.pause()
    (story.folder / "alerts" / "state.json").write_text("{")
    bell = bell_of(story, hook, clock)
    bell.turn()
    assert hook.taken() == []
    story.fault("i9")
    bell.turn()
    assert titles(hook) == ["a fault of grade G2"]


def test_a_thread_tells_the_last_word_without_waiting_for_its_next_look(
    story: Story, hook: Hook, clock: FakeClock
) -> None:
    bell = bell_of(story, hook, clock)
    bell.start()
    story.say("coordinator", "run.finished", exit_code=1, error="SV103", sentence="the budget is spent")
    assert bell.stop(10)
    assert titles(hook) == ["the run ended badly"]


def test_an_end_that_no_ledger_tells_of(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    bell.start()
    bell.ended("launcher:x", "the coordinator keeps dying", "SV112", node="n1")
    assert bell.stop(10)
    (post,) = hook.taken()
    assert post["alert"]["page"] == "SV112"


# --- how often, and what if not --------------------------------------------------------------------------------------


def test_what_comes_soon_after_is_told_in_one_message(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, min_gap_s=60)
    for number in range(8):
        story.fault(f"i{number}", summary=f"fault {number}")
        bell.turn()
        clock.advance(5)
    assert titles(hook) == ["a fault of grade G2"]
    clock.advance(30)
    bell.turn()
    (post,) = hook.taken()
    assert post["subject"].endswith("(and 6 more)")
    assert [one["sentence"] for one in post["earlier"]] == [f"fault {number}" for number in range(1, 7)]
    assert post["alert"]["sentence"] == "fault 7"


def test_what_is_critical_never_waits(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, min_gap_s=3600)
    story.pause()
    bell.turn()
    story.say(RANK, "breaker.ended", step=40, why="stopped by me")
    bell.turn()
    assert titles(hook) == ["the circuit breaker opened", "the circuit breaker ended the run"]


def test_a_receiver_that_is_away_is_asked_ever_more_seldom(
    story: Story, hook: Hook, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    bell = bell_of(story, hook, clock)
    hook.status = 500
    story.pause()
    asked: list[int] = []
    for second in range(64):
        bell.turn()
        if hook.taken():
            asked.append(second)
        clock.advance(1)
    assert asked == [0, 2, 6, 14, 30, 62]
    assert [record.message.count("AL101") for record in caplog.records] == [1], "said once"
    hook.status = 200
    clock.advance(300)
    bell.turn()
    assert titles(hook) == ["the circuit breaker opened"]


def test_the_wish_of_a_receiver_is_kept(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    hook.status, hook.headers = 429, {"Retry-After": "60"}
    story.pause()
    bell.turn()
    clock.advance(59)
    bell.turn()
    assert len(hook.taken()) == 1
    clock.advance(2)
    bell.turn()
    assert len(hook.taken()) == 1


def test_what_a_receiver_does_not_want_is_not_sent_again(
    story: Story, hook: Hook, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    bell = bell_of(story, hook, clock)
    hook.status, hook.answer = 400, b"invalid_payload"
    story.pause()
    bell.turn()
    clock.advance(1000)
    bell.turn()
    assert len(hook.taken()) == 1
    assert "invalid_payload" in caplog.text


def test_a_redirect_is_no_delivery(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    hook.status, hook.headers = 302, {"Location": hook.url("/login")}
    story.pause()
    bell.turn()
    assert len(hook.taken()) == 1, "a POST that becomes a GET elsewhere would look delivered"
    assert read_state(story.folder).waiting


def test_one_receiver_that_is_down_does_not_silence_the_others(
    story: Story, hook: Hook, clock: FakeClock, tmp_path: Path
) -> None:
    (tmp_path / "dead").write_text("http://127.0.0.1:9/services/T0/B0/s3cr3t")
    (tmp_path / "live").write_text(hook.url())
    bell = bell_of(story, hook, clock, to={"webhook": [f"file:{tmp_path}/dead", f"file:{tmp_path}/live"]})
    story.pause()
    bell.turn()
    assert len(hook.taken()) == 1
    assert read_state(story.folder).waiting[0].left == ["webhook:1"]


def test_too_many_are_counted_and_not_kept(
    story: Story, hook: Hook, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "MOST_WAITING", 5)
    bell = bell_of(story, hook, clock)
    hook.status = 503
    for number in range(12):
        story.fault(f"i{number}")
    bell.turn()
    assert len(read_state(story.folder).waiting) == 5
    hook.taken()
    hook.status = 200
    clock.advance(10)
    bell.turn()
    (post,) = hook.taken()
    assert "7 alerts before these were dropped" in post["text"]


def test_nobody_is_told_after_a_day(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    hook.status = 503
    story.pause()
    bell.turn()
    clock.advance(25 * 3600)
    hook.taken()
    hook.status = 200
    bell.turn()
    assert hook.taken() == []


def test_a_clock_that_is_set_back_does_not_silence(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, min_gap_s=60)
    story.fault("i1")
    bell.turn()
    clock.jump_wall(-86_400)
    story.fault("i2")
    bell.turn()
    assert len(hook.taken()) == 2


def test_a_run_folder_that_is_gone_is_not_made_again(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock)
    away = story.folder.rename(story.folder.with_name("away"))
    bell.turn()
    assert not story.folder.exists()
    away.rename(story.folder)
    story.pause()
    bell.turn()
    assert len(hook.taken()) == 1


# --- secrets and hostile text ------------------------------------------------------------------------------------


def test_no_secret_is_ever_shown(
    story: Story, hook: Hook, clock: FakeClock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    secret = "T0SECRETB0"
    hook.status, hook.answer = 403, f"no hook at {hook.url('/' + secret)}".encode()
    config = alerts(
        tmp_path,
        to={"webhook": hook.url(f"/{secret}"), "slack": f"http://127.0.0.1:9/{secret}", "pagerduty": f"{secret}-x"},
    )
    bell = Bell(story.folder, config, clock=clock, say=said.append)
    story.pause()
    bell.turn(is_ending=True)
    written = "".join(path.read_text() for path in story.folder.rglob("*") if path.is_file())
    assert secret not in written + caplog.text + "".join(said)
    assert "webhook:1" in "".join(said)


def test_an_address_in_the_configuration_is_refused_and_not_quoted() -> None:
    from midwatch.config import load_config

    for value in (["https://hooks.example/T0/s3cr3t"], "https://hooks.example/T0/s3cr3t"):
        with pytest.raises(ConfigError) as caught:
            load_config({"alerts": {"to": {"slack": value}}})
        assert "s3cr3t" not in str(caught.value) + json.dumps(caught.value.as_dict())


def test_what_a_rank_wrote_calls_nobody_and_moves_no_cursor(story: Story, hook: Hook, clock: FakeClock) -> None:
    bell = bell_of(story, hook, clock, to={"slack": hook.url()})
    story.fault("i1", summary="``` <!channel> @all <https://evil|click> \x1b[31m\nmore & token=hunter2hunter2")
    bell.turn()
    (post,) = hook.taken()
    assert post["text"].count("```") == 2
    for harm in ("<!channel>", "@all", "<https", "\x1b", "hunter2hunter2"):
        assert harm not in post["text"]
    assert "&lt;!channel&gt;" in post["text"]


# --- the other targets -----------------------------------------------------------------------------------------------


def test_pagerduty_gets_the_end_of_what_it_was_told(story: Story, hook: Hook, clock: FakeClock, tmp_path: Path) -> None:
    to = {"pagerduty": "R0UTINGKEY", "pagerduty_url": hook.url("/v2/enqueue")}
    bell = bell_of(story, hook, clock, to=to)
    story.fault("i1")
    clock.advance(1)
    story.pause()
    bell.turn()
    story.say("coordinator", "incident.closed", incident="i1", how="progress")
    clock.advance(1)
    story.say(RANK, "breaker.moved", step=40, before="open", after="closed", why="go_on by me")
    bell.turn()
    fault, opened, healed, closed = hook.taken()
    assert fault["routing_key"] == "R0UTINGKEY"
    assert opened["payload"]["severity"] == "critical"
    assert opened["payload"]["summary"].startswith("[midwatch] llm: the circuit breaker opened: training is paused")
    assert opened["payload"]["source"] == "n1"
    assert [event["event_action"] for event in (fault, opened, healed, closed)] == ["trigger"] * 2 + ["resolve"] * 2
    assert (fault["dedup_key"], opened["dedup_key"]) == (healed["dedup_key"], closed["dedup_key"])
    assert "payload" not in closed


def test_mail(story: Story, clock: FakeClock, tmp_path: Path) -> None:
    server = MailServer(refuse="gone@")
    try:
        config = alerts(
            tmp_path,
            to={"email": ["a@example.org", "gone@example.org"]},
            smtp={"host": "127.0.0.1", "port": server.port, "security": "none", "sender": "midwatch@example.org"},
        )
        bell = Bell(story.folder, config, name="llm\nBcc: everybody@example.org", clock=clock)
        story.pause()
        bell.turn()
        assert read_state(story.folder).waiting == []
        (letter,) = server.letters
    finally:
        server.close()
    assert "\nBcc:" not in letter
    assert "training is paused: nonfinite at step 40" in letter
    assert "Auto-Submitted: auto-generated" in letter


def test_a_program_gets_the_alert_and_its_exit_code_counts(story: Story, clock: FakeClock, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(
        "import sys, pathlib\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "tries = out.with_suffix('.tries')\n"
        "tries.write_text(tries.read_text() + 'x' if tries.exists() else 'x')\n"
        "if len(tries.read_text()) == 1: sys.exit('nobody there')\n"
        "out.write_text(sys.stdin.read())\n"
    )
    out = tmp_path / "alert.json"
    config = alerts(tmp_path, to={"command": [sys.executable, str(script), str(out)]})
    bell = Bell(story.folder, config, clock=clock)
    story.pause()
    bell.turn()
    assert not out.exists()
    clock.advance(10)
    bell.turn()
    assert json.loads(out.read_text())["alert"]["title"] == "the circuit breaker opened"
    assert read_state(story.folder).waiting == []


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "still-here"
    child = f"import time, pathlib; time.sleep(1.0); pathlib.Path({str(mark)!r}).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    (target,) = targets_of(alerts(tmp_path, to={"command": [sys.executable, "-c", parent]}))
    message = Message(alert=Alert(id="x", kind="test", severity="info", key="x", title="x", sentence="x"))
    with pytest.raises(TargetAwayError, match=r"did not end within 0\.4 s"):
        target.send(message, 0.4)
    (again,) = targets_of(alerts(tmp_path, to={"command": [sys.executable, "-c", "import time; time.sleep(1.0)"]}))
    again.send(message, 10.0)
    assert not mark.exists(), "what it had started went with it"


def test_a_secret_that_is_not_there_is_told_and_looked_for_again(
    story: Story, hook: Hook, clock: FakeClock, tmp_path: Path
) -> None:
    said: list[str] = []
    config = alerts(tmp_path, to={"webhook": [f"file:{tmp_path}/later"]})
    bell = Bell(story.folder, config, clock=clock, say=said.append)
    assert "AL102" in said[0]
    assert f"{tmp_path}/later" in said[0]
    story.pause()
    bell.turn()
    (tmp_path / "later").write_text(hook.url())
    clock.advance(10)
    bell.turn()
    assert len(hook.taken()) == 1


@pytest.mark.skipif(importlib.util.find_spec("apprise") is not None, reason="apprise is installed")
def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    (target,) = targets_of(alerts(tmp_path, to={"apprise": "mailto://x"}))
    with pytest.raises(ConfigError, match="CF107"):
        target.check()


def test_a_disk_that_takes_nothing_more_is_told_of(
    story: Story, hook: Hook, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bell = bell_of(story, hook, clock, min_gap_s=0)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ops, "write_file", full)
    story.pause()
    bell.turn()
    story.fault("i1")
    bell.turn()
    bell.turn()
    assert titles(hook) == ["the circuit breaker opened", "a fault of grade G2"]
    assert caplog.text.count("No space left") == 1


def test_a_pause_that_outlives_its_attempt_is_the_same_one(story: Story, hook: Hook, clock: FakeClock) -> None:
    to = {"pagerduty": "R0UTINGKEY", "pagerduty_url": hook.url("/v2/enqueue")}
    bell = bell_of(story, hook, clock, to=to)
    story.pause()
    bell.turn()
    story.say("a0002-r00000", "breaker.paused", step=40, kind="nonfinite", why="still paused", until_ns=0)
    bell.turn()
    opened, still = hook.taken()
    assert opened["dedup_key"] == still["dedup_key"]
    assert "the circuit breaker is open:" in still["payload"]["summary"]
