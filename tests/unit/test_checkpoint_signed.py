"""What somebody without the run's key may try: each forgery on a signed checkpoint, and what refuses it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import msgspec
import pytest

from midwatch.checkpoint.manifest import (
    MANIFEST_FILE,
    VERIFIED_FILE,
    Manifest,
    VerifiedMark,
    decode_manifest,
    decode_receipt,
    decode_verified,
    encode_record,
    receipt_file,
    seal,
    shard_file,
)
from midwatch.checkpoint.signing import SigningKey, is_mark_signed, load_key, sign, sign_mark, signature_fault
from midwatch.checkpoint.verify import read_mark, verify_checkpoint
from midwatch.config import TrustConfig
from midwatch.core import CheckpointError, ConfigError
from midwatch.storage import chunk_digest, hashing, root_digest, secure_kind, sha256_hex
from midwatch.testing.saves import SmallRun

KEY = SigningKey(b"the run's own secret")
OTHER = SigningKey(b"somebody else's secret")


def redigest(folder: Path, rank: int, kind: str) -> str:
    """Receipt of ``rank`` with digests of what the shard holds now; returns the receipt's own digest."""
    path = folder / receipt_file(rank)
    receipt = decode_receipt(path.read_bytes())
    data = (folder / shard_file(rank)).read_bytes()
    size = receipt.chunk_bytes
    chunks = [chunk_digest(data[begin : begin + size], kind) for begin in range(0, len(data), size)]
    receipt = msgspec.structs.replace(
        receipt, digest_kind=kind, chunks=tuple(chunks), digest=root_digest(chunks, kind), size_bytes=len(data)
    )
    path.write_bytes(encode_record(receipt))
    return sha256_hex(path.read_bytes())


def remanifest(folder: Path, kind: str) -> Manifest:
    """The manifest of what lies there now, unsigned."""
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    digests = [redigest(folder, file.rank, kind) for file in manifest.files]
    files = tuple(
        msgspec.structs.replace(
            file,
            receipt_digest=digest,
            digest=decode_receipt((folder / receipt_file(file.rank)).read_bytes()).digest,
        )
        for file, digest in zip(manifest.files, digests, strict=True)
    )
    return msgspec.structs.replace(manifest, files=files, digest_kind=kind, key_id="", signature="", digest="")


def write(folder: Path, manifest: Manifest, key: SigningKey | None) -> None:
    manifest = msgspec.structs.replace(manifest, digest=seal(manifest)) if key is None else sign(manifest, key)
    (folder / MANIFEST_FILE).write_bytes(encode_record(manifest))
    mark = VerifiedMark(name=manifest.name, manifest_digest=manifest.digest, verified_ns=1, ranks=(0, 1))
    mark = msgspec.structs.replace(mark, digest=seal(mark)) if key is None else sign_mark(mark, key)
    (folder / VERIFIED_FILE).write_bytes(encode_record(mark))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two signed checkpoints, of steps 10 and 20."""
    run = SmallRun(tmp_path)
    run.claim()
    for step in (10, 20):
        run.save(step)
        folder = run.root / run.name(step)
        write(folder, remanifest(folder, secure_kind()), KEY)
    return run.root


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "step-00000010-a0001"


def codes(folder: Path, key: SigningKey | None = KEY) -> set[str]:
    return {problem.code for problem in verify_checkpoint(folder, key=key).problems}


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_genuine_one_passes_with_the_key_and_without(folder: Path) -> None:
    report = verify_checkpoint(folder, key=KEY)
    assert (report.problems, report.mark) == ((), "valid")
    assert verify_checkpoint(folder).is_ok


def test_another_key_is_told_apart_from_a_forgery(folder: Path) -> None:
    (problem,) = verify_checkpoint(folder, key=OTHER).problems
    assert problem.code == "CK109"
    assert "another key" in problem.message


def test_an_unsigned_one_is_refused_once_a_key_is_configured(folder: Path) -> None:
    write(folder, remanifest(folder, "xxh3-128"), None)
    assert codes(folder) == {"CK109"}
    assert codes(folder, None) == set()


@pytest.mark.parametrize("kind", ["xxh3-128", "sha256"])
def test_shard_edited_and_every_digest_made_anew(folder: Path, kind: str) -> None:
    flip(folder / shard_file(0))
    genuine = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    forged = remanifest(folder, kind)
    # The forger keeps what the key has signed, and seals the rest anew.
    forged = msgspec.structs.replace(forged, key_id=genuine.key_id)
    forged = msgspec.structs.replace(forged, digest=seal(forged), signature=genuine.signature)
    (folder / MANIFEST_FILE).write_bytes(encode_record(forged))
    assert codes(folder, None) == set(), "without the key nothing is wrong with it"
    assert codes(folder) == {"CK109"}


def test_shard_edited_and_only_its_receipt_made_anew(folder: Path) -> None:
    flip(folder / shard_file(0))
    redigest(folder, 0, secure_kind())
    assert codes(folder) == {"CK104"}


def test_signature_stripped(folder: Path) -> None:
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    stripped = msgspec.structs.replace(manifest, signature="", key_id="", digest="")
    stripped = msgspec.structs.replace(stripped, digest=seal(stripped))
    (folder / MANIFEST_FILE).write_bytes(encode_record(stripped))
    assert codes(folder) == {"CK109"}
    assert verify_checkpoint(folder, key=KEY).mark == "damaged"


def test_signed_with_the_forgers_own_key_under_the_name_of_ours(folder: Path) -> None:
    manifest = remanifest(folder, secure_kind())
    theirs = sign(manifest, OTHER)
    named = msgspec.structs.replace(theirs, key_id=KEY.key_id, signature="", digest="")
    named = msgspec.structs.replace(named, digest=seal(named), signature=theirs.signature)
    (folder / MANIFEST_FILE).write_bytes(encode_record(named))
    (problem,) = verify_checkpoint(folder, key=KEY).problems
    assert "signature is wrong" in problem.message


def test_signed_records_of_one_checkpoint_in_another(root: Path, folder: Path) -> None:
    other = root / "step-00000020-a0001"
    for name in (MANIFEST_FILE, VERIFIED_FILE):
        shutil.copy(other / name, folder / name)
    assert codes(folder) == {"CK105"}


def test_a_whole_older_checkpoint_under_a_newer_name(root: Path, folder: Path) -> None:
    shutil.rmtree(root / "step-00000020-a0001")
    shutil.copytree(folder, root / "step-00000020-a0001")
    assert codes(root / "step-00000020-a0001") == {"CK105"}


def test_one_shard_of_another_signed_checkpoint(root: Path, folder: Path) -> None:
    for name in (shard_file(0), receipt_file(0)):
        shutil.copy(root / "step-00000020-a0001" / name, folder / name)
    assert codes(folder) == {"CK105"}


def test_a_mark_of_verification_is_not_forged(folder: Path) -> None:
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    mark = decode_verified((folder / VERIFIED_FILE).read_bytes())
    assert mark is not None
    forged = msgspec.structs.replace(mark, verified_ns=2, digest="", signature="")
    forged = msgspec.structs.replace(forged, digest=seal(forged), signature=mark.signature)
    (folder / VERIFIED_FILE).write_bytes(encode_record(forged))
    assert read_mark(folder, manifest) == "valid"
    assert read_mark(folder, manifest, KEY) == "damaged"


def test_the_signature_of_a_manifest_is_none_of_a_mark(folder: Path) -> None:
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    mark = VerifiedMark(
        name="x", manifest_digest="", verified_ns=1, ranks=(), digest=manifest.digest, signature=manifest.signature
    )
    assert not is_mark_signed(mark, KEY)


def test_a_signature_over_digests_that_anybody_can_match_is_none(folder: Path) -> None:
    manifest = msgspec.structs.replace(remanifest(folder, "xxh3-128"), key_id=KEY.key_id)
    manifest = msgspec.structs.replace(manifest, digest=seal(manifest))
    signed = msgspec.structs.replace(manifest, signature=KEY.tag(b"midwatch-manifest-v1", manifest.digest))
    assert "can match" in signature_fault(signed, KEY)


def test_rot_in_a_signed_checkpoint_is_told_with_its_place(folder: Path) -> None:
    flip(folder / shard_file(1))
    (problem,) = verify_checkpoint(folder, key=KEY).problems
    assert (problem.code, problem.file) == ("CK104", shard_file(1))
    assert problem.tensors


def test_digests_of_a_kind_to_come_are_no_damage(folder: Path) -> None:
    for rank in (0, 1):
        path = folder / receipt_file(rank)
        table = json.loads(path.read_bytes())
        table["digest_kind"] = "blake9"
        path.write_bytes(msgspec.json.encode(table, order="sorted") + b"\n")
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    files = tuple(
        msgspec.structs.replace(file, receipt_digest=sha256_hex((folder / receipt_file(file.rank)).read_bytes()))
        for file in manifest.files
    )
    write(folder, msgspec.structs.replace(manifest, digest_kind="blake9", files=files, digest=""), None)
    assert codes(folder, None) == {"CK108"}


def test_blake3_without_its_package_is_told_and_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if secure_kind() != "blake3":
        pytest.skip("the package blake3 is not installed")
    monkeypatch.setattr(hashing, "_blake3", lambda: None)
    hashing._hash_of.cache_clear()
    try:
        with pytest.raises(CheckpointError, match="not installed") as caught:
            chunk_digest(b"x", "blake3")
        assert (caught.value.code, caught.value.hint) == ("CK108", "pip install 'midwatch[sign]'")
        assert codes(folder) == {"CK108"}
    finally:
        hashing._hash_of.cache_clear()


def test_a_key_shows_itself_nowhere() -> None:
    assert "secret" not in repr(KEY)
    assert KEY.key_id != sha256_hex(b"the run's own secret")[:16]
    with pytest.raises(TypeError):
        pickle.dumps(KEY)


def test_white_space_around_a_key_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for data in (b"0123456789abcdef", b" 0123456789abcdef\r\n\n"):
        path.write_bytes(data)
        path.chmod(0o600)
        assert load_key(path).key_id == SigningKey(b"0123456789abcdef").key_id


@pytest.mark.parametrize(
    ("mode", "data", "code"),
    [(0o644, b"k" * 32, "CF104"), (0o620, b"k" * 32, "CF104"), (0o600, b"short", "CF102"), (0o600, b" " * 40, "CF102")],
)
def test_a_key_that_is_none_is_refused(tmp_path: Path, mode: int, data: bytes, code: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        load_key(path)
    assert caught.value.code == code
    assert data.decode().strip() not in str(caught.value) or not data.strip()


def test_a_mounted_secret_that_its_group_may_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o440)
    load_key(path)
    assert "can be read by its group" in caplog.text


def test_a_path_that_is_no_file_of_a_key_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent", Path("/dev/zero")):
        with pytest.raises(ConfigError) as caught:
            load_key(path)
        assert caught.value.code == "CF104"


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_run_with_a_key_signs_what_it_saves(tmp_path: Path, has_tier: bool) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"the secret of this run")
    path.chmod(0o600)
    run = SmallRun(tmp_path / "run", local_dir=tmp_path / "nvme" if has_tier else None)
    run.trust = TrustConfig(signing_key=str(path))
    run.claim()
    events = run.save(10)
    assert [event.state for event in events[0] if event.is_final] == ["uploaded" if has_tier else "verified"]
    key = load_key(path)
    for root in (run.root, tmp_path / "nvme") if has_tier else (run.root,):
        report = verify_checkpoint(root / run.name(10), key=key)
        assert (report.problems, report.notes, report.mark) == ((), (), "valid")
        assert report.manifest is not None
        assert (report.manifest.digest_kind, report.manifest.key_id) == (secure_kind(), key.key_id)
    assert codes(run.root / run.name(10), OTHER) == {"CK109"}
