"""Let a model behind an OpenAI-compatible endpoint play an environment, without training.

::

    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_MODEL=my-model OPENAI_API_KEY=...
    python -m examples.prompt_agent.evaluate --episodes 128 env.env_name=Webshop env.max_steps=15

The environment, its prompts, the rollout loop, the tasks and the files that are written are those of validation in
training; arguments without dashes are overrides of ppo_trainer.yaml. What has no meaning here (models, optimisers,
ranks) has no effect. Sampling is ``actor_rollout_ref.rollout.val_kwargs``, ``data.max_response_length`` counts tokens
and ``data.max_prompt_length`` characters: a longer prompt shows fewer past steps, then the episode ends.

Tasks are played in blocks of ``data.val_batch_size``. A finished block is kept in ``OUT/parts``: the same command goes
on with the blocks that are missing.

Exit codes: 0 = done, 1 = it failed, 2 = the settings cannot work, 130 = stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.prompt_agent.endpoint import EndpointClient, EndpointSettings, TextCodec
from verl.protocol import DataProto
from verl.trainer.config import ConfigError, PPOTrainerConfig, compose_config, to_dataclass
from verl.trainer.config.prepare import to_yaml, write_resolved
from verl.trainer.config.tool import exit_code, sigterm_stops
from verl.trainer.config.validate import check_names
from verl.trainer.config.validate_files import check_paths
from verl.trainer.config.validate_numbers import at_least, check_numbers, check_sampling

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
STEP = 0  # files are named after the training step; nothing is trained here
_DEFAULTS = (
    "env.env_name=Webshop",
    "env.max_steps=15",
    "env.rollout.n=1",
    "data.train_batch_size=1",  # the environment's training half, which nobody plays
    "data.max_prompt_length=1000000",
    "data.truncation=shorten_history",
    "data.dataloader_num_workers=0",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
)
_MOST_AT_A_TIME = 64


def parser() -> argparse.ArgumentParser:
    """The command line; what the environment variables hold is shown by ``--help``, except for the key."""
    made = argparse.ArgumentParser(
        prog="python -m examples.prompt_agent.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--base-url", default=os.environ.get("OPENAI_BASE_URL", ""), help="default: OPENAI_BASE_URL")
    add("--model", default=os.environ.get("OPENAI_MODEL", ""), help="default: OPENAI_MODEL")
    add("--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key (OPENAI_API_KEY)")
    add("--episodes", type=int, default=128, help="validation tasks to play (128)")
    add("--out", type=Path, default=None, help="folder for the results (outputs/prompt_agent/MODEL)")
    add("--concurrency", type=int, default=16, help="requests in flight at most (16)")
    add("--request-timeout", type=float, default=120.0, metavar="S", help="seconds for one try (120)")
    add("--max-retries", type=int, default=5, help="further tries of a request that failed (5)")
    add("--max-tokens-field", default="max_tokens", help="max_completion_tokens for servers that ask for it")
    add("--no-seed", action="store_true", help="send no seed, for servers that refuse one")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of a request; null removes")
    add("overrides", nargs="*", metavar="key=value", help="overrides of ppo_trainer.yaml")
    return made


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as {{\"top_k\": 20}}")
    return value


def endpoint_settings(arguments: argparse.Namespace) -> EndpointSettings:
    """Raises ConfigError for settings that cannot work."""
    for option, value, variable in (
        ("--base-url", arguments.base_url, "OPENAI_BASE_URL"),
        ("--model", arguments.model, "OPENAI_MODEL"),
    ):
        if not value:
            raise ConfigError(f"{option} is not set: give it, or export {variable}")
    try:
        return EndpointSettings(
            base_url=arguments.base_url,
            model=arguments.model,
            api_key=os.environ.get(arguments.api_key_env, "").strip() or None,
            concurrency=arguments.concurrency,
            request_timeout_s=arguments.request_timeout,
            max_retries=arguments.max_retries,
            max_tokens_field=arguments.max_tokens_field,
            send_seed=not arguments.no_seed,
            extra_body=arguments.extra_body,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def environment_config(overrides: Sequence[str], episodes: int) -> PPOTrainerConfig:
    """The typed configuration of the environment and its rollout; raises ConfigError where it cannot work."""
    at_a_time = f"data.val_batch_size={max(1, min(episodes, _MOST_AT_A_TIME))}"
    config = to_dataclass(compose_config([*_DEFAULTS, at_a_time, *overrides]))
    problems = [line for rule in (check_names, check_numbers, check_sampling, check_paths) for line in rule(config)]
    problems += at_least(
        [
            ("--episodes", episodes),
            ("data.val_batch_size", config.data.val_batch_size),
            ("env.max_steps", config.env.max_steps),
            ("data.max_response_length", config.data.max_response_length),
            ("actor_rollout_ref.rollout.val_kwargs.n", config.actor_rollout_ref.rollout.val_kwargs.n),
        ]
    )
    if problems:
        raise ConfigError("\n  ".join(problems))
    return config


class Results:
    """The folder of an evaluation: finished blocks, and at the end the files that validation in training writes.

    Raises:
        ConfigError: it holds blocks that were played with other settings, or is no folder that can be written to.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self._parts = folder / "parts"
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder} is no folder that can be written to: {error}") from error
        file = folder / SETTINGS_FILE
        text = json.dumps(settings, indent=1, sort_keys=True)
        if not file.is_file() or not any(self._parts.iterdir()):
            file.write_text(text, encoding="utf-8")
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--out {folder}: {file} is damaged ({error}); give another folder") from error
        changed = sorted(key for key in {*before, *settings} if before.get(key) != json.loads(text).get(key))
        if changed:
            raise ConfigError(
                f"--out {folder} holds episodes that were played with other settings ({', '.join(changed)}); give "
                "another folder, or remove it to start again"
            )

    def load(self, block: int, size: int) -> DataProto | None:
        """The rows of a finished block of ``size`` tasks; None where it has not been played."""
        file = self._parts / f"{block}-{size}.pkl"
        return DataProto.load_from_disk(file) if file.is_file() else None

    def keep(self, block: int, size: int, rows: DataProto) -> None:
        """Keep a block, whole or not at all."""
        partial = self._parts / f"{block}-{size}.pkl.tmp"
        rows.save_to_disk(partial)
        os.replace(partial, self._parts / f"{block}-{size}.pkl")

    def write(
        self,
        rows: DataProto,
        failed: Sequence[tuple[str, str]],
        metrics: dict[str, float],
        split_digest: str | None,
    ) -> None:
        """``episodes/0.jsonl``, a line a step, and ``validation/0.json``, success by task and metrics."""
        from verl.trainer.ppo import dumps
        from verl.trainer.ppo.validation import success_by_task

        dumps.write_rollout(str(self.folder / "episodes"), rows, TextCodec(), STEP)
        dumps.write_validation(self.folder, success_by_task(rows, failed), metrics, STEP, split_digest)


def evaluate(
    settings: EndpointSettings, config: PPOTrainerConfig, episodes: int, folder: Path
) -> dict[str, float]:
    """Play ``episodes`` validation tasks and write the results to ``folder``; returns the ``val/*`` metrics.

    Ray must be running.

    Raises:
        ConfigError: the folder holds results of other settings.
        ValueError: the endpoint refuses, or the environment has fewer tasks.
    """
    from agent_system.environments.env_manager import make_envs
    from agent_system.multi_turn_rollout import TrajectoryCollector
    from verl.trainer.ppo.batching import concat_rows

    results = Results(folder, _identity(settings, config))
    write_resolved(to_yaml(config), folder)
    envs, val_envs = make_envs(config)
    client = EndpointClient(settings)
    try:
        if val_envs is None:
            raise ConfigError(f"env.env_name={config.env.env_name} has no validation environment to play in")
        collector = TrajectoryCollector(config=config, tokenizer=TextCodec())
        parts: list[DataProto] = []
        failed: list[tuple[str, str]] = []  # task and source of episodes that have no rows
        for block, size in enumerate(_blocks(episodes, config.data.val_batch_size)):
            rows = results.load(block, size)
            if rows is None:
                shell = _shell(size, block, config)
                rows = collector.multi_turn_loop(shell, client, val_envs, is_train=False)
                rows.meta_info.pop("rollout_metrics", None)
                rows.batch["token_level_scores"] = _scores(rows)
                results.keep(block, size, rows)
            failed += rows.meta_info.pop("failed_without_rows", [])
            parts.append(rows)
            logger.info("after block %d: %s", block + 1, summary(_metrics(concat_rows(parts), failed)))
        rows = concat_rows(parts)
        metrics = _metrics(rows, failed)
        metrics |= {f"endpoint/{key}": value for key, value in client.statistics().items()}
        results.write(rows, failed, metrics, getattr(envs, "split_digest", None))
        return metrics
    finally:
        client.close()
        for manager in filter(None, (val_envs, envs)):
            manager.close()


def _identity(settings: EndpointSettings, config: PPOTrainerConfig) -> dict[str, Any]:
    """What has to be the same for episodes to belong together; limits and concurrency are free to change."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "base_url": settings.base_url,
        "model": settings.model,
        "extra_body": dict(settings.extra_body),
        "env": config.env.to_dict(),
        "val_kwargs": rollout.val_kwargs.to_dict(),
        "seed": rollout.seed,
        "send_seed": settings.send_seed,
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
        "val_batch_size": config.data.val_batch_size,
    }


def _blocks(episodes: int, at_a_time: int) -> list[int]:
    """Tasks of each block: full ones, then the rest."""
    full, rest = divmod(episodes, at_a_time)
    return [at_a_time] * full + ([rest] if rest else [])


def _shell(size: int, block: int, config: PPOTrainerConfig) -> DataProto:
    """What says how many tasks a block has."""
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    names = np.full(size * sampling.n, config.env.env_name, dtype=object)
    shell = DataProto.from_dict(non_tensors={"data_source": names})
    shell.meta_info.update(global_steps=STEP, validate=True, do_sample=sampling.do_sample, batch_index=block)
    return shell


def _scores(rows: DataProto) -> Any:
    """The episode's reward on the last character of each response, ``(rows, longest response)`` float32."""
    from agent_system.reward_manager import EpisodeRewardManager

    return EpisodeRewardManager(tokenizer=TextCodec(), num_examine=0)(rows)


def _metrics(rows: DataProto, failed: Sequence[tuple[str, str]]) -> dict[str, float]:
    from verl.trainer.ppo.validation import validation_metrics

    return validation_metrics(rows, rows.non_tensor_batch["episode_rewards"], failed)


def summary(metrics: dict[str, float]) -> str:
    """Success ± standard error and the other success figures."""
    error = metrics.get("val/success_rate_stderr")
    spread = f" ± {error:.3f}" if error is not None else ""
    others = [
        f"{key.removeprefix('val/')} {value:.3f}"
        for key, value in metrics.items()
        if "success_rate" in key and key not in ("val/success_rate", "val/success_rate_stderr")
    ]
    parts = [f"success {metrics['val/success_rate']:.3f}{spread} over {metrics['val/episodes']:.0f} episodes", *others]
    parts.append(f"{metrics['val/episode_length']:.1f} steps an episode")
    parts.append(f"{metrics['val/action_valid_ratio']:.3f} of the actions valid")
    return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = parser().parse_intermixed_args(argv)
    stopped = "Stopped; the same command goes on with the blocks that are not finished."
    return exit_code(lambda: _evaluate(arguments), stopped)


def _evaluate(arguments: argparse.Namespace) -> None:
    settings = endpoint_settings(arguments)
    config = environment_config(arguments.overrides, arguments.episodes)
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in arguments.model)
    folder = (arguments.out or Path("outputs/prompt_agent") / name).expanduser().absolute()
    metrics = _with_ray(settings, config, arguments.episodes, folder)
    sys.stdout.write(f"{arguments.model}: {summary(metrics)}\nwritten to {folder}\n")


def _with_ray(
    settings: EndpointSettings, config: PPOTrainerConfig, episodes: int, folder: Path
) -> dict[str, float]:
    import ray

    from verl.trainer.main_ppo import start_ray
    from verl.utils.external_lib import import_external_lib

    import_external_lib(config.actor_rollout_ref.model.external_lib)
    start_ray(config)
    with sigterm_stops():
        try:
            return evaluate(settings, config, episodes, folder)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sys.exit(main())
