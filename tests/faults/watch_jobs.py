"""A trainer that waits for its peers without a poll, as gloo does, and takes the pauses and hangs it is told to."""

from __future__ import annotations

JOB = '''
import ctypes, gc, json, os, signal, subprocess, sys, threading, time, urllib.request
from contextlib import nullcontext
from pathlib import Path

home, form, plan = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["MIDWATCH_ATTEMPT"])
pulse = None
if form == "five":
    from midwatch.pulse import Flag, writer_from_env
    pulse = writer_from_env()
    pulse.begin(os.getpid(), attempt)
    pulse.resumed(None, "", "c" * 16)
    while not pulse.flags() & Flag.GO:
        time.sleep(0.005)
for peer in range(world):
    try:
        os.mkfifo(home / f"a{attempt}-r{peer}")
    except FileExistsError:
        pass
# Opened for both directions: opening waits for nobody, and a peer that has ended does not close it.
pipes = [os.open(home / f"a{attempt}-r{peer}", os.O_RDWR) for peer in range(world)]

# In stack samples this is the library, so that waiting here is told from being stuck in user code.
exec(compile("""
def all_reduce():
    for pipe in pipes:
        os.write(pipe, b"x")
    got = 0
    while got < world:
        got += len(os.read(pipes[rank], world - got))
""", "torch/distributed/stand_in.py", "exec"))

def burn(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(2000))

def compile_in_child(seconds):
    code = f"import time\\nend = time.monotonic() + {seconds}\\nwhile time.monotonic() < end: sum(range(2000))"
    subprocess.run([sys.executable, "-c", code], check=True)

def save_in_thread(seconds):
    def write():
        end = time.monotonic() + seconds
        with open(home / f"saved-r{rank}", "wb", buffering=0) as file:
            while time.monotonic() < end:
                file.seek(0)
                file.write(bytes(1 << 20))
                time.sleep(0.05)
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()

def collect(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        waste = [[] for _ in range(20000)]
        for item in waste:
            item.append(waste)
        del waste
        gc.collect()

def read_slowly(seconds):
    with urllib.request.urlopen(f"{os.environ['TEST_STORE']}/{seconds}") as answer:
        answer.read()

def prefetch(seconds):
    thread = threading.Thread(target=read_slowly, args=(seconds,))
    thread.start()
    thread.join()

def declared(seconds):
    with pulse.phase("eval") if pulse else nullcontext():
        time.sleep(seconds) if pulse else burn(seconds)

def inject(what, seconds):
    (home / "hurt").write_text(json.dumps(time.time_ns()))
    if what == "sigstop": os.kill(os.getpid(), signal.SIGSTOP)
    if what == "sleep": time.sleep(3600)
    if what == "exit3": os._exit(3)
    if what == "gil": ctypes.PyDLL(None).sleep(3600)
    if what == "thread":
        threading.Thread(target=lambda: [time.sleep(0.1) for _ in iter(int, 1)], daemon=True).start()
        threading.Event().wait()

pauses = {"eval": burn, "compile": compile_in_child, "checkpoint": save_in_thread, "gc": collect,
          "storage": read_slowly, "prefetch": prefetch, "declared": declared, "short": time.sleep}
for step in range(plan["steps"]):
    if pulse:
        pulse.beat(step)
    for at, who, what, seconds, *when in plan["events"]:
        if at == step and who in (rank, -1) and attempt == (when or [1])[0]:
            pauses.get(what, lambda s: inject(what, s))(seconds)
    burn(0.005)
    with pulse.phase("collective") if pulse else nullcontext():
        all_reduce()
    time.sleep(0.05)
    if step % 5 == 0:
        print("step", step, flush=True)
if pulse:
    pulse.finished()
'''
