"""The contract between an environment and the trainer, in its two forms.

*Lock-step* (``EnvironmentManagerBase``): ``reset`` and ``step`` act on the whole batch at once. An author who wraps a
vectorised environment writes ``reset``, ``build_text_obs`` and perhaps ``_process_batch``.

*Event-driven* (``EpisodeEnvironmentManager``): every episode goes its own way. The rollout loop holds object
references of replies that are on their way and asks the manager what a reply means once it is there. A manager of this
kind also has the lock-step form, derived from the event-driven one.

Errors: an environment that fails, in a step or as a process, is data. Its observation has ``infra_failed`` set and the
rollout loop decides whether the episode starts again. Only a mistake of the caller raises, or one against this
contract (``contract.py``).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from agent_system.environments import contract
from verl.trainer.config.failure import noted

logger = logging.getLogger(__name__)

ObservationBatch = dict[str, Any]
Infos = list[dict[str, Any]]
Projection = Callable[[list[str]], tuple[list[Any], list[int]]]


def to_numpy(data: Any) -> np.ndarray:
    """Tensor, array, number or list as an array.

    Raises:
        ValueError: any other type.
    """
    if isinstance(data, torch.Tensor):
        return data.detach().cpu().numpy()
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, (int, float, bool, tuple, list)):
        return np.array(data)
    raise ValueError(f"cannot make an array of {type(data).__name__}")


@dataclass
class Observation:
    """What one episode shows after a reset or a step.

    Attributes:
        prompt: the text the agent answers next.
        anchor: the raw state, the key of step groups.
        reward: of the step that led here; 0 after a reset.
        done: the episode is over.
        info: the environment's own figures; ``is_action_valid`` and ``is_action_admissible`` judge the last action.
        infra_failed: the environment could not answer; ``info`` says why (``error``) and whether the episode had no
            part in it (``blameless``: its process was lost for another's sake). The other fields mean nothing.
    """

    prompt: str = ""
    anchor: Any = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    infra_failed: bool = False

    @classmethod
    def failed(cls, reason: str, blameless: bool = False) -> Observation:
        return cls(done=True, info={"error": reason, "blameless": blameless}, infra_failed=True)


class EnvironmentManagerBase:
    """A vectorised environment with the text around it.

    Args:
        envs: the vectorised environment, with ``reset() -> (obs, infos)`` and
            ``step(actions) -> (obs, rewards, dones, infos)``.
        projection_f: model outputs to ``(actions, valids)``.
        config: the run's configuration.
    """

    def __init__(self, envs: Any, projection_f: Projection, config: Any) -> None:
        self.envs = envs
        self.projection_f = projection_f
        self.config = config

    def reset(self, kwargs: Any = None) -> tuple[ObservationBatch, Infos]:
        """Starts every episode.

        Args:
            kwargs: one dict per episode from the data set's ``env_kwargs`` column, or None.

        Returns:
            ``({"text": list[str] | None, "image": array | list | None, "anchor": per-episode states}, infos)``.
        """
        obs, infos = self.envs.reset()
        return {"text": None, "image": obs, "anchor": None}, infos

    def step(self, text_actions: list[str]) -> tuple[ObservationBatch, np.ndarray, np.ndarray, Infos]:
        """Acts in every episode; ``infos[i]["is_action_valid"]`` says whether output ``i`` had the required form.

        Returns:
            Observations as in ``reset``, rewards ``(episodes,)``, dones ``(episodes,)`` and infos.
        """
        actions, valids = self.projection_f(text_actions)
        next_obs, rewards, dones, infos = self.envs.step(actions)
        for info, valid in zip(infos, valids, strict=True):
            info["is_action_valid"] = to_numpy(valid)
        return {"text": None, "image": next_obs, "anchor": None}, to_numpy(rewards), to_numpy(dones), infos

    def build_text_obs(self) -> list[str]:
        """The prompts of all episodes; a manager of text environments overrides this."""
        raise NotImplementedError(f"{type(self).__name__} has no text observations")

    def close(self) -> None:
        """Ends the environment; a second call does nothing."""
        self.envs.close()

    def success_evaluator(self, **kwargs: Any) -> dict[str, np.ndarray]:
        """Success figures of finished episodes.

        Args:
            total_infos: for each episode the info of each of its steps.
            total_batch_list: for each episode its rows, each with ``active_masks``.
            episode_rewards, episode_lengths: ``(episodes,)`` arrays.

        Returns:
            ``{name: (episodes,) array}``; the base gives ``success_rate``, the ``won`` of the last active step.
        """
        total_infos, total_batch_list = kwargs["total_infos"], kwargs["total_batch_list"]
        success: dict[str, list[float]] = defaultdict(list)
        for index in range(len(total_batch_list)):
            self._process_batch(index, total_batch_list, total_infos, success)
        return {name: np.array(values) for name, values in success.items()}

    def _process_batch(
        self, batch_idx: int, total_batch_list: Any, total_infos: Any, success: dict[str, list[float]]
    ) -> None:
        """Adds the figures of episode ``batch_idx`` to ``success``."""
        last = self._last_active(batch_idx, total_batch_list)
        if last is not None:
            success["success_rate"].append(contract.won(self, total_infos[batch_idx], last))

    @staticmethod
    def _last_active(batch_idx: int, total_batch_list: Any) -> int | None:
        rows = total_batch_list[batch_idx]
        return next((i for i in reversed(range(len(rows))) if rows[i]["active_masks"]), None)

    def save_image(self, image: Any, step: int, folder: str | Path = "images") -> Path:
        """Writes one image observation as ``{folder}/{env name}/step_{step}.png`` and returns the path."""
        from PIL import Image

        pixels = to_numpy(image)
        if pixels.dtype != np.uint8:
            pixels = (pixels * 255 if pixels.max() <= 1 else pixels).astype(np.uint8)
        if pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.shape[-1] != 3:
            pixels = pixels.transpose(1, 2, 0)
        path = Path(folder) / str(self.config.env.env_name).replace("/", "_") / f"step_{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        return path


class EventEnvironments(ABC):
    """The face the rollout loop sees: episodes in numbered slots, groups of ``group_size`` consecutive slots.

    Methods that start something return the references to wait for; there may be none when the environment is not
    ready to act. Every reference that was returned is handed to ``collect`` or to ``expire`` exactly once.
    """

    num_episodes: int
    group_size: int

    @abstractmethod
    def begin(
        self, groups: Sequence[int], kwargs: Sequence[Any] | None = None, attempt: int = 0, block: int = 0
    ) -> list[ray.ObjectRef]:
        """Draws a task for each of ``groups`` and resets their slots.

        Args:
            groups: numbers of the groups that start.
            kwargs: one dict per slot of the whole batch, or None.
            attempt: how many tasks these groups have already been given in this rollout. Which task group ``g`` gets
                at attempt ``a`` does not depend on when the group asks for it.
            block: which block of the validation tasks to play.
        """

    @abstractmethod
    def submit_steps(self, actions: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        """Hands over the model output of some slots."""

    @abstractmethod
    def collect(self, ref: ray.ObjectRef) -> list[tuple[int, Observation]]:
        """The observations a ready reference holds; failures are observations too."""

    @abstractmethod
    def expire(self, ref: ray.ObjectRef, reason: str) -> list[tuple[int, Observation]]:
        """Gives up on a reference that took too long: failed observations for its slots."""

    @abstractmethod
    def restart(self, slot: int) -> list[ray.ObjectRef]:
        """Starts the slot's present task again, on a fresh session."""

    @abstractmethod
    def finish(self, slot: int) -> list[ray.ObjectRef]:
        """The slot's episode is over. May free what others were waiting for, hence the references."""

    def shorter_prompt(self, slot: int, history_length: int) -> str | None:
        """The current prompt with at most ``history_length`` past steps; None if the prompt cannot be shortened."""
        return None

    def task_id(self, slot: int) -> str:
        """Name of the slot's task, the same for the same task in every rollout."""
        return str(slot)


class EpisodeEnvironmentManager(EnvironmentManagerBase, EventEnvironments):
    """A manager whose episodes go their own way; ``reset``/``step`` over the whole batch are derived from that."""

    def begin(
        self, groups: Sequence[int], kwargs: Sequence[Any] | None = None, attempt: int = 0, block: int = 0
    ) -> list[ray.ObjectRef]:
        slots = self._start(groups, kwargs, attempt, block)
        size = self.group_size
        wanted = [slot for group in groups for slot in range(group * size, (group + 1) * size)]
        contract.check_slots(f"{type(self).__name__}._start", slots, wanted)
        return self.envs.submit_resets(slots)

    @abstractmethod
    def _start(self, groups: Sequence[int], kwargs: Any, attempt: int, block: int) -> list[tuple[int, Any]]:
        """Draws the tasks of ``groups``: ``(slot, task)`` for each of their slots."""

    @abstractmethod
    def absorb(self, slot: int, raw: Mapping[str, Any]) -> Observation:
        """What the raw reply of a session means for ``slot``."""

    def collect(self, ref: ray.ObjectRef) -> list[tuple[int, Observation]]:
        return [(slot, self._read(slot, raw)) for slot, raw in self.envs.collect(ref)]

    def expire(self, ref: ray.ObjectRef, reason: str) -> list[tuple[int, Observation]]:
        return [(slot, self._read(slot, raw)) for slot, raw in self.envs.expire(ref, reason)]

    def _read(self, slot: int, raw: Mapping[str, Any]) -> Observation:
        if "error" in raw:
            return Observation.failed(raw["error"], raw.get("blameless", False))
        call = f"{type(self).__name__}.absorb"
        with noted(f"in {call}, of a reply with {sorted(map(str, raw))}"):
            observation = self.absorb(slot, raw)
        if not isinstance(observation, Observation):
            raise ValueError(f"{call} returned {type(observation).__name__}, it has to return an Observation")
        if not observation.infra_failed:
            contract.check_observation(call, slot, observation)
        return observation

    def reset(self, kwargs: Any = None) -> tuple[ObservationBatch, Infos]:
        refs = self.begin(range(self.num_episodes // self.group_size), kwargs)
        observations = self._gather(refs, self.config.env.reset_timeout, "env.reset_timeout")
        return self._as_batch(observations), [observation.info for observation in observations]

    def step(self, text_actions: list[str]) -> tuple[ObservationBatch, np.ndarray, np.ndarray, Infos]:
        if len(text_actions) != self.num_episodes:
            raise ValueError(f"{self.num_episodes} episodes need as many actions, not {len(text_actions)}")
        refs = self.submit_steps(list(enumerate(text_actions)))
        observations = self._gather(refs, self.config.env.step_timeout, "env.step_timeout")
        rewards = np.array([observation.reward for observation in observations], dtype=np.float32)
        dones = np.array([observation.done for observation in observations], dtype=bool)
        return self._as_batch(observations), rewards, dones, [observation.info for observation in observations]

    def _gather(self, refs: list[ray.ObjectRef], limit: float, key: str) -> list[Observation]:
        """All observations in slot order; a failed session raises, since lock-step callers have no way to say it."""
        _, late = ray.wait(refs, num_returns=len(refs), timeout=limit)
        if late:
            raise TimeoutError(f"{len(late)} of {len(refs)} environment replies took longer than {key}={limit} s")
        by_slot = dict(pair for ref in refs for pair in self.collect(ref))
        for slot, observation in by_slot.items():
            if observation.infra_failed:
                raise RuntimeError(f"the environment of episode {slot} failed: {observation.info['error']}")
        return [by_slot[slot] for slot in range(self.num_episodes)]

    @staticmethod
    def _as_batch(observations: list[Observation]) -> ObservationBatch:
        return {
            "text": [observation.prompt for observation in observations],
            "image": None,
            "anchor": [observation.anchor for observation in observations],
        }
