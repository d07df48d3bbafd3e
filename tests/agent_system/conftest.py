"""One local Ray for all tests of the agent room that need actors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        ray.init(num_cpus=4, include_dashboard=False, address="local", logging_level="WARNING")
        yield
        ray.shutdown()
        if "support" in sys.modules:
            sys.modules["support"].forget_actors()
