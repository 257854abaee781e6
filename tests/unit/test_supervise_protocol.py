"""Forged, repeated, misdirected and outdated messages, and tokens that others can read: all refused."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from midwatch.core import MidwatchError, ProtocolError, StorageError
from midwatch.supervise.protocol import (
    Envelope,
    ReplayGuard,
    Signer,
    check_answer,
    create_token,
    read_envelope,
    read_token,
)

TOKEN = bytes(range(32))


def envelope(**changes: object) -> Envelope:
    plain = Envelope(session="s1", attempt=3, sender="agent-1/report", nonce="7")
    return msgspec.structs.replace(plain, **changes)


def refused(code: str) -> pytest.RaisesExc[MidwatchError]:
    return pytest.raises(MidwatchError, check=lambda error: error.code == code)


def test_a_signed_message_is_accepted_as_it_is() -> None:
    signed = Signer(TOKEN).sign("request", "/v1/report", envelope(), b"{}")
    Signer(TOKEN).check("request", "/v1/report", read_envelope(signed.headers()), b"{}")


@pytest.mark.parametrize(
    ("path", "changes", "body"),
    [
        ("/v1/join", {}, b"{}"),
        ("/v1/report", {"attempt": 4}, b"{}"),
        ("/v1/report", {"sender": "agent-2/report"}, b"{}"),
        ("/v1/report", {"nonce": "8"}, b"{}"),
        ("/v1/report", {"session": "s2"}, b"{}"),
        ("/v1/report", {}, b"{ }"),
        ("/v1/report", {"signature": ""}, b"{}"),
        ("/v1/report", {"signature": "ä"}, b"{}"),
    ],
)
def test_a_changed_message_is_refused(path: str, changes: dict[str, object], body: bytes) -> None:
    signed = Signer(TOKEN).sign("request", "/v1/report", envelope(), b"{}")
    with refused("PR101"):
        Signer(TOKEN).check("request", path, msgspec.structs.replace(signed, **changes), body)


def test_another_runs_token_is_refused() -> None:
    signed = Signer(bytes(32)).sign("request", "/v1/report", envelope(), b"{}")
    with refused("PR101"):
        Signer(TOKEN).check("request", "/v1/report", signed, b"{}")


def test_a_request_sent_back_as_an_answer_is_refused() -> None:
    signed = Signer(TOKEN).sign("request", "/v1/report", envelope(), b"{}")
    with refused("PR101"):
        Signer(TOKEN).check("answer", "/v1/report", signed, b"{}")


def test_parts_cannot_be_shifted_between_fields() -> None:
    one = Signer(TOKEN).sign("request", "/v1/report", envelope(sender="a", nonce="11"), b"")
    two = Signer(TOKEN).sign("request", "/v1/report", envelope(sender="a1", nonce="1"), b"")
    assert one.signature != two.signature


def test_headers_that_are_missing_or_no_numbers_are_refused() -> None:
    headers = envelope().headers()
    with refused("PR101"):
        read_envelope({name: value for name, value in headers.items() if "Nonce" not in name})
    with refused("PR101"):
        read_envelope({**headers, "X-Midwatch-Attempt": "three"})


@pytest.mark.parametrize("nonce", ["7", "6", "0", "-1", "x", "", "٨"])
def test_a_repeated_or_older_message_is_refused(nonce: str) -> None:
    guard = ReplayGuard()
    guard.admit(envelope(nonce="7"))
    with refused("PR102"):
        guard.admit(envelope(nonce=nonce))
    guard.admit(envelope(nonce="8"))


def test_each_channel_counts_for_itself() -> None:
    guard = ReplayGuard()
    guard.admit(envelope(nonce="7"))
    guard.admit(envelope(sender="agent-1/orders", nonce="1"))


def test_a_sender_that_falls_back_to_an_older_attempt_is_refused() -> None:
    guard = ReplayGuard()
    guard.admit(envelope(nonce="7", attempt=3))
    with refused("PR103"):
        guard.admit(envelope(nonce="8", attempt=2))


def test_an_answer_to_another_question_is_refused() -> None:
    asked = envelope()
    check_answer(asked, envelope())
    with refused("PR102"):
        check_answer(asked, envelope(nonce="6"))
    with refused("PR102"):
        check_answer(asked, envelope(sender="agent-2/report"))


def test_an_answer_from_an_older_coordinator_is_refused() -> None:
    with refused("PR103"):
        check_answer(envelope(attempt=3), envelope(attempt=2))


def test_the_token_is_private_exclusive_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = create_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    assert len(token) == 32
    with refused("ST102"):
        create_token(path)


def test_a_token_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    create_token(path)
    path.chmod(0o644)
    with refused("ST102"):
        read_token(path)


@pytest.mark.parametrize("content", ["", "zz", "00ff", None])
def test_a_damaged_or_missing_token_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.touch(mode=0o600)
        path.write_text(content)
    with pytest.raises(StorageError) as refusal:
        read_token(path)
    assert refusal.value.code == "ST103"


def test_a_token_behind_a_link_is_refused(tmp_path: Path) -> None:
    create_token(tmp_path / "real")
    (tmp_path / "token").symlink_to(tmp_path / "real")
    with refused("ST103"):
        read_token(tmp_path / "token")


def test_errors_carry_no_token() -> None:
    with pytest.raises(ProtocolError) as refusal:
        Signer(TOKEN).check("request", "/v1/report", envelope(), b"{}")
    assert TOKEN.hex() not in str(refusal.value.as_dict())
