"""What people lost when their job came back: the newest was taken though it was not the right one, or none at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from resume_jobs import Job, name, resumed, trained

from midwatch.checkpoint.format import list_checkpoints, mark_suspect, read_resumes
from midwatch.config import semantic_section
from midwatch.core import CheckpointError, CodeState, Provenance

pytestmark = [pytest.mark.torch, pytest.mark.procs]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    trained(run_dir, 1, (3, 6), config_hash="c1")
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def refusal(run_dir: Path, attempt: int, *args: object, **options: object) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        resumed(run_dir, attempt, *args, **options)  # type: ignore[arg-type]
    return caught.value


# --- which one ------------------------------------------------------------------------------------------------------


def test_auto_resume_without_a_tracker_file_does_not_start_over_on_good_data(run_dir: Path) -> None:
    """verl#7952."""
    (run_dir / "checkpoints" / "latest").unlink()
    assert resumed(run_dir, 2)[0].name == name(6)


def test_a_restore_path_that_is_missing_is_no_reason_to_train_from_scratch(run_dir: Path) -> None:
    """metaseq#602."""
    assert refusal(run_dir, 2, "auto", run_dir / "checkpoints" / name(9)).code == "CK201"
    shutil.rmtree(run_dir / "checkpoints")
    assert refusal(run_dir, 2, "must").code == "CK201"


def test_a_job_killed_in_the_middle_of_a_save_comes_back_by_itself_each_time(run_dir: Path) -> None:
    """transformers#35525, #35782 and fms-hf-tuning#432: the newest folder is incomplete."""
    torn = run_dir / "checkpoints" / f"{name(9)}.partial"
    shutil.copytree(run_dir / "checkpoints" / name(6), torn)
    (torn / "MANIFEST.json").unlink()
    for attempt in (2, 3):
        assert resumed(run_dir, attempt)[0].name == name(6)


def test_the_newest_is_told_by_its_manifest_and_not_by_name_or_time_of_change(run_dir: Path) -> None:
    """transformers#27138, #26961."""
    os.utime(run_dir / "checkpoints" / name(3), (2e9, 2e9))
    (run_dir / "checkpoints" / "step-99999999").mkdir()
    assert resumed(run_dir, 2)[0].name == name(6)


def test_a_copied_checkpoint_that_lost_its_marks_is_checked_and_used(run_dir: Path, tmp_path: Path) -> None:
    """orbax#394."""
    other = tmp_path / "moved"
    for step in (3, 6):
        shutil.copytree(run_dir / "checkpoints" / name(step), other / "checkpoints" / name(step))
        (other / "checkpoints" / name(step) / "VERIFIED.json").unlink()
    assert resumed(other, 2)[0].name == name(6)
    assert sorted(path.name for path in (other / "checkpoints").iterdir()) == [name(3), name(6)]


def test_loading_right_after_an_asynchronous_save_gives_a_whole_one(run_dir: Path) -> None:
    """torchtitan#930: the save may be done by now or not, but what is loaded is one or the other."""
    job = Job(run_dir, 2, async_save=True, config_hash="c1")
    job.train(0, 9, save_at=(9,))
    point = job.ckpt.resume()
    assert point is not None
    assert point.name in (name(6), name(9, 2))
    assert job.data.at == point.step
    job.ckpt.close()


# --- the branch that was given up -----------------------------------------------------------------------------------


def test_after_a_step_back_a_crash_before_the_first_save_does_not_return_to_the_abandoned_branch(run_dir: Path) -> None:
    assert resumed(run_dir, 2, "auto", run_dir / "checkpoints" / name(3))[0].name == name(3)
    for attempt in (3, 4):
        assert resumed(run_dir, attempt)[0].name == name(3)
    by_name = {info.name: info for info in list_checkpoints(run_dir / "checkpoints")}
    assert by_name[name(6)].is_abandoned
    assert not by_name[name(3)].is_abandoned
    trained(run_dir, 5, (4,))
    assert resumed(run_dir, 6)[0].name == name(4, 5)


def test_a_step_back_that_failed_gives_nothing_up(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / name(3)
    shard = path / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refusal(run_dir, 2, "auto", path).code == "CK103"
    assert resumed(run_dir, 3)[0].name == name(6)


def test_naming_the_newest_is_no_step_back(run_dir: Path) -> None:
    resumed(run_dir, 2, "auto", run_dir / "checkpoints" / "latest")
    assert not read_resumes(run_dir)[2].is_rewind
    assert not any(info.is_abandoned for info in list_checkpoints(run_dir / "checkpoints"))


def test_a_fresh_start_over_checkpoints_is_on_record_and_they_do_not_come_back(run_dir: Path) -> None:
    job = Job(run_dir, 2)
    assert job.ckpt.resume("never") is None
    assert job.ckpt.passed_over == (name(3), name(6))
    job.ckpt.close()
    again = Job(run_dir, 3)
    assert again.ckpt.resume() is None
    again.ckpt.close()
    trained(run_dir, 4, (2,))
    assert resumed(run_dir, 5)[0].name == name(2, 4)


# --- tried again and again ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_crashes_the_run_is_not_taken_forever(run_dir: Path) -> None:
    """scr#174."""
    for attempt in (2, 3):
        assert resumed(run_dir, attempt, resume={"max_attempts": 2})[0].name == name(6)
    point, notes = resumed(run_dir, 4, resume={"max_attempts": 2})
    assert point.name == name(3)
    assert notes.of("resume.passed_over") == [{"step": 6, "name": name(6), "code": "CK208", "attempts": [2, 3]}]
    assert not (run_dir / "checkpoints" / "quarantine").exists()
    # It is given up for good, also when this attempt dies as well.
    assert resumed(run_dir, 5, resume={"max_attempts": 2})[0].name == name(3)


def test_the_last_one_is_taken_once_more_unless_a_resume_must_be_sound(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run_dir / "checkpoints" / name(3))
    resumed(run_dir, 2, resume={"max_attempts": 1})
    assert resumed(run_dir, 3, resume={"max_attempts": 1})[0].name == name(6)
    assert "there is no older one, so it is taken once more" in caplog.text
    error = refusal(run_dir, 4, "must", resume={"max_attempts": 1})
    assert error.code == "CK208"
    assert error.context["attempts"] == [2, 3]


def test_one_that_is_named_is_taken_however_often_it_was_tried(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / name(6)
    for attempt in (2, 3, 4):
        assert resumed(run_dir, attempt, "auto", path, resume={"max_attempts": 1})[0].name == name(6)


def test_progress_from_a_checkpoint_clears_it(run_dir: Path) -> None:
    resumed(run_dir, 2)
    trained(run_dir, 3, (8,))
    (run_dir / "checkpoints" / name(8, 3) / "MANIFEST.json").write_text("rotten")
    assert resumed(run_dir, 4, resume={"max_attempts": 1})[0].name == name(6)


def test_an_attempt_with_the_wrong_model_does_not_speak_against_the_checkpoint(run_dir: Path) -> None:
    for attempt in (2, 3):
        job = Job(run_dir, attempt, resume={"max_attempts": 1})
        job.ckpt.track(model=job.model[0])
        with pytest.raises(CheckpointError) as caught:
            job.ckpt.resume()
        assert caught.value.code in ("CK204", "CK305")
        job.ckpt.close()
    assert resumed(run_dir, 4, resume={"max_attempts": 1})[0].name == name(6)


# --- whose it is ----------------------------------------------------------------------------------------------------


def test_a_reused_folder_does_not_resume_another_run(run_dir: Path) -> None:
    """lm-resiliency#77."""
    error = refusal(run_dir, 2, run="another")
    assert error.code == "CK203"
    point, notes = resumed(run_dir, 3, run="another", accept="warm start of the ablation")
    assert point.name == name(6)
    (accepted,) = notes.of("resume.accepted")
    assert accepted["reason"] == "warm start of the ablation"
    assert accepted["differs"] == ["run mine, not another"]


def test_another_configuration_is_refused_unless_a_reason_is_given(run_dir: Path) -> None:
    error = refusal(run_dir, 2, config_hash="c2")
    assert error.code == "CK207"
    assert (error.context["config_hash_before"], error.context["config_hash"]) == ("c1", "c2")
    assert refusal(run_dir, 3, "auto", run_dir / "checkpoints" / "latest", config_hash="c2").code == "CK207"
    _, notes = resumed(run_dir, 4, config_hash="c2", resume={"accept": "half the learning rate"})
    (accepted,) = notes.of("resume.accepted")
    assert accepted == {"name": name(6), "differs": ["configuration c1, not c2"], "reason": "half the learning rate"}


def origin(script: str, *, is_installed: bool = False, **params: float) -> Provenance:
    code = CodeState(hash=script, entry=script, is_entry_installed=is_installed)
    return Provenance(semantic=semantic_section(params, {}), code=code)


def test_the_parameter_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    trained(tmp_path, 1, (3,), provenance=origin("train.py", lr=0.1, seed=1))
    error = refusal(tmp_path, 2, provenance=origin("train.py", lr=0.05, seed=1))
    assert error.code == "CK207"
    assert error.message.endswith(": params.lr 0.1 -> 0.05")
    assert error.context["changes"] == [{"name": "params.lr", "change": "changed", "old": 0.1, "new": 0.05}]
    point, notes = resumed(tmp_path, 3, accept="spike", provenance=origin("train.py", lr=0.05, seed=1))
    assert point.provenance == origin("train.py", lr=0.1, seed=1)
    (accepted,) = notes.of("resume.accepted")
    assert accepted["differs"][0].endswith("params.lr 0.1 -> 0.05")


def test_another_script_is_refused_where_neither_declares_parameters(tmp_path: Path) -> None:
    """Both would otherwise be one experiment: the default run folder is the same for all scripts of a folder."""
    trained(tmp_path, 1, (3,), provenance=origin("train.py"))
    error = refusal(tmp_path, 2, provenance=origin("other.py"))
    assert error.code == "CK207"
    assert "was written by train.py, this is other.py" in error.message
    assert "run.dir" in error.hint
    _, notes = resumed(tmp_path, 3, accept="renamed", provenance=origin("other.py"))
    assert notes.of("resume.accepted")[0]["differs"] == ['entry script "train.py" -> "other.py"']
    # Where the name says little, or nothing is known, there is no refusal.
    resumed(tmp_path, 4, provenance=origin("pytest/__main__.py", is_installed=True))
    resumed(tmp_path, 5, provenance=origin(""))
    resumed(tmp_path, 6)


def test_another_script_with_the_same_parameters_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, 1, (3,), provenance=origin("train.py", lr=0.1))
    resumed(tmp_path, 2, provenance=origin("renamed.py", lr=0.1))
    assert 'written by another script: entry script "train.py" -> "renamed.py"' in caplog.text


def test_a_reason_that_stays_in_the_settings_is_used_only_where_something_differs(run_dir: Path) -> None:
    trained(run_dir, 2, (8,), config_hash="c2")
    _, notes = resumed(run_dir, 3, config_hash="c2", resume={"accept": "half the learning rate"})
    assert not notes.of("resume.accepted")


def test_without_a_configuration_hash_nothing_is_compared(run_dir: Path) -> None:
    assert resumed(run_dir, 2)[0].name == name(6)


def test_a_suspect_one_is_never_taken_by_default_and_on_record_when_named(run_dir: Path) -> None:
    mark_suspect(run_dir / "checkpoints", name(6), "loss spike")
    assert resumed(run_dir, 2)[0].name == name(3)
    point, notes = resumed(run_dir, 3, "auto", run_dir / "checkpoints" / name(6))
    assert point.name == name(6)
    (accepted,) = notes.of("resume.accepted")
    assert accepted["differs"] == ["marked suspect: loss spike"]


@pytest.fixture
def signed(tmp_path: Path) -> dict[str, str]:
    key = tmp_path / "key"
    key.write_text("correct horse battery staple")
    key.chmod(0o600)
    return {"signing_key": str(key)}


def test_an_unsigned_one_is_passed_over_and_never_silently_taken(run_dir: Path, signed: dict[str, str]) -> None:
    trust = signed
    assert refusal(run_dir, 2, trust=trust).code == "CK109"
    assert refusal(run_dir, 3, "auto", run_dir / "checkpoints" / name(6), trust=trust).code == "CK109"
    trained(run_dir, 4, (2,), trust=trust)
    shutil.move(run_dir / "checkpoints" / name(2, 4), run_dir / "checkpoints" / "aside")
    trained(run_dir, 6, (9,))
    shutil.move(run_dir / "checkpoints" / "aside", run_dir / "checkpoints" / name(2, 4))
    point, notes = resumed(run_dir, 7, trust=trust)
    assert point.name == name(2, 4)
    assert [event["code"] for event in notes.of("resume.passed_over")] == ["CK109"]
    point, notes = resumed(
        run_dir, 8, "auto", run_dir / "checkpoints" / name(9, 6), trust=trust, accept="the key was off"
    )
    assert point.name == name(9, 6)
    assert notes.of("resume.accepted")[0]["reason"] == "the key was off"


def test_a_reason_that_stays_in_the_settings_did_not_let_a_forged_one_in(run_dir: Path, signed: dict[str, str]) -> None:
    trained(run_dir, 2, (9,), trust=signed, config_hash="c1")
    trained(run_dir, 3, (12,), config_hash="c1")  # by somebody without the key
    reason = {"accept": "half the learning rate"}
    point, notes = resumed(run_dir, 4, trust=signed, config_hash="c2", resume=reason)
    assert point.name == name(9, 2)
    (accepted,) = notes.of("resume.accepted")
    assert accepted["differs"] == ["configuration c1, not c2"]


def test_where_nothing_is_signed_yet_a_reason_is_enough(run_dir: Path, signed: dict[str, str]) -> None:
    point, notes = resumed(run_dir, 2, trust=signed, accept="written before the key")
    assert point.name == name(6)
    (accepted,) = notes.of("resume.accepted")
    assert accepted["differs"] == ["it is not signed, and a signing key is configured"]


def test_a_forged_one_of_another_run_did_not_stop_the_resume(run_dir: Path, signed: dict[str, str]) -> None:
    trained(run_dir, 2, (9,), trust=signed)
    trained(run_dir, 3, (12,), run="another")
    assert resumed(run_dir, 4, trust=signed)[0].name == name(9, 2)


# --- what it brings back --------------------------------------------------------------------------------------------


def test_what_is_restored_and_what_is_not_is_said(run_dir: Path, tmp_path: Path) -> None:
    """accelerate#2016, Lightning#19764 and #18780: data seen twice after a resume, and nobody knew."""
    point, _ = resumed(run_dir, 2, absent_on_purpose=("scaler",))
    assert point.restored == ("model", "optimizer", "rng", "data")
    assert point.missing == ("scheduler",)
    job = Job(tmp_path / "bare")
    job.ckpt.save(1)
    job.ckpt.close()
    bare = Job(tmp_path / "bare", 2)
    del bare.ckpt._tracked.data  # type: ignore[attr-defined]
    bare.ckpt._tracked.data = None
    point = bare.ckpt.resume()
    bare.ckpt.close()
    assert point is not None
    assert "data" in point.missing
