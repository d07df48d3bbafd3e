"""The split of the tasks is part of what a run's configuration says."""
import pytest
import yaml

from verl.trainer.config import ConfigError, default_config, pin_split


def test_the_digest_is_kept_with_the_run(tmp_path):
    config = default_config(f"trainer.run_dir={tmp_path}")
    pinned = pin_split(config, "00ff")
    assert pinned.env.split_digest == "00ff"
    assert yaml.safe_load((tmp_path / "resolved_config.yaml").read_text())["env"]["split_digest"] == "00ff"
    assert pin_split(pinned, "00ff") == pinned
    assert pin_split(config, None) is config


def test_other_tasks_are_refused(tmp_path):
    config = default_config(f"trainer.run_dir={tmp_path}", "env.split_digest=00ff")
    with pytest.raises(ConfigError, match="env.split_digest=00ff"):
        pin_split(config, "1234")
    assert not list(tmp_path.iterdir())
