"""What is read from a model without a word of its script: checksums, gradients, updates; one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from midwatch.checkpoint import ControlGroup  # noqa: E402
from midwatch.config import InspectConfig  # noqa: E402
from midwatch.core import NullRecorder  # noqa: E402
from midwatch.guards import Guards, Sample  # noqa: E402
from midwatch.train import agreement  # noqa: E402
from midwatch.train.agreement import Exchange  # noqa: E402
from midwatch.train.highest import keys_of, of_keys  # noqa: E402
from midwatch.train.inspecting import Inspector  # noqa: E402
from midwatch.train.inspecting_checksums import LANE, checksum  # noqa: E402
from midwatch.train.inspecting_numbers import Evidence, is_gradient_bad, with_bad_gradient  # noqa: E402
from midwatch.train.inspecting_sample import MOST_OF_ONE, batches_of  # noqa: E402
from midwatch.train.readings import OnTheWay  # noqa: E402

pytestmark = pytest.mark.torch


# --- checksums ----------------------------------------------------------------------------------------------------


def random_bits(size: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_every_single_bit_that_flips_shows(dtype: Any) -> None:
    words = random_bits(6)
    tensor = words.view(dtype)
    before = int(checksum(tensor))
    for place in range(len(words)):
        for bit in range(32):
            words[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert int(checksum(tensor)) != before, (place, bit)
            words[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert int(checksum(tensor)) == before


def test_flips_far_inside_a_long_tensor_show() -> None:
    words = random_bits(5 * LANE + 1234, seed=1)
    before = int(checksum(words))
    for place in (0, LANE - 1, LANE, 3 * LANE + 17, 5 * LANE, 5 * LANE + 1233):
        for bit in (1, 1 << 30, -(1 << 31)):
            words[place] ^= bit
            assert int(checksum(words)) != before, place
            words[place] ^= bit


def swapped(tensor: Any, one: Any, other: Any) -> Any:
    again = tensor.clone()
    again[one], again[other] = tensor[other].clone(), tensor[one].clone()
    return again


def test_what_changed_places_shows() -> None:
    # Among them a row and a place within it that change roles, and whole lanes.
    words = random_bits(8 * LANE, seed=2)
    before = int(checksum(words))
    pairs = [(0, 1), (5, LANE + 5), (3 * LANE + 5, 5 * LANE + 3)]
    pairs += [(slice(0, LANE), slice(LANE, 2 * LANE)), (slice(0, 4), slice(4, 8))]
    for one, other in pairs:
        assert int(checksum(swapped(words, one, other))) != before


def test_signs_of_zero_and_payloads_of_nan_are_told_apart() -> None:
    zeros = torch.zeros(1000)
    signed = zeros.clone()
    signed[[3, 700]] = -0.0  # two at once: their changes must not cancel out
    assert torch.equal(zeros, signed)
    assert int(checksum(zeros)) != int(checksum(signed))
    negated = torch.linspace(-1, 1, 64)
    assert int(checksum(negated)) != int(checksum(-negated))
    nans = torch.full((4,), math.nan)
    other = nans.clone()
    other.view(torch.int32)[2] ^= 1
    assert bool(other.isnan().all())
    assert int(checksum(nans)) != int(checksum(other))


def test_the_checksum_is_of_the_elements_and_not_of_how_they_lie() -> None:
    tensor = random_bits(300, seed=3).view(torch.float32).view(20, 15)
    assert int(checksum(tensor)) == int(checksum(tensor.t().contiguous().t()))
    wide = torch.zeros(20, 30)
    wide[:, 5:20] = tensor
    assert int(checksum(wide[:, 5:20])) == int(checksum(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.tensor(1.5),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(8, dtype=torch.bfloat16)[1:],
        torch.ones(5, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_odd_sizes_and_types_have_a_checksum(tensor: Any) -> None:
    assert checksum(tensor).dtype == torch.int64
    assert int(checksum(tensor)) == int(checksum(tensor.clone()))


def by_hand(words: list[int]) -> int:
    """As it is meant, in Python's whole numbers."""

    def odd(begin: int, place: int) -> int:
        mixed = (begin + place) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return (mixed ^ mixed >> 31) | 1

    lanes = [words[first : first + LANE] for first in range(0, len(words), LANE)]
    sums = [sum(word * odd(0x5DEECE66D, place) for place, word in enumerate(lane)) for lane in lanes]
    total = sum(one * odd(0x2545F491, place) for place, one in enumerate(sums)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def test_the_numbers_are_those_of_the_formula() -> None:
    # Ranks with other versions of PyTorch, and other devices, must come to the same.
    words = random_bits(LANE + 321, seed=4)
    assert int(checksum(words)) == by_hand(words.tolist())


# --- one process, step by step ------------------------------------------------------------------------------------


class Loop:
    """The course of ``Run`` around one training step."""

    def __init__(self, every: int = 1, **tracked: Any) -> None:
        group = ControlGroup(0, 1)
        self.inspector = Inspector(InspectConfig(every=every), group, NullRecorder())
        self.exchange = Exchange(group)
        self.inspector.attach(tracked)
        self.step = 0

    def run(self, train: Callable[[], Any], logged: dict[str, float] | None = None) -> Sample:
        step, self.step = self.step, self.step + 1
        self.inspector.begin(step)
        train()
        numbers = {**OnTheWay(self.inspector.measured(step)).numbers(), **(logged or {})}
        self.exchange.begin(step, numbers, 0)
        agreed = self.exchange.finish()
        assert agreed is not None
        return self.inspector.completed(step, agreed.sample(), agreed.found, agreed.by_rank)


@pytest.fixture
def loops() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(**given: Any) -> Loop:
        made.append(Loop(**given))
        return made[-1]

    yield make
    for loop in made:
        loop.inspector.detach()
        shields = [loop.inspector._of_gradients, loop.inspector._of_updates, loop.inspector._of_replicas]
        assert not any(shield.is_off for shield in shields), "a look failed"


def model_of(dtype: Any = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.LayerNorm(64), nn.Linear(64, 8)).to(dtype)


def trainer(model: nn.Module, *optimizers: Any, scale: float = 1.0) -> Callable[[], None]:
    dtype = next(model.parameters()).dtype
    data = torch.randn(16, 40, generator=torch.Generator().manual_seed(1)).to(dtype)

    def train() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(data).square().mean() * scale).backward()
        for optimizer in optimizers:
            optimizer.step()

    return train


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_how_far_a_step_moves_the_weights(loops: Callable[..., Loop], kind: dict[str, bool]) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)
    train, loop = trainer(model, optimizer), loops(model=model, optimizer=optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sample = loop.run(train)
    moved = math.sqrt(
        sum(float((p.detach() - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True))
    )
    norm = math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters()))
    assert sample.param_norm == pytest.approx(norm, rel=1e-5)
    assert sample.update_ratio == pytest.approx(moved / norm, rel=0.05)
    assert sample.unchanged_share == 0, "healthy"
    assert loop.run(train).update_ratio is None, "not at every step"
    found = [loop.run(train) for _ in range(20)]
    assert [one.step for one in found if one.update_ratio is not None] == [10, 20]


def test_weights_that_a_step_leaves_as_they_were(loops: Callable[..., Loop]) -> None:
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0)
    sample = loops(model=model, optimizer=optimizer).run(trainer(model, optimizer))
    share = sample.unchanged_share
    assert share is not None
    assert share > 0.5
    assert [one.kind for one in Guards().observe(sample).findings] == ["weights_stalled"]


def test_a_step_that_is_left_out_says_nothing(loops: Callable[..., Loop]) -> None:
    for kind in ({}, {"fused": True}):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
        data, loop = torch.randn(16, 40), loops(model=model, optimizer=optimizer)

        def train(model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler, data: Any = data) -> None:
            optimizer.zero_grad()
            scaler.scale(model(data).square().mean() * 1e4).backward()
            scaler.step(optimizer)
            scaler.update()

        before = model[0].weight.detach().clone()
        sample = loop.run(train)
        assert torch.equal(model[0].weight, before), "the overflow was left out"
        assert (sample.update_ratio, sample.unchanged_share) == (None, None)
        assert sample.rank_norms is None, "a gradient that is not finite is no fault here"


def test_a_gradient_that_is_not_finite_is_named_though_the_loss_is(loops: Callable[..., Loop]) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = loops(model=model, optimizer=optimizer)
    assert loop.run(trainer(model, optimizer)).rank_norms is None

    def train() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 40)).square().mean() + (model[1].weight * 0).sum().sqrt()
        assert bool(loss.detach().isfinite())
        loss.backward()
        optimizer.step()

    sample = loop.run(train)
    assert sample.place == "1.weight"
    (finding,) = [one for one in Guards().observe(sample).findings if one.kind == "nonfinite"]
    assert (finding.tier, finding.ranks) == ("trip", (0,))
    assert "1.weight" in finding.text


def test_a_step_that_the_script_leaves_out_is_no_fault(loops: Callable[..., Loop]) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = loops(model=model, optimizer=optimizer)
    sample = loop.run(lambda: (model(torch.full((2, 40), math.inf)).sum()).backward())
    assert (sample.rank_norms, sample.is_skipped, sample.update_ratio) == (None, True, None)
    assert Guards().observe(sample).ok
    optimizer.zero_grad()
    assert loop.run(trainer(model, optimizer)).update_ratio is not None, "made up for at the next step"


def test_before_the_step_gradients_say_who_began_and_no_more(loops: Callable[..., Loop]) -> None:
    model = model_of()
    loop = loops(model=model)
    loop.inspector.begin(0)
    model(torch.full((2, 40), math.inf)).sum().backward()
    assert loop.inspector.early({"loss": 1.0}) == {}
    assert math.isnan(loop.inspector.early({"loss": 1.0, "grad_norm": math.nan})["own_grad_norm"])


class Odd(nn.Module):
    """A sparse embedding, a tied weight, one that gets no gradient, a frozen one, an empty one, a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 16, sparse=True)
        self.inner = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.inner.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0))
        self.turned = nn.Parameter(torch.randn(60, 40).t())
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, ids: Any) -> Any:
        hidden = self.tied(self.inner(self.table(ids))) * self.frozen
        return hidden.square().mean() + self.turned.square().mean() + self.wide.square().mean().float()


def test_odd_parameters_and_several_optimizers(loops: Callable[..., Loop]) -> None:
    torch.manual_seed(0)
    model = Odd()
    dense = [p for name, p in model.named_parameters() if not name.startswith("table")]
    first = torch.optim.AdamW(dense, lr=1e-3)
    second = torch.optim.SparseAdam(model.table.parameters(), lr=1e-3)
    loop = loops(model=model, optimizer=first, other=second)
    ids = torch.arange(8)

    def train(*optimizers: Any) -> None:
        for optimizer in (first, second):
            optimizer.zero_grad()
        for _ in range(2):  # accumulated
            model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()

    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters() if p.requires_grad))
    sample = loop.run(lambda: train(first, second))
    assert sample.param_norm == pytest.approx(norm, rel=1e-2)
    assert sample.unchanged_share == 0, "what has no gradient is not asked"
    for _ in range(10):
        sample = loop.run(lambda: train(first))
        # Both are in use: the weights of one of them alone would be another number.
        assert sample.param_norm is None
    assert loop.run(lambda: train(first, second)).param_norm == pytest.approx(norm, rel=1e-1)


def test_a_learning_rate_of_nothing_is_no_stall(loops: Callable[..., Loop]) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    sample = loops(model=model, optimizer=optimizer).run(trainer(model, optimizer))
    assert sample.unchanged_share is None
    assert Guards().observe(sample).findings == ()


def test_an_optimizer_of_other_weights_is_let_alone(loops: Callable[..., Loop]) -> None:
    model, stranger = model_of(), model_of()
    other = torch.optim.SGD(stranger.parameters(), lr=1.0)
    assert loops(model=model).run(trainer(stranger, other)).update_ratio is None


def test_a_compiled_model_is_looked_at(loops: Callable[..., Loop]) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    compiled: Any = torch.compile(model, backend="aot_eager")
    loop = loops(model=compiled, optimizer=optimizer)

    def train() -> None:
        optimizer.zero_grad()
        compiled(torch.full((2, 40), math.inf)).sum().backward()
        optimizer.step()

    assert loop.run(trainer(compiled, optimizer)).rank_norms is None
    sample = loop.run(train)
    assert sample.rank_norms is not None
    assert sample.place.endswith(("weight", "bias"))


def test_a_look_that_fails_is_the_last_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loop = Loop(model=model, optimizer=optimizer)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("midwatch.train.inspecting_gradients._norm", fail)
    train = trainer(model, optimizer)
    before = model[0].weight.detach().clone()  # pyright: ignore[reportIndexIssue]
    for _ in range(3):
        sample = loop.run(train)
    loop.inspector.detach()
    assert not torch.equal(before, model[0].weight)  # pyright: ignore[reportIndexIssue]
    assert (sample.rank_norms, sample.grad_norm) == (None, None)
    assert [record.message for record in caplog.records if "GD105" in record.message] == [
        "[GD105] the model is not inspected any more (guards.inspect.gradients): RuntimeError: no such kernel"
    ]


# --- samples and sums ---------------------------------------------------------------------------------------------


def test_the_sample_speaks_for_every_element_and_crosses_columns() -> None:
    weight = nn.Parameter(torch.arange(512 * 512, dtype=torch.float32).view(512, 512))
    small = nn.Parameter(torch.zeros(7))
    (batch,) = batches_of(torch.optim.SGD([weight, small], lr=1.0), {})
    taken = batch.read()
    assert len(taken) <= 2 * MOST_OF_ONE
    assert float(batch.stands_for.sum()) == pytest.approx(512 * 512 + 7, rel=1e-4)
    assert len({int(one) % 512 for one in taken}) > 256
    assert torch.equal(taken, batch.read()), "the same at every step"


def test_two_ways_of_measuring_are_not_mixed() -> None:
    evidence = Evidence()
    found = {"update_sq": 4.0, "weight_sq": 16.0, "unchanged": 1.0, "with_gradient": 4.0}
    first = dict(found)
    evidence.complete(first)
    assert (first["update_ratio"], first["param_norm"], first["unchanged_share"]) == (0.5, 4.0, 0.25)
    logged = {**found, "param_norm": 9.0}
    evidence.complete(logged)
    assert logged["param_norm"] == 9.0
    later = dict(found)
    evidence.complete(later)
    assert "param_norm" not in later
    assert later["update_ratio"] == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_comes_to_the_same_checksum_and_is_never_waited_for(loops: Callable[..., Loop]) -> None:
    words = random_bits(70 * LANE + 999, seed=5)
    assert int(checksum(words.cuda())) == int(checksum(words))
    model = model_of().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.randn(16, 40, device="cuda")
    loop = loops(model=model, optimizer=optimizer)
    measured: list[Any] = []
    for step in range(21):
        # The first time tables go to the device.
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            loop.inspector.begin(step)
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            measured.append(loop.inspector.measured(step))
            [checksum(parameter) for parameter in model.parameters()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [sorted(one) for one in measured if len(one) > 1] == 3 * [
        ["own_grad_norm", "unchanged", "update_sq", "weight_sq", "with_gradient"]
    ]


def test_of_very_many_ranks_the_one_with_bad_gradients_is_named_too() -> None:
    """They send sums and maxima, and not what each of them has."""
    numbers = [{"own_grad_norm": math.nan if rank == 2 else 1.0, "place": 15.0, "weight_sq": 9.0} for rank in range(4)]
    for one in numbers:
        one["update_sq"] = 0.09
    sums = torch.stack([agreement._summands(one, rank) for rank, one in enumerate(numbers)]).sum(0)
    names = agreement._COMPARED
    keys = [keys_of([one.get(name) for name in names], rank) for rank, one in enumerate(numbers)]
    highest = dict(zip(names, of_keys(torch.stack(keys).amax(0)), strict=True))
    agreed = agreement._from_sums(7, sums.tolist(), highest)
    Evidence().complete(agreed.found)
    assert is_gradient_bad(agreed.found)
    sample = with_bad_gradient(agreed.sample(), agreed.by_rank, 4, "head.weight")
    assert list(sample.rank_norms or {}) == [2]
    assert (sample.param_norm, sample.update_ratio) == (3.0, pytest.approx(0.1))
