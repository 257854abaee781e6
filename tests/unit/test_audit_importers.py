"""Metrics of other frameworks: what is taken, and what is made of cut, mixed and foreign files."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from midwatch.audit import read_run, tfrecord
from midwatch.audit.importers import Imported, format_of, import_metrics
from midwatch.audit.index import MetricIndex
from midwatch.audit.protowire import FIXED32, put_bytes, put_double, put_int, put_varint
from midwatch.core import MetricsError

GOLDEN = Path(__file__).parents[1] / "data" / "metrics"
CURVES = Path(__file__).resolve().parents[2].parent / "shared" / "cases" / "curves" / "real"

MEGATRON = (
    " [2026-07-01 05:26:{:02d}] iteration {:8d}/  500000 | consumed samples: {:12d} |"
    " elapsed time per iteration (ms): 5278.7 | learning rate: 1.412000E-04 | global batch size:  1024 |"
    " lm loss: {} | loss scale: 1.0 | grad norm: 0.375 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)
TITAN = (
    "[rank0]:[titan] 2026-02-28 02:08:{:02d},366 - root - INFO - \x1b[31mstep: {:2d}  \x1b[32mloss: {}"
    "  \x1b[38;2;180;60;0mgrad_norm:  0.4609  \x1b[36mmemory: 61.22GiB(77.30%)  \x1b[34mtps: 7,350"
    "  \x1b[36mtflops: 407.19  \x1b[35mmfu: 41.16%\x1b[0m\n"
)


def bring(run_dir: Path, *files: Path, **how: object) -> tuple[Imported, dict[str, list[tuple[int, float]]]]:
    """Import, and the live values of each metric of rank 0."""
    done = import_metrics(list(files), run_dir, **how)  # pyright: ignore[reportArgumentType]
    with MetricIndex(run_dir, run_dir.parent / "indexes") as index:
        index.sync()
        names = [info.metric for info in index.metrics() if info.rank == 0]
        return done, {name: [tuple(point) for point in index.series(name)] for name in names}  # pyright: ignore[reportReturnType]


def megatron(steps: list[int], loss: str = "2.133473E+00") -> str:
    return "".join(MEGATRON.format(step % 60, step, step * 1024, loss) for step in steps)


# --- logs -----------------------------------------------------------------------------------------------------------


def test_megatron_lines(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    validation = (
        " validation loss at iteration 4411 on validation set | lm loss value: 2.1E+00 | lm loss PPL: 8.1E+00 | \n"
    )
    log.write_text("> building\n" + megatron([4410, 4411]) + "-" * 50 + "\n" + validation + megatron([4412], "NaN"))
    assert format_of(log) == "megatron"
    done, found = bring(tmp_path / "run", log)
    assert found["loss"][:2] == [(4410, 2.133473), (4411, 2.133473)]
    assert math.isnan(found["loss"][2][1])
    assert found["step_s"][0] == (4410, 5.2787)
    assert found["lr"][0] == (4410, 0.0001412)
    assert (found["validation_loss"], found["validation_ppl"]) == ([(4411, 2.1)], [(4411, 8.1)])
    assert {"grad_norm", "skipped", "nan_iterations", "global_batch_size", "consumed_samples"} <= set(found)
    assert (done.attempts[0].attempt, done.attempts[0].first, done.attempts[0].last) == (1, 4410, 4412)
    with MetricIndex(tmp_path / "run", tmp_path / "indexes") as index:
        stamps = {one.metric: one.ts_ns for one in index.newest()}
    assert stamps["loss"] == 1_782_883_592_000_000_000
    assert stamps["validation_loss"] == stamps["loss"] - 10**9, "the time of the line before"


def test_a_restart_is_seen_from_steps_that_go_back(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron(list(range(100, 111)), "1.0E+00") + "Traceback\n" + megatron([106, 107], "2.0E+00"))
    done, found = bring(tmp_path / "run", log)
    assert [(one.attempt, one.start, one.first, one.last) for one in done.attempts] == [
        (1, 0, 100, 110),
        (2, 106, 106, 107),
    ]
    assert found["loss"] == [*((step, 1.0) for step in range(100, 106)), (106, 2.0), (107, 2.0)]


@pytest.mark.parametrize(
    ("cut", "kind"),
    [
        ("lm loss: 2.13", "fields that were cut"),
        ("iteration        2/  5", "iterations that cannot be read"),
        ("iteration        2/  500000", "iterations that cannot be read"),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_a_line_of_a_log_that_was_cut_is_said_with_its_place(
    tmp_path: Path, cut: str, kind: str, is_last: bool
) -> None:
    second = megatron([2])
    begin = second[: second.index(cut) + len(cut)]
    (tmp_path / "train.log").write_text(megatron([1]) + begin + ("" if is_last else megatron([3])))
    done, found = bring(tmp_path / "run", tmp_path / "train.log")
    assert done.passed_over == {kind: 1}
    assert done.notes == [f"{kind}: 1 (first: line 2)"]
    assert [step for step, _ in found["loss"]] == ([1] if is_last else [1, 3])


def test_what_else_of_a_log_cannot_be_read_is_said(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    validation = " validation loss at iteration 1 on validation set | lm loss value: 2.1E+00 | lm loss P\n"
    broken = megatron([2], "2.1-2.2").replace("| loss scale: 1.0 ", "| loss scale: None ")
    log.write_text(megatron([1]) + validation + validation.partition(" on ")[0] + "\n" + broken)
    done, _ = bring(tmp_path / "run", log)
    assert done.notes == [
        "fields that were cut: 1 (first: line 2)",
        "validations that cannot be read: 1 (first: line 3)",
        "fields without a number: 1 (first: line 4)",
    ]


def test_lines_of_torchtitan_that_were_cut_are_said(tmp_path: Path) -> None:
    one, two, three = (TITAN.format(step, step, "2.5") for step in (1, 2, 3))
    (tmp_path / "train.log").write_text(one[:110] + two + three[: three.index("0.4609") + 3])
    done, found = bring(tmp_path / "run", tmp_path / "train.log")
    assert done.notes == ["lines that were cut: 1 (first: line 1)", "fields that were cut: 1 (first: line 2)"]
    assert [step for step, _ in found["grad_norm"]] == [2]


def test_a_cut_line_gives_no_wrong_number(tmp_path: Path) -> None:
    whole = megatron([1, 2])
    for cut in (whole[:-60], whole[: whole.rindex("lm loss: ") + 13], whole[: whole.rindex("E-04")]):
        log = tmp_path / f"cut{len(cut)}.log"
        log.write_text(cut)
        _, found = bring(tmp_path / f"run{len(cut)}", log)
        for name in ("loss", "lr"):
            assert len({value for _, value in found[name]}) == 1, name


def test_two_processes_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    glued = megatron([1]).rstrip("\n")[:150] + megatron([2])
    log.write_text(glued + megatron([3]))
    _, found = bring(tmp_path / "run", log)
    assert [step for step, _ in found["loss"]] == [2, 3]


def test_torchtitan_lines(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    lines = [TITAN.format(step, step, value) for step, value in ((1, " 8.2361"), (2, " 7.1"), (3, "    nan"))]
    validation = "[titan] 2026-02-28 02:09:00,000 - validate step:  3  loss:  7.5  memory: 61.2GiB(77.3%)  tps: 9\n"
    log.write_text(
        "preamble step: none\n" + "".join(lines) + validation + lines[0].replace("step:  1", "step:  4")[:-40]
    )
    assert format_of(log) == "torchtitan"
    _, found = bring(tmp_path / "run", log)
    assert found["loss"][:2] == [(1, 8.2361), (2, 7.1)]
    assert math.isnan(found["loss"][2][1])
    assert (found["tps"][0], found["mfu"][0]) == ((1, 7350.0), (1, 41.16))
    assert (found["memory_gib"][0], found["memory_pct"][0]) == ((1, 61.22), (1, 77.3))
    assert found["validation_loss"] == [(3, 7.5)]
    assert [step for step, _ in found["tflops"]] == [1, 2, 3], "cut in the middle of the line"


@pytest.mark.parametrize("escape", ["\x1b", "\x1b\x1b", ""])
def test_torchtitan_lines_whose_colours_were_half_removed(tmp_path: Path, escape: str) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("".join(TITAN.format(step, step, "2.5") for step in range(3)).replace("\x1b", escape))
    _, found = bring(tmp_path / "run", log)
    assert found["loss"] == [(0, 2.5), (1, 2.5), (2, 2.5)]
    assert found["mfu"][0] == (0, 41.16)


def test_ranks_in_one_log_are_kept_apart(tmp_path: Path) -> None:
    log = tmp_path / "merged.log"
    lines = [
        TITAN.format(s, s, "2.0").replace("rank0", f"rank{r}")
        for s in range(1, 30)
        for r in random.Random(s).sample(range(8), 8)
    ]
    log.write_text("".join(lines))
    done, _ = bring(tmp_path / "run", log)
    assert len(done.attempts) == 1
    assert len(list((tmp_path / "run" / "metrics").glob("a0001*.jsonl"))) == 8


# --- trainer_state.json ---------------------------------------------------------------------------------------------

STATE = {
    "best_metric": None,
    "log_history": [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 5e-5, "loss": 2.5, "step": 10},
        {"epoch": 0.1, "eval_loss": 2.4, "eval_runtime": 3.0, "step": 10},
        {"epoch": 0.2, "grad_norm": math.nan, "learning_rate": 4e-5, "loss": 0.0, "step": 20},
        {"epoch": 0.2, "train_runtime": 9.0, "train_loss": 1.2, "step": 20},
        {"note": "no step"},
        "odd",
    ],
    "max_steps": 20,
}


def test_trainer_state(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(STATE, indent=2))
    done, found = bring(tmp_path / "run", path)
    assert done.files[0]["format"] == "trainer-state"
    assert found["loss"] == [(10, 2.5), (20, 0.0)]
    assert found["lr"] == [(10, 5e-5), (20, 4e-5)]
    assert math.isnan(found["grad_norm"][1][1])
    assert (found["eval_loss"], found["train_loss"]) == ([(10, 2.4)], [(20, 1.2)])
    assert done.passed_over["entries without a step"] == 1


def test_a_trainer_state_with_odd_numbers(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    entries = [{"step": step, "loss": 2.5, "odd": True} for step in (1.0, 2.5, "3", None, True, -1, 2**70)]
    path.write_text(json.dumps({"log_history": entries}).replace("2.5", "9" * 5000, 1))
    done, found = bring(tmp_path / "run", path)
    assert found == {"loss": [(1, math.inf)], "odd": [(1, 1)]}
    assert done.passed_over == {"entries without a step": 6}


def test_of_a_trainer_state_no_value_is_dropped_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    values = [True, False, "False", "true", None, "soon", [1], {}]
    entries = [{"step": step, "loss": 2.5, "skipped": value} for step, value in enumerate(values)]
    path.write_text(json.dumps({"log_history": entries}))
    done, found = bring(tmp_path / "run", path)
    assert found["skipped"] == [(0, 1), (1, 0), (2, 0), (3, 1)]
    assert done.notes == ["values without a number in skipped: 3 (first: entry 6, entry 7, entry 8)"]


def test_a_trainer_state_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    text = json.dumps(STATE)
    path.write_text(text[: text.index('"loss": 0.0')])
    done, found = bring(tmp_path / "run", path)
    assert found["loss"] == [(10, 2.5)]
    assert any("cut" in note for note in done.notes)


# --- tables ---------------------------------------------------------------------------------------------------------


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_table_with_true_and_false(tmp_path: Path) -> None:
    words = ("True", "False", "true", "FALSE")
    rows = "".join(f"{step},2.5,{words[step % 4]}\n" for step in range(8))
    done, found = bring(tmp_path / "run", table(tmp_path / "t.csv", f"step,loss,skipped\n{rows}True,2.5,True\n"))
    assert [value for _, value in found["skipped"]] == [1, 0, 1, 0] * 2
    assert done.notes == ["rows without a step: 1 (first: line 10)"]


def test_a_table_with_gaps_and_words(tmp_path: Path) -> None:
    rows = "\n".join(f"{step},{2 - step / 100},{'' if step % 2 else step},{step * 37 % 991:04x}" for step in range(50))
    text = f"step,loss,extra,crc\n{rows}\nx,1,1,1\n50,nan,,aa\n51,-Infinity,1_0\n52,1e-3,,ff,,\n53.0,3,,00\n\n54,1.2"
    done, found = bring(tmp_path / "run", table(tmp_path / "t.csv", text))
    assert set(found) == {"loss", "extra"}, "the column of hashes is text, though some look like numbers"
    assert found["loss"][49:] == [
        (49, 1.51),
        (50, pytest.approx(math.nan, nan_ok=True)),
        (51, -math.inf),
        (52, 0.001),
        (53, 3.0),
    ]
    assert found["extra"][-1] == (48, 48.0)
    assert done.passed_over["rows without a step"] == 1
    assert done.passed_over["cells without a number in extra"] == 1
    assert done.passed_over["cut last line"] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Wall time,Step,Value\n1700000000.5,7,1.25\n", {"Value": [(7, 1.25)]}),
        ("_step;train/loss\r\n3;2,5\r\n4;2.5\r\n", {"train/loss": [(3, 2.5), (4, 2.5)]}),
        ("\ufeffglobal_step\tloss\n1\t2.5\n", {"loss": [(1, 2.5)]}),
        ('"step","a ""b"""\n"1","2"\n', {'a "b"': [(1, 2.0)]}),
        ("step,loss,loss\n1,2,3\n", {"loss": [(1, 2.0)], "loss.2": [(1, 3.0)]}),
        ("loss,step\n1.5,9007199254740993\n", {"loss": [(9007199254740993, 1.5)]}),
    ],
)
def test_tables_of_many_kinds(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    path = table(tmp_path / "t.csv", text)
    assert bring(tmp_path / "run", path)[1] == expected


def test_a_table_that_names_attempts_and_ranks_may_be_in_any_order(tmp_path: Path) -> None:
    rows = [(attempt, rank, step) for attempt in (0, 1) for rank in (0, 1) for step in range(5 if attempt else 0, 10)]
    random.Random(1).shuffle(rows)
    text = "attempt,rank,step,loss\n" + "".join(f"{a},{r},{s},{a + r / 10}\n" for a, r, s in rows)
    done, found = bring(tmp_path / "run", table(tmp_path / "t.csv", text))
    assert [one.attempt for one in done.attempts] == [0, 1]
    assert found["loss"] == [(step, float(step >= 5)) for step in range(10)]


@pytest.mark.parametrize(
    ("attempts", "ranks"),
    [("a0001 a0002", "r0 r1"), ("attempt_1 attempt_2", "rank0 rank1"), ("A1 2", "Rank-0 r00001"), ("1.0 2.0", "0 1")],
)
def test_attempts_and_ranks_as_midwatch_spells_them(tmp_path: Path, attempts: str, ranks: str) -> None:
    text = "".join(
        f"{attempt},{rank},{step},{number}.5\n"
        for number, attempt in enumerate(attempts.split())
        for step in range(number * 5, 10)
        for rank in ranks.split()
    )
    done, found = bring(tmp_path / "run", table(tmp_path / "t.csv", f"attempt,rank,step,loss\n{text}"))
    assert [(one.attempt, one.first, one.rows) for one in done.attempts] == [(1, 0, 20), (2, 5, 10)]
    assert found["loss"] == [(step, 0.5 + (step >= 5)) for step in range(10)]
    assert done.passed_over == {}
    assert len(list((tmp_path / "run" / "metrics").glob("a000?-r00001.jsonl"))) == 2


@pytest.mark.parametrize("column", ["attempt", "rank"])
def test_attempts_and_ranks_that_are_no_numbers_are_refused_with_what_to_do(tmp_path: Path, column: str) -> None:
    path = table(tmp_path / "t.csv", f"{column},step,loss\n" + "".join(f"node7,{step},2.5\n" for step in range(9)))
    with pytest.raises(MetricsError, match="of which attempt or rank they are: 9") as caught:
        import_metrics([path], tmp_path / "run")
    assert "as numbers" in caught.value.hint
    path.write_text(path.read_text().replace(column, f"{column}_id", 1))
    assert bring(tmp_path / "run", path)[1] == {"loss": [(step, 2.5) for step in range(9)]}


@pytest.mark.parametrize(
    ("column", "cell", "ts_ns"),
    [
        ("timestamp", "1700000000.5", 1_700_000_000_500_000_000),
        ("_timestamp", "1700000000500", 1_700_000_000_500_000_000),
        ("Wall time", "2023-11-14T22:13:20.5Z", 1_700_000_000_500_000_000),
        ("ts_ns", "1700000000500000001", 1_700_000_000_500_000_001),
        ("timestamp", "12.5", 0),
        ("timestamp", "yesterday", 0),
    ],
)
def test_times_of_many_kinds(tmp_path: Path, column: str, cell: str, ts_ns: int) -> None:
    bring(tmp_path / "run", table(tmp_path / "t.csv", f"step,loss,{column}\n1,2.5,{cell}\n"))
    with MetricIndex(tmp_path / "run", tmp_path / "indexes") as index:
        assert [(one.metric, one.ts_ns) for one in index.newest()] == [("loss", ts_ns)]


def test_an_odd_column_of_steps_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "updates_done,loss\n1,2\n")
    with pytest.raises(MetricsError, match="in no format"):
        import_metrics([path], tmp_path / "run")
    with pytest.raises(MetricsError, match="the first line is: updates_done, loss"):
        import_metrics([path], tmp_path / "run", format="csv")
    assert bring(tmp_path / "run", path, step_column="Updates_Done")[1] == {"loss": [(1, 2.0)]}


def test_real_curves(tmp_path: Path) -> None:
    if not CURVES.is_dir():
        pytest.skip(f"no recorded curves at {CURVES}")
    done, found = bring(tmp_path / "run", CURVES / "mcore_gpt3_fp8_tp2pp2_h100.csv")
    assert found["loss"][:2] == [(1, 10.9488), (2, 10.94638)]
    assert found["num_zero_grads"][0] == (1, 82.0)
    assert len(done.attempts) == 1


# --- what is no run -------------------------------------------------------------------------------------------------


def test_runs_that_are_mixed_are_refused(tmp_path: Path) -> None:
    rows = [line for step in range(200) for line in (f"{step + 500},1.0", f"{step},2.0")]
    path = table(tmp_path / "t.csv", "step,loss\n" + "\n".join(rows) + "\n")
    with pytest.raises(MetricsError) as caught:
        import_metrics([path], tmp_path / "run")
    assert caught.value.code == "MT102"
    assert list((tmp_path / "run" / "metrics").glob("*.jsonl")) == []


@pytest.mark.parametrize("header", ["run,step,loss", "Run ID,step,loss", "fragment,step,loss"])
@pytest.mark.parametrize("is_mixed", [True, False])
def test_a_column_that_names_two_runs_is_refused_and_one_may_be_taken(
    tmp_path: Path, header: str, is_mixed: bool
) -> None:
    rows = [(run, step) for step in range(200) for run in ("exp a", "exp b")]
    rows = rows if is_mixed else sorted(rows)
    path = table(tmp_path / "t.csv", f"{header}\n" + "".join(f"{run},{step},{len(run)}.5\n" for run, step in rows))
    with pytest.raises(MetricsError, match="exp a, exp b") as caught:
        import_metrics([path], tmp_path / "run")
    assert (caught.value.code, "--run-name 'exp a'" in caught.value.hint) == ("MT102", True)
    done, found = bring(tmp_path / "run", path, run_name="exp b")
    assert found == {"loss": [(step, 5.5) for step in range(200)]}
    assert done.passed_over == {"rows of other runs": 200}
    with pytest.raises(MetricsError, match="rows of other runs: 400") as caught:
        import_metrics([path], tmp_path / "other", run_name="exp c")
    assert "--run-name" in caught.value.hint


def test_two_files_whose_columns_name_two_runs_are_refused(tmp_path: Path) -> None:
    paths = [table(tmp_path / f"{run}.csv", f"run,step,loss\n{run},1,2.5\n") for run in ("a", "b")]
    with pytest.raises(MetricsError, match="MT102"):
        import_metrics(paths, tmp_path / "run")
    assert len(import_metrics(paths[:1] * 2, tmp_path / "run").attempts) == 1


def test_a_run_can_be_taken_only_where_a_column_names_some(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(megatron([1]))
    for path in (table(tmp_path / "t.csv", "step,loss\n1,2.5\n"), tmp_path / "train.log"):
        with pytest.raises(MetricsError, match="names runs") as caught:
            import_metrics([path], tmp_path / "run", run_name="a")
        assert "--run-name" in caught.value.hint


@pytest.mark.parametrize(
    "header", ["step,loss,lr", "step,lr,loss", "attempt,step,loss", "rank,step,loss", "step,loss,elapsed"]
)
def test_two_writers_that_keep_pace_are_refused(tmp_path: Path, header: str) -> None:
    fill = {"lr": "0.1", "attempt": "1", "rank": "0"}
    text = "".join(
        ",".join(fill.get(name, str(step) if name == "step" else f"{2.5 + writer}") for name in header.split(","))
        + "\n"
        for step in range(200)
        for writer in range(2)
    )
    with pytest.raises(MetricsError, match="200 of 200 steps are told twice and differently") as caught:
        import_metrics([table(tmp_path / "t.csv", f"{header}\n{text}")], tmp_path / "run")
    assert caught.value.code == "MT102"
    assert list((tmp_path / "run" / "metrics").glob("*.jsonl")) == []


def test_two_writers_of_a_log_that_keep_pace_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "".join(megatron([step], loss) for step in range(90) for loss in ("2.0", "9.0"))
    )
    with pytest.raises(MetricsError, match="MT102"):
        import_metrics([tmp_path / "train.log"], tmp_path / "run")


@pytest.mark.parametrize(
    "rows",
    [
        [f"{step},{row}" for step in range(50) for row in ("2.5,,1", ",2.25,1")],
        [f"{step},2.5,,{time}" for step in range(50) for time in (1, 2)],
        [f"{step},2.5,,1" for first in (0, 5, 10, 15) for step in range(first, first + 20)],
        [f"{step},{2.5 + first / 100},,1" for first in (0, 1, 2) for step in range(20)],
        [f"{step},{loss},,1" for step in range(50) for loss in (f"{5.0 / (step + 3):.4f}", 5.0 / (step + 3))],
        [f"{step},{loss},,1" for step in range(50) for loss in (5.0 / (step + 3), f"{5.0 / (step + 3):.1e}")],
        [f"{step},{row}" for step in range(50) for row in ("2.5,nan,1", "nan,2.25,1")],
        [f"{step},{loss},,1" for step in range(50) for loss in ((2.5, 2.4) if step == 7 else (2.5,))],
    ],
    ids=[
        *("validation", "twice", "resumed", "begun anew", "rounded first", "rounded afterwards", "filled up with NaN"),
        "one odd duplicate",
    ],
)
def test_what_one_run_tells_twice_is_no_second_run(tmp_path: Path, rows: list[str]) -> None:
    text = "step,loss,val_loss,elapsed_s\n" + "\n".join(rows) + "\n"
    _, found = bring(tmp_path / "run", table(tmp_path / "t.csv", text))
    assert [step for step, _ in found["loss"]] == sorted({int(row.split(",")[0]) for row in rows})


def test_a_run_in_a_crash_loop_is_none_of_them(tmp_path: Path) -> None:
    path = table(
        tmp_path / "t.csv", "step,loss\n" + "".join(f"{step},1.0\n" for _ in range(60) for step in (10, 20, 30))
    )
    done, found = bring(tmp_path / "run", path)
    assert len(done.attempts) == 60
    assert len(found["loss"]) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty", b""),
        ("blank", b"\n\n \n"),
        ("log", b"hello\nworld, and more\n"),
        ("json", b'{"a": 1}'),
        ("binary", bytes(range(256)) * 10),
        ("header alone", b"step,loss\n"),
        ("state", b'{"log_history": 5}'),
        ("state2", b'{"log_history": [' + b"[" * 100_000),
    ],
)
def test_files_of_no_use_are_refused_in_words(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(MetricsError) as caught:
        import_metrics([path], tmp_path / "run")
    assert caught.value.code == "MT101"
    assert str(path.name) in caught.value.message


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("megatron", " iteration 1/ 9 | " + "a b: " * 20_000),
        ("megatron", " iteration 1/ 9 |" + " " * 60_000),
        ("megatron", "iteration " * 6000),
        ("torchtitan", "step: 1 x: " + "w" * 60_000),
        ("torchtitan", "step: 1 " * 8000),
        ("csv", "step," + "a," * 400_000),
        ("csv", "step,loss\n1," + "1" * 900_000),
        ("trainer-state", '{"log_history": [' + "[" * 500_000),
    ],
)
def test_odd_lines_take_no_time(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / "file"
    path.write_text((line + "\n") * 20)
    began = time.process_time()
    with contextlib.suppress(MetricsError):
        import_metrics([path], tmp_path / "run", format=name)
    assert time.process_time() - began < 3


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with path.open("w") as file:
        file.write("step,loss,lr\n")
        file.writelines(f"{step},2.5,0.1\n" for step in range(12_000))
    seen: list[int] = []
    tracemalloc.start()
    try:
        done = import_metrics([path], tmp_path / "run", progress=seen.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done.points == 24_000
    assert peak < 2e6
    assert sum(seen) == path.stat().st_size


# --- TensorBoard ----------------------------------------------------------------------------------------------------


def event(step: int, wall: float, *values: bytes, **more: bytes) -> bytes:
    body = put_double(1, wall) + put_int(2, step) + put_bytes(5, b"".join(put_bytes(1, value) for value in values))
    return tfrecord.framed(body + b"".join(more.values()))


def scalar(tag: str, value: float) -> bytes:
    return put_bytes(1, tag.encode()) + put_varint(2 << 3 | FIXED32) + struct.pack("<f", value)


def events_file(folder: Path, *events: bytes, name: str = "events.out.tfevents.1700000000.host.1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    version = tfrecord.framed(put_double(1, 0.0) + put_bytes(3, b"brain.Event:2"))
    path = folder / name
    path.write_bytes(version + b"".join(events))
    return path


def test_event_files_of_tensorboard_itself(tmp_path: Path) -> None:
    """See the README beside them."""
    done, found = bring(tmp_path / "run", GOLDEN / "torch")
    assert found["train/loss"] == [(step, pytest.approx(3.0 - step / 8)) for step in range(8)]
    assert math.isnan(found["edge"][0][1])
    assert found["edge"][1][1] == math.inf
    assert (found["new style"], found["double"]) == ([(3, 0.25)], [(4, 1 / 3)])
    assert "weights" not in found
    assert done.passed_over["summaries that are no scalars"] == 2
    assert len(done.attempts) == 1, "a tag that begins late is no restart"
    assert bring(tmp_path / "other", GOLDEN / "tensorboard")[1] == {"loss": [(0, 2.5), (1, 1.5), (2, 0.5)]}


def test_a_folder_with_several_runs_in_it(tmp_path: Path) -> None:
    for name, base in (("train", 0), ("validation", 5)):
        events = [event(step, 1.7e9 + step + base, scalar("loss", step)) for step in range(0, 50, 5 if base else 1)]
        events_file(tmp_path / "tb" / name, *events)
    done, found = bring(tmp_path / "run", tmp_path / "tb")
    assert set(found) == {"train/loss", "validation/loss"}
    assert len(found["train/loss"]) == 50
    assert len(done.attempts) == 1


def test_event_files_of_one_run_after_the_other(tmp_path: Path) -> None:
    first = [event(step, 1.7e9 + step, scalar("loss", 1.0), scalar("lr", 0.1)) for step in range(20)]
    second = [event(step, 1.7e9 + 100 + step, scalar("loss", 2.0)) for step in range(12, 15)]
    events_file(tmp_path / "tb", *first)
    events_file(tmp_path / "tb", *second, name="events.out.tfevents.1700000100.host.1.0")
    done, found = bring(tmp_path / "run", tmp_path / "tb")
    assert [(one.attempt, one.start) for one in done.attempts] == [(1, 0), (2, 12)]
    assert [value for _, value in found["loss"]] == [1.0] * 12 + [2.0] * 3
    assert len(found["lr"]) == 12


def test_a_purge_step_is_a_restart(tmp_path: Path) -> None:
    first = [event(step, 1.7e9 + step, scalar("loss", 1.0)) for step in range(20)]
    purge = tfrecord.framed(put_double(1, 1.7e9 + 50) + put_int(2, 8) + put_bytes(7, put_int(1, 1)))
    path = events_file(tmp_path / "tb", *first, purge, event(30, 1.7e9 + 60, scalar("loss", 2.0)))
    _, found = bring(tmp_path / "run", path)
    assert [step for step, _ in found["loss"]] == [*range(8), 30]


def test_damaged_event_files(tmp_path: Path) -> None:
    events = [event(step, 1.7e9 + step, scalar("loss", float(step))) for step in range(6)]
    whole = events_file(tmp_path / "tb", *events).read_bytes()
    flipped = bytearray(whole)
    flipped[-len(events[5]) - 10] ^= 0xFF
    length_hit = bytearray(whole)
    length_hit[-len(events[5]) - len(events[4]) + 9] ^= 0xFF
    for number, (raw, steps) in enumerate(
        ((whole[:-3], [0, 1, 2, 3, 4]), (bytes(flipped), [0, 1, 2, 3, 5]), (bytes(length_hit), [0, 1, 2, 3]))
    ):
        path = tmp_path / f"{number}.tfevents.x"
        path.write_bytes(raw)
        done, found = bring(tmp_path / f"run{number}", path)
        assert [step for step, _ in found["loss"]] == steps
        assert done.notes, "it is said"


def test_check_sums_are_those_of_the_standard() -> None:
    assert tfrecord.crc32c(b"123456789") == 0xE3069283
    assert tfrecord.masked_crc(bytes(32)) == ((0x8A9136AA >> 15 | 0x8A9136AA << 17) + 0xA282EAD8) & 0xFFFFFFFF


# --- the run folder -------------------------------------------------------------------------------------------------


def test_an_import_comes_whole_or_not_at_all_and_only_once(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "train.log"
    log.write_text(megatron([1, 2, 3]))
    rehearsed = import_metrics([log], run, is_rehearsal=True)
    assert (rehearsed.points, rehearsed.dry_run, run.exists()) == (27, True, False)
    import_metrics([log], run)
    info = read_run(run)
    assert info is not None
    head = json.loads((run / "metrics" / "a0001.jsonl").read_text().splitlines()[0])
    assert (head["run"], head["source"], head["start"]) == (info.run, "train.log", 0)
    log.write_text(megatron([1, 2, 3, 2]))
    with pytest.raises(MetricsError) as caught:
        import_metrics([log], run)
    assert caught.value.code == "MT104"
    assert import_metrics([log], run, is_replacing=True).replaced == ["a0001.jsonl"]
    assert sorted(path.name for path in (run / "metrics").glob("*.jsonl")) == ["a0001.jsonl", "a0002.jsonl"]


def test_what_midwatch_recorded_is_never_replaced(tmp_path: Path) -> None:
    own = tmp_path / "run" / "metrics" / "a0001.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text('{"schema": 1, "attempt": 1, "start": 0}\n{"step": 0, "loss": 1}\n')
    (tmp_path / "train.log").write_text(megatron([1]))
    with pytest.raises(MetricsError, match="own record"):
        import_metrics([tmp_path / "train.log"], tmp_path / "run", is_replacing=True)
    assert '"loss": 1' in own.read_text()


def test_what_a_killed_import_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "run" / "metrics" / ".import-99999"
    left.mkdir(parents=True)
    (left / "a0001.jsonl").write_text("{}\n")
    (tmp_path / "train.log").write_text(megatron([1]))
    import_metrics([tmp_path / "train.log"], tmp_path / "run")
    assert not left.exists()
