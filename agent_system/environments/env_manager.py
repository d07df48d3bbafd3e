"""Environment managers: one class per environment, and ``make_envs`` that builds what ``env.env_name`` asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray

from agent_system.environments.base import EnvironmentManagerBase, EpisodeEnvironmentManager, Observation, to_numpy
from agent_system.environments.env_package.webshop.envs import WebshopVectorEnv, build_webshop_envs, make_pool
from agent_system.environments.env_package.webshop.projection import is_admissible, webshop_projection
from agent_system.environments.prompts.webshop import WebshopDialogue
from agent_system.environments.registry import (
    checked_managers,
    find_environment,
    register_environment,
    registered_name,
)
from verl.trainer.config.group_size import train_group_size, val_group_size

logger = logging.getLogger(__name__)

Managers = tuple[EnvironmentManagerBase, "EnvironmentManagerBase | None"]


class WebshopEnvironmentManager(EpisodeEnvironmentManager):
    """WebShop episodes as an agent reads them.

    Every info has ``is_action_valid`` (the output had the required form), ``is_action_admissible`` (the page offered
    the action), ``won`` and ``task_score``, the shop's own score.
    """

    def __init__(self, envs: WebshopVectorEnv, projection_f: Any, config: Any) -> None:
        super().__init__(envs, projection_f, config)
        self.num_episodes, self.group_size = envs.num_episodes, envs.group_size
        self._dialogues = [
            WebshopDialogue(config.env.history_length, config.env.max_prompt_chars) for _ in range(self.num_episodes)
        ]
        self._available: list[Mapping[str, Any]] = [{} for _ in range(self.num_episodes)]
        self._tasks: dict[int, Any] = {}
        self._judged: dict[int, tuple[str, bool, bool]] = {}  # slot -> action on its way, valid, admissible

    def _start(self, groups: Sequence[int], kwargs: Any, attempt: int, block: int) -> list[tuple[int, Any]]:
        tasks = self.envs.draw(groups, attempt, block)
        for slot, task in tasks:
            self._tasks[slot] = task
            self._judged.pop(slot, None)
        return tasks

    def submit_steps(self, actions: Sequence[tuple[int, str]]) -> list[ray.ObjectRef]:
        projected, valids = self.projection_f([text for _, text in actions])
        steps = []
        for (slot, _), action, valid in zip(actions, projected, valids, strict=True):
            self._judged[slot] = (action, bool(valid), is_admissible(action, self._available[slot]))
            steps.append((slot, action))
        return self.envs.submit_steps(steps)

    def absorb(self, slot: int, raw: Mapping[str, Any]) -> Observation:
        info = dict(raw["info"])
        page, self._available[slot] = raw["observation"], info["available_actions"]
        dialogue = self._dialogues[slot]
        judged = self._judged.pop(slot, None)
        if judged is None:
            prompt = dialogue.start(page, self._available[slot])
        else:
            action, valid, admissible = judged
            prompt = dialogue.advance(action, page, self._available[slot])
            info.update(is_action_valid=to_numpy(valid), is_action_admissible=to_numpy(admissible))
        return Observation(prompt, dialogue.observation, float(raw["reward"]), bool(raw["done"]), info)

    def restart(self, slot: int) -> list[ray.ObjectRef]:
        self._judged.pop(slot, None)
        return self.envs.submit_resets([(slot, self._tasks[slot])], fresh=True)

    def finish(self, slot: int) -> list[ray.ObjectRef]:
        return []

    def shorter_prompt(self, slot: int, history_length: int) -> str | None:
        return self._dialogues[slot].prompt(history_length)

    def build_text_obs(self) -> list[str]:
        return [dialogue.prompt() for dialogue in self._dialogues]

    def task_id(self, slot: int) -> str:
        task = self._tasks[slot]
        return f"seed-{task[0]}-goal-{task[1]}" if isinstance(task, tuple) else f"goal-{task}"

    @property
    def split_digest(self) -> str:
        """Names the split of the goals: scores with equal digests are on equal tasks."""
        return self.envs.split_digest

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the tasks that come next."""
        return self.envs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.envs.load_state_dict(state)

    def _process_batch(
        self, batch_idx: int, total_batch_list: Any, total_infos: Any, success: dict[str, list[float]]
    ) -> None:
        last = self._last_active(batch_idx, total_batch_list)
        if last is not None:
            info = total_infos[batch_idx][last]
            success["success_rate"].append(float(info["won"]))
            success["webshop_task_score (not success_rate)"].append(float(info["task_score"]))


@register_environment("webshop")
def make_webshop(config: Any) -> Managers:
    """Training and validation managers of WebShop, their sessions in the same host processes."""
    env, data = config.env, config.data
    size, num_groups = train_group_size(config), data.gen_batch_size or data.train_batch_size
    val_size = val_group_size(config)
    pool = make_pool(
        env.webshop,
        max(num_groups * size, data.val_batch_size * val_size),
        env.resources_per_worker,
        env.num_workers,
        reset_limit_s=env.reset_timeout,
        step_limit_s=env.step_timeout,
        start_limit_s=config.trainer.start_timeout,
    )
    try:
        pool.wait_until_built()
        build = partial(
            build_webshop_envs, resources_per_worker=env.resources_per_worker, env_kwargs=env.webshop, pool=pool
        )
        train = build(seed=env.seed, env_num=num_groups, group_n=size, is_train=True)
        val = build(seed=env.seed + 1000, env_num=data.val_batch_size, group_n=val_size, is_train=False)
    except BaseException:
        pool.close()
        raise
    logger.info(
        "WebShop: %d training and %d validation episodes at a time in %d processes; split %s",
        train.num_episodes,
        val.num_episodes,
        pool.num_hosts,
        train.split_digest,
    )
    train.owns_pool = True
    return (
        WebshopEnvironmentManager(train, webshop_projection, config),
        WebshopEnvironmentManager(val, webshop_projection, config),
    )


def make_envs(config: Any) -> Managers:
    """``(training manager, validation manager)`` of the environment that ``env.env_name`` names.

    Raises:
        ValueError: no such environment, sizes that make none, or a factory that returns something else than the two.
    """
    train_group_size(config), val_group_size(config)
    if config.data.val_batch_size is None:
        raise ValueError("data.val_batch_size is the number of validation environments and has to be set, e.g. to 128")
    env_name = config.env.env_name
    name = registered_name(env_name)
    if name != env_name.lower():
        logger.warning("env.env_name=%s is read as %s", env_name, name)
    return checked_managers(env_name, find_environment(name)(config))
