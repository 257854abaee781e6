"""The one reader of tables: the right numbers, or none, of whatever writes CSV or what it takes for it.

Importing and triage read through it, so each case here holds for both; a few are asked of both to be sure.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.audit.importers import Table, UnfitFileError, import_metrics
from midwatch.audit.importers.numbers import NumberFormat, number_format
from midwatch.audit.index import MetricIndex
from midwatch.core import MetricsError, TriageError
from midwatch.triage import replay

Curve = dict[int, float | None]


def read(folder: Path, content: str | bytes, name: str = "loss") -> tuple[Curve, Counter[str]]:
    """Step -> the number in a column, and what was passed over."""
    path = folder / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    table, odd = Table(path), Counter[str]()
    at = [one.strip() for one in table.names].index(name)

    def tell(what: str, where: str) -> None:
        odd[what] += bool(where)

    found = {row.step: table.format.number(row.cells[at]) if at < len(row.cells) else None for row in table.rows(tell)}
    return found, odd


# --- separators, decimals, thousands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step,loss\n1,2.5\n2,2.25\n", {1: 2.5, 2: 2.25}),
        ("step;loss\n1;2,5\n2;2,25\n", {1: 2.5, 2: 2.25}),
        ("step\tloss\n1\t2,5\n2\t2,25\n", {1: 2.5, 2: 2.25}),
        ('step,loss\n1,"2,5"\n2,"2,25"\n', {1: 2.5, 2: 2.25}),
        ("step|loss\n1|2.5\n", {1: 2.5}),
        ("step  loss\n 1    2.5\n 20   2.25\n", {1: 2.5, 20: 2.25}),
        ("# step loss\n1 2.5\n", {1: 2.5}),
        ("step;loss\n999;1.234,5\n1.000;2,5\n", {999: 1234.5, 1000: 2.5}),
        ('step,loss\n999,"1,234.5"\n"1,000",2.5\n', {999: 1234.5, 1000: 2.5}),
        ('step,loss\n999,2.5\n"1,000",2.25\n', {999: 2.5, 1000: 2.25}),
        ("step;loss\n1 000;2.5\n2\u202f000;2.25\n3'000;2\n", {1000: 2.5, 2000: 2.25, 3000: 2.0}),
        ("step;loss\n1;2,345\n2;2,346\n", {1: 2.345, 2: 2.346}),
        ("step;loss;lr\n1;2,345;0.1\n2;1,000,000;0.1\n", {1: 2345.0, 2: 1e6}),
        ("step,loss\n1e3,2.5\n1001.0,2.25\n", {1000: 2.5, 1001: 2.25}),
        ("step,loss\n1,1e400\n2,-1e400\n", {1: math.inf, 2: -math.inf}),
        ("step,loss\n1,0.003\n2,1_000\n3,0x10\n", {1: 0.003, 2: None, 3: None}),
    ],
)
def test_how_numbers_are_written(tmp_path: Path, text: str, expected: Curve) -> None:
    assert read(tmp_path, text)[0] == expected


def test_a_comma_before_three_digits_is_decided_by_the_others() -> None:
    assert number_format(["2,345", "0.5"]).number("2,345") == 2345
    assert number_format(["2,345", "12,5"]).number("2,345") == 2.345
    assert number_format(["0,345"]).number("2,345") == 2.345
    assert NumberFormat().number("2,345") is None, "nobody can tell"
    assert NumberFormat().whole("2,345") == 2345, "but steps have no decimals"


@pytest.mark.parametrize("step", ["1.5", "nan", "inf", "1e400", "1_0", str(2**63), "9" * 5000, "0x10", "", "one"])
def test_what_is_no_step(tmp_path: Path, step: str) -> None:
    assert read(tmp_path, f"step,loss\n1,2.5\n{step},9\n3,2.25\n") == (
        {1: 2.5, 3: 2.25},
        {"rows without a step": 1},
    )


# --- names -----------------------------------------------------------------------------------------------------------


def test_empty_names_extra_cells_and_a_column_twice(tmp_path: Path) -> None:
    assert read(tmp_path, ",step,,loss,loss\n7,1,8,2.5,3\n7,2,8,2.25\n7,3,8,2,1,\n")[0] == {1: 2.5, 2: 2.25, 3: 2.0}


def test_the_column_of_steps_that_is_filled(tmp_path: Path) -> None:
    rows = "".join(f",{step},2.5\n" if step % 10 else f"{step // 10},{step},2.5\n" for step in range(1, 40))
    assert list(read(tmp_path, f"step,_step,loss\n{rows}")[0]) == list(range(1, 40))


def test_lines_before_the_names(tmp_path: Path) -> None:
    text = "exported at each step\nby somebody; who knows, when\n\nstep,loss\n1,2.5\n"
    assert read(tmp_path, text)[0] == {1: 2.5}


def test_rubbish_among_the_rows_makes_no_column_one_of_text(tmp_path: Path) -> None:
    rubbish = "Traceback, most recent call last\n" * 20
    path = tmp_path / "table.csv"
    path.write_text("step,loss\n" + rubbish + "".join(f"{step},2.5\n" for step in range(50)))
    assert import_metrics([path], tmp_path / "run").points == 50


def test_a_line_of_a_log_is_no_line_of_names(tmp_path: Path) -> None:
    for line in ("[2026-07-01 05:26:15] iteration 7/ 9 | lm loss: 2.5 |", "at step 7 of 9", "step loss 7"):
        with pytest.raises(UnfitFileError):
            read(tmp_path, f"{line}\n" + "x y 7 8\n7 7 7 7\n" * 5)


def test_joined_files_with_other_columns(tmp_path: Path) -> None:
    text = "step,loss,lr\n1,2.5,0.1\nlr,step,loss\n0.1,2,2.25\nstep,lr\n3,0.1\nstep,loss,lr\n4,2.0,0.1\n"
    assert read(tmp_path, text) == ({1: 2.5, 2: 2.25, 3: None, 4: 2.0}, {})


def test_names_that_do_not_fit_the_rows_are_refused(tmp_path: Path) -> None:
    for text in ("step,loss\n" + "1,2,5\n" * 9, "step lm loss\n" + "1 2.5\n" * 9, "step loss\n" + "1 a 2.5\n" * 9):
        with pytest.raises(UnfitFileError, match="nobody can tell"):
            read(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"1,2.5\n2,2.25\n", "holds numbers, not names"),
        (b"a,b\n1,2\n", "no column counts steps"),
        (b"step," * 30_000 + b"\n", "no list of names"),
        (b"x" * (3 << 20), "longer than any line of names"),
        (b"PK\x03\x04abc", "spreadsheet"),
        (b"\x1f\x8b\x08\0", "gzip"),
        (b"\0" * 5000, "is not text"),
    ],
)
def test_what_is_no_table_is_refused_by_both_in_words(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(TriageError, match=what) as told:
        replay(path)
    assert (told.value.code, "table.csv" in told.value.message) == ("TR101", True)
    with pytest.raises(MetricsError, match=what) as told_too:
        import_metrics([path], tmp_path / "run", format="csv")
    assert told_too.value.code == "MT101"


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing", "device"])
def test_what_is_no_file_is_refused_by_both_in_words(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "there"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    with pytest.raises(TriageError, match=str(path)):
        replay(path)
    with pytest.raises(MetricsError, match=str(path)) as told:
        import_metrics([path], tmp_path / "run")
    assert told.value.code == "MT101"


# --- how it is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_and_line_ends(tmp_path: Path, encoding: str, end: str) -> None:
    text = "step,loss,\u00b5s\n" + "".join(f"{step},2.5,7\n" for step in range(300))
    found, odd = read(tmp_path, text.replace("\n", end).encode(encoding))
    assert (found, odd) == (dict.fromkeys(range(300), 2.5), {})


def test_files_that_begin_with_a_mark_and_were_joined(tmp_path: Path) -> None:
    one = "step,loss\n1,2.5\n".encode("utf-8-sig")
    assert read(tmp_path, one + one.replace(b"1", b"2")) == ({1: 2.5, 2: 2.5}, {})


def test_a_cell_over_several_lines_and_a_quote_that_stands_alone(tmp_path: Path) -> None:
    text = 'step,text,loss\n1,"a\nb, ""c""\nz9,9",2.5\n2,5" disk,2.25\n3,"open,2.0\n4,x,1.75\n5,"shut,1.5\n6,y,1.25\n'
    found, odd = read(tmp_path, text)
    assert found == {1: 2.5, 2: 2.25, 3: None, 4: 1.75, 5: None, 6: 1.25}
    assert odd == {"last cells of rows that end early": 2}
    lost = "step,loss\n" + '1,"2\n' + "".join(f"{step},2.5\n" for step in range(2, 500))
    assert len(read(tmp_path, lost)[0]) == 499, "one quote does not swallow the file"


@pytest.mark.parametrize("end", ["", ",", ",,"])
@pytest.mark.parametrize(
    "odd_row",
    ["300,99,2.5,0.9", "300,2.5401,9.5,0.9", "300,2.5,0.9401,9.5,0.9", "300,,9.5,0.9", "300,9,2.5,0.9,301,2.5,0.9"],
)
def test_a_row_with_more_cells_than_names_is_not_taken(tmp_path: Path, odd_row: str, end: str) -> None:
    rows = [f"{step},2.5,0.9" for step in range(600)]
    rows[300] = odd_row
    found, odd = read(tmp_path, "".join(f"{row}{end}\n" for row in ["step,loss,lr", *rows]))
    assert (found, odd) == (
        {step: 2.5 for step in range(600) if step != 300},
        {"rows with more cells than there are names": 1},
    )
    done = import_metrics([tmp_path / "table.csv"], tmp_path / "run", is_rehearsal=True)
    assert (done.points, done.passed_over) == (2 * 599, odd)
    assert replay(tmp_path / "table.csv").findings == []


def test_more_cells_than_there_were_names_for_are_right_behind_names_for_them(tmp_path: Path) -> None:
    begin = "step,loss\n" + "".join(f"{step},2.5,\n" for step in range(9))
    found, odd = read(tmp_path, begin + "step,loss,lr\n9,2.5,0.1\n10,2.5,0.1,7\n")
    assert (found, odd) == (dict.fromkeys(range(10), 2.5), {"rows with more cells than there are names": 1})


def test_a_last_column_without_a_name_is_one_where_it_is_filled(tmp_path: Path) -> None:
    assert read(tmp_path, "step,loss,\n1,2.5,a\n2,2.5,b\n") == ({1: 2.5, 2: 2.5}, {})


def test_what_a_crash_leaves(tmp_path: Path) -> None:
    text = b"step,loss\n1,2.5\n2,2." + b"\0" * 3 + b"15,2.25\n16,2.0\n17,1.7"
    found, odd = read(tmp_path, text)
    assert found == {1: 2.5, 16: 2.0, 17: None}, "neither a number that was cut nor one that begins in a hole"
    assert odd == {"lines with zero bytes": 1, "cut last line": 1}


def test_a_line_of_megabytes_is_passed_over(tmp_path: Path) -> None:
    found, odd = read(tmp_path, b"step,loss\n1,2.5\n2," + b"7" * (5 << 20) + b"\n3,2.25\n")
    assert found == {1: 2.5, 3: 2.25}
    assert set(odd) == {"lines too long for a row"}


def test_thousands_of_columns(tmp_path: Path) -> None:
    names = ",".join(f"m{number}" for number in range(5000))
    began = time.process_time()
    text = f"step,{names},loss\n" + "".join(f"{step},{'1.5,' * 5000}2.5\n" for step in range(60))
    assert read(tmp_path, text)[0] == dict.fromkeys(range(60), 2.5)
    assert time.process_time() - began < 5


# --- both see the same -----------------------------------------------------------------------------------------------


def test_triage_and_import_see_the_same_numbers(tmp_path: Path) -> None:
    source = random.Random(3)
    cells = ["2.5", "2,5", "nan", "", "None", "-", "1e400", '"3"', "4 ", "1.#QNAN", "-nan(ind)", "1e-3"]
    lines = [f"{step};{source.choice(cells)}" for step in range(400)]
    lines[7] = "7;x"
    path = tmp_path / "table.csv"
    path.write_text("iteration;lm loss\n" + "\n".join(lines) + "\n")
    import_metrics([path], tmp_path / "run")
    with MetricIndex(tmp_path / "run", tmp_path / "indexes") as index:
        index.sync()
        imported = len(index.series("lm loss"))
    judged = replay(path)
    assert judged.inputs["loss"] == imported == sum(line.split(";")[1] not in ("", "None", "-", "x") for line in lines)


def test_a_validation_in_a_row_of_its_own_hides_no_loss(tmp_path: Path) -> None:
    lines = [f"{step},{'' if is_eval else 2.5},{2.4 if is_eval else ''}" for step in range(300) for is_eval in (1, 0)]
    path = tmp_path / "table.csv"
    path.write_text("step,loss,eval_loss\n" + "\n".join(lines) + "\n")
    found = replay(path)
    assert (found.rows, found.inputs["loss"], found.repeated_rows) == (300, 300, 0)


def test_perplexity_is_a_loss_and_negative_steps_are_none(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("step,ppl\n-1,20\n" + "".join(f"{step},{12 if step != 500 else 90}\n" for step in range(600)))
    found = replay(path)
    assert found.oddities == {"rows with a negative step": 1}
    assert [(one.kind, one.step) for one in found.findings] == [("spike", 500)]


def test_columns_of_several_runs_are_not_mixed_up_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = "".join(f"{step},,2.5,2.4\n" for step in range(300))
    path.write_text(f"Step,old - train/loss,new - train/loss,big - train/loss\n{rows}")
    found = replay(path)
    assert found.inputs == {"loss": 300}, "the first that holds anything"
    assert list(found.oddities) == ["column called like one that is judged: big - train/loss"]


def test_names_and_steps_beyond_all_bounds_are_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"step,loss,{'n' * 600}\n1,2.5,1\n{2**63 - 1},2.5,1\n-{2**62},2.25,1\n")
    done = import_metrics([path], tmp_path / "run")
    assert (done.points, done.passed_over) == (
        2,
        {"values whose name is none": 2, "rows without a step": 1},
    )
    path.write_text("rank,step,loss\n" + "".join(f"{rank},1,2.5\n" for rank in range(20_001)))
    with pytest.raises(MetricsError, match="attempts and ranks"):
        import_metrics([path], tmp_path / "other", is_rehearsal=True)


def test_a_file_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff.csv"))
    path.write_text("step,loss\n1,2.5\n")
    assert import_metrics([path], tmp_path / "run").files[0]["path"].endswith(r"run\udcff.csv")
    assert replay(path).rows == 1


WORDS = [
    b"step",
    b"loss",
    b",",
    b"\n",
    b"1",
    b"2.5",
    b"nan",
    b'"',
    b"\0",
    b";",
    b"\xff",
    b"-",
    b"\r",
    b" ",
    b"\t",
    b"#",
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(WORDS), max_size=60).map(b"".join))
def test_any_bytes_are_a_table_or_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any-table.csv"
    for content in (text, b"step,loss\n1,2.5\n" + text):
        path.write_bytes(content)
        try:
            rows = list(Table(path).rows(lambda what, where: None))
        except UnfitFileError:
            continue
        assert content is text or rows[0].step == 1


def test_one_step_that_is_written_wrongly_is_no_restart(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    steps = [*range(250), 3, *range(250, 300)]
    path.write_text("step,loss\n" + "".join(f"{step},{9 if at == 250 else 2.5}\n" for at, step in enumerate(steps)))
    done = import_metrics([path], tmp_path / "run")
    assert (len(done.attempts), done.points) == (1, 300)
    assert done.passed_over == {"rows that lie behind those around them": 1}
    found = replay(path)
    assert (found.rows, found.stray_rows, found.dead_rows, found.resumes, found.findings) == (300, 1, 0, [], [])


def test_rows_of_no_attempt_are_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("attempt,step,loss\n1,1,2.5\nx,1,9\n,1,9\n2,1,2.25\n")
    done = import_metrics([path], tmp_path / "run")
    assert ([one.attempt for one in done.attempts], done.points) == ([1, 2], 2)
