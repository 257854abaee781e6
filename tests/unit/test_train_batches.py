"""What is made of the tokens that a script says it reads: known rows, repeated rows, distribution, sources."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from token_streams import VOCABULARY, Documents, batches  # noqa: E402

from midwatch.checkpoint import values  # noqa: E402
from midwatch.config import DataConfig, GuardsConfig, ScheduleConfig  # noqa: E402
from midwatch.guards import Finding, Guards, Sample  # noqa: E402
from midwatch.train.batch_numbers import ROWS_HASH, made_of, same_rows  # noqa: E402
from midwatch.train.batches import Batches  # noqa: E402
from midwatch.train.row_memory import RowMemory  # noqa: E402
from midwatch.train.sources import ARMED, LATELY, Sources  # noqa: E402
from midwatch.train.token_rows import rows_of  # noqa: E402

pytestmark = pytest.mark.torch


class Reader:
    """One rank with guards of its own."""

    def __init__(self, **config: Any) -> None:
        self.batches = Batches(DataConfig(**config))
        self.guards = Guards(GuardsConfig(schedule=ScheduleConfig()))
        self.step = 0

    def read(self, tokens: Any, source: Any = "", epoch: int | None = None) -> dict[str, float]:
        self.batches.add(self.step, source, tokens, epoch)
        return made_of(self.batches.take(), {})

    def judge(self, *args: Any, **more: Any) -> tuple[Finding, ...]:
        numbers = self.read(*args, **more)
        source = self.batches.source if "source_z" in numbers else ""
        found = self.guards.observe(Sample(step=self.step, source=source, **numbers)).findings
        self.step += 1
        return found


def judged(stream: Iterable[Any], change: Callable[[int, Any], Any] = lambda _, tokens: tokens) -> list[Finding]:
    reader = Reader()
    return [one for step, tokens in enumerate(stream) for one in reader.judge(change(step, tokens))]


def rows(*numbers: int) -> Any:
    """A batch with one row for each number."""
    return np.array([[number, number + 1, 7] for number in numbers])


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_of_earlier_steps_are_known_and_those_of_this_step_are_not() -> None:
    reader = Reader()
    assert reader.read(rows(1, 2, 3, 4))["seen_share"] == 0
    assert reader.read(rows(5, 1, 2, 6))["seen_share"] == 0.5
    reader.batches.add(0, "", rows(10, 11), None)
    reader.batches.add(1, "", rows(10, 12), None)
    numbers = made_of(reader.batches.take(), {})
    assert (numbers["seen_share"], numbers["repeated_share"]) == (0, 0.5), "two micro-batches are one step"


def test_how_the_numbers_are_stored_makes_no_difference() -> None:
    tokens = np.random.default_rng(1).integers(0, 200, (4, 33))
    forms: list[Any] = [tokens, tokens.astype(np.int32), tokens.astype(np.uint8), torch.from_numpy(tokens)]
    forms += [torch.from_numpy(tokens).short(), tokens.tolist(), [torch.from_numpy(row) for row in tokens]]
    forms += [np.asfortranarray(tokens), torch.from_numpy(tokens).t().contiguous().t(), tokens.reshape(4, 3, 11)]
    reader = Reader()
    seen = [reader.read(form)["seen_share"] for form in forms]
    assert seen == [0.0] + [1.0] * (len(forms) - 1)


def test_rows_of_different_lengths() -> None:
    reader = Reader()
    reader.read([[1, 2, 3], [1, 2], []])
    numbers = reader.read([[1, 2], [1, 2, 3, 4], [1, 2]])
    assert numbers["seen_share"] == pytest.approx(2 / 3)
    assert numbers["repeated_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        (torch.ones(2, 3), "float32"),
        (np.ones((2, 3)), "float64"),
        (torch.ones(2, 3, dtype=torch.bool), "bool"),
        (torch.ones(5, dtype=torch.int64), "shape"),
        (torch.empty(2, 3, dtype=torch.int64, device="meta"), "on the CPU"),
        (torch.eye(3).long().to_sparse(), "shape (rows, length)"),
        ([["a", "b"]], "row"),
        ([1, 2, 3], "row"),
        ([[[1, 2], [3]]], "shape"),
        ("text", "not a str"),
        (5, "not a int"),
    ],
)
def test_what_is_no_batch_of_tokens_is_refused_by_its_name(tokens: Any, word: str) -> None:
    with pytest.raises(TypeError, match=r"run\.batch") as caught:
        rows_of(tokens)
    assert word in str(caught.value)


@pytest.mark.parametrize("tokens", [[], np.empty((0, 5), int), np.empty((5, 0), int), torch.empty(0, 0).long()])
def test_a_batch_of_nothing_says_nothing(tokens: Any) -> None:
    assert Reader().read(tokens) == {}


def test_in_another_epoch_rows_may_come_again_once() -> None:
    reader = Reader()
    assert reader.read(rows(1, 2, 3, 4), epoch=0)["seen_share"] == 0
    assert reader.read(rows(4, 3, 2, 1), epoch=1)["seen_share"] == 0
    assert reader.read(rows(1, 2, 9, 8), epoch=1)["seen_share"] == 0.5
    assert reader.read(rows(1, 2, 3, 4), epoch=0)["seen_share"] == 1, "epochs begin again, too"


def test_a_second_epoch_that_nobody_told_of_is_noted_once() -> None:
    stream = [rows(*range(8 * step, 8 * step + 8)) for step in range(200)]
    found = judged(stream * 3)
    assert [(one.step, one.kind, one.tier) for one in found] == [(200, "data_repeated", "note")]
    assert "another epoch" in found[0].text


# --- what is remembered --------------------------------------------------------------------------------------------


def test_the_first_rows_and_the_newest_stay_known_and_memory_is_bounded() -> None:
    source = random.Random(1)
    memory = RowMemory(4096)
    every = [source.getrandbits(64) or 1 for _ in range(40_000)]
    for at in range(0, len(every), 8):
        assert not memory.take(every[at : at + 8])
    size = sum(one.nbytes for one in memory.state_dict().values() if isinstance(one, torch.Tensor))
    assert size <= 4096 * 9
    assert len(memory.take(every[:100])) >= 85
    assert len(memory.take(every[-500:])) >= 495
    assert len(memory.take(every[10_000:20_000])) < 1500, "most of the others are forgotten"


def test_a_table_that_grows_loses_hardly_a_row() -> None:
    source = random.Random(2)
    memory = RowMemory(2**18)
    every: list[int] = []
    for _ in range(40):  # through three sizes
        every += [source.getrandbits(64) or 1 for _ in range(1000)]
        memory.take(every[-1000:])
        assert len(memory.take(every)) > 0.99 * len(every)


def test_nothing_is_remembered_where_that_is_asked_for() -> None:
    reader = Reader(remember_rows=0)
    for _ in range(3):
        numbers = reader.read(rows(1, 1, 2))
        assert (numbers["seen_share"], numbers["repeated_share"]) == (0, pytest.approx(2 / 3))
    assert reader.batches.state_dict()["rows"] == {}


def test_steps_that_a_resume_does_again_are_not_known() -> None:
    reader = Reader(mix={"a": 1, "b": 1})
    for step in range(40):
        reader.read(rows(*range(8 * step, 8 * step + 8)), source="ab"[step % 2])
    saved = stored(reader.batches)
    for step in range(40, 60):  # a branch that dies
        reader.read(rows(*range(8 * step, 8 * step + 8)), source="a")
    again = Reader(mix={"a": 1, "b": 1})
    again.batches.load_state_dict(saved)
    reader.batches.load_state_dict(saved)
    for one in (again, reader):
        assert one.read(rows(*range(320, 328)), source="a")["seen_share"] == 0
        assert one.read(rows(*range(8)), source="b")["seen_share"] == 1
    assert again.batches.state_dict()["sources"] == reader.batches.state_dict()["sources"]


def stored(batches: Batches) -> dict[str, Any]:
    """As a checkpoint would give it back: plain data, and tensors of their own."""
    kept: dict[str, Any] = {}

    def leaf(path: str, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, torch.Tensor):
            return None
        kept[path] = value.clone()
        return {"$tensor": path}

    text = values.dumps(values.encode(batches.state_dict(), "batches", leaf))
    return values.decode(values.loads(text), lambda _, key: kept[key])


@pytest.mark.parametrize("part", ["rows", "tokens"])
def test_a_state_of_another_shape_is_refused(part: str) -> None:
    reader = Reader()
    reader.read(rows(1, 2))
    state = stored(reader.batches)
    for name, value in state[part].items():
        if isinstance(value, torch.Tensor):
            state[part][name] = value[:3]
    with pytest.raises(ValueError):
        reader.batches.load_state_dict(state)


# --- how tokens are distributed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_healthy_documents_raise_nothing(seed: int) -> None:
    assert judged(batches(seed, 700, length=1024)) == []


def corrupt(seed: int) -> Callable[[Any], Any]:
    source = np.random.default_rng(seed)
    return lambda tokens: source.integers(0, VOCABULARY, tokens.shape)


def halved(tokens: Any) -> Any:
    return np.concatenate([tokens[:4], np.full_like(tokens[4:], 7)])


SICK = {
    "corrupt, one step": (corrupt(1), 1, {"token_entropy": 0}),
    "one token in half of the rows": (halved, 15, {"repeated_share": 0, "token_entropy": 3, "token_distance": 6}),
    "nothing but one token": (lambda tokens: tokens * 0, 1, {"repeated_share": 0, "token_entropy": 0}),
    "another tokenizer": (lambda tokens: (tokens * 31 + 5) % VOCABULARY, 100, {"token_distance": 3}),
    "spaces taken out": (lambda t: np.resize(t[(t != 1) & (t != 2)], t.shape), 100, {"token_distance": 20}),
}


@pytest.mark.parametrize("name", SICK)
def test_sick_rows_are_noted_by_what_shows_them(name: str) -> None:
    change, steps, delays = SICK[name]
    begin = 400
    found = judged(batches(3, 520, length=1024), lambda at, t: change(t) if begin <= at < begin + steps else t)
    first = {one.metric: one.step - begin for one in reversed(found)}
    assert {metric: 0 <= first.get(metric, 1000) <= delay for metric, delay in delays.items()} == dict.fromkeys(
        delays, True
    ), found
    assert {one.tier for one in found} == {"note"}
    assert min(one.step for one in found) >= begin


def test_another_mix_of_documents_is_noted_with_no_word_of_their_source() -> None:
    documents = Documents(4)
    reader = Reader()
    found: list[Finding] = []
    for step in range(520):
        documents.code_share = 0.15 if step < 400 else 0.85
        found += reader.judge(documents.batch(length=1024))
    assert found
    assert 400 <= found[0].step < 420
    assert found[0].kind == "data_changed"


def test_tokens_of_any_size_and_sign_are_counted() -> None:
    reader = Reader()
    for _ in range(2):
        numbers = reader.read(np.array([[2**62, -100, 5, -(2**63)]]))
    assert numbers["token_distance"] == 0
    assert 1 <= numbers["token_entropy"] <= 2


# --- ranks ---------------------------------------------------------------------------------------------------------


def hashed(batch: Any, peers: list[int]) -> float | None:
    reader = Reader()
    reader.batches.meet(peers)
    reader.batches.add(0, "", batch, None)
    return reader.batches.take().get(ROWS_HASH)


def test_only_peers_that_read_the_same_rows_have_the_same_fingerprint() -> None:
    mine = hashed(rows(1, 2, 3), [0, 1])
    assert mine == hashed(rows(3, 1, 2), [1, 0])
    assert mine is not None
    assert float(int(mine)) == mine
    assert mine != hashed(rows(1, 2, 4), [0, 1])
    assert mine != hashed(rows(1, 2, 3), [0, 2]), "of the other ranks that it shares a batch with on purpose"
    assert hashed(rows(1, 2, 3), []) is hashed(rows(1, 2, 3), [4]) is None
    assert same_rows({0: 5.0, 1: 6.0, 2: 5.0, 3: 7.0}) == (0, 2)
    assert same_rows({0: 5.0, 1: 6.0}) == ()


# --- sources -------------------------------------------------------------------------------------------------------


def drawn(
    sources: Sources, steps: int, weights: dict[str, float], rows: int = 8, turn: int = 1, seed: int = 0
) -> float:
    """The highest z of some steps."""
    source = random.Random(seed)
    highest = 0.0
    names: list[str] = []
    for _ in range(steps):
        while len(names) < rows:
            names += source.choices(list(weights), list(weights.values())) * turn
        sources.add(names[:rows], rows)
        names = names[rows:]
        highest = max(highest, *sources.take().values(), 0.0)
    return highest


MIX = {"web": 0.7, "code": 0.28, "books": 0.0199, "rare": 0.0001}


@pytest.mark.parametrize("turn", [1, 16])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_sources_that_have_their_shares_raise_nothing(declared: bool, seed: int, turn: int) -> None:
    assert drawn(Sources(MIX if declared else {}), 3000, MIX, turn=turn, seed=seed) < 5


@pytest.mark.parametrize("declared", [True, False])
def test_another_share_is_noted_with_the_source(declared: bool) -> None:
    sources = Sources({"web": 7, "code": 3} if declared else {})
    assert drawn(sources, 3 * ARMED // 8, {"web": 0.7, "code": 0.3}) < 5
    assert drawn(sources, LATELY // 8, {"web": 0.5, "code": 0.5}) > 5
    assert "code" in sources.farthest or "web" in sources.farthest
    assert ("meant" if declared else "usual") in sources.farthest


def test_a_source_that_the_mix_lacks_is_noted_and_a_single_row_of_it_is_not() -> None:
    sources = Sources({"web": 0.7, "code": 0.3})
    drawn(sources, 200, {"web": 0.7, "code": 0.3})
    sources.add(["web", "web", "code", "spam"], 4)
    assert sources.take()["own_source_z"] < 5
    assert drawn(sources, 100, {"web": 0.65, "code": 0.3, "spam": 0.05}) > 5
    assert "spam" in sources.farthest


def test_one_source_and_nothing_of_the_other_is_noted() -> None:
    sources = Sources({"web": 0.7, "code": 0.3})
    assert drawn(sources, 800, {"web": 1}) > 5


def test_shards_that_are_read_one_after_another_are_no_mix() -> None:
    sources = Sources({})
    highest = 0.0
    for step in range(4 * ARMED):
        sources.add(f"shard-{step // 500:05d}", 8)
        highest = max(highest, *sources.take().values(), 0.0)
    assert highest < 5


def test_names_of_files_are_no_sources_and_take_no_memory() -> None:
    for mix in ({}, {"web": 1.0}):
        sources = Sources(mix)
        highest = [
            sum(sources.take().values()) for number in range(20_000) if sources.add(f"{number}.jsonl", 8) is None
        ]
        assert len(sources.state_dict()["lately"]["by_source"]) <= 65
        assert (max(highest) > 5) == bool(mix), "the mix has 'web', and it is never read"


def test_sources_and_rows_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 sources for 3 rows"):
        Reader().read(rows(1, 2, 3), source=["a", "b"])


def test_a_finding_names_the_source() -> None:
    reader = Reader(mix={"web": 0.9, "code": 0.1})
    found = [one for step in range(300) for one in reader.judge(rows(8 * step, 8 * step + 4), source=["web", "code"])]
    assert [one.kind for one in found if one.kind == "data_off_mix"] == ["data_off_mix"]
    assert "'web' is 50.0% of what was read lately, and 90.0% was meant" in str(found)


def test_another_declared_mix_begins_anew() -> None:
    reader = Reader(mix={"a": 1, "b": 1})
    for step in range(500):
        reader.read(rows(step), source="ab"[step % 2])
    other = Reader(mix={"a": 9, "b": 1})
    other.batches.load_state_dict(stored(reader.batches))
    assert other.read(rows(1000), source="a")["source_z"] < 2
