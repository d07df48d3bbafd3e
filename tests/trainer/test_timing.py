"""Every second of a step belongs to one phase."""
import time

import pytest

from verl.trainer.ppo.timing import StepTimer


def test_phases_and_other_sum_to_the_step():
    timer = StepTimer()
    for _ in range(2):
        with timer.phase("gen"):
            time.sleep(0.02)
    time.sleep(0.01)
    seconds = timer.finish()
    assert seconds["gen"] >= 0.04 and seconds["other"] >= 0.01
    assert seconds["step"] == pytest.approx(seconds["gen"] + seconds["other"])


def test_nested_phases_are_refused():
    timer = StepTimer()
    with pytest.raises(AssertionError, match="would count twice"), timer.phase("gen"), timer.phase("adv"):
        pass
