"""The split of the tasks is part of what a run's configuration says."""
import pytest

from verl.trainer.config import ConfigError, default_config, pin_split


def test_the_digest_becomes_part_of_the_configuration():
    config = default_config()
    pinned = pin_split(config, "00ff")
    assert pinned.env.split_digest == "00ff"
    assert pin_split(pinned, "00ff") == pinned
    assert pin_split(config, None) is config


def test_other_tasks_are_refused():
    config = default_config("env.split_digest=00ff")
    with pytest.raises(ConfigError, match="env.split_digest=00ff"):
        pin_split(config, "1234")
