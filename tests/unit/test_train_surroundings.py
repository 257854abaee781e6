"""What a training process tells of its work without being told."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from midwatch.config import make_section  # noqa: E402
from midwatch.testing import Notes  # noqa: E402
from midwatch.train import surroundings  # noqa: E402


def test_the_optimizer_tells_its_settings_as_the_script_made_them() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 2))
    facts = surroundings.observed_facts({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    values = make_section("observed", facts).values
    assert values["model.class"] == "Linear"
    assert values["model.parameters"] == 20
    assert values["model.dtypes"] == ["bfloat16"]
    assert values["optimizer.lr"] == 0.1, "the beginning of the schedule, not where it stands"
    assert values["optimizer.betas"] == [0.9, 0.95]
    assert values["optimizer.group1.weight_decay"] == 0
    assert "optimizer.group1.lr" not in values
    assert values["scheduler.class"] == "LambdaLR"


def test_a_learning_rate_on_a_device_is_not_copied_and_odd_objects_are_no_error() -> None:
    class Odd:
        param_groups = None

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    assert "lr" not in surroundings.observed_facts({"optimizer": optimizer})["optimizer"]
    assert surroundings.observed_facts({"model": torch.nn.LazyLinear(2)})["model"]["parameters"] == 0
    assert surroundings.observed_facts({"optimizer": Odd(), "model": object()}) == {
        "optimizer": {"class": "Odd"},
        "model": {"class": "object"},
    }


def test_what_the_script_declares_of_the_layout_counts_above_what_is_seen() -> None:
    assert surroundings.layout_facts(8, 2, None, {"tensor_parallel": 4, "nodes": 1}) == {
        "world_size": 8,
        "nodes": 1,
        "tensor_parallel": 4,
    }


def test_device_meshes_are_seen(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Linear(4, 4)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Shard(1)]))
        assert surroundings.layout_facts(1, 1, model, {})["meshes"] == ["dp=1 tp=1"]
    finally:
        dist.destroy_process_group()


def test_the_driver_is_read_from_what_the_kernel_module_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    monkeypatch.setattr(surroundings, "_DRIVER", version)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "driver" not in surroundings.library_facts()
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert surroundings.library_facts()["driver"] == "570.86.15"


def test_a_node_with_another_torch_is_named_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    same, other = {"torch": "2.9.0", "nccl": "2.27.3"}, {"torch": "2.8.0", "nccl": "2.27.3"}
    answers = [{"node": f"n{rank // 2}", "libraries": {} if rank % 2 else same} for rank in range(6)]
    notes = Notes()
    surroundings.note_other_nodes(answers, notes)
    assert not notes.of("run.nodes_differed")
    answers[4]["libraries"] = other
    surroundings.note_other_nodes(answers, notes)
    (told,) = notes.of("run.nodes_differed")
    assert told["differing_nodes"] == 1
    assert told["nodes"] == {"n2": [{"name": "torch", "change": "changed", "old": "2.9.0", "new": "2.8.0"}]}
    assert '1 nodes have other libraries than rank 0\'s: n2: torch "2.9.0" -> "2.8.0"' in caplog.text
