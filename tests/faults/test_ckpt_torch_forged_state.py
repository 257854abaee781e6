"""State that is sealed soundly and is none all the same: refused by name in every place, never with a traceback."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resume_jobs import Job, name, resumed, trained

from midwatch.checkpoint import fetch as fetch_module
from midwatch.core import CheckpointError
from midwatch.storage import canonical_json, chunk_digest, root_digest

pytestmark = [pytest.mark.torch, pytest.mark.procs]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    trained(run_dir)
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the non-tensor state of rank 0's shard, and make every digest fit again."""
    path = folder / "rank-00000.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:size])
    state = json.loads(table["__metadata__"]["midwatch.state"])
    change(state)
    table["__metadata__"]["midwatch.state"] = json.dumps(state)
    text = json.dumps(table).encode()
    padded = -(-(8 + len(text)) // 4096) * 4096
    data = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8) + data[size:]
    path.write_bytes(data)
    receipt = json.loads((folder / "rank-00000.receipt.json").read_bytes())
    receipt["size_bytes"] = len(data)
    step = receipt["chunk_bytes"]
    receipt["chunks"] = [chunk_digest(data[at : at + step]) for at in range(0, len(data), step)]
    receipt["digest"] = root_digest(receipt["chunks"])
    record = canonical_json(receipt) + b"\n"
    (folder / "rank-00000.receipt.json").write_bytes(record)
    manifest = json.loads((folder / "MANIFEST.json").read_bytes())
    digests = {"digest": receipt["digest"], "receipt_digest": hashlib.sha256(record).hexdigest()}
    manifest["files"][0].update(size_bytes=len(data), **digests)
    manifest["digest"] = hashlib.sha256(canonical_json({**manifest, "digest": "", "signature": ""})).hexdigest()
    (folder / "MANIFEST.json").write_bytes(canonical_json(manifest) + b"\n")


def optimizer(state: dict[str, Any]) -> dict[str, Any]:
    return state["shared"]["optimizer"]


FORGERIES = [
    (lambda s: s["shared"].update(optimizer=[]), "CK106", "optimizer"),
    (lambda s: optimizer(s).pop("param_groups"), "CK106", "param_groups"),
    (lambda s: optimizer(s).update(state=7), "CK106", "state"),
    (lambda s: optimizer(s).update(param_groups=[{"lr": 1}]), "CK106", "params"),
    (lambda s: optimizer(s)["param_groups"][0].update(params=[1, 2]), "CK106", "params"),
    (lambda s: optimizer(s).update(param_groups=[{"$tuple": []}]), "CK106", "optimizer.param_groups"),
    (lambda s: optimizer(s)["state"].update({"9.weight": {}}), "CK204", "9.weight"),
    (lambda s: optimizer(s)["state"].update({"0.weight": 5}), "CK106", "optimizer.state.0.weight"),
    (lambda s: optimizer(s)["state"]["0.weight"].update(exp_avg={"$tensor": "nowhere"}), "CK106", "nowhere"),
    (lambda s: optimizer(s)["state"]["0.weight"].update(exp_avg={"$tensor": ["x"]}), "CK106", "$tensor"),
    (lambda s: s["private"].update(rng=[]), "CK106", "rng"),
    (lambda s: s["private"].update(rng={}), "CK106", "random state"),
    (lambda s: s["private"]["rng"].update(python=3), "CK106", "rng.python"),
    (lambda s: s["private"]["rng"].update(python={"$tuple": [3, {"$bytes": "AAAA"}, None]}), "CK106", "rng.python"),
    (lambda s: s["private"]["rng"].update(python={"$tuple": [3, "text", None]}), "CK106", "rng.python"),
    (lambda s: s["private"]["rng"].update(torch_cpu="text"), "CK106", "rng.torch_cpu"),
    (lambda s: s["private"]["rng"].update(torch_cpu={"$tensor": "model.0.weight"}), "CK106", "rng.torch_cpu"),
    (lambda s: s["private"]["rng"].update(numpy=1), "CK106", "rng.numpy"),
    (lambda s: s["private"]["rng"].update(dice=1), "CK106", "rng.dice"),
    (lambda s: s["private"].update(data=[1]), "CK204", "data"),
    (lambda s: s["private"].update(data={}), "CK204", "data"),
    (lambda s: s["shared"].update(aliases=3), "CK106", "aliases"),
    (lambda s: s.update(private=3), "CK106", "private"),
]


@pytest.mark.parametrize(("change", "code", "named"), FORGERIES)
def test_forged_state_is_refused_by_name(run_dir: Path, change: Any, code: str, named: str) -> None:
    folder = run_dir / "checkpoints" / name(6)
    forge(folder, change)
    job = Job(run_dir, 2)
    before = job.weights()
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume(path=folder)
    job.ckpt.close()
    assert caught.value.code == code
    assert named in caught.value.message
    assert set(before) == set(job.weights())
    # It is damage only where another checkpoint would do better.
    if code == "CK106":
        assert resumed(run_dir, 3)[0].name == name(3)


def test_the_forgery_itself_is_sound(run_dir: Path) -> None:
    """Without this the matrix above would prove nothing."""
    forge(run_dir / "checkpoints" / name(6), lambda state: None)
    (run_dir / "checkpoints" / name(6) / "VERIFIED.json").unlink()
    (run_dir / "checkpoints" / name(3) / "VERIFIED.json").unlink()
    assert resumed(run_dir, 2)[0].name == name(6)


@pytest.mark.parametrize(
    "file",
    ["rank-00000.safetensors", "rank-00000.receipt.json", "MANIFEST.json", "VERIFIED.json", "SUSPECT.json", "PIN.json"],
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(run_dir: Path, file: str) -> None:
    path = run_dir / "checkpoints" / name(6) / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    # The marks are no part of the data: without that of verification it is read in full; a suspect one is left alone.
    wanted = 6 if file in ("VERIFIED.json", "PIN.json") else 3
    assert resumed(run_dir, 2)[0].name == name(wanted)


def test_a_medium_that_cannot_be_read_leads_to_the_older_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fetch_module.Shard._fill  # type: ignore[attr-defined]

    def fill(shard: Any, position: int, views: Any) -> None:
        if name(6) in str(shard.path):
            raise OSError(errno.EIO, "Input/output error")
        real(shard, position, views)

    monkeypatch.setattr(fetch_module.Shard, "_fill", fill)
    point, notes = resumed(run_dir, 2)
    assert point.name == name(3)
    assert "Input/output error" in notes.of("checkpoint.rejected")[0]["reason"]
