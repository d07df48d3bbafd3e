"""Ranks with a scripted policy instead of an engine."""

from __future__ import annotations

from typing import Any

from support import ScriptedPolicy, shopper

from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker


class ScriptedRank(Worker):
    """One of two ranks of a replica; both follow the same script."""

    def __init__(self) -> None:
        super().__init__()
        self._policy = ScriptedPolicy.__ray_metadata__.modified_class()
        self._policy.follow(shopper, 0.0)
        self._phases: list[str] = []
        self._broken = -1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_rollout(self) -> dict[str, float]:
        self._phases.append("begin")
        return {"timing_rollout_s/weight_sync": float(self.rank)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> dict[str, float]:
        self._phases.append("end")
        return {}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def rollout_step(self, requests: list[Any], max_steps: int) -> list[Any]:
        if self.rank == self._broken:
            raise RuntimeError(f"rank {self.rank} is out of memory")
        return self._policy.rollout_step(requests, max_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_layout(self) -> tuple[int, int]:
        return divmod(self.rank, 2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def break_rank(self, rank: int) -> None:
        self._broken = rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def calls_seen(self) -> list[str]:
        return self._policy.seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def phases_seen(self) -> list[str]:
        return self._phases
