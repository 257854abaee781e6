"""The writer process: it serves, dies with its rank, and its own death is a failed save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from midwatch.checkpoint.format import SaveEvent, WriterClient, newest_verified
from midwatch.checkpoint.jobs import FrameBuffer, encode_frame
from midwatch.testing.crash_writer import MODULE
from midwatch.testing.saves import SmallRun

pytestmark = pytest.mark.procs

NICE = min(os.nice(0) + 10, 19)
"""Of a writer: below its rank, whatever that one runs at."""


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    small = SmallRun(tmp_path / "run", world_size=1)
    small.claim()
    return small


def _finish(client: WriterClient) -> list[SaveEvent]:
    events: list[SaveEvent] = []
    while client.in_flight:
        events += client.poll(10.0)
    return events


def test_saves_one_after_the_other(run: SmallRun) -> None:
    client = WriterClient()
    client.submit(run.job(10, 0))
    client.submit(run.job(20, 0))
    events = _finish(client)
    assert [(event.step, event.state) for event in events] == [
        (step, state) for step in (10, 20) for state in ("persisted", "committed", "verified")
    ]
    assert psutil.Process(client.pid).nice() == NICE
    assert psutil.Process(client.pid).ionice().value == 7
    assert client.close(5.0) == []
    assert not client.is_alive
    assert newest_verified(run.root).step == 20


def test_its_death_is_a_failed_save_and_a_new_one_takes_over(run: SmallRun) -> None:
    client = WriterClient(MODULE, ["--at", "12", "--how", "sigkill"])
    client.submit(run.job(10, 0))
    events = _finish(client)
    assert events[-1].error_code == "CK302"
    assert events[-1].is_final
    assert [event.is_slot_free for event in events].count(True) == 1
    client.close(5.0)
    client = WriterClient()
    client.submit(run.job(20, 0))
    assert _finish(client)[-1].state == "verified"
    os.kill(client.pid, signal.SIGKILL)
    client.submit(run.job(30, 0))
    assert _finish(client)[-1].state in ("verified", "failed")
    client.submit(run.job(40, 0))
    assert _finish(client)[-1].state == "verified"
    client.close(5.0)


def test_a_save_whose_writer_died_unnoticed_is_failed_when_the_next_one_is_handed_over(run: SmallRun) -> None:
    client = WriterClient()
    client.start()
    process = client._process
    process.send_signal(signal.SIGSTOP)  # so that it takes the job and does nothing with it
    client.submit(run.job(10, 0))
    process.kill()
    process.wait(10.0)
    client.submit(run.job(20, 0))  # no poll in between: training was copying
    assert client.in_flight == ("step-00000020-a0001",)
    events = _finish(client)
    assert (events[0].step, events[0].error_code, events[0].is_slot_free) == (10, "CK302", True)
    assert (events[-1].step, events[-1].state) == (20, "verified")
    client.close(5.0)


def test_a_writer_that_cannot_start_is_a_failed_save(run: SmallRun) -> None:
    client = WriterClient("midwatch.no_such_module")
    client.submit(run.job(10, 0))
    assert _finish(client)[-1].error_code == "CK302"
    assert not client.is_alive
    client.close(1.0)


def test_a_full_disk_in_the_writer_process(run: SmallRun) -> None:
    client = WriterClient(MODULE, ["--at", "9", "--how", "ENOSPC", "--sticky"])
    client.submit(run.job(10, 0))
    assert _finish(client)[-1].error_code == "ST101"
    client.close(5.0)


def test_a_stop_signal_does_not_end_it(run: SmallRun) -> None:
    client = WriterClient()
    client.submit(run.job(10, 0))
    _finish(client)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(client.pid, number)
    client.submit(run.job(20, 0))
    assert _finish(client)[-1].state == "verified"
    client.close(5.0)


@pytest.mark.parametrize("is_held_open", [False, True], ids=["stdin-ends", "stdin-held-by-a-child"])
def test_it_never_outlives_its_rank(is_held_open: bool) -> None:
    script = (
        "import subprocess, sys, time\n"
        "from midwatch.checkpoint.format import WriterClient\n"
        "client = WriterClient()\n"
        "client.start()\n"
        "fd = client._process.stdin.fileno()\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[fd], stdout=subprocess.DEVNULL)"
        f" if {is_held_open} else None\n"
        "print(client.pid, child.pid if child else 0, flush=True)\n"
        "time.sleep(60)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        writer_pid, child_pid = map(int, rank.stdout.readline().split())
        writer = psutil.Process(writer_pid)
        while writer.nice() != NICE:  # past its start-up
            time.sleep(0.01)
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    writer.wait(5.0)
    if child_pid:
        os.kill(child_pid, signal.SIGKILL)


def test_a_writer_that_hangs_in_the_kernel_is_a_failed_save(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midwatch.checkpoint.writer.EXIT_TIMEOUT_S", 0.05)
    client = WriterClient()
    client.start()
    process = client._process
    process.send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(process, "kill", lambda: None)
            client.submit(run.job(10, 0))
            assert client.close(0.05)[-1].error_code == "CK302"
    finally:
        process.kill()
        process.wait()


def test_frames_are_cut_wherever_the_stream_breaks() -> None:
    event = SaveEvent(name="step-00000001-a0001", step=1, state="persisted")
    data = encode_frame(event) * 3
    for cut in range(len(data)):
        buffer = FrameBuffer()
        assert len(buffer.feed(data[:cut]) + buffer.feed(data[cut:])) == 3
    with pytest.raises(ValueError, match="frame"):
        FrameBuffer().feed(b"\xff" * 8)


def test_it_does_not_load_torch() -> None:
    code = "import sys, midwatch.checkpoint.persist; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_that_cannot_be_sent_is_not_waited_for(run: SmallRun) -> None:
    client = WriterClient()
    with pytest.raises(UnicodeEncodeError):
        client.submit(msgspec.structs.replace(run.job(10, 0), run="\ud800"))
    assert client.in_flight == ()
    client.close(60.0)
