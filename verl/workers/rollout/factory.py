"""Build the rollout engine that the config names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.settings import engine_settings

ENGINES = ("vllm", "hf")


def import_engine(name: str, device: str) -> type[RolloutEngine]:
    """The engine class of `actor_rollout_ref.rollout.name`, with everything imported that building one needs.

    Raises ValueError naming the config key.
    """
    if name == "sglang":
        raise ValueError(
            "actor_rollout_ref.rollout.name=sglang is not supported: its engine runs in processes of its own, while "
            f"the hybrid engine hands weights over inside one process. Choose one of {', '.join(ENGINES)}"
        )
    if name not in ENGINES:
        raise ValueError(f"actor_rollout_ref.rollout.name={name!r} is unknown; choose one of {', '.join(ENGINES)}")
    if name == "hf":
        from verl.workers.rollout.hf_rollout import HFRollout

        return HFRollout
    from verl.workers.rollout.vllm_environment import import_vllm
    from verl.workers.rollout.vllm_rollout import VLLMRollout

    try:
        import_vllm(device)
    except ImportError as error:
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm needs vLLM; install it or use rollout.name=hf ({error})"
        ) from error
    return VLLMRollout


def build_rollout_engine(
    rollout: Any,
    model_path: str,
    *,
    eos_token_ids: Sequence[int],
    device: str,
    seed: int = 0,
    trust_remote_code: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
    requests: int | None = None,
) -> RolloutEngine:
    """The engine of this rank, with weights that must still come through `load_weights`.

    rollout: `actor_rollout_ref.rollout` of the config (attributes). model_path: local folder with config.json; a
    tokenizer beside it is needed only for text-based sampling keys. eos_token_ids: every id that ends a response.
    requests: the most that all engines together are expected to have at once, if that is known.
    With tensor parallelism all ranks call this together, after the process group exists. Raises ValueError naming the
    config key.
    """
    engine = import_engine(rollout.name, device)
    settings = engine_settings(
        rollout,
        model_path,
        device=device,
        eos_token_ids=eos_token_ids,
        seed=seed,
        trust_remote_code=trust_remote_code,
        hf_overrides=hf_overrides,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        requests=requests,
    )
    return engine(settings)
