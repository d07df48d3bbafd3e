"""What of a rank's logging reaches the log of a run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from verl.utils.rank_log import OWN_LINE

CODE = """
import logging
from verl.utils.rank_log import log_as_rank
log_as_rank({rank})
log_as_rank({rank})  # a process that is told twice says everything once
for name in ("verl.models.build", "agent_system.memory", "gigpo", "somebody.else"):
    logging.getLogger(name).info("%s tells", name)
    logging.getLogger(name).warning("%s warns", name)
    logging.getLogger(name).debug("%s whispers", name)
"""


@pytest.mark.parametrize(("rank", "telling"), [(0, True), (1, False)])
def test_rank_zero_tells_what_the_others_keep(rank: int, telling: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(rank=rank)], capture_output=True, text=True, timeout=60, check=True
    )
    for name in ("verl.models.build", "agent_system.memory", "gigpo"):
        assert done.stderr.count(f"[{name}][INFO] - {name} tells\n") == telling
        assert done.stderr.count(f"[{name}][WARNING] - {name} warns\n") == 1
    assert "somebody.else tells" not in done.stderr
    assert done.stderr.count("[somebody.else][WARNING] - somebody.else warns\n") == 1
    own = [line for line in done.stderr.splitlines() if re.search(OWN_LINE, line)]
    assert len(own) == 3 * (1 + telling)
    assert "whispers" not in done.stderr
