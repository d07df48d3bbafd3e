"""Every second of a step belongs to one phase."""
import subprocess
import sys
import time

import pytest

from verl.trainer.ppo.timing import StartupLedger, StepTimer


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


def test_parts_of_a_start_overlap_and_the_slowest_rank_counts():
    ledger = StartupLedger()
    ledger.mark("ranks_asked")
    with ledger.part("waiting", "waiting for ranks"), ledger.part("environments", "building environments"):
        time.sleep(0.02)
    ledger.add([{"startup/engine": 3.0}, {"startup/engine": 5.0, "startup/model": 1.0}, None])
    ledger.mark("ready")
    seconds = ledger.seconds()
    assert seconds["startup/waiting"] >= seconds["startup/environments"] >= 0.02
    assert (seconds["startup/engine"], seconds["startup/model"]) == (5.0, 1.0)
    assert seconds["startup/ready"] >= seconds["startup/ranks_asked"] > 0
    assert "engine 5.0" in str(ledger)


def test_marks_count_from_the_start_of_the_process():
    started = time.monotonic()
    command = "import time; time.sleep(0.3); from verl.trainer.ppo.timing import process_age; print(process_age())"
    output = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True, timeout=60).stdout
    assert 0.3 <= float(output) <= time.monotonic() - started + 0.02  # the system stamps starts in hundredths
