"""The rules of a configuration about what a rollout collects and how it is paid: groups, baselines, penalties."""

from __future__ import annotations

from collections.abc import Iterator

from verl.trainer.config.schema import PPOTrainerConfig
from verl.trainer.config.validate_files import local_folder

_FILTER = "algorithm.filter_groups"
_OVERLONG = "reward_model.overlong_buffer"


def check_groups(config: PPOTrainerConfig) -> Iterator[str]:
    """How many tasks a rollout starts, and what becomes of groups that are too many."""
    data, filters, rollout = config.data, config.algorithm.filter_groups, config.actor_rollout_ref.rollout
    started, wanted = data.gen_batch_size or data.train_batch_size, data.train_batch_size
    if started != wanted and not filters.enable:
        yield (
            f"data.gen_batch_size={started} differs from data.train_batch_size={wanted}, the number of tasks that a "
            f"step learns from: without {_FILTER}.enable=true nothing chooses among them; use data.gen_batch_size=null"
        )
    elif started < wanted:
        yield (
            f"data.gen_batch_size={started} is less than the data.train_batch_size={wanted} tasks that a step learns "
            "from; use data.gen_batch_size=null or more"
        )
    if not filters.enable:
        return
    if filters.max_num_gen_batches < 1:
        yield f"{_FILTER}.max_num_gen_batches={filters.max_num_gen_batches} has to be at least 1"
    if config.env.rollout.n < 2:
        yield (
            f"{_FILTER}.enable=true drops groups whose episodes do not differ, and "
            f"env.rollout.n={config.env.rollout.n} makes groups of one; use env.rollout.n=8"
        )
    if filters.surplus != "carry":
        return
    if started >= 2 * wanted:
        yield (
            f"{_FILTER}.surplus=carry with data.gen_batch_size={started} could carry a whole batch of "
            f"data.train_batch_size={wanted}; use data.gen_batch_size={2 * wanted - 1} or less, or surplus=cut"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"{_FILTER}.surplus=carry learns from carried rows by the log-probabilities they were sampled with, and "
            f"those of actor_rollout_ref.rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k} are not the policy's; "
            "use top_p=1.0 and top_k=-1, or surplus=cut"
        )


def check_overlong(config: PPOTrainerConfig) -> Iterator[str]:
    """The soft penalty of long responses."""
    buffer, limit = config.reward_model.overlong_buffer, config.data.max_response_length
    if not buffer.enable:
        return
    if not 0 < buffer.len <= limit:
        yield (
            f"{_OVERLONG}.len={buffer.len} has to lie between 1 and data.max_response_length={limit}: the fine grows "
            f"over the last that many tokens; use {max(1, limit // 5)}"
        )
    if buffer.penalty_factor < 0:
        yield f"{_OVERLONG}.penalty_factor={buffer.penalty_factor:g} has to be at least 0, such as 1.0"


def check_reward_model(config: PPOTrainerConfig) -> Iterator[str]:
    """The model whose scores are the rewards."""
    judge, key = config.reward_model, "reward_model.model.path"
    if not judge.enable:
        return
    if config.custom_reward_function.path is not None:
        yield (
            "reward_model.enable=true and custom_reward_function.path exclude each other: either gives a row its whole "
            "reward; leave one of them out"
        )
    if judge.max_length is not None and judge.max_length < 1:
        yield f"reward_model.max_length={judge.max_length} has to be at least 1, or null for no limit"
    if judge.use_dynamic_bsz and judge.forward_max_token_len_per_gpu < 1:
        budget = judge.forward_max_token_len_per_gpu
        yield f"reward_model.forward_max_token_len_per_gpu={budget} has to be at least 1, such as 16384"
    path = judge.model.path
    if not path:
        yield f"{key} is not set: reward_model.enable=true needs a classification model with one label"
        return
    folder = local_folder(path)
    if folder is not None and not (folder / "config.json").is_file():
        yield f"{key}={path}: there is no config.json in {folder}; use a folder in Hugging Face format, or a hub name"
