"""Planted keys must not come out again; vocabulary must not be mistaken for keys."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midwatch.config import REDACTED, config_hash, is_secret_name, redact, redact_environment, redact_text

redact_module = importlib.import_module("midwatch.config.redact")

SECRET_NAMES = [
    "password", "db_password", "DB_PASSWORD", "secret", "clientSecret", "AWS_SECRET_ACCESS_KEY", "api_key", "apikey",
    "APIKey", "WANDB_API_KEY", "wandb_key", "hf_token", "HF_TOKEN", "token", "accessToken", "--api-key", "auth",
    "Authorization", "private_key", "ssh-key", "credentials", "passphrase", "sentry_dsn", "key",
]  # fmt: skip
INNOCENT_NAMES = [
    "tokenizer", "max_tokens", "tokens_per_step", "n_tokens", "eos_token", "pad_token", "num_key_value_heads",
    "key_dim", "text_key", "label_key", "loss_per_token", "keyboard", "monkey", "author", "interval", "special_token",
    "sort_key", "passes", "secretary", "tokenizer_path",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)
    assert redact({name: "planted"}) == {name: REDACTED}


@pytest.mark.parametrize("name", INNOCENT_NAMES)
def test_vocabulary_and_columns_are_left_alone(name: str) -> None:
    assert not is_secret_name(name)
    assert redact({name: "gpt2"}) == {name: "gpt2"}


PLANTED = [
    "sk-proj-abcdefghijklmnopqrstuv",
    "hf_abcdefghijklmnopqrstuvwx",
    "ghp_abcdefghijklmnopqrstuvwxyz0123",
    "github_pat_11ABCDEFG0abcdefghij_klmnop",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-1234567890-abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("planted", PLANTED)
def test_shapes_of_secrets_are_known_wherever_they_stand(planted: str) -> None:
    assert planted not in repr(redact({"note": f"run with {planted} please", "deep": [{"x": (planted,)}]}))
    assert "run with" in redact({"note": f"run with {planted} please"})["note"]


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("curl -H 'Authorization: Bearer abcdefghijkl'", "abcdefghijkl"),
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("postgres://me:hunter2@db/x", "hunter2"),
        ("WANDB_API_KEY=hunter2 python train.py", "hunter2"),
        ("--hf-token=hunter2", "hunter2"),
        ('password: "hunter2 with space"', "hunter2"),
    ],
)
def test_assigned_secrets_are_taken_out_of_text(text: str, gone: str) -> None:
    assert gone not in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "loss=2.5 max_tokens=512",
        "KeyError: 'step'",
        "unexpected token: )",
        "unknown key: foo",
        "https://host:80/x",
        "a@b",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize("unit", ["x", "a.", "a-", "key=", "a='", 'b="', "://a:", "eyJ-", "sk-", "Bearer ", " = "])
@pytest.mark.timeout(20)
def test_hostile_text_costs_linear_time(unit: str) -> None:
    redact_text(unit * (200_000 // len(unit)))


def test_a_flag_hides_the_word_after_it() -> None:
    argv = ["python", "train.py", "--api-key", "planted", "--lr", "0.1", "--token", "--verbose"]
    assert redact(argv) == ["python", "train.py", "--api-key", REDACTED, "--lr", "0.1", "--token", "--verbose"]


def test_numbers_are_hidden_only_where_passwords_are() -> None:
    assert redact({"pin_password": 1234, "token": 5, "key": 7, "secret": True}) == {
        "pin_password": REDACTED,
        "token": 5,
        "key": 7,
        "secret": True,
    }


def test_the_environment_passes_only_by_the_allow_list() -> None:
    environ = {"RANK": "0", "NCCL_DEBUG": "INFO", "HOME": "/h", "AWS_PROFILE": "x", "TORCH_API_TOKEN": "planted"}
    assert redact_environment(environ) == {"NCCL_DEBUG": "INFO", "RANK": "0"}


def test_a_rotated_secret_does_not_change_the_config_hash() -> None:
    assert config_hash({"hf_token": "a", "lr": 1}, {}) == config_hash({"hf_token": "b", "lr": 1}, {})
    assert config_hash({"hf_token": "a", "lr": 1}, {}) == config_hash(redact({"hf_token": "a", "lr": 1}), {})


FRAGMENTS = (
    *("hf_plantedplantedplanted", "sk-plantedplantedplanted", "https://user:planted@host/x", "Bearer plantedplanted"),
    *("AUTHORIZATION: planted", "eyJplantedplanted.planted.x", "AKIAABCDEFGHIJKLMNOP", "xoxb-plantedplanted"),
    *("-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----", "glpat-plantedplantedplanted", "x = 1"),
    *("\n", "\r\n", " ", "\t", "://", "bearer", "é", "a" * 40),
)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_looking_only_where_a_secret_can_be_misses_none(fragments: list[str]) -> None:
    text = "".join(fragments)
    assert redact_module._hide_shapes(text) == redact_module._SHAPES.sub(REDACTED, text)
