"""What changed, in words."""

from __future__ import annotations

from midwatch.core import (
    NOT_KEPT,
    CodeState,
    Provenance,
    Section,
    changed_section,
    changed_values,
    changes_text,
    compare_provenance,
    names_of,
)


def section(**values: object) -> Section:
    return Section(hash=str(sorted(values.items())), values=values)


def test_values_are_told_with_old_and_new_and_strictly() -> None:
    changes = changed_values({"a": 1, "b": 1, "c": "1", "d": 0.1}, {"a": True, "b": 1.5, "c": 1, "e": None})
    assert changes_text(changes) == 'a 1 -> true, b 1 -> 1.5, c "1" -> 1, d 0.1 is gone, e null is new'
    assert names_of(changes, "changed") == ["a", "b", "c"]


def test_many_changes_are_counted_and_long_values_cut() -> None:
    changes = changed_values({}, {f"k{i:02d}": "x" * 500 for i in range(20)})
    text = changes_text(changes)
    assert text.endswith("and 12 more")
    assert len(text) < 1000


def test_where_only_hashes_are_known_the_change_says_so() -> None:
    (change,) = changed_section(Section(hash="a"), Section(hash="b"))
    assert (change.name, change.old, change.new) == (NOT_KEPT, "a", "b")


def test_what_one_side_has_no_record_of_is_unknown_and_no_change() -> None:
    known = Provenance(semantic=section(lr=1), code=CodeState(hash="c", entry="train.py", files={"train.py": "1"}))
    found = compare_provenance(Provenance(), known)
    assert found.is_same
    assert set(found.unknown) == {"semantic", "layout", "operational", "observed", "code"}
    assert compare_provenance(known, known).is_same


def test_each_part_is_compared_by_name() -> None:
    old = Provenance(
        semantic=section(lr=1),
        layout=section(world_size=4),
        code=CodeState(hash="1", entry="a.py", files={"a.py": "1", "m.py": "1"}, commit="c1", is_dirty=False),
        command=("--lr", "1", "--bf16"),
        libraries={"torch": "2.8"},
    )
    new = Provenance(
        semantic=section(lr=2),
        layout=section(world_size=2),
        code=CodeState(hash="2", entry="b.py", files={"b.py": "2", "m.py": "2"}, commit="c2", is_dirty=True),
        command=("--lr=2",),
        libraries={"torch": "2.9"},
    )
    found = compare_provenance(old, new)
    assert not found.is_same
    assert changes_text(found.semantic) == "lr 1 -> 2"
    assert changes_text(found.layout) == "world_size 4 -> 2"
    assert changes_text(found.files) == 'a.py "1" is gone, b.py "2" is new, m.py "1" -> "2"'
    assert str(found.entry) == 'entry script "a.py" -> "b.py"'
    assert [change.name for change in found.commit] == ["commit", "uncommitted changes"]
    assert changes_text(found.command) == '--bf16 "" is gone, --lr "1" -> "2"'
    assert changes_text(found.libraries) == 'torch "2.8" -> "2.9"'


def test_files_with_uncommitted_changes_are_named_where_both_sides_name_them() -> None:
    def found(old: CodeState, new: CodeState) -> list[tuple[str, object, object]]:
        changes = compare_provenance(Provenance(code=old), Provenance(code=new)).commit
        return [(change.name, change.old, change.new) for change in changes]

    clean = CodeState(hash="1", commit="c", is_dirty=False)
    dirty = CodeState(hash="1", commit="c", is_dirty=True, diff_digest="d", changed_files=("a.py",), changed_count=1)
    assert found(clean, dirty) == [("uncommitted changes", "none", "d"), ("files with them", [], ["a.py"])]
    more = CodeState(hash="1", commit="c", is_dirty=True, diff_digest="e", changed_files=("a.py",), changed_count=1)
    assert found(dirty, more) == [("uncommitted changes", "d", "e")]
    unnamed = CodeState(hash="1", commit="c", is_dirty=True, diff_digest="f")
    assert found(unnamed, dirty) == [("uncommitted changes", "f", "d")]


def test_arguments_are_compared_by_option_and_by_place() -> None:
    def told(old: str, new: str) -> str:
        return changes_text(
            compare_provenance(Provenance(command=tuple(old.split())), Provenance(command=tuple(new.split()))).command
        )

    assert told("fit --lr 1", "fit --lr 2") == '--lr "1" -> "2"'
    assert told("3 0.1 big", "5 0.1 big") == 'argument "3" -> "5"'
    assert told("a b", "a c") == 'argument (2) "b" -> "c"'
    assert told("--bias -1", "--bias=-2") == '--bias "-1" -> "-2"'
    assert told("--x 1 --x 2", "--x 1 --x 3") == '--x (2) "2" -> "3"'
    assert told("--lr 1 --bf16", "--bf16 --lr 1") == ""


def test_settings_that_only_another_version_knows_are_no_change() -> None:
    old = Provenance(operational=section(a=1, gone=1), libraries={"midwatch": "1"})
    new = Provenance(operational=section(a=2, fresh=1), libraries={"midwatch": "2"})
    assert changes_text(compare_provenance(old, new).operational) == "a 1 -> 2"
