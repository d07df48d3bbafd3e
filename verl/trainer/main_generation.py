"""Answer the prompts of a parquet file with a model: ``data.n_samples`` responses each, without training.

::

    python -m verl.trainer.main_generation model.path=my_model data.path=prompts.parquet \\
        data.output_path=responses.parquet data.n_samples=8 rollout.temperature=0.7 trainer.n_gpus_per_node=2

The settings are in ``config/generation.yaml``. Models live in Ray workers, one a rank; engines get prompts as they have
room. The output has the input's columns, ``responses`` (list of text) and ``finish_reasons`` (list of ``stop`` or
``length``). A response depends on its row, its number and ``rollout.seed``, not on what ran beside it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.trainer.config.errors import ConfigError
from verl.trainer.config.machine import visible_gpus
from verl.trainer.config.schema.offline import GenerationConfig
from verl.trainer.config.tool import output_problem, sigterm_stops, tool_main
from verl.trainer.config.validate_files import check_external_lib, check_model_path
from verl.trainer.config.validate_numbers import at_least, finite

logger = logging.getLogger(__name__)

_POLL_S = 5.0
RESPONSES, REASONS = "responses", "finish_reasons"


@tool_main(GenerationConfig, "generation")
def main(config: GenerationConfig) -> None:
    """Answer the prompts of a parquet file; every key is in verl/trainer/config/generation.yaml."""
    run_generation(config)


def run_generation(config: GenerationConfig) -> Path:
    """Write ``data.output_path``; returns it. Starts Ray, or joins the one of ``RAY_ADDRESS``, and ends it.

    Raises:
        ConfigError: settings or files that cannot work, before anything is started.
    """
    check(config)
    config = replace(config, trainer=replace(config.trainer, device=device_of(config)))
    table = read_table(config.data.path, "data.path", config.data.prompt_key)
    from verl.trainer.main_ppo import start_ray
    from verl.utils.bytecode import keep_bytecode
    from verl.utils.external_lib import import_external_lib
    from verl.utils.fs import copy_to_local
    from verl.utils.tokenizer import hf_tokenizer

    keep_bytecode(config.trainer.compile_cache_dir)
    import_external_lib(config.model.external_lib)
    path = copy_to_local(config.model.path, use_shm=config.model.use_shm, key="model.path")
    tokenizer = hf_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    prompts = prompt_ids(table.column(config.data.prompt_key).to_pylist(), tokenizer, config)
    import ray

    start_ray(config)
    with sigterm_stops():
        try:
            results = _generate(config, prompts)
        finally:
            ray.shutdown()
    texts = [tokenizer.batch_decode([r.response_ids for r in row], skip_special_tokens=True) for row in results]
    table = table.drop_columns([name for name in (RESPONSES, REASONS) if name in table.column_names])
    table = table.append_column(RESPONSES, pa.array(texts, pa.list_(pa.string())))
    table = table.append_column(REASONS, pa.array([[r.finish_reason for r in row] for row in results]))
    return write_table(table, Path(str(config.data.output_path)))


def check(config: GenerationConfig) -> None:
    """Raises ConfigError, one line for each setting that cannot work."""
    from verl.workers.rollout.settings import sampling_settings

    data, rollout, trainer = config.data, config.rollout, config.trainer
    problems = [f"{key} is not set" for key, value in (
        ("model.path", config.model.path), ("data.path", data.path), ("data.output_path", data.output_path)
    ) if not value]  # fmt: skip
    if config.model.path:
        problems += check_model_path("model.path", config.model.path)
    problems += check_external_lib("model.external_lib", config.model.external_lib)
    try:
        sampling_settings(rollout)
    except ValueError as error:
        problems.append(str(error))
    problems += at_least(
        [
            ("data.n_samples", data.n_samples),
            ("trainer.nnodes", trainer.nnodes),
            ("trainer.n_gpus_per_node", trainer.n_gpus_per_node),
            ("trainer.start_timeout", trainer.start_timeout),
            ("trainer.step_timeout", trainer.step_timeout),
            ("trainer.ray_wait_register_center_timeout", trainer.ray_wait_register_center_timeout),
            ("rollout.prompt_length", rollout.prompt_length),
            ("rollout.response_length", rollout.response_length),
            ("rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size),
            ("rollout.max_steps_per_slice", rollout.max_steps_per_slice),
            ("rollout.max_num_seqs", rollout.max_num_seqs),
            ("rollout.max_num_batched_tokens", rollout.max_num_batched_tokens),
            ("rollout.kv_cache_memory_mb", rollout.kv_cache_memory_mb),
            ("ray_init.num_cpus", config.ray_init.num_cpus),
        ]
    )
    row = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < row:
        problems.append(
            f"rollout.max_model_len={rollout.max_model_len} is less than rollout.prompt_length+"
            f"rollout.response_length = {row}; use null or {row}"
        )
    if not 0 < rollout.gpu_memory_utilization <= 1:
        problems.append(f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g} has to lie in (0, 1]")
    problems += finite(
        [
            ("trainer.start_timeout", trainer.start_timeout),
            ("trainer.step_timeout", trainer.step_timeout),
            ("rollout.temperature", rollout.temperature),
        ]
    )
    if data.n_samples > 1 and (not rollout.do_sample or rollout.temperature == 0):
        problems.append(f"data.n_samples={data.n_samples} greedy responses are all the same: use 1, or sample")
    if rollout.tensor_model_parallel_size >= 1 and config.world_size % rollout.ranks_per_engine:
        problems.append(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide the "
            f"{config.world_size} ranks (trainer.nnodes*trainer.n_gpus_per_node)"
        )
    if device_of(config) == "cuda" and not os.environ.get("RAY_ADDRESS") and trainer.n_gpus_per_node > visible_gpus():
        problems.append(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, but this machine shows {visible_gpus()} GPU(s); use "
            f"trainer.n_gpus_per_node={visible_gpus()} or trainer.device=cpu"
            if visible_gpus()
            else "trainer.device=cuda, but no NVIDIA GPU is visible on this machine; use trainer.device=cpu"
        )
    if data.output_path and (problem := output_problem("data.output_path", data.output_path)):
        problems.append(problem)
    if problems:
        raise ConfigError("\n  ".join(problems))


def device_of(config: GenerationConfig) -> str:
    """``cuda`` or ``cpu``; ``auto`` looks for a GPU."""
    if config.trainer.device != "auto":
        return config.trainer.device
    return "cuda" if visible_gpus() else "cpu"


def read_table(paths: str | Sequence[str] | None, key: str, *columns: str) -> pa.Table:
    """The rows of one or more parquet files; ConfigError where they cannot be read or lack ``columns``."""
    names = [paths] if isinstance(paths, str) else list(paths or ())
    if not names:
        raise ConfigError(f"{key} is not set")
    tables = []
    for name in names:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}={name}: there is no such file")
        try:
            tables.append(pq.read_table(path))
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{key}={name} is no readable parquet file ({str(error).splitlines()[0]})") from error
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{key}: the files differ in their columns: {str(error).splitlines()[0]}") from error
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise ConfigError(f"{key}={names[0]} has no column {missing[0]!r}; it has {', '.join(table.column_names)}")
    if table.num_rows == 0:
        raise ConfigError(f"{key}={names[0]} holds no rows")
    return table


def write_table(table: pa.Table, path: Path) -> Path:
    """Write a parquet file whole or not at all; returns its path."""
    path = path.expanduser().absolute()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temporary)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"data.output_path={path} cannot be written: {error}") from error
    logger.info("%d rows written to %s", table.num_rows, path)
    return path


def prompt_ids(chats: Sequence[Any], tokenizer: Any, config: GenerationConfig) -> list[np.ndarray]:
    """Token ids of every prompt, int32 and of true length, at most ``rollout.prompt_length``.

    Raises:
        ConfigError: a row that is no chat, or a longer prompt where ``data.truncation`` is ``error``.
    """
    from agent_system.multi_turn_rollout.prompt_encoder import truncate

    limit, side = config.rollout.prompt_length, config.data.truncation
    prompts = []
    for row, chat in enumerate(chats):
        turns = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
        if not turns or not all(isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in turns):
            raise ConfigError(f"data.prompt_key={config.data.prompt_key}: row {row} is neither a chat nor a text")
        text = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False, **config.data.apply_chat_template_kwargs
        )
        ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        if len(ids) > limit and side == "error":
            raise ConfigError(
                f"row {row} has a prompt of {len(ids)} tokens, rollout.prompt_length is {limit}: raise it, or set "
                "data.truncation=left (or right, middle)"
            )
        prompts.append(truncate(ids, limit, side))
    return prompts


def _generate(config: GenerationConfig, prompts: Sequence[np.ndarray]) -> list[list[Any]]:
    """Starts the engines and collects ``data.n_samples`` results for every prompt."""
    from agent_system.multi_turn_rollout.generation import WorkerGroupClient
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.ppo.resources import worker_env_vars
    from verl.workers.engine_worker import EngineWorker

    trainer, device = config.trainer, config.trainer.device
    group = RayWorkerGroup(
        resource_pool=RayResourcePool(
            process_on_nodes=[trainer.n_gpus_per_node] * trainer.nnodes,
            use_gpu=device == "cuda",
            max_colocate_count=1,
            name_prefix="generation",
        ),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=EngineWorker, model=config.model, rollout=config.rollout, device=device
        ),
        env_vars=worker_env_vars(config),
        ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
        call_timeout=trainer.step_timeout,
        call_timeout_key="trainer.step_timeout",
    )
    try:
        refs = group.execute_ranks_async(list(range(config.world_size)), "init_model")
        group.get(refs, method="init_model", timeout=trainer.start_timeout, key="trainer.start_timeout")
        return collect(config, WorkerGroupClient(group), prompts)
    finally:
        group.shutdown()


def collect(config: GenerationConfig, client: Any, prompts: Sequence[np.ndarray]) -> list[list[Any]]:
    """``data.n_samples`` ``RolloutResult`` for each prompt, in order, from a ``GenerationClient``."""
    import ray
    from tqdm import tqdm

    from agent_system.multi_turn_rollout.episode import request_seed
    from agent_system.multi_turn_rollout.scheduler import ReplicaScheduler
    from verl.workers.rollout.base import RolloutRequest
    from verl.workers.rollout.settings import sampling_settings

    samples, rollout = config.data.n_samples, config.rollout
    sampling = sampling_settings(rollout)
    scheduler = ReplicaScheduler(client, rollout.max_steps_per_slice, config.trainer.step_timeout)
    client.begin()
    for row, ids in enumerate(prompts):
        for sample in range(samples):
            seed = request_seed(rollout.seed, "generation", row, sample)
            scheduler.enqueue(row, RolloutRequest(f"{row}-{sample}", ids, sampling, seed))
    found: dict[str, Any] = {}
    total = len(prompts) * samples
    with tqdm(total=total, desc="responses", disable=not config.trainer.progress_bar, mininterval=0.5) as bar:
        while len(found) < total:
            scheduler.dispatch(environments_pending=False)
            ready, _ = ray.wait(scheduler.calls, num_returns=1, timeout=_POLL_S)
            if not ready:
                scheduler.check()
            for call in ready:
                results = scheduler.collect(call)
                found.update((result.request_id, result) for result in results)
                bar.update(len(results))
    client.end()
    return [[found[f"{row}-{sample}"] for sample in range(samples)] for row in range(len(prompts))]


if __name__ == "__main__":
    main()
