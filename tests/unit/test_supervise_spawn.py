"""Commands that cannot start, and what a rank is told when it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midwatch.core import SuperviseError
from midwatch.supervise.ports import ReservedPort
from midwatch.supervise.spawn import NodeSetup, rank_environment, resolve_command
from midwatch.supervise.wire import StartRanks


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    program = tmp_path / "tool.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "mine").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["nosuch.py"],
        ["nosuch-program"],
        ["./train.py/x"],
        ["-m"],
        ["-m", "nosuch_module"],
        ["python", "nosuch.py", "--lr", "1"],
        ["python", "-W", "error", "nosuch.py"],
        ["mine"],
    ],
)
def test_a_command_that_cannot_start_is_refused_before_anything_starts(command: list[str]) -> None:
    with pytest.raises(SuperviseError) as refusal:
        resolve_command(command)
    assert refusal.value.code == "SV101"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["train.py", "--lr", "1"], (sys.executable, "-u", "train.py", "--lr", "1")),
        (["-m", "json.tool", "x"], (sys.executable, "-u", "-m", "json.tool", "x")),
    ],
)
def test_scripts_and_modules_run_with_our_python_unbuffered(command: list[str], expected: tuple[str, ...]) -> None:
    assert resolve_command(command) == expected


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py"],
        ["python3", "-X", "dev", "train.py"],
        ["python", "-c", "pass"],
        ["./tool.sh", "a"],
        ["sh"],
    ],
)
def test_programs_keep_their_arguments_and_become_absolute(command: list[str]) -> None:
    program, *arguments = resolve_command(command)
    assert Path(program).is_absolute()
    assert arguments == command[1:]


SETUP = NodeSetup(command=("/bin/true",), node="n1", nproc=2, tag="t", run="r1", run_dir="/runs/x", config_path="")
START = StartRanks(
    attempt=3,
    world_size=4,
    ranks=(2, 3),
    group_rank=1,
    group_world_size=2,
    master_addr="10.0.0.1",
    master_port=2345,
    restart_count=2,
    max_restarts=5,
)


def environment(base: dict[str, str], setup: NodeSetup = SETUP) -> dict[str, str]:
    return rank_environment(base, setup, START, 1, {"pulse": "/p", "error": "/e"})


def test_torchruns_contract_is_kept() -> None:
    env = environment({"HOME": "/h", "RANK": "77"})
    expected = {
        "HOME": "/h",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "2345",
        "TORCHELASTIC_RUN_ID": "r1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_ERROR_FILE": "/e",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MIDWATCH_RUN_DIR": "/runs/x",
        "MIDWATCH_RUN": "r1",
        "MIDWATCH_ATTEMPT": "3",
        "MIDWATCH_NODE": "n1",
        "MIDWATCH_PULSE": "/p",
        "MIDWATCH_TAG": "t",
        "MIDWATCH_GATE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/n1.flight-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/p-flight-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert env == expected


def test_what_the_user_set_is_kept() -> None:
    env = environment({"OMP_NUM_THREADS": "8", "PYTHONFAULTHANDLER": "0"})
    assert (env["OMP_NUM_THREADS"], env["PYTHONFAULTHANDLER"]) == ("8", "0")


def test_reserved_ports_differ_and_are_free_when_released() -> None:
    first, second = ReservedPort(), ReservedPort()
    assert first.number != second.number
    import socket

    with socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", first.number))
        first.release()
        other.bind(("127.0.0.1", first.number))
    second.release()
