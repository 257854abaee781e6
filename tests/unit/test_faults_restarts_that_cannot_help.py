"""Which failures stop a run, which are tried again, and what counts as the same failure."""

from __future__ import annotations

import msgspec
import pytest
from faults_cases import CLOSED, IN_LIBRARY, SCRIPT, USER, alive, bad_batch, dead, evidence, traceback, victim

from midwatch.core.codes import CODES
from midwatch.faults import CLASSES, Evidence, fingerprint, judge
from midwatch.faults.fingerprint import normalise


def raised(error: str, **more: object) -> Evidence:
    tail = traceback(1, frames=(*USER, (SCRIPT, 117, "load_batch")), error=error)
    return evidence(victim(), dead(1, 1, stderr_tail=tail), **more)


def with_history(given: Evidence, *steps: int | None) -> Evidence:
    mark = judge(given).fingerprint
    return msgspec.structs.replace(given, history=tuple((mark, step) for step in steps))


def at_step(step: int | None) -> Evidence:
    return evidence(victim(step=step), dead(1, 1, step=step, stderr_tail=bad_batch()))


def test_the_first_exception_is_tried_again() -> None:
    verdict = judge(at_step(20))
    assert (verdict.grade, verdict.action) == ("G1", "restart")


@pytest.mark.parametrize("before", [19, 20, 21])
def test_the_same_exception_at_the_same_step_stops(before: int) -> None:
    verdict = judge(with_history(at_step(20), before))
    assert (verdict.grade, verdict.action, verdict.rule) == ("G5", "stop", "same-failure")


def test_the_same_exception_elsewhere_is_tried_again() -> None:
    assert judge(with_history(at_step(20), 12)).action == "restart"


def test_another_exception_is_tried_again() -> None:
    other = judge(raised("ValueError: nan in labels")).fingerprint
    assert judge(msgspec.structs.replace(at_step(20), history=((other, 20),))).action == "restart"


def test_a_higher_limit_is_kept() -> None:
    assert judge(with_history(at_step(20), 20), same_failure_limit=3).action == "restart"
    assert judge(with_history(at_step(20), 20, 20), same_failure_limit=3).action == "stop"


def test_a_limit_of_one_stops_at_once() -> None:
    assert judge(at_step(20), same_failure_limit=1).action == "stop"


def test_a_script_without_steps_stops_at_the_second_same_exception() -> None:
    assert judge(with_history(at_step(None), None)).action == "stop"


@pytest.mark.parametrize("times", [1, 5, 50])
def test_a_kill_from_outside_is_never_deterministic(times: int) -> None:
    given = evidence(victim(step=20), dead(1, -9, step=20))
    assert judge(with_history(given, *[20] * times)).action == "restart"


def test_a_crash_needs_a_known_step_to_be_deterministic() -> None:
    assert judge(with_history(evidence(dead(1, -11)), None, None)).action == "restart"
    assert judge(with_history(evidence(dead(1, -11, step=7)), 7)).action == "stop"


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError: No module named 'modle'",
        "ImportError: cannot import name 'x'",
        "SyntaxError: invalid syntax",
    ],
)
def test_a_script_that_cannot_start_is_not_tried_again(error: str) -> None:
    verdict = judge(raised(error, lived_s=2.0))
    assert (verdict.fault_class, verdict.action) == ("startup_error", "stop")
    assert CLASSES[verdict.fault_class].stop_code == "SV105"


def test_a_syntax_error_without_a_header_is_seen() -> None:
    tail = ('  File "/home/ada/project/train.py", line 3', "    def (", "        ^", "SyntaxError: invalid syntax")
    assert judge(evidence(dead(1, 1, stderr_tail=tail), lived_s=1.0)).fault_class == "startup_error"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (2, "train.py: error: unrecognized arguments: --stepz 5"),
        (2, "/usr/bin/python: can't open file '/home/ada/trian.py': [Errno 2] No such file or directory"),
        (1, "/usr/bin/python: No module named trian"),
        (127, "bash: trian: command not found"),
        (126, ""),
    ],
)
def test_a_refused_command_is_not_tried_again(code: int, line: str) -> None:
    verdict = judge(evidence(dead(0, code, stderr_tail=(line,)), dead(1, code, stderr_tail=(line,)), lived_s=1.0))
    assert (verdict.fault_class, verdict.action) == ("startup_error", "stop")


def test_an_import_error_after_progress_is_tried_again() -> None:
    verdict = judge(raised("ImportError: libnfs.so: cannot open shared object file", lived_s=3.0, has_progressed=True))
    assert verdict.action == "restart"


def test_a_late_import_error_is_tried_again() -> None:
    assert judge(raised("ModuleNotFoundError: No module named 'wandb'", lived_s=5000.0)).action == "restart"


def test_exit_2_late_in_life_is_just_an_exit_code() -> None:
    assert judge(evidence(dead(1, 2), victim(), lived_s=5000.0)).fault_class == "explicit_exit"


def test_a_broken_service_is_left_to_the_budget() -> None:
    given = raised("ConnectionRefusedError: [Errno 111] Connection refused")
    assert judge(given).fault_class == "environment_error"
    assert judge(with_history(given, None, None, None)).action == "restart"


def test_many_nodes_at_once_are_held_not_restarted() -> None:
    ranks = [alive(r, node=f"n{r}") for r in range(4)]
    lost = tuple(f"n{r}" for r in range(3))
    verdict = judge(evidence(*ranks, trigger="agent_lost", lost_nodes=lost, nodes_total=8))
    assert (verdict.grade, verdict.action) == ("G4", "hold")


def test_a_bug_that_hits_all_nodes_is_not_a_fleet_fault() -> None:
    ranks = [dead(r, 1, node=f"n{r}", step=3, stderr_tail=bad_batch(r)) for r in range(4)]
    assert judge(evidence(*ranks, nodes_total=4)).grade == "G1"


@pytest.mark.parametrize(
    ("error", "fault_class"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total",
            "gpu_out_of_memory",
        ),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "gpu_out_of_memory"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
            "memory_error",
        ),
        ("MemoryError", "memory_error"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "gpu_error"),
        ("RuntimeError: CUDA error: device-side assert triggered", "user_exception"),
        ("RuntimeError: DataLoader worker (pid 717) is killed by signal: Killed. ", "data_worker_died"),
        ("OSError: [Errno 28] No space left on device", "environment_error"),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms", "peers_lost"),
        ("RuntimeError: Gloo connectFullMesh failed with [..pair.cc:144] no error", "peers_lost"),
        ("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited", "peers_lost"),
        (
            "RuntimeError: [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4",
            "collective_mismatch",
        ),
        ("ValueError: Default process group has not been initialized", "user_exception"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "environment_error"),
    ],
)
def test_the_words_of_an_exception_make_its_class(error: str, fault_class: str) -> None:
    assert judge(evidence(dead(1, 1, stderr_tail=traceback(1, frames=USER, error=error)))).fault_class == fault_class


def test_nccl_speaking_of_this_rank_itself_is_no_victim() -> None:
    error = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, invalid usage, NCCL version 2.26.2"
    tail = (*traceback(1, frames=IN_LIBRARY, error=error), "[rank1]: Last error:", "[rank1]: Duplicate GPU detected")
    assert judge(evidence(victim(), dead(1, 1, stderr_tail=tail))).root_rank == 1


def test_a_loader_workers_own_traceback_is_what_counts() -> None:
    outer = traceback(
        1, frames=USER, error="ValueError: Caught ValueError in DataLoader worker process 0.", prefix=False
    )
    inner = (
        "Original Traceback (most recent call last):",
        f'  File "{SCRIPT}", line 7, in __getitem__',
        "    x = decode(i)",
        "ValueError: broken jpeg 17",
    )
    verdict = judge(evidence(dead(1, 1, stderr_tail=(*outer, *inner, ""))))
    assert "broken jpeg 17" in verdict.summary
    assert "__getitem__" in verdict.summary


@pytest.mark.parametrize(("code", "name"), [(137, "SIGKILL"), (143, "SIGTERM"), (-15, "SIGTERM"), (-1, "SIGHUP")])
def test_a_shells_128_plus_n_is_the_signal(code: int, name: str) -> None:
    verdict = judge(evidence(victim(), dead(1, code)))
    assert verdict.fault_class == "killed_outside"
    assert name in verdict.summary


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_what_changes_between_attempts_is_not_in_the_fingerprint() -> None:
    one = raised("RuntimeError: batch 4711 at 0x7fa2 in /data/a/shard-3.bin is bad (took 1.5 s)")
    two = raised("RuntimeError: batch 4899 at 0x7fb9 in /data/b/shard-9.bin is bad (took 2.25 s)")
    assert judge(one).fingerprint == judge(two).fingerprint


def test_another_place_or_another_word_is_another_fingerprint() -> None:
    base = raised("RuntimeError: bad batch")
    other_word = raised("RuntimeError: bad label")
    elsewhere = evidence(dead(1, 1, stderr_tail=traceback(1, frames=USER, error="RuntimeError: bad batch")))
    assert len({judge(e).fingerprint for e in (base, other_word, elsewhere)}) == 3


def test_victims_do_not_change_the_fingerprint() -> None:
    alone = evidence(dead(1, 1, stderr_tail=bad_batch()))
    assert judge(alone).fingerprint == judge(evidence(victim(), dead(1, 1, stderr_tail=bad_batch()))).fingerprint


def test_normalising_twice_changes_nothing() -> None:
    for text in (CLOSED, "id 123e4567-e89b-12d3-a456-426614174000 at /a/b/c.py:12", "deadbeef01 x  y"):
        assert normalise(normalise(text)) == normalise(text)


def test_fingerprints_are_sixteen_hex_digits() -> None:
    assert len(fingerprint("hang", "hang", None)) == 16


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_stop_code_is_a_code() -> None:
    assert all(row.stop_code in CODES for row in CLASSES.values() if row.stop_code)


def test_own_failures_come_before_victims_in_the_order_of_blame() -> None:
    last = CLASSES["early_exit"].order
    own = ["native_crash", "host_out_of_memory", "memory_error", "user_exception", "explicit_exit", "killed_outside"]
    assert all(CLASSES[name].order < last for name in own)
    assert last < CLASSES["peers_lost"].order < CLASSES["torn_down"].order


def test_only_what_is_no_fault_has_no_action() -> None:
    assert [name for name, row in CLASSES.items() if row.action == "none"] == ["no_fault"]
