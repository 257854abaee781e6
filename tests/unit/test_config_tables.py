"""Tables inside tables: every way to write them means the same, and a slip at any level is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from midwatch.config import Config, RankEnv, dump_config, flatten_config, load_config, trace_config
from midwatch.core import ConfigError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MIDWATCH_")] + ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
        monkeypatch.delenv(name, raising=False)


def refusal(source: Any, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value


SPELLINGS = [
    "[checkpoint.keep]\nbest = 2\nbest_metric = 'val_loss'\n",
    "[checkpoint]\nkeep = { best = 2, best_metric = 'val_loss' }\n",
    "[checkpoint]\nkeep.best = 2\nkeep.best_metric = 'val_loss'\n",
    "checkpoint.keep.best = 2\ncheckpoint.keep.best_metric = 'val_loss'\n",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_table_in_a_table_has_four_spellings_in_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "midwatch.toml"
    path.write_text(text)
    keep = load_config(path).checkpoint.keep
    assert (keep.best, keep.best_metric, keep.every_steps) == (2, "val_loss", 0)
    assert keep == load_config({"checkpoint": {"keep": {"best": 2, "best_metric": "val_loss"}}}).checkpoint.keep
    assert keep == load_config({}, ["checkpoint.keep.best=2", "checkpoint.keep.best_metric=val_loss"]).checkpoint.keep


def test_an_override_changes_one_value_of_an_inner_table_and_no_other() -> None:
    source = {"checkpoint": {"interval": 7, "keep": {"best": 2, "every_steps": 1000}, "trust": {"scrub_hours": 1}}}
    checkpoint = load_config(source, ["checkpoint.keep.best=3"]).checkpoint
    assert (checkpoint.keep.best, checkpoint.keep.every_steps) == (3, 1000)
    assert (checkpoint.interval, checkpoint.trust.scrub_hours) == (7, 1.0)


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({"keep": {"bst": 1}}, "CF101", "unknown key checkpoint.keep.bst; did you mean checkpoint.keep.best?"),
        ({"kep": {"best": 1}}, "CF101", "unknown key checkpoint.kep; did you mean checkpoint.keep?"),
        ({"best": 1}, "CF101", "did you mean checkpoint.keep.best?"),
        ({"every_step": 1}, "CF101", "did you mean checkpoint.keep.every_steps?"),
        ({"keep": {"interval": 1}}, "CF101", "did you mean checkpoint.interval?"),
        ({"trust": {"zzz": 1}}, "CF101", "unknown key checkpoint.trust.zzz"),
        ({"keep": 1}, "CF103", "must be a table, written [checkpoint.keep]; did you mean checkpoint.keep_last?"),
        ({"resume": "must"}, "CF103", "checkpoint.resume = 'must': must be a table, written [checkpoint.resume]"),
        ({"keep_last": {"best": 1}}, "CF103", "must be a whole number, not a table"),
        ({"staging": {"slots": 3}}, "CF102", "checkpoint.staging.slots = 3: must be <= 2"),
        ({"staging": {"slots": 0}}, "CF102", "checkpoint.staging.slots = 0: must be >= 1"),
        ({"keep": {"every_hours": float("nan")}}, "CF102", "checkpoint.keep.every_hours = nan: must be"),
        ({"trust": {"load_test": "some"}}, "CF102", "checkpoint.trust.load_test = 'some': must be 'full' or 'sample'"),
        ({"absent_on_purpose": ["optimiser"]}, "CF102", "must be 'data', 'optimizer', 'scaler' or 'scheduler'"),
        ({"absent_on_purpose": "optimizer"}, "CF103", "must be a list, not text"),
        ({"trust": {"signing_key": 5}}, "CF103", "checkpoint.trust.signing_key = 5: must be text"),
    ],
)
def test_a_slip_at_any_level_is_named_with_what_would_be_right(values: dict[str, Any], code: str, message: str) -> None:
    error = refusal({"checkpoint": values})
    assert (error.code, error.exit_code) == (code, 78)
    assert message in error.message


def test_a_table_of_checkpoints_written_at_the_top_is_recognised() -> None:
    assert "did you mean checkpoint.keep?" in refusal({"keep": {"best": 1}}).message
    assert "did you mean checkpoint.keep.best?" in refusal({"best": 1}).message


def test_a_plain_value_for_a_table_is_answered_with_its_keys() -> None:
    hint = refusal({"checkpoint": {"keep": 1}}).hint
    assert "checkpoint.keep_last" in hint
    assert "checkpoint.keep.every_steps" in hint
    assert "checkpoint.resume.max_attempts" in refusal({"checkpoint": {"resume": "must"}}).hint


def test_slips_of_all_levels_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "midwatch.toml"
    path.write_text("[checkpoint]\nintervall = 1\nstaging = { slots = 9 }\n\n[checkpoint.keep]\nbest = -1\nbst = 2\n")
    assert [(p["code"], p["key"], p["where"]) for p in refusal(path).context["problems"]] == [
        ("CF101", "checkpoint.intervall", f"{path}:2"),
        ("CF102", "checkpoint.staging.slots", f"{path}:3"),
        ("CF102", "checkpoint.keep.best", f"{path}:6"),
        ("CF101", "checkpoint.keep.bst", f"{path}:7"),
    ]


def test_origins_of_inner_values(tmp_path: Path) -> None:
    path = tmp_path / "midwatch.toml"
    path.write_text("[checkpoint]\nstaging = { overlap = true }\n[checkpoint.keep]\nbest = 2\n")
    origins = trace_config(path, ["checkpoint.keep.best=3"], env=RankEnv()).origins
    assert (origins["checkpoint.keep.best"].kind, origins["checkpoint.staging.overlap"].where) == (
        "override",
        f"{path}:2",
    )
    assert origins["checkpoint.keep.best_mode"].kind == "default"


def test_inner_tables_survive_being_written_down(tmp_path: Path) -> None:
    config = load_config({"checkpoint": {"keep": {"best": 2}, "absent_on_purpose": ["data"]}})
    path = tmp_path / "config.json"
    path.write_bytes(dump_config(config))
    assert load_config(path) == config == load_config(config)
    flat = flatten_config(config)
    assert flat["checkpoint.keep.best"] == 2
    assert flat["checkpoint.absent_on_purpose"] == ("data",)
    assert "checkpoint.keep" not in flat


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"staging": {"overlap": True}, "async_save": False}, "does not go with checkpoint.async_save = false"),
        ({"keep": {"best": 1, "best_mode": "max"}}, "is wrong for checkpoint.keep.best_metric = 'loss'"),
        ({"keep": {"best": 1, "best_mode": "max", "best_metric": "val/loss"}}, "is wrong for"),
        ({"dir": "ckpts", "trust": {"signing_key": "ckpts/key"}}, "must lie outside checkpoint.dir"),
        ({"trust": {"signing_key": "midwatch-run/checkpoints/key"}}, "must lie outside checkpoint.dir"),
    ],
)
def test_inner_values_that_do_not_go_together(values: dict[str, Any], message: str) -> None:
    error = refusal({"checkpoint": values})
    assert error.code == "CF106"
    assert message in error.message


@pytest.mark.parametrize(
    "values",
    [
        {"keep": {"best_mode": "max"}},
        {"keep": {"best": 1, "best_mode": "max", "best_metric": "neg_log_loss"}},
        {"keep": {"best": 1, "best_mode": "max", "best_metric": "accuracy"}},
        {"trust": {"signing_key": "/nowhere/key"}},
    ],
)
def test_inner_values_that_do_go_together(values: dict[str, Any]) -> None:
    assert load_config({"checkpoint": values}) != Config()


def test_the_path_of_a_key_is_not_hidden_as_if_it_were_the_key() -> None:
    flat = flatten_config(load_config({"checkpoint": {"trust": {"signing_key": "/etc/midwatch/key"}}}))
    assert flat["checkpoint.trust.signing_key"] == "/etc/midwatch/key"
    assert "'a\\x00b'" in refusal({"checkpoint": {"trust": {"signing_key": "a\0b"}}}).message
