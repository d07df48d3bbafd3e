"""Checkpoint folders of the driver: whole or not at all."""
import contextlib
import os

import pytest

from verl.trainer.ppo.trainer_checkpoint import (
    CheckpointFolder,
    TrainerState,
    complete_checkpoints,
    load_state,
)
from verl.utils.checkpoint.step_folder import TRACKER_FILE, find_checkpoint


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


def test_what_killed_runs_left_half_written_goes_with_the_next_save(tmp_path):
    CheckpointFolder(tmp_path, 7).save_state(TrainerState(global_step=7))  # killed while it saved on a signal
    save(tmp_path, 10)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_10", TRACKER_FILE}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("saves", [[(5, 1), (10, 1)], [(5, 2), (10, 2), (10, 2)]])
def test_a_kill_at_any_moment_leaves_the_newest_checkpoint_that_was_finished(tmp_path, monkeypatch, saves):
    for moment in range(200):
        root, calls, saved = tmp_path / str(moment), iter(range(moment)), [1]
        save(root, 1)
        with monkeypatch.context() as patch:
            for name in ("mkdir", "replace", "rmdir", "unlink", "utime"):
                patch.setattr(os, name, killed_after(calls, getattr(os, name)))
            with contextlib.suppress(Killed):
                for step, keep in saves:
                    save(root, step, keep)
                    saved.append(step)
        found = load_state(find_checkpoint("auto", None, root))
        assert found.global_step >= saved[-1] and found.dataloader == {"at": found.global_step}, moment
        save(root, 99, keep=1)
        assert {path.name for path in root.iterdir()} == {"global_step_99", TRACKER_FILE}, moment
        if len(saved) > len(saves):
            return
    raise AssertionError("the saves never came to their end")


def killed_after(calls, function):
    """``function``, until ``calls`` are used up."""

    def call(*args, **kwargs):
        if next(calls, None) is None:
            raise Killed
        return function(*args, **kwargs)

    return call


def test_rotation_keeps_the_newest(tmp_path):
    for step in (2, 9, 10):
        save(tmp_path, step, keep=2)
    assert [f.name for f in complete_checkpoints(tmp_path)] == ["global_step_9", "global_step_10"]


@pytest.mark.parametrize("keep", [1, 2])
def test_rotation_goes_by_time_not_by_step(tmp_path, keep):
    for step in (80, 100):  # of a longer run, whose folder is used again
        save(tmp_path, step)
    for step in (2, 4):
        save(tmp_path, step, keep=keep)
        assert find_checkpoint("auto", None, tmp_path).name == f"global_step_{step}"
    kept = [f.name for f in complete_checkpoints(tmp_path)]
    assert kept == ["global_step_2", "global_step_4"][-keep:]


def test_rotation_keeps_the_step_just_written_whatever_the_clock_said(tmp_path):
    save(tmp_path, 9)
    os.utime(tmp_path / "global_step_9", (4e9, 4e9))  # from a machine whose clock is ahead
    save(tmp_path, 3, keep=1)
    assert [f.name for f in complete_checkpoints(tmp_path)] == ["global_step_3"]


def test_a_step_written_again_is_the_newest(tmp_path):
    for step in (2, 4, 2):
        save(tmp_path, step, keep=2)
    assert [f.name for f in complete_checkpoints(tmp_path)] == ["global_step_4", "global_step_2"]


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path, 5)
    assert find_checkpoint("resume_path", "~/global_step_5", tmp_path) == tmp_path / "global_step_5"


def test_disable_starts_afresh(tmp_path):
    save(tmp_path, 5)
    assert find_checkpoint("disable", None, tmp_path) is None
    assert find_checkpoint("auto", None, tmp_path / "new") is None


@pytest.mark.parametrize(
    ("mode", "path", "message"),
    [
        ("resume_path", None, "needs trainer.resume_from_path"),
        ("resume_path", "somewhere", "must end in global_step_"),
        ("resume_path", "somewhere", "has global_step_5, global_step_20$"),
        ("resume_path", "global_step_7", "there is no such folder; .* has global_step_5, global_step_20$"),
        ("resume_path", "", "must end in global_step_<number>; .* has global_step_5, global_step_20$"),
        ("resume_path", "global_step_5/actor", "global_step_5 has no checkpoints$"),
    ],
)
def test_bad_resume_paths_name_the_key_and_what_there_is(tmp_path, mode, path, message):
    for name in ("global_step_20", "global_step_5/actor", "global_step_9.old.tmp"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=message):
        find_checkpoint(mode, None if path is None else str(tmp_path / path), tmp_path)


def test_a_tracker_file_that_names_nothing_is_an_error(tmp_path):
    (tmp_path / TRACKER_FILE).write_text("12")
    with pytest.raises(ValueError, match="resume_mode=disable"):
        find_checkpoint("auto", None, tmp_path)


def test_missing_parts_are_warned_about(tmp_path, caplog):
    (tmp_path / "global_step_3").mkdir()
    assert load_state(tmp_path / "global_step_3").global_step == 3
    assert "data.pt is missing" in caplog.text


def test_a_step_that_is_saved_again_replaces_the_folder_whole(tmp_path):
    save(tmp_path, 5)
    (tmp_path / "global_step_5" / "old").touch()
    save(tmp_path, 5)
    assert not (tmp_path / "global_step_5" / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_5", TRACKER_FILE}


def test_a_save_that_fails_leaves_nothing_of_its_own(tmp_path):
    save(tmp_path, 5)
    folder = CheckpointFolder(tmp_path, 10)
    with pytest.raises(AttributeError):
        folder.save_state(TrainerState(global_step=10, dataloader={"at": lambda: 1}))
    folder.discard()
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_5", TRACKER_FILE}
    assert find_checkpoint("auto", None, tmp_path).name == "global_step_5"
