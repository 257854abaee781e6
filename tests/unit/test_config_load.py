"""What users get wrong in a configuration, and what they are told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from midwatch.config import Config, RankEnv, dump_config, flatten_config, load_config, trace_config
from midwatch.core import ConfigError

LAPTOP = RankEnv()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MIDWATCH_")] + ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
        monkeypatch.delenv(name, raising=False)


def refusal(source: Any, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value


def write(folder: Path, text: str, name: str = "midwatch.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


BLOCK = """[checkpoint]
interval = 500          # steps
async_save = true
shard = true
keep_last = 3
save_optimizer = true
"""


def test_the_documented_block_works_verbatim(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, BLOCK))
    checkpoint = config.checkpoint
    assert (checkpoint.interval, checkpoint.keep_last) == (500, 3)
    assert checkpoint.async_save
    assert checkpoint.shard
    assert checkpoint.save_optimizer


def test_a_dict_means_the_same_as_a_file(tmp_path: Path) -> None:
    values = {
        "checkpoint": {"interval": 500, "async_save": True, "shard": True, "keep_last": 3, "save_optimizer": True}
    }
    assert load_config(values) == load_config(write(tmp_path, BLOCK))


def test_nothing_given_is_the_defaults() -> None:
    assert load_config() == Config()
    assert load_config({}) == Config()


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({"checkpoint": {"interval": 0}}, "CF102", "checkpoint.interval = 0: must be >= 1"),
        ({"checkpoint": {"keep_last": 0}}, "CF102", "checkpoint.keep_last = 0: must be >= 1"),
        ({"watch": {"grace_s": 0}}, "CF102", "watch.grace_s = 0: must be > 0"),
        ({"watch": {"grace_s": float("inf")}}, "CF102", "watch.grace_s = inf: must be finite"),
        ({"watch": {"grace_s": float("nan")}}, "CF102", "watch.grace_s = nan: must be"),
        ({"restart": {"backoff_s": [1, -2]}}, "CF102", "restart.backoff_s[1] = [1, -2]: must be >= 0"),
        ({"restart": {"backoff_s": []}}, "CF102", "restart.backoff_s = []: must not be empty"),
        ({"run": {"dir": ""}}, "CF102", "run.dir = '': must not be empty"),
        ({"run": {"dir": "a\0b"}}, "CF102", "zero byte"),
        ({"checkpoint": {"interval": "500"}}, "CF103", "must be a whole number, not text"),
        ({"checkpoint": {"interval": 500.0}}, "CF103", "must be a whole number, not a number"),
        ({"checkpoint": {"interval": True}}, "CF103", "must be a whole number, not true or false"),
        ({"checkpoint": {"shard": 1}}, "CF103", "must be true or false, not a whole number"),
        ({"checkpoint": 5}, "CF103", "must be a table, written [checkpoint]"),
        ({"checkpoint": None}, "CF103", "must be a table"),
        ({"train": {"model": object()}}, "CF103", "train.model: a object cannot be written down"),
        ({"train": {3: 1}}, "CF103", "key 3 is not text"),
        (
            {"checkpoint": {"intervall": 5}},
            "CF101",
            "unknown key checkpoint.intervall; did you mean checkpoint.interval?",
        ),
        ({"checkpoint": {"keep-last": 5}}, "CF101", "did you mean checkpoint.keep_last?"),
        ({"watch": {"interval": 5}}, "CF101", "did you mean checkpoint.interval?"),
        ({"chekpoint": {}}, "CF101", "unknown table 'chekpoint'; did you mean checkpoint?"),
        ({"interval": 5}, "CF101", "did you mean checkpoint.interval?"),
        ({"zzzz": {}}, "CF101", "unknown table 'zzzz'"),
        ({"watch": {"confirm_s": 9.0}}, "CF106", "watch.confirm_s = 9.0 must not exceed watch.floor_s = 5.0"),
        ({"watch": {"floor_s": 700.0}}, "CF106", "watch.floor_s = 700.0 must not exceed watch.phase_timeout_s"),
        ({"metrics": {"push": {"url": "u:p@host/x"}}}, "CF102", "must begin with http://, https:// or tensorboard:"),
        ({"checkpoint": {"dir": "a", "local_dir": "a/b"}}, "CF106", "must lie outside checkpoint.dir"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(values: dict[str, Any], code: str, message: str) -> None:
    error = refusal(values)
    assert (error.code, error.exit_code) == (code, 78)
    assert message in error.message


def test_every_problem_is_told_at_once_and_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "# mine\n[checkpoint]\ninterval = 0\nkeep-last = 2\n\n[chekpoint]\nx = 1\n")
    error = refusal(path, "watch.grace_s=-1")
    assert [(p["code"], p["where"]) for p in error.context["problems"]] == [
        ("CF102", f"{path}:3"),
        ("CF101", f"{path}:4"),
        ("CF101", f"{path}:6"),
        ("CF102", "--set watch.grace_s"),
    ]
    assert error.code == "CF102"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = = 2\n", 2),
        ("[checkpoint\n", 1),
        ("[run]\nname = 'x'\nname = 'y'\n", 3),
        ('a = "open\n', 1),
        ("=", 1),
    ],
)
def test_broken_toml_is_named_by_line(tmp_path: Path, text: str, line: int) -> None:
    path = write(tmp_path, text)
    error = refusal(path)
    assert error.code == "CF105"
    assert error.context["line"] == line
    assert f"{path}:{line}:" in error.message


def test_a_broken_line_with_a_password_is_not_shown(tmp_path: Path) -> None:
    assert "hunter2" not in str(refusal(write(tmp_path, "[train]\ndb_password = = 'hunter2'\n")))


def test_a_file_that_is_no_text_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"a = 1\n\xff\xfe")
    assert refusal(path).context["line"] == 2


def test_a_byte_order_mark_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbf[checkpoint]\ninterval = 7\n")
    assert load_config(path).checkpoint.interval == 7


def test_an_unreadable_file_is_refused_by_reason(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.toml").message
    assert "is a folder" in refusal(tmp_path).message
    assert refusal(str(tmp_path / "a\0b")).code == "CF104"
    big = tmp_path / "checkpoint.toml"
    with big.open("wb") as file:
        file.truncate(5 * 2**20)
    assert refusal(big).code == "CF104"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, BLOCK)
    path.chmod(0)
    assert "Permission denied" in refusal(path).message


def test_overrides_are_read_as_toml_and_fall_back_to_text() -> None:
    overrides = [
        "checkpoint.interval=200",
        "checkpoint.shard=false",
        "checkpoint.dir=/scratch/x",
        "run.name=007",
        "restart.backoff_s=[0, 1.5]",
        "train.lr=3e-4",
        "train.optimizer.name=adamw",
        "train.note=a=b",
    ]
    config = load_config({}, overrides)
    assert config.checkpoint.interval == 200
    assert not config.checkpoint.shard
    assert config.checkpoint.dir == "/scratch/x"
    assert config.run.name == "007"
    assert config.restart.backoff_s == (0.0, 1.5)
    assert config.train == {"lr": 3e-4, "optimizer": {"name": "adamw"}, "note": "a=b"}


@pytest.mark.parametrize(
    "text", ["checkpoint.interval", "interval=5", "=5", ".a=5", "checkpoint.=5", "checkpoint..a=1", ""]
)
def test_an_override_that_is_none_is_refused(text: str) -> None:
    assert refusal({}, text).code == "CF101"


@pytest.mark.parametrize(
    ("source", "overrides"),
    [
        ({}, ["api_key=hunter2-and-more"]),
        ({}, ["sk-proj-abcdefghijklmnopqrstuv"]),
        ({"train": "sk-proj-abcdefghijklmnopqrstuv"}, []),
        ({"run": {"log_every": "sk-proj-abcdefghijklmnopqrstuv"}}, []),
    ],
)
def test_a_refusal_repeats_no_secret(source: dict[str, Any], overrides: list[str]) -> None:
    text = str(refusal(source, *overrides).as_dict())
    assert "hunter2" not in text
    assert "abcdefgh" not in text


def test_an_override_cannot_smuggle_a_second_assignment() -> None:
    assert load_config({}, ["run.name=1\nx = 2"]).run.name == "1\nx = 2"


def test_the_last_override_wins_and_a_bad_one_does_not_hide() -> None:
    assert load_config({}, ["checkpoint.interval=5", "checkpoint.interval=6"]).checkpoint.interval == 6
    assert refusal({}, "checkpoint.interval=0", "checkpoint.interval=6").code == "CF102"


def test_origins_say_who_set_what(tmp_path: Path) -> None:
    path = write(tmp_path, "[checkpoint]\ninterval = 7\n[train]\nlr = 0.1\n[train.opt]\nname = 'sgd'\n")
    env = RankEnv(run_dir=tmp_path / "run")
    loaded = trace_config(path, ["checkpoint.keep_last=2", "train.opt.eps=1"], env=env)
    kinds = {key: origin.kind for key, origin in loaded.origins.items() if origin.kind != "default"}
    assert kinds == {
        "run.dir": "environment",
        "checkpoint.interval": "file",
        "checkpoint.keep_last": "override",
        "train.lr": "file",
        "train.opt.name": "file",
        "train.opt.eps": "override",
    }
    assert loaded.origins["checkpoint.interval"].where == f"{path}:2"
    assert loaded.origins["train.opt.name"].where == f"{path}:6"
    assert loaded.config.run.dir == str(tmp_path / "run")


def test_the_launchers_file_is_used_when_nothing_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, '{"checkpoint": {"interval": 9}}', "config.json")
    loaded = trace_config(None, env=RankEnv(config_path=path))
    assert loaded.config.checkpoint.interval == 9
    assert loaded.origins["checkpoint.interval"].kind == "environment"


def test_a_dumped_configuration_loads_back_the_same(tmp_path: Path) -> None:
    config = load_config(
        {"checkpoint": {"interval": 3}, "train": {"lr": 1.0, "x": float("inf"), "names": ["a"], "none": None}}
    )
    path = tmp_path / "config.json"
    path.write_bytes(dump_config(config))
    again = load_config(path)
    assert again == config
    assert isinstance(again.train["lr"], float)


def test_a_dumped_configuration_holds_no_secret() -> None:
    config = load_config({"train": {"hf_token": "planted-1", "db": {"password": "planted-2"}, "tokenizer": "gpt2"}})
    assert b"planted" not in dump_config(config)
    assert b"gpt2" in dump_config(config)
    assert "planted" not in repr(flatten_config(config))


def test_broken_json_is_named_by_line(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, '{\n"a": }', "c.json")).context["line"] == 2
    assert refusal(write(tmp_path, "[1]", "c.json")).code == "CF105"
