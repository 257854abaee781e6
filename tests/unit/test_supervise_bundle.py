"""Bundles of large runs, of hostile names, of incidents that are looked at twice; and what ``incidents show`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from midwatch.cli.main import main
from midwatch.faults import Evidence, Frame, RankEvidence, Suspect, Verdict
from midwatch.storage import sha256_hex
from midwatch.supervise import log_files
from midwatch.supervise.bundle import shown_ranks, write_bundle
from midwatch.supervise.report import report_text

EVIL = "\x1b[2J\x07n0\r\n\u202e[bold]%s{0}[/bold]"


def verdict(**changes: Any) -> Verdict:
    base = Verdict(
        incident="a0002-i01",
        fault_class="gpu_error",
        summary="rank 3 lost its GPU",
        root_rank=3,
        root_node="n0",
        suspects=(Suspect(rank=3, node="n0", weight=0.7, reasons=("XID 79",)),),
        victims=(0, 1, 2),
        confidence="likely",
        grade="G2",
        action="restart",
        rule="class-default",
        fingerprint="f",
        step=7,
        exit_code=1,
        evidence=("XID 79: fallen off the bus",),
    )
    return msgspec.structs.replace(base, **changes)


def evidence(world: int, **changes: Any) -> Evidence:
    frame = ((Frame("wait", "torch/distributed/c10d.py", 3),),)
    ranks = tuple(RankEvidence(rank=rank, node="n0", stacks=frame) for rank in range(world))
    return msgspec.structs.replace(Evidence(incident="a0002-i01", trigger="exit", ranks=ranks), **changes)


def logs_of(run: Path, world: int) -> None:
    folder = run / "logs" / "a0002"
    folder.mkdir(parents=True)
    for rank in range(world):
        (folder / f"n0.r{rank:05d}.out").write_text(f"hello from {rank}\napi_key=sk-aaaaaaaaaaaaaaaaaaaaaaaa\n")
        (folder / f"n0.r{rank:05d}.err").write_text("")


def test_of_a_thousand_ranks_the_suspects_and_a_sample_are_kept(tmp_path: Path) -> None:
    logs_of(tmp_path, 1000)
    folder = tmp_path / "incidents" / "a0002-i01"
    write_bundle(folder, verdict(), evidence(1000), {}, (), log_files(tmp_path, 2))
    kept = sorted(path.name for path in folder.glob("tail-*"))
    assert "tail-r00003.out" in kept
    assert 5 <= len(kept) <= 9
    assert max(int(name[6:11]) for name in kept) > 700, "from all over the run"
    assert len(list(folder.glob("stacks-*"))) == 64
    text = "".join(path.read_text() for path in folder.iterdir())
    assert "hello from 3\n" in text
    assert "sk-aaaa" not in text


def test_who_fell_by_itself_is_kept_and_who_was_ended_by_us_is_a_mere_sample() -> None:
    ranks = [RankEvidence(rank=rank, exit_code=-15, signalled_by_us=True) for rank in range(100)]
    ranks[41] = RankEvidence(rank=41, exit_code=1)
    ranks[42] = RankEvidence(rank=42, is_overdue=True)
    shown = shown_ranks(verdict(), evidence(0, ranks=tuple(ranks)))
    assert shown[:3] == [3, 41, 42]
    assert len(shown) <= 3 + 8


def test_the_second_look_replaces_the_first_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "incidents" / "a0002-i01"
    write_bundle(folder, verdict(), evidence(4, kernel_lines=(("n0", "XID 79"),)), {}, ("chapter",))
    (folder / "NOTES").write_text("mine\n")
    write_bundle(folder, verdict(), evidence(2), {}, ())
    hashes = json.loads((folder / "HASHES.json").read_text())
    assert {path.name for path in folder.iterdir()} == {*hashes, "HASHES.json", "NOTES"}
    assert "kernel.txt" not in hashes
    assert all(sha256_hex((folder / name).read_bytes()) == digest for name, digest in hashes.items())


def test_names_and_lines_from_outside_are_data(tmp_path: Path) -> None:
    hostile = verdict(
        summary=f"rank 3 on {EVIL} fell",
        root_node=EVIL,
        domain=EVIL,
        evidence=(EVIL,),
        suspects=(Suspect(rank=None, node=EVIL, weight=0.5, reasons=(EVIL,)),),
    )
    frame = ((Frame(EVIL, EVIL, 1),),)
    seen = evidence(0, ranks=(RankEvidence(rank=3, stacks=frame),), lost_nodes=(EVIL,))
    folder = tmp_path / "incidents" / "a0002-i01"
    write_bundle(folder, hostile, seen, {EVIL: (EVIL,)}, ())
    for name in ("report.txt", "stacks-r00003.txt"):
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set((folder / name).read_text()), name
    for words in (["show"], ["ls"]):
        done = CliRunner().invoke(main, ["incidents", words[0], str(tmp_path)], catch_exceptions=False)
        assert done.exit_code == 0
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(done.output)
        assert "[bold]%s{0}[/bold]" in done.output


@pytest.mark.parametrize("grade", ["G0", "G1", "G2", "G3", "G4", "G5"])
@pytest.mark.parametrize("action", ["restart", "stop", "hold", "requeue", "none"])
@pytest.mark.parametrize("confidence", ["certain", "likely", "weak", "unknown"])
def test_the_report_speaks_of_everything_in_words(grade: str, action: str, confidence: str) -> None:
    text = report_text(verdict(grade=grade, action=action, confidence=confidence), evidence(4))
    assert text.startswith("Incident a0002-i01\n\nRank 3 lost its GPU. ")
    assert "rank 3 on node n0 at step 7" in text
    assert "Ranks 0-2 stopped because of it and are not to blame." in text
    assert not [word for word in ("gpu_error", grade, "class-default", "None", "  ") if word in text.split("What")[0]]


def test_nobody_to_blame() -> None:
    text = report_text(verdict(root_rank=None, root_node=None, suspects=(), victims=()), evidence(2))
    assert "Nobody in particular is to blame." in text


def test_a_bundle_that_was_changed_or_torn_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "incidents" / "a0002-i01"

    def damaged() -> list[str]:
        done = CliRunner().invoke(main, ["incidents", "show", str(tmp_path), "--json"], catch_exceptions=False)
        found: list[str] = json.loads(done.output)["damaged"]
        assert done.exit_code == (1 if found else 0)
        return found

    write_bundle(folder, verdict(), evidence(2), {}, ())
    assert damaged() == []
    (folder / "report.txt").write_text("all was well\n")
    (folder / "stacks-r00001.txt").unlink()
    assert damaged() == ["report.txt", "stacks-r00001.txt"]
    (folder / "HASHES.json").unlink()
    assert damaged() == ["HASHES.json"]
