"""What goes wrong with a heartbeat in shared memory: torn reads, foreign files, wrong ranks, nested phases."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midwatch.core import StorageError
from midwatch.pulse import Flag, NullPulse, PulseReader, PulseWriter, SlotFile, writer_from_env
from midwatch.pulse.layout import HEAD, HEAD_AT, SLOT_BYTES


@pytest.fixture
def slots(tmp_path: Path) -> SlotFile:
    return SlotFile.create(tmp_path / "midwatch-t-a0001", 2, attempt=1)


def test_a_slot_nobody_attached_to_is_not_attached(slots: SlotFile) -> None:
    slot = PulseReader(slots.path).read(1)
    assert not slot.is_attached
    assert slot.step is None
    assert slot.verified_step is None


def test_a_beat_arrives_with_step_and_age(slots: SlotFile) -> None:
    writer, reader = PulseWriter(slots.path, 1), PulseReader(slots.path)
    writer.begin(4242, 7)
    assert (reader.read(1).pid, reader.read(1).attempt, reader.read(1).state) == (4242, 7, "init")
    writer.beat(10)
    writer.beat(11)
    slot = reader.read(1)
    assert (slot.step, slot.beats, slot.steps_done, slot.state, slot.phase) == (11, 2, 1, "running", "step")
    assert 0 <= slot.phase_age_s(time.monotonic_ns()) < 60
    assert not reader.read(0).is_attached, "the neighbour's slot stays untouched"
    writer.finished()
    assert (reader.read(1).steps_done, reader.read(1).is_finished) == (2, True)


def test_step_zero_is_a_step_and_a_fresh_start_is_a_resume_report(slots: SlotFile) -> None:
    writer, reader = PulseWriter(slots.path, 0), PulseReader(slots.path)
    writer.begin(1, 1)
    assert not reader.read(0).has_resumed
    writer.resumed(None, "", "00ff00ff00ff00ff")
    slot = reader.read(0)
    assert (slot.has_resumed, slot.resumed_step, slot.digest, slot.config_hash) == (True, None, "", "00ff00ff00ff00ff")
    writer.resumed(0, "abcdef0123456789ffff", "00ff00ff00ff00ff")
    assert (reader.read(0).resumed_step, reader.read(0).digest) == (0, "abcdef0123456789")
    writer.beat(0)
    writer.checkpoint_verified(0)
    assert (reader.read(0).step, reader.read(0).verified_step) == (0, 0)


def test_flags_reach_the_rank_and_only_that_rank(slots: SlotFile) -> None:
    first, second, reader = PulseWriter(slots.path, 0), PulseWriter(slots.path, 1), PulseReader(slots.path)
    reader.set_flag(0, Flag.GO)
    reader.set_flag(0, Flag.STOP)
    first.beat(1)
    assert first.flags() == Flag.GO | Flag.STOP
    assert second.flags() == Flag(0)
    reader.clear_flag(0, Flag.STOP)
    assert first.flags() == Flag.GO
    assert reader.read(0).flags == Flag.GO


def test_nested_phases_report_the_outermost_long_one(slots: SlotFile) -> None:
    writer, reader = PulseWriter(slots.path, 0), PulseReader(slots.path)
    writer.begin(1, 1)
    assert reader.read(0).phase == "init"
    writer.beat(0)
    with writer.phase("forward_backward"):
        with writer.phase("collective"):
            assert reader.read(0).phase == "collective"
        with writer.phase("eval"):
            with writer.phase("data_wait"):
                assert reader.read(0).phase == "eval"
            with writer.phase("custom:bleu"):
                assert reader.read(0).phase == "eval"
        assert reader.read(0).phase == "forward_backward"
    assert reader.read(0).phase == "step"
    with writer.phase("bleu"):
        assert reader.read(0).phase == "custom:bleu"


def test_time_in_long_phases_is_counted_once_and_leaving_one_is_progress(slots: SlotFile) -> None:
    writer, reader = PulseWriter(slots.path, 0), PulseReader(slots.path)
    writer.beat(0)
    before = time.monotonic_ns()
    with writer.phase("eval"), writer.phase("compile"):
        pass
    after = time.monotonic_ns()
    slot = reader.read(0)
    assert 0 < slot.long_ns <= after - before
    assert before <= slot.phase_ns <= after


def test_a_phase_left_by_an_exception_is_left(slots: SlotFile) -> None:
    writer, reader = PulseWriter(slots.path, 0), PulseReader(slots.path)
    with pytest.raises(ValueError), writer.phase("eval"):
        raise ValueError
    assert reader.read(0).phase == "init"


def test_a_writer_frozen_mid_write_leaves_the_last_whole_copy(slots: SlotFile) -> None:
    writer, reader = PulseWriter(slots.path, 0), PulseReader(slots.path)
    writer.beat(5)
    assert reader.read(0).step == 5
    HEAD.pack_into(slots.mapping, slots.offset(0) + HEAD_AT, 99)
    assert reader.read(0).step == 5


def test_the_file_is_private_and_never_replaces_another(slots: SlotFile) -> None:
    assert stat.S_IMODE(slots.path.stat().st_mode) == 0o600
    with pytest.raises(StorageError) as refusal:
        SlotFile.create(slots.path, 1)
    assert refusal.value.code == "ST102"


@pytest.mark.parametrize(("content", "code"), [(b"", "ST104"), (bytes(1024), "ST104"), (None, "ST102")])
def test_a_foreign_or_missing_file_is_refused(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageError) as refusal:
        SlotFile.open(path)
    assert refusal.value.code == code


def test_a_rank_without_a_slot_is_refused(slots: SlotFile) -> None:
    with pytest.raises(StorageError):
        PulseWriter(slots.path, 2)


def test_without_an_agent_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIDWATCH_PULSE", raising=False)
    pulse = writer_from_env()
    assert isinstance(pulse, NullPulse)
    pulse.beat(1)
    with pulse.phase("eval"):
        assert pulse.flags() == Flag(0)


def test_the_environment_names_the_slot(monkeypatch: pytest.MonkeyPatch, slots: SlotFile) -> None:
    monkeypatch.setenv("MIDWATCH_PULSE", str(slots.path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    writer_from_env().beat(3)
    assert PulseReader(slots.path).read(1).step == 3


HAMMER = """
import sys
from midwatch.pulse import PulseWriter
writer = PulseWriter(sys.argv[1], 0)
writer.begin(1, 1)
print("go", flush=True)
step = 0
while True:
    step += 1
    writer.beat(step)
    if step % 7 == 0:
        writer.resumed(step, f"{step:016x}", f"{step:016x}")
"""


@pytest.mark.procs
def test_a_reader_never_sees_torn_data_while_a_process_hammers(slots: SlotFile) -> None:
    reader = PulseReader(slots.path)
    hammer = subprocess.Popen([sys.executable, "-c", HAMMER, str(slots.path)], stdout=subprocess.PIPE)
    try:
        assert hammer.stdout is not None
        assert hammer.stdout.readline() == b"go\n"
        seen: set[int] = set()
        while len(seen) < 5_000:
            slot = reader.read(0)
            assert slot.step is None or slot.step == slot.beats
            assert slot.steps_done == max(0, slot.beats - 1)
            if slot.has_resumed:
                assert slot.digest == slot.config_hash == f"{slot.resumed_step:016x}"
                due = slot.beats - slot.beats % 7
                assert slot.resumed_step in ((due, due - 7) if due == slot.beats else (due,))
            seen.add(slot.beats)
    finally:
        hammer.kill()
        hammer.communicate()
    assert os.path.exists(slots.path)


def test_counts_of_groups_are_read_by_step(tmp_path: Path) -> None:
    file = SlotFile.create(tmp_path / "pulse", 2)
    writer, reader = PulseWriter(file.path, 1), PulseReader(file.path)
    writer.begin(1, 1)
    writer.groups(["00ff00ff00ff00ff", "1111111111111111"])
    for step in range(100):
        writer.beat(step, [2 * step, 3 * step])
    first, second = reader.counts(1)
    assert first.digest == "00ff00ff00ff00ff"
    assert first.counts == tuple((step, 2 * step) for step in (80, *range(92, 100)))
    assert dict(second.counts)[96] == 288, "a step where all nodes can meet"
    assert reader.counts(0) == ()
    assert reader.read(1).step == 99
    writer.groups([])
    assert reader.counts(1) == ()


def test_what_is_read_is_cut_to_its_room(tmp_path: Path) -> None:
    file = SlotFile.create(tmp_path / "pulse", 1)
    writer, reader = PulseWriter(file.path, 0), PulseReader(file.path)
    writer.begin(1, 1)
    assert reader.position(0) == ""
    writer.position("shard-00017.bin 4096")
    assert reader.position(0) == "shard-00017.bin 4096"
    writer.position("é" * 40)
    assert len(reader.position(0)) <= 48


def test_a_rank_that_wrote_over_its_slot_does_not_take_the_agent_with_it(slots: SlotFile) -> None:
    writer, reader = PulseWriter(slots.path, 0), PulseReader(slots.path)
    writer.begin(1, 1)
    base = slots.offset(0)
    for noise in (b"\xff" * SLOT_BYTES, bytes(range(256)) * 4, b"\x0b" * SLOT_BYTES):
        slots.mapping[base : base + SLOT_BYTES] = noise
        slot = reader.read(0)
        assert slot.phase_age_s(time.monotonic_ns()) >= 0
        assert isinstance(slot.flags, Flag)
        reader.counts(0)
        reader.position(0)


def test_a_phase_may_have_any_name(slots: SlotFile) -> None:
    writer = PulseWriter(slots.path, 0)
    writer.begin(1, 1)
    with writer.phase("Auswertung \udcff" + "ä" * 30):
        assert PulseReader(slots.path).read(0).phase.startswith("custom:Auswertung")
