"""Evidence that is missing, foreign, secret or late."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest

from midwatch.faults.tracebacks import find_raised
from midwatch.faults.types import Evidence, Frame, RankEvidence, Verdict
from midwatch.storage import sha256_hex
from midwatch.supervise.bundle import write_bundle
from midwatch.supervise.clocks import ClockReading
from midwatch.supervise.error_file import read_error_file
from midwatch.supervise.gathering import Gathering
from midwatch.supervise.kernel import KernelLog, oom_victims
from midwatch.supervise.last_words import read_tail
from midwatch.supervise.members import Member
from midwatch.supervise.messages import GatherEvidence
from midwatch.supervise.sample import Stacks, parse_stacks
from midwatch.supervise.tee import Tee
from midwatch.supervise.wire import Join, Report, Sampled

PY_SPY = [
    {"thread_name": "MainThread", "os_thread_id": 5, "frames": [{"name": "inner", "filename": "/x/t.py", "line": 3}]},
    {"thread_name": "worker", "os_thread_id": 6, "frames": []},
]


def test_the_main_threads_frames_are_taken_innermost_first() -> None:
    assert parse_stacks(json.dumps(PY_SPY[::-1]).encode(), 5) == Stacks((Frame("inner", "/x/t.py", 3),), ((),))


@pytest.mark.parametrize("document", [b"", b"{}", b"[]", b"[1]", b'[{"thread_name": "MainThread"}]', b"\xff"])
def test_an_unreadable_stack_is_no_stack(document: bytes) -> None:
    assert parse_stacks(document, 5) == Stacks()


def test_only_the_last_lines_are_kept_and_secrets_are_not(tmp_path: Path) -> None:
    path = tmp_path / "err"
    path.write_text("\n".join(f"line {n}" for n in range(1000)) + "\nAPI_KEY=sk-abcdefghijklmnopqrstuvwx\n")
    tail = read_tail(path)
    assert len(tail) == 200
    assert tail[0] == "line 801"
    assert "sk-abc" not in tail[-1]
    assert read_tail(tmp_path / "nothing") == ()


UNCAUGHT = """Traceback (most recent call last):
  File "/x/train.py", line 9, in <module>
    main()
  File "/x/train.py", line 5, in main
    raise ValueError("bad batch 17")
ValueError: bad batch 17
"""
HANDLED = UNCAUGHT.replace("<module>", "load").replace("bad batch 17", "tried again")


@pytest.mark.parametrize("mark", ["", "[rank1]: "])
def test_a_traceback_is_found_behind_what_was_printed_after_it(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "err"
    noise = "".join(f"dump of thread {n}\n" for n in range(5000))
    path.write_text(noise + "".join(f"{mark}{line}\n" for line in UNCAUGHT.splitlines()) + noise + HANDLED + noise)
    tail = read_tail(path, has_failed=True)
    assert len(tail) <= 200
    assert tail[-1] == "dump of thread 4999"
    raised = find_raised(tail)
    assert raised is not None
    assert raised.message == "bad batch 17"
    assert len(read_tail(path)) == 200, "of a rank that lives the end is enough"


def test_a_traceback_that_was_caught_long_ago_is_not_dug_out(tmp_path: Path) -> None:
    path = tmp_path / "err"
    path.write_text(HANDLED + "".join(f"step {n}\n" for n in range(1000)))
    assert find_raised(read_tail(path, has_failed=True)) is None


def test_a_damaged_error_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_error_file(path) is None
    path.write_text("[1]")
    assert read_error_file(path) is None
    path.write_text('{"message": {"message": "boom password=hunter2hunter2", "password": "x"}}')
    assert read_error_file(path) == {"message": {"message": "boom password=[redacted]"}}


def test_an_error_file_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    for text in ("[" * 500_000, '{"message": ' + '{"message": ' * 100_000, '{"a": ' + "9" * 5000 + "}", "\0" * 100):
        path.write_text(text)
        assert read_error_file(path) in (None, {})
    told = {"message": "no such file: \udcff.bin", "extraInfo": {"py_callstack": "x" * 900_000}}
    path.write_text(json.dumps({"message": told}))
    content = read_error_file(path)
    assert content is not None
    assert content["message"]["message"] == "no such file: ?.bin"
    assert len(msgspec.json.encode(RankEvidence(rank=0, error_file=content))) < 30_000
    path.unlink()
    os.mkfifo(path)
    assert read_error_file(path) is None


def test_the_kernel_names_whom_it_killed() -> None:
    lines = [
        "Memory cgroup out of memory: Killed process 4242 (python3) total-vm:1kB",
        "oom_reaper: reaped process 7 (x)",
    ]
    assert oom_victims([*lines, "usb 1-1: new device"]) == {4242, 7}


def test_an_unreadable_kernel_log_is_said_so(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "kmsg")
    assert log.lines(0) == []
    assert "not readable" in log.remark


def member(name: str) -> Member:
    join = Join(
        node=name,
        is_name_fixed=False,
        agent=name,
        tag="t",
        nproc=1,
        nnodes=2,
        command="",
        address="",
        port=1,
        boot="b",
        mono_ns=0,
        pid=1,
    )
    return Member(join, name, 0, shares_clock=True)


def part(rank: int) -> Sampled:
    evidence = RankEvidence(rank=rank, node="n")
    return Sampled(attempt=1, incident="i1", ranks=(evidence,), kernel_lines=("oops",), window_s=0.5, remarks=("r",))


def gather(names: list[str], done: list[Evidence]) -> tuple[Gathering, list[Member]]:
    asked = GatherEvidence(cause="c", incident="i1", attempt=1, trigger="hang", samples=2)
    found = [member(name) for name in names]
    return Gathering(asked, found, 0.5, done.append), found


def test_all_parts_together_are_the_evidence() -> None:
    async def story() -> None:
        done: list[Evidence] = []
        gathering, (a, b) = gather(["a", "b"], done)
        gathering.take(b, part(1))
        gathering.take(b, part(9))
        assert done == []
        gathering.take(a, part(0))
        (evidence,) = done
        assert [rank.rank for rank in evidence.ranks] == [0, 1]
        assert evidence.kernel_lines == (("b", "oops"), ("a", "oops"))

    asyncio.run(story())


def test_the_evidence_says_how_well_each_clock_is_known() -> None:
    async def story() -> None:
        done: list[Evidence] = []
        asked = GatherEvidence(cause="c", incident="i1", attempt=1, trigger="hang", samples=2)
        a, away = member("a"), Member(member("b").join, "b", 0, shares_clock=False)
        clock = ClockReading(offset_ns=5_000_000_000, error_ns=2_000_000)
        away.hear(Report(node="b", mono_ns=1, attempt=1, port=1, clock=clock), 9)
        gathering = Gathering(asked, [a, away], 0.5, done.append)
        late = msgspec.structs.replace(part(1).ranks[0], exit_mono_ns=1_000_000_000)
        gathering.take(away, msgspec.structs.replace(part(1), ranks=(late,)))
        gathering.take(a, part(0))
        (evidence,) = done
        assert evidence.ranks[1].exit_mono_ns == 6_000_000_000, "on our clock"
        bounds = dict(evidence.clock_error_s)
        assert bounds["b"] - bounds["a"] == pytest.approx(0.002)

    asyncio.run(story())


def test_a_lost_node_is_not_waited_for() -> None:
    async def story() -> None:
        done: list[Evidence] = []
        gathering, (a, _) = gather(["a", "b"], done)
        gathering.take(a, part(0))
        gathering.drop("b")
        assert len(done) == 1

    asyncio.run(story())


def test_with_nobody_to_ask_the_answer_comes_anyway() -> None:
    async def story() -> None:
        done: list[Evidence] = []
        gather([], done)
        async with asyncio.timeout(5):
            while not done:
                await asyncio.sleep(0)

    asyncio.run(story())


VERDICT = Verdict(
    incident="a0001-i01",
    fault_class="user_exception",
    summary="rank 1 raised",
    root_rank=1,
    root_node="n",
    suspects=(),
    victims=(0, 2),
    confidence="certain",
    grade="G1",
    action="restart",
    rule="r1",
    fingerprint="f",
    step=7,
    exit_code=1,
    evidence=("RuntimeError: x",),
)


def test_the_bundle_is_whole_and_its_hashes_hold(tmp_path: Path) -> None:
    ranks = (
        RankEvidence(rank=1, stacks=((Frame("f", "t.py", 3),),), stderr_tail=("boom",)),
        RankEvidence(rank=0),
    )
    folder = tmp_path / "incidents" / "a0001-i01"
    evidence = Evidence(incident="a0001-i01", trigger="exit", ranks=ranks)
    write_bundle(folder, VERDICT, evidence, {"n": ("no stacks: x",)}, ("chapter",))
    hashes = json.loads((folder / "HASHES.json").read_text())
    assert set(hashes) == {path.name for path in folder.iterdir()} - {"HASHES.json"}
    assert all(sha256_hex((folder / name).read_bytes()) == digest for name, digest in hashes.items())
    assert msgspec.json.decode((folder / "verdict.json").read_bytes(), type=Verdict) == VERDICT
    assert json.loads((folder / "evidence.json").read_text())["remarks"] == {"n": ["no stacks: x"]}
    report = (folder / "report.txt").read_text()
    assert "The cause is laid to rank 1 on node n at step 7. There is no doubt about it" in report
    assert "Ranks 0,2 stopped because of it and are not to blame." in report
    assert not [word for word in ("user_exception", "G1", "r1", "chapter") if word in report]
    assert (folder / "decision.txt").read_text() == "chapter\n"
    assert "f (t.py:3)" in (folder / "stacks-r00001.txt").read_text()


def test_shown_output_is_whole_and_marked(tmp_path: Path) -> None:
    import os

    out, err = tmp_path / "o", tmp_path / "e"
    out.write_text("one\ntw")
    shown = tmp_path / "shown"
    fd = os.open(shown, os.O_CREAT | os.O_WRONLY)
    tee = Tee("all", fd, fd)
    tee.follow([(3, str(out), str(err))])
    tee.look()
    assert shown.read_text() == "[rank 3] one\n"
    with out.open("a") as file:
        file.write("o\nthree")
    tee.drain()
    assert shown.read_text() == "[rank 3] one\n[rank 3] two\n[rank 3] three\n"
    os.close(fd)


BODY = "MIIEowIBAAKCAQEA7bq5sX0planted0inside0a0private0key"


@pytest.mark.parametrize(
    "text",
    [
        f"before\n-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n{BODY}\n-----END RSA PRIVATE KEY-----\nafter\n",
        f"{BODY}\n{BODY}\n-----END PRIVATE KEY-----\nafter\n",
    ],
)
def test_a_private_key_over_many_lines_does_not_reach_the_bundle(tmp_path: Path, text: str) -> None:
    log = tmp_path / "rank.err"
    log.write_text(text)
    tail = read_tail(log)
    assert not any(BODY in line for line in tail)
    assert tail[-1] == "after"
