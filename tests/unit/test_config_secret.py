"""Secrets that the configuration points to: read where they are, named where they are not, quoted never."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from midwatch.config import dump_config, flatten_config, is_reference, load_config, read_secret
from midwatch.core import ConfigError

KEY = "alerts.to.slack"


def test_a_file_and_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hook").write_text("  https://x/s3cr3t\n\n")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("HOOK", "https://y")
    assert read_secret(KEY, f"file:{tmp_path}/hook") == "https://x/s3cr3t"
    assert read_secret(KEY, "file:$FOLDER/hook") == "https://x/s3cr3t"
    assert read_secret(KEY, "env:HOOK") == "https://y"
    monkeypatch.setenv("HOOK", "https://z")
    assert read_secret(KEY, "env:HOOK") == "https://z", "read anew"


@pytest.mark.parametrize("text", ["", "https://x", "file:", "env:", "FILE:x", "s3cr3t"])
def test_what_is_no_reference(text: str) -> None:
    assert not is_reference(text)
    with pytest.raises(ConfigError, match="CF102") as caught:
        read_secret(KEY, text)
    assert "s3cr3t" not in str(caught.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    for reference, code in (
        ("env:NOT_SET_ANYWHERE", "CF102"),
        (f"file:{tmp_path}/empty", "CF102"),
        (f"file:{tmp_path}/none", "CF104"),
        (f"file:{tmp_path}", "CF104"),
        (f"file:{tmp_path}/bytes", "CF104"),
        (f"file:{tmp_path}/pipe", "CF104"),
        ("file:$NOT_SET_ANYWHERE/x", "CF102"),
    ):
        with pytest.raises(ConfigError, match=code) as caught:
            read_secret(KEY, reference)
        assert KEY in str(caught.value)


def test_the_configuration_holds_no_secret(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("https://x/s3cr3t")
    (tmp_path / "password").write_text("s3cr3t")
    config = load_config(
        {
            "alerts": {
                "to": {"slack": [f"file:{tmp_path}/hook"], "email": ["a@example.org"]},
                "smtp": {"host": "mail", "password": f"file:{tmp_path}/password"},
            }
        }
    )
    assert "s3cr3t" not in str(flatten_config(config)) + dump_config(config).decode()


@pytest.mark.parametrize(
    "table",
    [
        {"to": {"webhook": ["https://hooks.example/s3cr3t"]}},
        {"to": {"pagerduty": ["s3cr3t"]}},
        {"to": {"pagerduty": "s3cr3t"}},
        {"to": {"apprise": [["s3cr3t"]]}},
        {"to": {"email": ["a@example.org"]}, "smtp": {"host": "mail", "password": "s3cr3t"}},
        {"to": {"email": ["a@example.org"]}},
        {"to": {"pagerduty_url": "ftp://x"}},
        {"on": ["everything"]},
        {"min_grade": "G9"},
        {"min_gap_s": -1},
    ],
)
def test_what_cannot_be_meant_is_refused_and_no_secret_quoted(table: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"alerts": table})
    assert "s3cr3t" not in str(caught.value) + str(caught.value.as_dict())
