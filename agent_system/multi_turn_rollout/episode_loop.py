"""The event-driven loop: every episode goes on as soon as what it waits for is there.

::

    finished request → decode → the environment of that episode alone → next prompt → request
    episode over     → its slot is free; nothing is prompted, tokenised or generated for it again

The loop waits for whichever comes first, an engine or an environment. It knows neither shops nor worker groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from tqdm import tqdm

from agent_system.environments.base import EventEnvironments, Observation
from agent_system.environments.contract import references
from agent_system.multi_turn_rollout.episode import Episode, Turn, request_seed
from agent_system.multi_turn_rollout.groups import Group, GroupChoice
from agent_system.multi_turn_rollout.prompt_encoder import PromptEncoder
from agent_system.multi_turn_rollout.scheduler import ReplicaScheduler
from verl.workers.rollout.base import RolloutRequest, RolloutResult, SamplingSettings

logger = logging.getLogger(__name__)

_MOST_RESTARTS = 10  # of one episode, for whatever reason
_POLL_S = 5.0  # how often a wait is interrupted to look at time limits and at ranks nobody waits for


@dataclass(frozen=True)
class RolloutPlan:
    """What one rollout is to do.

    Attributes:
        name: what makes ids of this rollout differ from those of others.
        seed_parts: what the seeds of its requests start from.
        num_groups: groups that start at once, in the first slots.
        wanted: groups that are kept; the others are surplus.
        most_groups: groups that may be played until ``wanted`` have rewards that differ; None keeps every group.
        baseline: sampling of the last member of each group, which is played for its reward alone; None: no such member.
        max_turns: agent steps of an episode at most.
        env_kwargs: one dict per slot for the environment, or None.
        block: block of the validation tasks.
        keep_prompts: keep the texts of prompts, for a reward model that renders conversations in its own way.
        reply_limit_s: time limit of an environment's reply, seconds.
        label: of the progress bar and in messages.
    """

    name: str
    seed_parts: tuple[int | str, ...]
    num_groups: int
    wanted: int
    max_turns: int
    sampling: SamplingSettings
    baseline: SamplingSettings | None = None
    env_kwargs: Sequence[Any] | None = None
    block: int = 0
    most_groups: int | None = None
    keep_prompts: bool = False
    reply_limit_s: float = 600.0
    progress_bar: bool = True
    label: str = "rollout"


@dataclass
class LoopCounts:
    """What happened in one rollout, beside what the engines did."""

    episodes: int = 0
    infra_retried: int = 0
    infra_failed: int = 0
    prompt_overflow: int = 0
    env_only_wait_s: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class EpisodeLoop:
    """One rollout: ``run`` plays it, ``choice`` then holds its groups."""

    def __init__(
        self,
        plan: RolloutPlan,
        envs: EventEnvironments,
        scheduler: ReplicaScheduler,
        encoder: PromptEncoder,
        tokenizer: Any,
    ) -> None:
        self._plan, self._envs, self._scheduler, self._encoder = plan, envs, scheduler, encoder
        self._tokenizer = tokenizer
        self._active: dict[int, Episode] = {}  # by slot
        self._requests: dict[str, Episode] = {}  # by request id
        self._env_replies: dict[ray.ObjectRef, float] = {}  # reference -> when it was asked for
        self._members: dict[int, Group] = {}  # finished episodes of each group that runs
        self.choice = GroupChoice(
            plan.wanted, plan.most_groups or plan.num_groups, filtering=plan.most_groups is not None
        )
        self.counts = LoopCounts()

    def run(self) -> None:
        """Plays until every group is through.

        Raises:
            ValueError: a prompt is longer than ``data.max_prompt_length`` and ``data.truncation`` is ``error``.
            TimeoutError: an engine took longer than ``trainer.step_timeout``.
        """
        begin = time.perf_counter()
        total = self._plan.num_groups * self._envs.group_size
        with tqdm(
            total=total, desc=self._plan.label, unit="episode", disable=not self._plan.progress_bar, mininterval=0.5
        ) as self._bar:
            self._start_groups(range(self._plan.num_groups), self.choice.start(self._plan.num_groups), attempt=0)
            while self._active:
                self._turn_of_the_loop()
        self.counts.seconds = time.perf_counter() - begin

    # ------------------------------------------------------------------ waiting

    def _turn_of_the_loop(self) -> None:
        hold = self._scheduler.dispatch(environments_pending=bool(self._env_replies))
        calls, replies = self._scheduler.calls, list(self._env_replies)
        assert calls or replies, f"{len(self._active)} episodes run but nothing is on its way"
        begin = time.perf_counter()
        ready = _wait_for_any(calls + replies, _POLL_S if hold is None else min(hold, _POLL_S))
        if not calls:
            self.counts.env_only_wait_s += time.perf_counter() - begin
        observations = [pair for ref in replies if ref in ready for pair in self._collect(ref)]
        results = [result for call in calls if call in ready for result in self._scheduler.collect(call)]
        if results:
            self._scheduler.dispatch(environments_pending=True)  # engines go on while answers are read
        self._act(results)
        self._take_observations(observations + self._overdue())
        if not ready:
            self._scheduler.check()

    def _collect(self, ref: ray.ObjectRef) -> list[tuple[int, Observation]]:
        del self._env_replies[ref]
        return self._envs.collect(ref)

    def _overdue(self) -> list[tuple[int, Observation]]:
        now, limit = time.perf_counter(), self._plan.reply_limit_s
        late = [ref for ref, asked in self._env_replies.items() if now - asked > limit]
        found = []
        for ref in late:
            del self._env_replies[ref]
            found += self._envs.expire(ref, f"no reply from the environment within {limit:g} s")
        return found

    def _expect(self, refs: Sequence[ray.ObjectRef], method: str) -> None:
        """Waits for the references that ``method`` of the environments returned."""
        now = time.perf_counter()
        refs = references(f"{type(self._envs).__name__}.{method}", refs)
        self._env_replies.update((ref, now) for ref in refs)

    # ------------------------------------------------------------------ an episode's way

    def _start_groups(self, places: Sequence[int], numbers: Sequence[int], attempt: int) -> None:
        """Starts the groups ``numbers`` in the slots of the environment's groups ``places``."""
        size, plan = self._envs.group_size, self._plan
        self._expect(self._envs.begin(places, plan.env_kwargs, attempt, plan.block), "begin")
        for place, number in zip(places, numbers, strict=True):
            uid = f"{plan.name}-group{number}"
            self._members[number] = []
            for member in range(size):
                slot, greedy = place * size + member, plan.baseline is not None and member == size - 1
                name = f"{uid}-baseline" if greedy else f"{uid}-member{member}"
                self._active[slot] = Episode(
                    slot, number, member, attempt, uid, name, self._envs.task_id(slot), baseline=greedy
                )

    def _take_observations(self, observations: Sequence[tuple[int, Observation]]) -> None:
        """Goes on in every slot that was answered; the new prompts are tokenised together."""
        to_prompt: list[tuple[Episode, Observation]] = []
        for slot, observation in observations:
            episode = self._active[slot]
            if observation.infra_failed:
                info = observation.info
                self._retry_or_give_up(episode, info.get("error", "no reason given"), info.get("blameless", False))
                continue
            self._complete_turn(episode, observation)
            if observation.done and not episode.turns:
                reason = "its environment says that it is over before its first step"
                self.counts.failures.append(f"{episode.traj_uid}: {reason}")
                logger.warning("%s is left out, %s", episode.traj_uid, reason)
            if observation.done or len(episode.turns) >= self._plan.max_turns:
                self._finish(episode)
            else:
                to_prompt.append((episode, observation))
        self._prompt(to_prompt)

    @staticmethod
    def _complete_turn(episode: Episode, observation: Observation) -> None:
        turn, episode.pending = episode.pending, None
        if turn is None:  # the observation is that of a reset
            return
        turn.reward, turn.info = observation.reward, observation.info
        episode.turns.append(turn)

    def _prompt(self, pairs: Sequence[tuple[Episode, Observation]]) -> None:
        encoded = self._encoder.encode([observation.prompt for _, observation in pairs])
        for (episode, observation), ids in zip(pairs, encoded, strict=True):
            fitted = self._encoder.fit(ids, lambda h, slot=episode.slot: self._envs.shorter_prompt(slot, h))
            if fitted is None:
                episode.prompt_overflow = True
                self.counts.prompt_overflow += 1
                self._finish(episode)
                continue
            text = observation.prompt if self._plan.keep_prompts else None
            episode.pending = Turn(prompt_ids=fitted, anchor=observation.anchor, prompt_text=text)
            self._request(episode)

    def _request(self, episode: Episode) -> None:
        turn = len(episode.turns)
        request_id = f"{episode.traj_uid}-turn{turn}" + (f"-restart{episode.restarts}" if episode.restarts else "")
        seed = request_seed(*self._plan.seed_parts, episode.group, episode.attempt, episode.member, turn)
        assert episode.pending is not None, "a request needs a prompt"
        sampling = self._plan.baseline if episode.baseline else self._plan.sampling
        assert sampling is not None, "a baseline is played with settings of its own"
        self._requests[request_id] = episode
        self._scheduler.enqueue(episode.group, RolloutRequest(request_id, episode.pending.prompt_ids, sampling, seed))

    def _act(self, results: Sequence[RolloutResult]) -> None:
        """Hands finished responses to their environments."""
        if not results:
            return
        texts = self._tokenizer.batch_decode([result.response_ids for result in results], skip_special_tokens=True)
        actions = []
        for result, text in zip(results, texts, strict=True):
            episode = self._requests.pop(result.request_id)
            turn = episode.pending
            assert turn is not None, "a response belongs to a pending turn"
            turn.response_ids, turn.log_probs = result.response_ids, result.log_probs
            turn.finish_reason = result.finish_reason
            actions.append((episode.slot, text))
        self._expect(self._envs.submit_steps(actions), "submit_steps")

    def _retry_or_give_up(self, episode: Episode, reason: str, blameless: bool) -> None:
        """One more try for an episode whose environment failed; more where another episode was the cause."""
        episode.pending = None
        if (episode.retries and not blameless) or episode.restarts >= _MOST_RESTARTS:
            episode.infra_failed = True
            self.counts.infra_failed += 1
            self.counts.failures.append(f"{episode.traj_uid}: {reason}")
            logger.warning("%s is left out, its environment failed again: %s", episode.traj_uid, reason)
            self._finish(episode)
            return
        logger.warning("%s starts again, its environment failed: %s", episode.traj_uid, reason)
        episode.restarts += 1
        episode.retries += not blameless
        episode.turns.clear()
        self.counts.infra_retried += 1
        self._expect(self._envs.restart(episode.slot), "restart")

    # ------------------------------------------------------------------ the end of episodes and groups

    def _finish(self, episode: Episode) -> None:
        del self._active[episode.slot]
        members = self._members[episode.group]
        members.append(episode)
        self.counts.episodes += 1
        self._expect(self._envs.finish(episode.slot), "finish")
        if len(members) == self._envs.group_size:
            self._close_group(episode.group, episode.slot // self._envs.group_size)
        self._bar.update()

    def _close_group(self, number: int, place: int) -> None:
        members = sorted(self._members.pop(number), key=lambda episode: episode.member)
        self.choice.close(number, members)
        if self.choice.needs_another:
            numbers = self.choice.start(1)
            self._bar.total += len(members)
            self._start_groups([place], numbers, attempt=numbers[0] - self._plan.num_groups + 1)


def _wait_for_any(refs: list[ray.ObjectRef], timeout_s: float) -> set[ray.ObjectRef]:
    """All that is ready once something is; empty after ``timeout_s``."""
    ready, rest = ray.wait(refs, num_returns=1, timeout=timeout_s)
    if ready and rest:
        ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
    return set(ready)
