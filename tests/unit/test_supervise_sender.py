"""The process that sends a live run's metrics: what it tells, what it does at the end, when it goes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from metrics_jobs import write_journal

from midwatch.audit import read_ledger
from midwatch.audit.exporters import Outgoing, PushTrouble, SinkAwayError
from midwatch.config import PushConfig
from midwatch.supervise.bystander import Ear
from midwatch.supervise.sender import Sender
from midwatch.supervise.specs import SenderSpec


class Receiver:
    """Takes everything while it is there."""

    name = "test:receiver"

    def __init__(self) -> None:
        self.is_away = False
        self.got: list[tuple[int, int]] = []

    def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
        if self.is_away:
            raise SinkAwayError("nobody there")
        self.got += [(record.attempt, record.step) for record in records]

    def close(self) -> None:
        """Nothing is held."""


class Bench:
    """A sender with its launcher's end of the pipe."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.receiver = Receiver()
        self.said: list[str] = []
        read, self._write = os.pipe()
        self.ear = Ear(read)
        self._read = read

    def sender(self, *, drain_s: float = 0.3) -> Sender:
        push = PushConfig(url="http://unused", every_s=0.01, drain_s=drain_s)
        spec = SenderSpec(run_dir=str(self.run), run="r1", node="n0", push=push)
        return Sender(spec, self.receiver, lambda sentence, level: self.said.append(sentence), PushTrouble(0.0))

    def tell(self, *words: object) -> None:
        os.write(self._write, msgspec.json.encode(words) + b"\n")

    def hang_up(self) -> None:
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def events(self) -> list[tuple[str, dict[str, object]]]:
        return [(line.event, line.data) for line in read_ledger(self.run / "ledger" / "sender.jsonl")]

    def close(self) -> None:
        self.hang_up()
        os.close(self._read)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_what_is_there_at_the_end_is_sent(bench: Bench) -> None:
    write_journal(bench.run, 1, range(20), start=0)
    write_journal(bench.run, 2, range(10, 30), start=10)
    bench.tell("finish", {})
    bench.sender().work(bench.ear)
    assert bench.receiver.got == [*((1, step) for step in range(20)), *((2, step) for step in range(10, 30))]
    assert bench.said == []
    assert not (bench.run / "ledger").exists(), "nothing to tell"


def test_what_cannot_be_sent_at_the_end_is_told_in_time_and_sent_by_the_next(bench: Bench) -> None:
    write_journal(bench.run, 1, range(20), start=0)
    bench.receiver.is_away = True
    bench.tell("finish", {})
    began = time.monotonic()
    bench.sender().work(bench.ear)
    assert time.monotonic() - began < 5.0
    assert "[MT106]" in bench.said[0]
    assert "midwatch metrics push" in bench.said[1]
    (failed, about), (left, rest) = bench.events()
    assert (failed, left) == ("metrics.push_failed", "metrics.push_left")
    assert (about["code"], about["to"], about["problem"]) == ("MT106", "test:receiver", "nobody there")
    assert rest["behind_bytes"] == (bench.run / "metrics" / "a0001.jsonl").stat().st_size
    bench.receiver.is_away = False
    bench.tell("finish", {})
    bench.sender().work(bench.ear)
    assert bench.receiver.got == [(1, step) for step in range(20)]


def test_a_receiver_that_comes_back_is_told_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write_journal(bench.run, 1, range(5), start=0)
    bench.receiver.is_away = True
    sender, turns = bench.sender(), 0

    def pause(timeout_s: float) -> tuple[str, dict[str, object]] | None:
        nonlocal turns
        turns += 1
        bench.receiver.is_away = turns < 5
        if bench.receiver.got:
            return ("finish", {})
        sender._pusher.hurry()
        return None

    monkeypatch.setattr(bench.ear, "word", pause)
    sender.work(bench.ear)
    assert [event for event, _ in bench.events()] == ["metrics.push_failed", "metrics.push_recovered"]
    assert len(bench.said) == 2
    assert bench.receiver.got == [(1, step) for step in range(5)]


def test_it_goes_when_its_launcher_is_gone(bench: Bench) -> None:
    bench.hang_up()
    bench.sender().work(bench.ear)


def test_a_ledger_that_cannot_be_written_stops_nothing(bench: Bench) -> None:
    write_journal(bench.run, 1, range(5), start=0)
    (bench.run / "ledger").write_text("in the way")
    bench.receiver.is_away = True
    bench.tell("finish", {})
    bench.sender(drain_s=0.0).work(bench.ear)
    assert len(bench.said) == 2


# --- hearing --------------------------------------------------------------------------------------------------------


def test_lines_and_words_are_heard_whole_however_they_come(bench: Bench) -> None:
    os.write(bench._write, b'{"a": 1}\n["fin')
    assert bench.ear.line() == b'{"a": 1}'
    assert bench.ear.word(0.01) is None, "half a word"
    os.write(bench._write, b'ish", {}]\nnonsense\n["host", {"is_host": true}]\n')
    assert bench.ear.word(1.0) == ("finish", {})
    assert bench.ear.word(1.0) is None, "no word of ours"
    assert bench.ear.word(1.0) == ("host", {"is_host": True})
    began = time.monotonic()
    bench.hang_up()
    assert bench.ear.word(30.0) is None
    assert time.monotonic() - began < 5.0
    assert bench.ear.is_closed
    assert bench.ear.line() == b""
