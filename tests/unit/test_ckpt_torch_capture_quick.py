"""Names remembered from the first save on give what PyTorch's own functions give, for every kind of wrapper."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader  # noqa: E402
from midwatch.checkpoint import walk as walk_module  # noqa: E402
from midwatch.checkpoint.copying import Copy  # noqa: E402
from midwatch.checkpoint.load import load_tensors  # noqa: E402
from midwatch.checkpoint.predict import predicted_state  # noqa: E402
from midwatch.checkpoint.walk import StateWalk, _is_same, _is_same_optimizer  # noqa: E402
from midwatch.config import CheckpointConfig, StagingConfig  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet = tmp_path_factory.mktemp("meet") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Extra(nn.Module):
    """Extra state, a shared weight, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.module = nn.Linear(6, 6)
        self.norm.bias.requires_grad_(False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(self.two(self.norm(self.one(x))))


class Compiled(nn.Module):
    """A compiled part inside a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.compile(nn.Linear(6, 6), backend="eager")
        self.tail = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(x))


def fsdp() -> nn.Module:
    model = Extra()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Any] = {
    "plain": Extra,
    "ddp": lambda: DistributedDataParallel(Extra()),
    "compiled": lambda: torch.compile(Extra(), backend="eager"),
    "compiled-part": Compiled,
    "compiled-part-in-ddp": lambda: DistributedDataParallel(Compiled()),
    "fsdp2": fsdp,
}


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = KINDS[kind]()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_remembered_equals_what_pytorch_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(kind)
    walk = StateWalk()
    with torch.no_grad():
        walk.model_state(model)
        walk.optimizer_state(model, optimizer)
        official, official_state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        for name in ("get_model_state_dict", "get_optimizer_state_dict"):
            monkeypatch.setattr(walk_module, name, lambda *_: pytest.fail("asked PyTorch again"))
        assert _is_same(walk.model_state(model), official)
        assert _is_same_optimizer(walk.optimizer_state(model, optimizer), official_state)


def test_fsdp_state_is_foreseen_as_sharded_as_it_will_be() -> None:
    model, optimizer = trained("fsdp2")
    walk = StateWalk()
    names = {parameter: name for name, parameter in walk.parameters(model).items()}
    with torch.no_grad():
        real = walk.optimizer_state(model, optimizer)["state"]
        foreseen = predicted_state(optimizer, names)
    assert foreseen.keys() == real.keys()
    for name, state in real.items():
        for key, value in state.items():
            assert type(foreseen[name][key]) is type(value), (name, key)
            assert foreseen[name][key].shape == value.shape
            assert foreseen[name][key].dtype == value.dtype


@pytest.mark.parametrize("fresh", [False, True])
def test_a_hook_that_renames_or_makes_new_tensors_is_obeyed(fresh: bool) -> None:
    model = nn.Linear(3, 3)

    def rename(_module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}weight") * (2 if fresh else 1)

    model.register_state_dict_post_hook(rename)
    walk = StateWalk()
    for _ in range(3):
        live, official = walk.model_state(model), get_model_state_dict(model)
        assert list(live) == list(official)
        assert all(torch.equal(live[key], official[key]) for key in official)


def test_an_exchanged_part_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    walk = StateWalk()
    for _ in range(2):
        walk.begin()
        walk.model_state(model)
    walk.begin()
    model[1] = torch.compile(nn.Linear(3, 3), backend="eager")
    model[0].weight = nn.Parameter(torch.ones(3, 3))
    for _ in range(2):
        assert _is_same(walk.model_state(model), get_model_state_dict(model))
        assert dict(walk.parameters(model)).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert walk.parameters(model)["0.weight"] is model[0].weight


def test_a_model_without_state_is_refused_as_pytorch_refuses_it() -> None:
    with pytest.raises(RuntimeError, match="state_dict is empty"):
        StateWalk().model_state(nn.Identity())


@pytest.mark.procs
@pytest.mark.parametrize("guarded", [True, False])
def test_a_sharded_model_is_copied_behind_training_whole_or_not_at_all(tmp_path: Path, guarded: bool) -> None:
    model, optimizer = trained("fsdp2")
    config = CheckpointConfig(staging=StagingConfig(overlap=True))
    ckpt = Checkpointer(tmp_path, config, identity=Identity(run="mine", attempt=1))
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.prewarm()
    wanted = {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        gate = threading.Event()
        run = Copy.run
        late = "midwatch-staging"
        patch.setattr(
            Copy, "run", lambda copy: (threading.current_thread().name.startswith(late) and gate.wait(60), run(copy))
        )
        ckpt.save(1)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        threading.Timer(0.1, gate.set).start()
        step = type(optimizer).step
        step(optimizer) if guarded else step.__wrapped__(optimizer)
        if guarded:
            ckpt.wait(60.0)
            reader = VerifyingReader(tmp_path / "checkpoints" / "step-00000001-a0001")
            targets = {f"model.{name}": torch.empty_like(tensor) for name, tensor in wanted.items()}
            load_tensors(reader, targets)
            assert all(torch.equal(targets[f"model.{name}"], tensor) for name, tensor in wanted.items())
        else:
            gate.wait(60)
            ckpt.wait(60.0)
            failure = ckpt.last_failure
            assert failure is not None
            assert failure.error_code == "CK307"
    ckpt.close()
