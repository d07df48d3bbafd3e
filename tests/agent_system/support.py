"""Real parts in small for tests of the agent room: a toy shop, a scripted policy, a tokenizer and a configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from toy_shop import toy_sessions

from agent_system.environments.env_manager import WebshopEnvironmentManager
from agent_system.environments.env_package.webshop.envs import TrainingGoals, ValidationGoals, WebshopVectorEnv
from agent_system.environments.env_package.webshop.projection import webshop_projection
from agent_system.environments.session_host import SessionPool
from verl.protocol import DataProto
from verl.trainer.config.group_size import train_group_size
from verl.utils.row_arrays import object_array
from verl.workers.rollout.base import RolloutRequest, RolloutResult

PAD, EOS = 0, 1
GOALS = 600


class ByteTokenizer:
    """One token a byte, shifted by two; token 0 pads and token 1 ends."""

    pad_token_id, eos_token_id = PAD, EOS

    def apply_chat_template(self, chat: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return f"<user>{chat[0]['content']}<agent>"

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str) -> list[int]:
        return [byte + 2 for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(int(i) - 2 for i in ids if i >= 2).decode(errors="replace")

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]


def answer(action: str) -> str:
    return f"<think>t</think><action>{action}</action>"


@ray.remote(num_cpus=0, max_concurrency=1)
class ScriptedPolicy:
    """A replica whose response is a function of prompt text and seed, one token a step."""

    def follow(self, script: Callable[[str, int], str], step_s: float) -> None:
        """Starts over with ``script``; a step takes ``step_s``."""
        self._script, self._step_s = script, step_s
        self._running: list[tuple[RolloutRequest, np.ndarray, int]] = []
        self._tokenizer = ByteTokenizer()
        self.seen: list[str] = []

    def rollout_step(self, requests: list[RolloutRequest], max_steps: int) -> list[RolloutResult]:
        for request in requests:
            self.seen.append(request.request_id)
            text = self._script(self._tokenizer.decode(request.prompt_ids), request.seed)
            ids = np.array([*self._tokenizer.encode(text), EOS], dtype=np.int32)[: request.sampling.max_tokens]
            self._running.append((request, ids, 0))
        steps = min(max_steps, max((len(ids) - done for _, ids, done in self._running), default=0))
        time.sleep(self._step_s * steps)
        finished, going = [], []
        for request, ids, done in self._running:
            if done + steps < len(ids):
                going.append((request, ids, done + steps))
                continue
            log_probs = np.full(len(ids), -0.5, dtype=np.float32)
            reason = "stop" if ids[-1] == EOS else "length"
            finished.append(RolloutResult(request.request_id, ids, log_probs, reason))
        self._running = going
        return finished

    def requests_seen(self) -> list[str]:
        return self.seen


class ActorClient:
    """A generation client over policy actors, one a replica."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors, self.num_replicas = actors, len(actors)
        self.calls: list[tuple[int, int, int]] = []  # replica, new requests, steps

    def begin(self) -> dict[str, float]:
        return {"timing_rollout_s/weight_sync": 0.25}

    def end(self) -> dict[str, float]:
        return {}

    def submit(self, replica: int, requests: Sequence[RolloutRequest], max_steps: int) -> ray.ObjectRef:
        self.calls.append((replica, len(requests), max_steps))
        return self.actors[replica].rollout_step.remote(list(requests), max_steps)

    def receive(self, call: ray.ObjectRef) -> list[RolloutResult]:
        return ray.get(call)

    def check(self) -> None:
        pass

    def requests_seen(self) -> list[str]:
        return [request for actor in self.actors for request in ray.get(actor.requests_seen.remote())]


_ACTORS: list[Any] = []
_POOLS: dict[Any, SessionPool] = {}


def forget_actors() -> None:
    """The Ray they lived in has ended."""
    _ACTORS.clear()
    _POOLS.clear()


def policy(script: Callable[[str, int], str], replicas: int = 1, step_s: float = 0.0) -> ActorClient:
    """A client of policies that follow ``script``; the processes are kept for the next test."""
    while len(_ACTORS) < replicas:
        _ACTORS.append(ScriptedPolicy.remote())
    ray.get([actor.follow.remote(script, step_s) for actor in _ACTORS[:replicas]])
    return ActorClient(_ACTORS[:replicas])


def shared_pool(builder: Callable[[], Callable[[], Any]]) -> SessionPool:
    """A pool of two hosts that is kept for the next test."""
    if builder not in _POOLS:
        _POOLS[builder] = SessionPool(builder, num_hosts=2, reset_limit_s=60, step_limit_s=60, start_limit_s=300)
    return _POOLS[builder]


def shopper(prompt: str, seed: int) -> str:
    """Searches, opens x or y by the seed, buys; on its way it may say something useless."""
    page = prompt.rsplit("age: ", 1)[1]
    if "'Search'" in page.splitlines()[0]:
        return answer("search[thing]") + "." * (seed % 50)
    if "page results" in page.splitlines()[0]:
        return answer(["click[x]", "click[y]", "click[z]"][seed % 3])
    return answer("click[buy now]")


def make_config(**changes: Any) -> SimpleNamespace:
    """The parts of the configuration the agent room reads; ``changes`` by dotted key with ``__`` for the dot."""
    config = SimpleNamespace(
        data=SimpleNamespace(
            max_prompt_length=4000,
            max_response_length=200,
            return_raw_chat=True,
            truncation="error",
            apply_chat_template_kwargs={},
            train_batch_size=4,
            gen_batch_size=None,
            val_batch_size=6,
        ),
        env=SimpleNamespace(
            env_name="Webshop",
            seed=0,
            max_steps=6,
            history_length=2,
            max_prompt_chars=13_000,
            step_timeout=60,
            reset_timeout=60,
            num_workers=2,
            rollout=SimpleNamespace(n=3),
            resources_per_worker=SimpleNamespace(num_cpus=0.1, num_gpus=0),
            webshop=SimpleNamespace(compat_seeding=False),
        ),
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(
                seed=7,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                do_sample=True,
                response_length=200,
                ignore_eos=False,
                max_steps_per_slice=32,
                log_prob_micro_batch_size_per_gpu=16,
                val_kwargs=SimpleNamespace(temperature=0.0, top_p=1.0, top_k=-1, do_sample=False, n=1, extra={}),
                extra={},
            ),
            ref=SimpleNamespace(log_prob_micro_batch_size_per_gpu=16),
            actor=SimpleNamespace(ppo_micro_batch_size_per_gpu=8),
        ),
        algorithm=SimpleNamespace(
            adv_estimator="gigpo",
            filter_groups=SimpleNamespace(enable=False, max_num_gen_batches=3, surplus="cut"),
        ),
        reward_model=SimpleNamespace(enable=False, model=SimpleNamespace(input_tokenizer=None)),
        trainer=SimpleNamespace(step_timeout=300, start_timeout=300, progress_bar=False, n_gpus_per_node=2, nnodes=1),
    )
    for key, value in changes.items():
        *path, last = key.split("__")
        node = config
        for part in path:
            node = getattr(node, part)
        setattr(node, last, value)
    return config


def toy_manager(
    config: Any,
    is_train: bool = True,
    builder: Callable[[], Callable[[], Any]] = toy_sessions,
    pool: SessionPool | None = None,
) -> WebshopEnvironmentManager:
    train_groups = config.data.gen_batch_size or config.data.train_batch_size
    groups = train_groups if is_train else config.data.val_batch_size
    size = train_group_size(config) if is_train else 1
    goals = TrainingGoals(GOALS, groups, config.env.seed) if is_train else ValidationGoals(GOALS, groups)
    name = "train" if is_train else "val"
    envs = WebshopVectorEnv(pool or shared_pool(builder), goals, groups, size, name, owns_pool=False)
    return WebshopEnvironmentManager(envs, webshop_projection, config)


def shell(rows: int, **meta: Any) -> DataProto:
    return DataProto.from_dict(non_tensors={"data_source": object_array(["text"] * rows)}, meta_info=meta)
