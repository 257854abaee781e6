"""Words that mislead: warnings in passing, a watchdog's errors, codes that hide an exception, lines without end."""

from __future__ import annotations

import time

import msgspec
import pytest
from faults_cases import (
    CLOSED,
    IN_ALL_REDUCE,
    IN_LIBRARY,
    MAIN,
    SCRIPT,
    SEGFAULT,
    STDLIB,
    TORCH,
    USER,
    alive,
    dead,
    evidence,
    frame,
    traceback,
    victim,
)

from midwatch.faults import Frame, judge
from midwatch.faults.frames import is_fetching, place_of_stack

AT_START = (
    (
        "[W1130 08:16:54.123456789 socket.cpp:752] [c10d] The client socket has failed to connect to "
        "[localhost]:29500 (errno: 97 - Address family not supported by protocol)."
    ),
    "[I1130 08:16:54.201 TCPStore.cpp:262] [c10d - debug] The server has started on port = 29500.",
)
WATCHDOG = (
    (
        "[rank1]:[E218 08:39:31.2 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread "
        "terminated with exception: {}"
    ),
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below is incorrect.",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with exception: {}",
)


def watchdog(error: str) -> tuple[str, ...]:
    return tuple(line.format(error) for line in WATCHDOG)


def test_a_warning_while_the_store_comes_up_makes_no_victim_of_a_crash() -> None:
    verdict = judge(evidence(victim(), dead(1, -6, stderr_tail=(*AT_START, "double free or corruption (!prev)"))))
    assert (verdict.fault_class, verdict.root_rank) == ("native_crash", 1)


def test_a_warning_while_the_store_comes_up_makes_no_victim_of_an_exit() -> None:
    verdict = judge(evidence(victim(at_s=9), dead(1, 1, stderr_tail=(*AT_START, "no data left"))))
    assert (verdict.fault_class, verdict.root_rank) == ("explicit_exit", 1)


@pytest.mark.parametrize(
    ("error", "fault_class"),
    [
        ("CUDA error: an illegal memory access was encountered", "gpu_error"),
        ("CUDA error: uncorrectable ECC error encountered", "gpu_error"),
        ("CUDA error: device-side assert triggered", "user_exception"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "gpu_out_of_memory"),
    ],
)
def test_the_watchdog_also_ends_a_rank_for_its_own_errors(error: str, fault_class: str) -> None:
    verdict = judge(evidence(victim(at_s=9), dead(1, -6, stderr_tail=watchdog(error))))
    assert (verdict.fault_class, verdict.root_rank) == (fault_class, 1)


def test_a_watchdog_that_lost_its_peers_is_a_victim_still() -> None:
    error = "NCCL error: remote process exited or there was a network error, NCCL version 2.26.2"
    verdict = judge(evidence(dead(0, -6, at_s=9, stderr_tail=watchdog(error)), dead(1, -9)))
    assert (verdict.root_rank, verdict.victims) == (1, (0,))


def test_a_kernel_line_about_the_device_makes_an_abort_a_matter_of_hardware() -> None:
    tail = watchdog("CUDA error: uncorrectable ECC error encountered")
    line = "NVRM: Xid (PCI:0000:10:00): 48, pid=4001, DBE"
    verdict = judge(evidence(victim(), dead(1, -6, stderr_tail=tail), kernel_lines=(("n0", line),)))
    assert verdict.is_hardware


def test_memory_that_native_code_did_not_get_is_want_of_memory() -> None:
    tail = ("terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc")
    verdict = judge(evidence(victim(), dead(1, -6, stderr_tail=tail)))
    assert (verdict.fault_class, verdict.root_rank) == ("memory_error", 1)


@pytest.mark.parametrize("code", [1, 3, 255])
def test_a_script_that_prints_its_exception_and_ends_with_a_code_of_its_own(code: int) -> None:
    lost = (*traceback(0, frames=IN_LIBRARY, error=CLOSED, prefix=False), "training failed, giving up")
    own = (*traceback(1, frames=USER, error="ValueError: bad label", prefix=False), "training failed, giving up")
    verdict = judge(evidence(dead(0, code, at_s=8, stderr_tail=lost), dead(1, code, at_s=9, stderr_tail=own)))
    assert (verdict.fault_class, verdict.root_rank, verdict.victims) == ("user_exception", 1, (0,))


def test_an_exception_that_was_handled_long_before_explains_no_exit_code() -> None:
    tail = (
        *traceback(1, frames=USER, error="ValueError: tried again", prefix=False),
        *(f"step {n}" for n in range(20)),
    )
    verdict = judge(evidence(dead(1, 3, stderr_tail=tail)))
    assert verdict.fault_class == "explicit_exit"


def test_a_crash_in_the_clean_up_after_lost_peers_is_no_crash_of_its_own() -> None:
    tail = (*traceback(0, frames=IN_LIBRARY, error=CLOSED), *SEGFAULT)
    own = traceback(1, frames=USER, error="ValueError: bad label")
    verdict = judge(evidence(dead(0, -11, at_s=8, stderr_tail=tail), dead(1, 1, at_s=9, stderr_tail=own)))
    assert (verdict.fault_class, verdict.root_rank, verdict.victims) == ("user_exception", 1, (0,))


@pytest.mark.parametrize("code", [126, 127])
@pytest.mark.parametrize("why", ["Resource temporarily unavailable", "Cannot allocate memory", "Too many open files"])
def test_a_process_that_the_machine_could_not_start_is_no_error_of_the_script(code: int, why: str) -> None:
    verdict = judge(evidence(dead(1, code, stderr_tail=(f"SV101 cannot start /usr/bin/python: {why}",)), lived_s=1.0))
    assert (verdict.fault_class, verdict.action) == ("environment_error", "restart")


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_loaders_worker_that_was_killed_for_memory(is_counted: bool) -> None:
    tail = traceback(1, frames=USER, error="RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ")
    lines = () if is_counted else (("n0", "Memory cgroup out of memory: Killed process 4711 (pt_data_worker)"),)
    rank = dead(1, 1, stderr_tail=tail, is_oom_counted=is_counted)
    verdict = judge(evidence(victim(), rank, kernel_lines=lines))
    assert (verdict.fault_class, verdict.root_rank) == ("host_out_of_memory", 1)


def test_a_shell_that_tells_of_a_kill_for_memory() -> None:
    verdict = judge(evidence(victim(), dead(1, 137, oom_killed=True)))
    assert (verdict.fault_class, verdict.root_rank) == ("host_out_of_memory", 1)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: " + "a" * 120_000,
        "ValueError: " + "a/" * 60_000,
        "ValueError: " + "1 " * 60_000,
        '  File "x.py", line 1, in f' + " " * 120_000 + "x",
        f'  File "x.py", line {"9" * 6000}, in f',
        "Xid " * 30_000,
    ],
    ids=lambda line: line[:18],
)
def test_a_line_without_end_is_read_in_no_time(line: str) -> None:
    tail = ("Traceback (most recent call last):", f'  File "{SCRIPT}", line 3, in <module>', line, "ValueError: x")
    began = time.monotonic()
    verdict = judge(evidence(victim(), dead(1, 1, stderr_tail=tail), kernel_lines=(("n0", line),)))
    assert time.monotonic() - began < 1.0
    assert verdict.root_rank == 1


READ_ONLY = {"cpu_delta_s": 0.0, "io_delta": 0, "is_attached": True, "step": 9, "phase_age_s": 20.0, "is_overdue": True}


def stdlib(function: str, file: str) -> Frame:
    return frame(function, f"{STDLIB}/{file}", 1)


@pytest.mark.parametrize(
    "inner",
    [
        # A loader's workers wait for the storage, the rank for them.
        (
            stdlib("_SelectorMixin.select", "selectors.py"),
            stdlib("wait", "multiprocessing/connection.py"),
            stdlib("Connection.poll", "multiprocessing/connection.py"),
            stdlib("Queue.get", "multiprocessing/queues.py"),
            frame("_MultiProcessingDataLoaderIter._try_get_data", f"{TORCH}/utils/data/dataloader.py"),
        ),
        # s3fs and gcsfs do their work in a thread.
        (
            stdlib("Condition.wait", "threading.py"),
            stdlib("Event.wait", "threading.py"),
            frame("sync", "/x/site-packages/fsspec/asyn.py"),
        ),
        (
            stdlib("Condition.wait", "threading.py"),
            stdlib("Future.result", "concurrent/futures/_base.py"),
            frame("TransferFuture.result", "/x/site-packages/s3transfer/futures.py"),
        ),
    ],
    ids=["loader", "fsspec", "s3transfer"],
)
def test_data_that_comes_late_through_threads_and_workers_is_no_hang_for_two_minutes(inner: tuple[Frame, ...]) -> None:
    def asked(**facts: object) -> str:
        loading = alive(1, (*inner, *MAIN), **{**READ_ONLY, **facts})
        waiting = alive(0, IN_ALL_REDUCE, is_attached=True, step=9, is_overdue=True)
        return judge(evidence(waiting, loading, trigger="hang", suspected=((1, 9),), extensions=2)).fault_class

    assert asked() == "no_fault"
    assert asked(phase_age_s=130.0) == "hang"


def test_a_thread_that_flushes_a_file_is_waited_for() -> None:
    stack = (stdlib("Thread.join", "threading.py"), frame("save"), *MAIN)
    flushing = alive(1, stack, **READ_ONLY, disk_wait=True)
    ranks = (alive(0, IN_ALL_REDUCE, is_attached=True, step=9, is_overdue=True), flushing)
    assert judge(evidence(*ranks, trigger="hang", suspected=((1, 9),), extensions=2)).fault_class == "no_fault"


@pytest.mark.parametrize("last", [(frame("load", line=40), *MAIN), IN_ALL_REDUCE], ids=["computing", "waiting"])
def test_a_pause_that_ends_between_the_two_looks_is_no_hang(last: tuple[Frame, ...]) -> None:
    pausing = (frame("prefetch", line=72), *MAIN)
    facts = {"cpu_delta_s": 0.01, "io_delta": 0, "stands_still": True}

    def asked(*stacks: tuple[Frame, ...], extensions: int = 0) -> str:
        moved = msgspec.structs.replace(alive(1, **facts), stacks=stacks)
        ranks = (alive(0, IN_ALL_REDUCE, **facts), moved)
        suspected = ((0, None), (1, None))
        return judge(evidence(*ranks, trigger="hang", suspected=suspected, extensions=extensions)).fault_class

    assert asked(pausing, last) == "no_fault"
    assert asked(pausing, pausing) == "hang"
    assert asked(pausing, last, extensions=5) in ("hang", "hang_everywhere"), "but not for ever"


@pytest.mark.parametrize("facts", [{"cpu_delta_s": 0.4}, {"io_delta": 10**7}])
def test_a_rank_that_works_on_its_result_after_the_last_step_is_no_hang(facts: dict[str, float]) -> None:
    def asked(**more: object) -> str:
        late = {**READ_ONLY, "phase_age_s": 700.0, "is_finished": True, **facts, **more}
        ranks = (dead(0, 0, is_finished=True), alive(1, (frame("export"), *MAIN), **late))
        return judge(evidence(*ranks, trigger="hang", suspected=((1, 9),), extensions=3)).action

    assert asked() == "none"
    assert asked(is_finished=False) == "restart"
    assert asked(cpu_delta_s=0.0, io_delta=0) == "restart"


def test_a_thread_of_the_scripts_own_that_reads_is_told_from_one_that_a_library_keeps_open() -> None:
    reading = (stdlib("SocketIO.readinto", "socket.py"), frame("Connection.read", "/x/site-packages/urllib3/x.py"))
    starting = (stdlib("Thread.run", "threading.py"), stdlib("Thread._bootstrap", "threading.py"))
    assert is_fetching((*reading, frame("prefetch"), *starting))
    assert not is_fetching((*reading, frame("keep_alive", "/x/site-packages/tracker/sync.py"), *starting))
    assert not is_fetching((*starting, frame("prefetch")))


@pytest.mark.parametrize(
    ("function", "place"),
    [
        ("ShardingPropagator.propagate_op_sharding", "user"),
        ("aggregate", "user"),
        ("all_gather_into_tensor", "collective"),
        ("Work.wait", "collective"),
        ("_isend_irecv", "collective"),
        ("reduce_scatter_tensor", "collective"),
        ("alltoall_base", "collective"),
    ],
)
def test_what_only_sounds_like_waiting_is_none(function: str, place: str) -> None:
    assert place_of_stack((frame(function, f"{TORCH}/distributed/tensor/_ops/x.py"), *MAIN)) == place
