"""An event-driven environment in a file that no process can import by name plays in real worker processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ray

from agent_system.environments import registry
from agent_system.environments.registry import find_environment
from agent_system.environments.session_host import SessionPool
from verl.trainer.config import default_config
from verl.utils.external_lib import import_external_lib

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


@pytest.mark.usefixtures("local_ray")
def test_a_file_as_external_lib_plays_in_worker_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_MAKERS", dict(registry._MAKERS))
    file = tmp_path / "guess_from_file.py"
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    file.write_text(source.replace('("guess', '("filed_guess'), encoding="utf-8")
    (module,) = import_external_lib(str(file))
    config = default_config(
        "preset=embedded", "env.env_name=filed_guess", "env.rollout.n=2", "data.train_batch_size=2", "env.num_workers=1"
    )
    train, val = find_environment("filed_guess")(config)
    try:
        assert type(train) is module.EventGuess
        observations, _ = train.reset()
        low, high = map(int, re.search(r"between (\d+) and (\d+)", observations["text"][0]).groups())
        assert (low, high) == (1, module.HIGHEST)
        secrets = [train.tasks[slot] for slot in range(4)]
        _, rewards, dones, infos = train.step([f"<action>{secret}</action>" for secret in secrets])
        assert rewards.tolist() == [10.0] * 4 and dones.all() and all(info["won"] for info in infos)
        (ref,) = val.restart(0) if val.tasks else val.begin([0])
        assert ray.wait([ref], timeout=60)[0] and not val.collect(ref)[0][1].infra_failed
    finally:
        train.close()
        val.close()


def test_what_cannot_be_sent_to_a_process_is_answered_before_one_starts(tmp_path):
    file = tmp_path / "locked.py"
    file.write_text("import threading\nLOCK = threading.Lock()\ndef make_sessions():\n    return LOCK\n")
    (module,) = import_external_lib(str(file))
    with pytest.raises(ValueError, match=r"make_sessions cannot be sent .*lock.*importable module.*PYTHONPATH"):
        SessionPool(module.make_sessions, num_hosts=1)
