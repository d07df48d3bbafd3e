"""What vLLM reads from the environment of this process, and what it leaves there.

It reads some variables when it is imported and others when an engine is built; both write more of them, for children
that vLLM starts. Here those are taken back, for this process goes on as a rank of the trainer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from verl.utils.long_lived import made_to_stay
from verl.utils.rng import preserved_rng
from verl.workers.rollout.settings import EngineSettings

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout"


@functools.cache
def import_vllm(device: str) -> dict[str, str]:
    """Import vLLM, which takes seconds: a rank does it while it would wait.

    Returns the environment variables that the import has set. They are withdrawn, and hold while an engine is built.
    """
    _set_variables(device)
    before = dict(os.environ)
    with preserved_rng(), restored_environment(), made_to_stay():
        from vllm import LLM

        logger.debug("imported %s", LLM.__module__)
        return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _set_variables(device: str) -> None:
    """Environment variables that vLLM reads when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1")):
        os.environ.setdefault(name, value)
    if device == "cpu":
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would override our size
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on shared cores are 10 to 100 times slower
    else:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it ignores seeds of single requests


def prepare_environment(settings: EngineSettings) -> None:
    """Environment variables that vLLM reads when an engine is built, and those that cannot go with the settings."""
    _set_variables(settings.device)
    if settings.device == "cpu":
        if settings.enforce_eager:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
            from torch import _dynamo  # `import torch._dynamo` would make `torch` a name of this function

            _dynamo.config.disable = True  # else the first log-probs wait 10 s for a C++ compiler
    else:
        if settings.dtype == torch.float32:  # vLLM's attention for it is Triton's, which rounds to TF32 unless told
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
        if settings.free_cache_engine and "expandable_segments:True" in allocator:
            raise ValueError(
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True cannot be combined with "
                f"{_KEY}.free_cache_engine=True (vLLM's sleeping memory pool); unset one of them"
            )
    if dist.is_initialized():
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")  # only a name here: the group exists already


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Undo what vLLM's start writes into the environment for its own children (LD_PRELOAD, LOCAL_WORLD_SIZE, ...)."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) | set(before):
            if not name.startswith("VLLM_") and os.environ.get(name) != before.get(name):
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]
