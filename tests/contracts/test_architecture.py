"""The laws of the tree, checked on the tree itself: who may import, touch, start, swallow and export what."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from midwatch.core import CODES
from midwatch.faults import CLASSES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "midwatch"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = {path: path.read_text() for path in SOURCES}
TREES = {path: ast.parse(text, str(path)) for path, text in TEXTS.items()}

TORCH_FREE = [
    *((name,) for name in ("audit.alerts", "audit.exporters", "audit.importers", "audit.index")),
    *((name,) for name in ("core", "config", "storage", "pulse", "faults", "supervise", "supervise.decide", "audit")),
    *((name,) for name in ("probes", "cluster", "guards", "triage")),
    *((name,) for name in ("checkpoint", "checkpoint.format", "checkpoint.persist", "cli.main", "testing")),
    (
        "supervise.agent",
        "supervise.coordinator",
        "supervise.guardian",
        "supervise.launcher",
        "supervise.page",
        "supervise.sender",
    ),
    tuple(f"cli.{path.stem}" for path in sorted((PACKAGE / "cli").glob("*.py")) if path.stem != "__init__"),
]

DOORS = {"environ", "getenv", "environb"}
ENVIRONMENT = ("config/", "pulse/", "testing/", "supervise/parked.py")
"""The parked process becomes a rank, and so takes a rank's environment on."""

OUTSIDE = {
    "audit/alerts/child.py": "the user's own program, and the library for many services",
    "audit/provenance_git.py": "git, bounded",
    "checkpoint/address.py": "the receipt store's listening socket and the own address",
    "checkpoint/board_server.py": "the receipt store",
    "checkpoint/net_board.py": "connections to the receipt store",
    "checkpoint/load_test.py": "a process of its own that loads a checkpoint whole",
    "checkpoint/writer.py": "the writer process",
    "cli/_checks.py": "a trial of py-spy",
    "cluster/command.py": "the scheduler's own commands",
    "probes/runner.py": "probes, each a process",
    "probes/surroundings.py": "a connection over loopback, the own host name",
    "storage/fence.py": "the host name in a claim",
    "supervise/address.py": "the listening socket and the own address",
    "supervise/agent.py": "ranks",
    "supervise/child.py": "agent, coordinator and guardian",
    "supervise/coordinator.py": "its listening socket",
    "supervise/failover.py": "the host name",
    "supervise/joining.py": "the host name",
    "supervise/launcher.py": "its children",
    "supervise/link.py": "options of its connections",
    "supervise/parked.py": "its socket to the agent",
    "supervise/ports.py": "a free port",
    "supervise/prepare.py": "the host name",
    "supervise/rank_proc.py": "ranks",
    "supervise/sample.py": "py-spy",
    "supervise/serving.py": "the coordinator's listening socket",
    "supervise/spawn.py": "ranks",
    "supervise/suspicion.py": "the host name",
    "supervise/waiting.py": "children that end",
    "supervise/warm.py": "the parked process",
}
"""Who may import ``subprocess``, ``socket`` or ``multiprocessing``, and for what; ``testing/`` may as well."""

BROAD = {
    "supervise/agent.py": "the agent cycle",
    "supervise/coordinator.py": "a bug of the decision core: what replays it is kept, and the process ends",
    "checkpoint/pipeline.py": "the background writer",
    "supervise/parked.py": "the imports and the script of others, as an interpreter would",
    "train/inspecting_quietly.py": "a look at a model, whatever its tensors can do",
    "probes/runner.py": "the probe runner",
}

DOORS_WITHIN = (
    *("audit.alerts", "audit.exporters", "audit.importers", "audit.index"),
    *("checkpoint.format", "supervise.decide", "supervise.messages"),
)
"""Rooms of their own inside a room."""

INNER = {
    "__main__.py": {"cli.main"},
    "cli/_checks.py": {"supervise.sample"},
    "cli/run.py": {"core.codes"},
    "supervise/bundle.py": {"faults.types"},
    "supervise/carry.py": {"faults.types"},
    "supervise/coordinator.py": {"faults.types"},
    "supervise/gathering.py": {"faults.types"},
    "supervise/late.py": {"faults.types"},
    "supervise/launcher.py": {"core.codes"},
    "supervise/messages.py": {"faults.types"},
    "supervise/sample.py": {"faults.types"},
    "supervise/wire.py": {"faults.types"},
    "testing/saves.py": {
        "checkpoint.board",
        "checkpoint.board_wire",
        "checkpoint.notes",
        "checkpoint.pipeline",
    },
    "testing/stores.py": {"checkpoint.address", "checkpoint.board_server", "checkpoint.board_wire"},
}
"""Who still reaches past a room's door, and to what; to become shorter, never longer."""

WALL_CLOCK = {
    "cli/_checks.py",  # examines this host's clock
    "supervise/coordinator.py",
    "supervise/prepare.py",
}
"""Who still reads the wall clock without ``core.clock``; to become shorter, never longer."""

ROOMS = [
    *("audit.alerts", "audit.exporters", "audit.importers", "audit.index"),
    *("core", "config", "storage", "pulse", "faults", "probes", "cluster", "guards", "audit"),
    *("checkpoint", "checkpoint.format", "triage", "train", "testing"),
]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_imports_go_down_only() -> None:
    tool = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rooms", TORCH_FREE, ids=lambda rooms: rooms[0])
def test_a_login_node_without_torch_can_import(rooms: tuple[str, ...]) -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy'): sys.modules[name] = None\n"
        f"import {', '.join(f'midwatch.{name}' for name in rooms)}\n"
        "loaded = {name.split('.')[0] for name, module in sys.modules.items() if module is not None}\n"
        "sys.exit(' '.join(loaded & {'torch', 'numpy'}) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_happens_at_import() -> None:
    program = (
        "import sys, threading\n"
        "import midwatch, midwatch.cli.main\n"
        "heavy = {'torch', 'aiohttp', 'rich', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else threading.active_count() - 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_environment_has_two_doors() -> None:
    found = {
        name_of(path)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if dotted(node) in ("os.environ", "os.getenv", "os.environb", "os.putenv", "os.unsetenv")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & DOORS)
    }
    assert {name for name in found if not name.startswith(ENVIRONMENT)} == set()


def test_a_room_is_entered_by_its_door() -> None:
    for path, tree in TREES.items():
        own = path.relative_to(PACKAGE).parts[0]
        foreign = {name.removeprefix("midwatch.") for name in imports(tree) if name.startswith("midwatch.")}
        inner = {name for name in foreign if "." in name and name.partition(".")[0] != own} - set(DOORS_WITHIN)
        assert inner <= INNER.get(name_of(path), set()), name_of(path)


def test_only_listed_modules_speak_to_the_outside() -> None:
    found = {
        name_of(path)
        for path, tree in TREES.items()
        if {name.partition(".")[0] for name in imports(tree)} & {"subprocess", "socket", "multiprocessing"}
    }
    assert {name for name in found if not name.startswith("testing/")} - set(OUTSIDE) == set()
    stale = {name for name in OUTSIDE if (PACKAGE / name).exists()} - found
    assert stale <= {"supervise/agent.py"}, "listed, but does not need it"


def test_the_wall_clock_is_read_in_one_place() -> None:
    words = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now")
    found = {name_of(path) for path, tree in TREES.items() for call in calls(tree) if dotted(call.func) in words}
    assert {name for name in found if not name.startswith(("core/", "testing/"))} <= WALL_CLOCK


def test_no_program_is_started_through_a_shell() -> None:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert dotted(node.func) not in ("os.system", "os.popen"), name_of(path)
                shells = [k for k in node.keywords if k.arg == "shell" and getattr(k.value, "value", True)]
                assert not shells, name_of(path)


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    is_caught = any(dotted(kind) in ("Exception", "BaseException") for kind in kinds)
    # Cleaning up and raising again swallows nothing.
    is_raised_again = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    return is_caught and not is_raised_again


def test_errors_are_swallowed_in_three_places_only() -> None:
    counts: dict[str, int] = {}
    for path, tree in TREES.items():
        broad = sum(isinstance(node, ast.ExceptHandler) and is_broad(node) for node in ast.walk(tree))
        if broad and not name_of(path).startswith("testing/"):
            counts[name_of(path)] = broad
    assert set(counts) <= set(BROAD)
    assert all(count <= (2 if name == "supervise/parked.py" else 1) for name, count in counts.items())


def raised_codes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[A-Z]{2}\d{3}", node.value)
        ):
            yield node.value


def test_every_code_that_is_raised_exists_and_every_code_has_a_page() -> None:
    families = {code[:2] for code in CODES}
    for path, tree in TREES.items():
        used = {code for code in raised_codes(tree) if code[:2] in families}
        assert used <= set(CODES), name_of(path)
    for code in CODES:
        assert (ROOT / "docs" / "runbook" / f"{code}.md").is_file(), code


def test_every_code_is_used() -> None:
    used = {code for path, tree in TREES.items() if path.name != "codes.py" for code in raised_codes(tree)}
    used |= set(re.findall(r"\"([A-Z]{2}\d{3})\"", (PACKAGE / "faults" / "classes.toml").read_text()))
    assert set(CODES) - used <= set(), "a code nobody raises"


def test_the_table_and_the_rules_know_the_same_fault_classes() -> None:
    source = "".join(text for path, text in TEXTS.items() if name_of(path).startswith("faults/"))
    named = set(re.findall(r"""(?:fault_class(?: ?==? ?)|\bpick\(\s*|class_of\()"(\w+)\"""", source))
    assert len(named) > 12
    assert named <= set(CLASSES), "a class without a row counts as unknown"
    silent = {name for name in CLASSES if f'"{name}"' not in source}
    assert not silent, "a row that no rule leads to"


@pytest.mark.parametrize("room", ROOMS)
def test_exported_names_are_the_public_names(room: str) -> None:
    if room == "train":
        pytest.importorskip("torch")
    module = importlib.import_module(f"midwatch.{room}")
    listed: list[str] = module.__all__
    assert listed == sorted(set(listed), key=listed.index), "a name twice"
    for name in listed:
        assert getattr(module, name) is not None
    eager = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("midwatch.")
    }
    assert eager <= set(listed)


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_nothing_read_from_disk_can_run() -> None:
    for path, tree in TREES.items():
        forbidden = {name.partition(".")[0] for name in imports(tree)} & {
            "pickle",
            "marshal",
            "shelve",
            "dill",
            "cloudpickle",
        }
        assert not forbidden, name_of(path)
        for call in calls(tree):
            word = dotted(call.func)
            is_interpreter = word == "exec" and name_of(path) == "supervise/parked.py"  # of the user's own script
            assert is_interpreter or word not in ("eval", "exec", "yaml.load"), name_of(path)
            if word == "torch.load":
                safe = [
                    k for k in call.keywords if k.arg == "weights_only" and getattr(k.value, "value", False) is True
                ]
                assert safe, name_of(path)


def test_logging_does_not_format() -> None:
    levels = {"debug", "info", "warning", "error", "exception", "critical"}
    for path, tree in TREES.items():
        for call in calls(tree):
            owner, _, level = dotted(call.func).rpartition(".")
            if owner in ("_log", "log", "logger", "logging") and level in levels and call.args:
                assert not isinstance(call.args[0], ast.JoinedStr), name_of(path)


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60, check=False)
    names = [name for name in done.stdout.decode().split("\0") if name]
    if done.returncode != 0 or not names:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    places = re.compile(rb"(?<![\w/.])/(?:work|root)/")
    hits = [
        str(path.relative_to(ROOT)) for path in tracked() if path != Path(__file__) and places.search(path.read_bytes())
    ]
    assert hits == []


def test_there_is_no_utils() -> None:
    swamps = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert [name_of(path) for path in SOURCES if {path.stem, *path.relative_to(PACKAGE).parts[:-1]} & swamps] == []


def test_files_stay_one_idea_long() -> None:
    long = {name_of(path): lines for path, text in TEXTS.items() if (lines := text.count("\n")) > 400}
    assert long == {}
