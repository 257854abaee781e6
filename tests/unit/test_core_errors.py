"""An error that another process met arrives as what it was: its class decides how callers react."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from midwatch.core import (
    CODES,
    AlertError,
    CheckpointError,
    ConfigError,
    FencedError,
    GuardError,
    LedgerError,
    MetricsError,
    MidwatchError,
    ProtocolError,
    StorageError,
    SuperviseError,
    TriageError,
    error_from_dict,
)

KINDS = [
    *(ConfigError, StorageError, CheckpointError, LedgerError, MetricsError),
    *(SuperviseError, ProtocolError, GuardError, AlertError, TriageError),
]


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_error_survives_the_way_through_json(code: str) -> None:
    (kind,) = (kind for kind in KINDS if code.startswith(kind.family))
    kind = FencedError if code.startswith(FencedError.family) else kind
    error = kind(code, "rank 1: it went wrong", hint="do this", path="/a", ranks=[1, 2])
    again = error_from_dict(msgspec.json.decode(msgspec.json.encode(error.as_dict())))
    assert type(again) is kind
    assert again.as_dict() == error.as_dict()
    assert pickle.loads(pickle.dumps(error)).as_dict() == error.as_dict()  # noqa: S301


def test_a_code_of_another_family_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="CK104"):
        StorageError("CK104", "no")
    with pytest.raises(AssertionError, match="CK104"):
        FencedError("CK104", "no")
    with pytest.raises(AssertionError, match="XX999"):
        MidwatchError("XX999", "no")
