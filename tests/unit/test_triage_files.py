"""Metrics files as they are found: cut, mixed, resumed, oddly encoded, huge. The right answer or a clear refusal."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import random
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.audit.importers import (
    SPELLINGS,
    STEP_COLUMNS,
    format_of,
    known_as,
    megatron,
    plain_words,
    trainer_state,
)
from midwatch.audit.importers.textfile import TextFile
from midwatch.core import TriageError
from midwatch.guards import sample_of
from midwatch.triage import Replayed, read_facts, replay, report

HEADER = "step,loss,grad_norm"


def row(step: int, loss: float | None = None) -> str:
    source = random.Random(step)
    value = 10 * (step + 10) ** -0.2 * (1 + source.gauss(0, 0.01)) if loss is None else loss
    return f"{step},{value:.6f},{0.5 + 0.1 * source.random():.4f}"


def rows(*ranges: range, header: str = HEADER) -> str:
    return "\n".join([header, *(row(step) for one in ranges for step in one)]) + "\n"


@pytest.fixture
def judge(tmp_path: Path) -> Callable[[str | bytes], Replayed]:
    def judged(text: str | bytes) -> Replayed:
        path = tmp_path / "run.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return replay(path)

    return judged


Judge = Callable[[str | bytes], Replayed]


@pytest.mark.parametrize("name", STEP_COLUMNS)
def test_what_can_be_imported_can_be_judged(judge: Judge, tmp_path: Path, name: str) -> None:
    judge(rows(range(300), header=f"{name},loss,grad_norm"))
    assert format_of(tmp_path / "run.csv") == "csv"


# --- what does not count -------------------------------------------------------------------------------------------


def test_rows_that_a_resume_rolled_back_are_a_dead_branch(judge: Judge) -> None:
    bad = "\n".join(row(step, 9.0) for step in range(700, 800))
    found = judge(rows(range(700)) + bad + "\n" + rows(range(650, 900)).partition("\n")[2])
    assert [one for one in found.findings if one.tier != "note"] == []
    assert found.dead_rows == 150
    assert found.rows == 900
    assert found.resumes == [650]


def test_a_second_roll_back_behind_the_first(judge: Judge) -> None:
    found = judge(rows(range(500), range(300, 600), range(200, 700)))
    assert (found.rows, found.dead_rows, found.resumes) == (700, 600, [200])


def test_a_run_that_began_anew_is_judged_from_its_beginning(judge: Judge) -> None:
    found = judge(rows(range(400), range(1000)))
    assert (found.rows, found.dead_rows) == (1000, 400)
    assert "begin anew 1 times" in report(found).remarks[0]


def test_a_header_in_the_middle_is_a_joined_file(judge: Judge) -> None:
    found = judge(rows(range(400)) + rows(range(350, 800)))
    assert (found.rows, found.dead_rows, found.oddities) == (800, 50, {})


def test_a_step_that_is_logged_twice_counts_once(judge: Judge) -> None:
    found = judge(HEADER + "\n" + "".join(f"{row(step)}\n{row(step)}\n" for step in range(600)))
    assert (found.rows, found.repeated_rows, found.findings) == (600, 600, [])


def twice(steps: int, first: Callable[[int], str], second: Callable[[int], str], header: str = HEADER) -> str:
    return "\n".join([header, *(say(step) for step in range(steps) for say in (first, second))]) + "\n"


@pytest.mark.parametrize("is_second", [True, False])
@pytest.mark.parametrize("word", ["nan", "inf"])
def test_what_is_not_finite_is_judged_in_either_row_of_a_step(judge: Judge, word: str, *, is_second: bool) -> None:
    def broken(step: int) -> str:
        return row(step) if step < 500 else f"{step},{word},0.5"

    found = judge(twice(600, row, broken) if is_second else twice(600, broken, row))
    assert [(one.kind, one.step) for one in found.findings] == [("nonfinite", 500)]
    [remark] = [one for one in report(found).remarks if "told twice, and differently" in one]
    assert ": 200 (first: loss of step 500, grad_norm of step 500" in remark


def test_of_ranks_in_one_row_the_value_that_is_not_finite_is_kept(judge: Judge) -> None:
    lines = [f"{step},2.5,2.5,2.5" for step in range(600)]
    lines[501:501] = ["500,2.5,nan,2.5"]
    kinds = {one.kind for one in judge("\n".join(["step,loss,loss_r0,loss_r1", *lines]) + "\n").findings}
    assert "nonfinite" in kinds


def other(step: int) -> str:
    return row(step, 3.0 + 0.01 * (step % 7))


@pytest.mark.parametrize(
    "text",
    [
        twice(300, row, other),
        twice(300, row, lambda step: other(step) if step % 3 == 0 else row(step)),
        twice(600, row, lambda step: other(step) if step >= 570 else row(step)),
        twice(
            300,
            lambda at: f"{at},{2.5 + at % 9 / 1000:.4f}",
            lambda at: f"{at},{2.501 + at % 9 / 1000:.4f}",
            "step,loss",
        ),
    ],
    ids=["always", "at each third step", "at the end", "ranks that are close"],
)
def test_two_writers_in_lockstep_are_refused(judge: Judge, text: str) -> None:
    with pytest.raises(TriageError, match="told twice, and differently: rows of several") as caught:
        judge(text)
    assert caught.value.code == "TR102"


def short(step: int) -> str:
    at, loss, norm = row(step).split(",")
    return f"{at},{float(loss):.3f},{float(norm):.2f}"


def test_one_writer_that_tells_steps_twice_is_judged(judge: Judge) -> None:
    assert judge(twice(600, short, row)).findings == [], "to the screen and to a file"
    rates = twice(600, lambda at: f"{at},2.5,{at}e-6", lambda at: f"{at},2.5,{at + 1}e-6", "step,loss,lr")
    assert judge(rates).findings == [], "the learning rate before the step and after it"
    evals = judge(twice(600, lambda at: f"{row(at)},", lambda at: f"{at},,,2.4", f"{HEADER},eval_loss"))
    assert (evals.findings, evals.repeated_rows, evals.remarks) == ([], 0, [])


def test_a_step_that_a_resume_tells_again(judge: Judge) -> None:
    found = judge("\n".join([HEADER, *map(row, range(500)), row(499, 2.9), *map(row, range(500, 1000))]) + "\n")
    assert (found.rows, found.findings, found.repeated_rows) == (1000, [], 0)
    assert list(found.oddities.values()) == [2]
    assert report(found).remarks[0].endswith(": 2 (first: loss of step 499, grad_norm of step 499)")


def test_of_two_values_of_a_step_the_last_one_counts(judge: Judge) -> None:
    lines = rows(range(600)).splitlines()
    lines[501] = f"{row(500, 9.0)}\n{lines[501]}"
    assert judge("\n".join(lines) + "\n").findings == []
    lines[501] = "\n".join(reversed(lines[501].split("\n")))
    assert [one.step for one in judge("\n".join(lines) + "\n").findings] == [500]


def attempts(*blocks: tuple[int, range, float | None]) -> list[str]:
    return [f"{attempt},{row(step, loss)}" for attempt, steps, loss in blocks for step in steps]


def test_attempts_with_a_column_are_told_apart_even_where_their_rows_alternate(judge: Judge) -> None:
    first, second = attempts((1, range(600), None)), attempts((2, range(400, 1000), None))
    joined = judge("\n".join([f"attempt,{HEADER}", *first, *second]) + "\n")
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    alternating = judge("\n".join([f"attempt,{HEADER}", *mixed, "what is this"]) + "\n")
    assert set(alternating.oddities.values()) == {1}, "counted once, however often it is read"
    alternating.oddities, alternating.remarks = {}, []
    assert (joined.rows, joined.dead_rows, joined.resumes) == (1000, 200, [400])
    assert alternating == joined
    backwards = judge("\n".join([f"attempt,{HEADER}", *second, *first]) + "\n")
    assert backwards == joined


def test_mixed_attempts_without_a_column_are_refused(judge: Judge) -> None:
    mixed = [line for step in range(300) for line in (row(step), row(step + 400))]
    with pytest.raises(TriageError, match="are mixed") as caught:
        judge("\n".join([HEADER, *mixed]) + "\n")
    assert caught.value.code == "TR102"


def test_two_writers_that_take_turns_with_their_buffers_are_refused(judge: Judge) -> None:
    bursts = [range(at, at + 10) for begin in range(0, 400, 10) for at in (begin, begin + 2000)]
    with pytest.raises(TriageError, match="are mixed"):
        judge(rows(*bursts))


def test_a_run_that_crashes_over_and_over_is_one_run(judge: Judge) -> None:
    starts = [range(5 * number, 5 * number + 8) for number in range(60)]
    found = judge(rows(*starts))
    assert (found.rows, found.dead_rows) == (303, 177)


def test_rows_of_one_rank_are_judged(judge: Judge) -> None:
    lines = [f"{rank},{row(step, 9.0 if rank else None)}" for rank in (0, 1) for step in range(600)]
    found = judge("\n".join([f"rank,{HEADER}", *lines]) + "\n")
    assert (found.rows, found.findings, found.oddities) == (600, [], {"row of another rank than 0": 600})


def test_excerpts_have_nothing_to_do_with_each_other(judge: Judge) -> None:
    first = [f"0,{row(step)}" for step in range(5000, 5400)]
    second = [f"1,{row(step, 9.0 + 0.01 * (step % 3))}" for step in range(1000, 1400)]
    found = judge("\n".join([f"fragment,{HEADER}", *first, *second]) + "\n")
    assert (found.rows, found.dead_rows, found.findings) == (800, 0, [])


# --- how it is written ---------------------------------------------------------------------------------------------


def test_a_line_that_was_cut(judge: Judge) -> None:
    whole = rows(range(600))
    plan = json.dumps({"schedule": {"kind": "constant", "peak_lr": 6e-5}})
    for cut in range(1, 30):
        found = judge(whole[:-cut])
        assert found.findings == [], whole[-cut - 30 : -cut]
        assert found.rows in (599, 600)
    assert plan


def test_a_number_that_was_cut_is_not_believed(tmp_path: Path) -> None:
    path, facts = tmp_path / "run.csv", tmp_path / "facts.json"
    path.write_text("step,loss,lr\n" + "".join(f"{step},2.5,5.279E-05\n" for step in range(300)) + "300,2.5,5.2")
    facts.write_text(json.dumps({"schedule": {"kind": "constant", "peak_lr": 5.279e-5}, "later": 1}))
    found = replay(path, read_facts(facts))
    assert found.findings == []
    assert found.oddities == {"cut last line": 1}
    assert found.rows == 301


@pytest.mark.parametrize("word", ["nan", "NaN", "NAN", "-nan", "inf", "-Infinity", "-nan(ind)", "1.#QNAN"])
def test_what_is_not_finite_is_seen_in_every_spelling(judge: Judge, word: str) -> None:
    lines = rows(range(600)).splitlines()
    lines[501] = f"500,{word},0.5"
    assert [(one.kind, one.step) for one in judge("\n".join(lines) + "\n").findings] == [("nonfinite", 500)]


@pytest.mark.parametrize("word", ["", " ", "null", "None", "N/A", "-"])
def test_what_is_absent_is_no_value(judge: Judge, word: str) -> None:
    lines = rows(range(600)).splitlines()
    lines[501] = f"500,{word},0.5"
    found = judge("\n".join(lines) + "\n")
    assert (found.findings, found.oddities, found.inputs["loss"]) == ([], {}, 599)


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("1", "0")])
def test_a_step_that_was_skipped_may_be_told_in_words(judge: Judge, yes: str, no: str) -> None:
    lines = [f"{step},{'nan' if step == 500 else 2.5},{yes if step == 500 else no}" for step in range(600)]
    found = judge("\n".join(["step,grad_norm,skipped", *lines]) + "\n")
    assert ([one for one in found.findings if one.tier == "trip"], found.remarks[:-1]) == ([], [])
    without = judge("\n".join(["step,grad_norm,skipped", *(line.rpartition(",")[0] + "," for line in lines)]) + "\n")
    assert [one.tier for one in without.findings] == ["trip"]


def test_no_step_is_told_in_words(judge: Judge) -> None:
    found = judge(rows(range(300)) + "True,2.5,0.5\n")
    assert found.oddities == {"rows without a step": 1}


def test_rubbish_is_passed_over_and_counted(judge: Judge) -> None:
    lines = rows(range(600)).splitlines()
    lines[101:101] = ["", "Traceback (most recent call last):", "99,", "99.5.5,2,2", "nan,2,2", '"99,2', "\x00\x00"]
    lines[300] = "292,broken,0.5"
    found = judge("\n".join(lines) + "\n")
    assert found.findings == []
    assert found.oddities["cells without a number in loss"] == 1
    assert "cells without a number in loss: 1 (first: line 301)" in report(found).remarks
    assert found.oddities["rows without a step"] >= 3
    assert found.rows == 600


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_encodings(judge: Judge, encoding: str) -> None:
    text = rows(range(500), header="step,loss,grad_norm,\u00b5s per step").replace("\n", "\r\n")
    found = judge(text.encode(encoding))
    assert (found.rows, found.findings, set(found.inputs)) == (500, [], {"loss", "grad_norm"})


@pytest.mark.parametrize("delimiter", [";", "\t", "|", " ", "  "])
def test_delimiters(judge: Judge, delimiter: str) -> None:
    found = judge(rows(range(500)).replace(",", delimiter))
    assert (found.rows, found.inputs) == (500, {"loss": 500, "grad_norm": 500})


def test_decimal_commas_and_quotes(judge: Judge) -> None:
    text = rows(range(500)).replace(",", ";").replace(".", ",")
    assert judge(text).inputs == {"loss": 500, "grad_norm": 500}
    quoted = "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in rows(range(500)).splitlines())
    assert judge(quoted + "\n").inputs == {"loss": 500, "grad_norm": 500}


def test_names_of_other_loggers(judge: Judge) -> None:
    assert judge(rows(range(9), header="# train/global_step,train/loss,train/grad-norm")).inputs == {
        "loss": 9,
        "grad_norm": 9,
    }
    assert judge(rows(range(9), header="Iteration,LM loss,grad norm")).inputs == {"loss": 9, "grad_norm": 9}
    assert judge(rows(range(9), header="step,lr_0,lr_1")).inputs == {"lr": 9}
    preamble = "exported by somebody\n\n" + rows(range(9))
    assert judge(preamble).inputs == {"loss": 9, "grad_norm": 9}


# --- learning rates --------------------------------------------------------------------------------------------------

CONSTANT: dict[str, Any] = {"schedule": {"kind": "constant", "peak_lr": 0.01}}
SPELLED = [
    ("lr", "lr_group1", "lr_group2"),
    ("lr", "lr/group_1", "lr/group_2"),
    ("lr", "lr_1", "lr_2"),
    ("lr_0", "lr_1", "lr_2"),
    ("lr_group0", "lr_group1", "lr_group2"),
    ("lr-AdamW/pg1", "lr-AdamW/pg2", "lr-AdamW/pg3"),
    ("lr-DecoupledAdamW/group0", "lr-DecoupledAdamW/group1", "lr-DecoupledAdamW/group2"),
    ("optim/LR (group 0)", "optim/LR (group 1)", "optim/LR (group 2)"),
    ("run-7 - train/learning_rate_g0", "run-7 - train/learning_rate_g1", "run-7 - train/learning_rate_g2"),
]


def judged_rates(folder: Path, names: Iterable[str], rates: Callable[[int], Iterable[object]]) -> Replayed:
    path = folder / "rates.csv"
    lines = [",".join(["step", *names]), *(",".join(map(str, (step, *rates(step)))) for step in range(400))]
    path.write_text("\n".join(lines) + "\n")
    (folder / "facts.json").write_text(json.dumps(CONSTANT))
    return replay(path, read_facts(folder / "facts.json"))


@pytest.mark.parametrize("names", SPELLED, ids=lambda names: names[1])
def test_the_rates_of_all_groups_in_every_spelling(tmp_path: Path, names: tuple[str, ...]) -> None:
    healthy = judged_rates(tmp_path, names, lambda _: (0.01, 0.02, 0.04))
    assert (healthy.findings, healthy.inputs, healthy.oddities) == ([], {"lr": 400}, {})
    usual = (0.01, 0.02, 0.04)
    for group in range(3):

        def sick(step: int, group: int = group) -> list[float]:
            return [rate * (30 if step >= 300 and at == group else 1) for at, rate in enumerate(usual)]

        (found,) = judged_rates(tmp_path, names, sick).findings
        assert (found.step, found.kind, f"of group {group}" in found.text) == (300, "lr_off_plan", group > 0)


@pytest.mark.parametrize("name", ["lr", "lr_group0", "lr/pg1", "lr-AdamW", "Train/Samples/lr", "learning rate"])
def test_the_rate_of_the_only_group(tmp_path: Path, name: str) -> None:
    (found,) = judged_rates(tmp_path, [name], lambda step: [0.01 if step < 300 else 0.3]).findings
    assert (found.step, found.text.startswith("learning rate 0.3")) == (300, True)


def test_a_later_group_alone_has_a_multiple_of_the_plan(tmp_path: Path) -> None:
    (found,) = judged_rates(tmp_path, ["lr_group1"], lambda step: [0.04 if step < 300 else 1.2]).findings
    assert (found.step, "of group 1" in found.text) == (300, True)


def test_a_first_group_with_a_column_of_its_own_counts_and_not_the_mean(tmp_path: Path) -> None:
    names = ["lr", "lr_group0", "lr_group1"]
    assert judged_rates(tmp_path, names, lambda _: (0.025, 0.01, 0.04)).findings == []


@pytest.mark.parametrize("names", SPELLED[:2], ids=lambda names: names[1])
def test_rates_that_some_rows_lack_keep_their_groups(tmp_path: Path, names: tuple[str, ...]) -> None:
    def gappy(step: int) -> list[object]:
        rates = (0.01, 0.02, 0.04 if step < 300 else 0.4)
        return [rate if (step + at) % 3 or step == 300 else "" for at, rate in enumerate(rates)]

    (found,) = judged_rates(tmp_path, names, gappy).findings
    assert (found.step, "of group 2" in found.text) == (300, True)


def test_groups_and_ranks_in_rows_of_their_own_are_one_step(judge: Judge) -> None:
    """As trackers export them: a row for each metric."""
    names = ["loss", "lr", "lr_group1", "loss_r0", "loss_r1", "loss_r2"]
    lines = ["step," + ",".join(names)]
    for step in range(400):
        values = [2.0, 0.01, 0.02, 2.0, 2.0, 2.0 if step < 390 else math.nan]
        lines += [
            f"{step}," + ",".join(str(one) if at == own else "" for at, one in enumerate(values)) for own in range(6)
        ]
    found = judge("\n".join(lines) + "\n")
    assert (found.rows, found.inputs) == (400, {"loss": 400, "rank_losses": 400, "lr": 400})
    assert [(one.kind, one.step, one.ranks) for one in found.findings if one.tier == "trip"] == [
        ("nonfinite", 390, (2,))
    ]


@pytest.mark.parametrize("names", [megatron.NAMES, trainer_state.NAMES], ids=["megatron", "trainer"])
def test_importers_and_triage_share_one_list_of_names(names: dict[str, str]) -> None:
    judged = [(word, known) for word, known in names.items() if known in SPELLINGS]
    assert judged
    assert [known_as(word) for word, _ in judged] == [known for _, known in judged]


def test_every_spelling_is_spelled_as_it_is_looked_for() -> None:
    for spelled in SPELLINGS.values():
        assert [plain_words(word) for word in spelled] == list(spelled)


def test_a_line_without_an_end_in_sight(judge: Judge) -> None:
    text = rows(range(300)).encode() + b"\0" * (3 << 20) + b"\n" + rows(range(300, 600)).encode()
    found = judge(text)
    assert (found.rows, found.findings) == (600, [])


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"\n\n  \n", "is empty"),
        (b"step,loss\n", "no row of numbers"),
        (b"step,loss\n0x0,2\n0x1,2\n", r"rows without a step: 2 \(first: line 2, line 3\)"),
        (b"step,loss\n0_000,2\n", "rows without a step: 1"),
        (b"step,loss\n99999999999999999999,2\n", "rows without a step: 1"),
        (b"step,loss\n-1,2\n", "rows with a negative step: 1"),
        (b"loss,lr\n2,3\n", "no column counts steps"),
        (b"step,wall_time\n1,2\n", "no column that can be judged"),
        (b"1,2.5\n2,2.4\n", "holds numbers, not names"),
        (gzip.compress(b"step,loss\n", mtime=0), "gzip"),
        (b"\x89PNG\0\0\0\x01", "is not text"),
    ],
)
def test_a_file_that_holds_nothing_is_refused(judge: Judge, content: bytes, what: str) -> None:
    with pytest.raises(TriageError, match=what) as caught:
        judge(content)
    assert caught.value.code == "TR101"


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no.csv"):
        with pytest.raises(TriageError):
            replay(path)
        with pytest.raises(TriageError):
            read_facts(path)


def test_facts_that_are_no_file_are_called_what_they_are(tmp_path: Path) -> None:
    for path, what in (
        (tmp_path, "is a folder"),
        (Path("/dev/null"), "not a regular file"),
        (tmp_path / "no", "no such"),
    ):
        with pytest.raises(TriageError, match=what) as caught:
            read_facts(path)
        assert caught.value.code == "TR103"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"resumes": 3}', '{"schedule": {"peak_lr": "high"}}', "\xff"])
def test_facts_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TriageError) as caught:
        read_facts(path)
    assert caught.value.code == "TR103"


def test_facts_with_gaps_and_odd_values(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(
        '{"schedule": {"kind": "spiral", "peak_lr": null, "floor_ratio": 7, "warmup_steps": -4}, "resumes": []}'
    )
    assert read_facts(path).guards().schedule.kind == "unknown"
    path.write_text('{"schedule": null, "resumes": null, "world_size": null}')
    assert read_facts(path).guards().schedule.warmup_steps == 0
    path.write_text('{"schedule": {"kind": "const", "peak_lr": 1, "warmup_steps": 60.0}, "resumes": [400.0]}')
    assert read_facts(path).guards().schedule.kind == "constant"
    assert read_facts(path).resumes == (400,)


COSINE = {"kind": "cosine", "peak_lr": 0.1, "warmup_steps": 10, "total_steps": 600}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"kind": "cosin"}, 'schedule.kind "cosin" is none of constant, linear, cosine, wsd'),
        ({"kind": None}, "schedule.kind is not told"),
        ({"peak_lr": -1}, "schedule.peak_lr -1.0 is not above 0"),
        ({"peak_lr": 0}, "schedule.peak_lr 0.0 is not above 0"),
        ({"peak_lr": None, "peek_lr": 0.1}, "schedule.peak_lr is not told"),
        ({"total_steps": 9}, "schedule.total_steps 9 is not beyond schedule.warmup_steps 10"),
        ({"total_steps": None}, "schedule.total_steps is not told"),
        ({"warmup_steps": -4}, "schedule.warmup_steps -4 is below 0"),
        ({"floor_ratio": 7}, "schedule.floor_ratio 7.0 is not between 0 and 1"),
        ({"kind": "wsd", "decay_start": 600}, "schedule.total_steps 600 is not beyond schedule.decay_start 600"),
    ],
)
def test_a_plan_that_cannot_be_used_is_said(tmp_path: Path, changed: dict[str, Any], what: str) -> None:
    path, facts = tmp_path / "run.csv", tmp_path / "facts.json"
    path.write_text("step,loss,lr\n" + "".join(f"{step},2.5,0.1\n" for step in range(300)))
    facts.write_text(json.dumps({"schedule": COSINE | changed}))
    found = replay(path, read_facts(facts))
    assert not found.has_plan
    assert found.remarks == [f"the learning rate is held against no plan, for of the facts {what}"]


@pytest.mark.parametrize(
    "facts",
    [
        {"schedule": None},
        {"schedule": dict.fromkeys(COSINE)},
        {"schedule": {"kind": "unknown", "peak_lr": 1}},
        {"schedule": COSINE | {"decay_start": 900, "floor_ratio": None, "kind": "Cosine", "note": "mine"}},
        {"schedule": {"kind": "const", "peak_lr": 0.1, "total_steps": None}},
        {"loss_scaling": "off", "more": [1]},
    ],
)
def test_facts_that_tell_less_or_more_are_fine(tmp_path: Path, facts: dict[str, Any]) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts))
    assert read_facts(path).remarks() == []


def test_a_scaling_that_is_none_is_said(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"loss_scaling": "dynmic"}')
    assert read_facts(path).remarks() == ['of the facts loss_scaling "dynmic" is none of dynamic, static, off, none']


# --- size ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(steps: int) -> int:
        path = tmp_path / f"{steps}.csv"
        with path.open("w") as file:
            file.write("step,loss\n")
            file.writelines(f"{step},{3 + 0.01 * math.sin(step)}\n" for step in range(steps))
        read: list[int] = []
        tracemalloc.start()
        replay(path, tell=read.append)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(read) <= 2 * path.stat().st_size
        return most

    small = peak(1_500)
    assert peak(6_000) < small + 100_000


def test_notes_beyond_what_is_kept_are_counted(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midwatch.triage.replaying.MAX_NOTES", 2)
    lines = [row(step, 4.0 if step in range(500, 2000, 100) else None) for step in range(2000)]
    found: Any = judge("\n".join([HEADER, *lines]) + "\n")
    notes = [one for one in found.findings if one.tier == "note"]
    assert len(notes) <= 2


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text(rows(range(300), header=f"attempt,{HEADER}").replace("\n", "\n1,").rpartition("1,")[0])
    grown: list[int] = []

    class Growing(TextFile):
        def lines(self, *args: Any, **more: Any) -> Any:
            yield from super().lines(*args, **more)
            with path.open("a") as file:
                file.write("".join(f"2,{row(step)}\n" for step in range(300, 320)))
            grown.append(1)

    found = replay(path)
    assert found.rows == 300
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("midwatch.audit.importers.table.TextFile", Growing)
        assert replay(path).rows == 300
    assert grown


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TriageError, match="read twice"):
        replay(tmp_path / "pipe")


@settings(max_examples=60)
@given(
    text=st.one_of(
        st.binary(max_size=400),
        st.lists(
            st.sampled_from(
                [b"step", b"loss", b",", b"\n", b"1", b"2.5", b"nan", b'"', b"\0", b";", b"\xff", b"-", b"attempt"]
            ),
            max_size=80,
        ).map(b"".join),
    )
)
def test_any_bytes_are_judged_or_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    for content in (text, b"step,loss,grad_norm\n1,2,3\n" + text):
        path.write_bytes(content)
        with contextlib.suppress(TriageError):
            report(replay(path))


def test_a_count_of_skipped_steps_says_the_same_in_a_table_as_in_training(judge: Judge) -> None:
    """Megatron-LM counts those since its last line."""
    lines = ["step,loss,grad_norm,skipped", *(f"{step},2.0,0.5,0" for step in range(400))]
    for skipped in (1, 3):
        lines[301] = f"300,2.0,nan,{skipped}"
        alarms = [one.step for one in judge("\n".join(lines) + "\n").findings if one.tier != "note"]
        assert alarms == ([] if sample_of(300, {"skipped": skipped}).is_skipped else [300])
