"""Checkpoint folders of the driver: whole or not at all."""
import pytest

from verl.trainer.ppo.trainer_checkpoint import (
    TRACKER_FILE,
    CheckpointFolder,
    TrainerState,
    complete_checkpoints,
    find_checkpoint,
    load_state,
)


def save(root, step, keep=None):
    folder = CheckpointFolder(root, step)
    folder.save_state(TrainerState(global_step=step, dataloader={"at": step}, environments={"train": {"rng": step}}))
    folder.commit(keep)


def test_state_comes_back_and_auto_finds_the_newest(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10)
    folder = find_checkpoint("auto", None, tmp_path)
    state = load_state(folder)
    assert (state.global_step, state.dataloader, state.environments) == (10, {"at": 10}, {"train": {"rng": 10}})


def test_a_save_that_was_killed_leaves_the_previous_checkpoint(tmp_path):
    save(tmp_path, 5)
    CheckpointFolder(tmp_path, 10).save_state(TrainerState(global_step=10))
    assert find_checkpoint("auto", None, tmp_path).name == "global_step_5"
    save(tmp_path, 10)
    assert find_checkpoint("auto", None, tmp_path).name == "global_step_10"
    assert not list(tmp_path.glob("*.tmp"))


def test_rotation_keeps_the_newest(tmp_path):
    for step in (2, 9, 10):
        save(tmp_path, step, keep=2)
    assert [f.name for f in complete_checkpoints(tmp_path)] == ["global_step_9", "global_step_10"]


def test_disable_starts_afresh(tmp_path):
    save(tmp_path, 5)
    assert find_checkpoint("disable", None, tmp_path) is None
    assert find_checkpoint("auto", None, tmp_path / "new") is None


@pytest.mark.parametrize(
    ("mode", "path", "message"),
    [
        ("resume_path", None, "needs trainer.resume_from_path"),
        ("resume_path", "somewhere", "must end in global_step_"),
        ("resume_path", "global_step_7", "does not exist"),
    ],
)
def test_bad_resume_paths_name_the_key(tmp_path, mode, path, message):
    with pytest.raises(ValueError, match=message):
        find_checkpoint(mode, path and str(tmp_path / path), tmp_path)


def test_a_tracker_file_that_names_nothing_is_an_error(tmp_path):
    (tmp_path / TRACKER_FILE).write_text("12")
    with pytest.raises(ValueError, match="resume_mode=disable"):
        find_checkpoint("auto", None, tmp_path)


def test_missing_parts_are_warned_about(tmp_path, caplog):
    (tmp_path / "global_step_3").mkdir()
    assert load_state(tmp_path / "global_step_3").global_step == 3
    assert "data.pt is missing" in caplog.text
