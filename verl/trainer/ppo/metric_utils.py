"""What a training step and a validation report, as name -> number.

The functions take both forms of a batch: rows (`response_mask` and `prompt_length`) and the padded form
(`attention_mask` over prompt and response). Rows without a response token are fillers and count nowhere.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gigpo.groups import factorize, first_of_each

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)

# Phases that work on prompt and response tokens alike; `gen` is charged to response tokens.
PHASES_OF_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
EPISODE_COLUMNS = {"episode_rewards": "reward", "episode_lengths": "length", "tool_callings": "tool_call_count"}


def reduce_metrics(metrics: dict[str, list[Any]]) -> dict[str, Any]:
    """Deprecated: use `verl.utils.metric.reduce_metrics`."""
    from verl.utils.metric import reduce_metrics as reduce

    warnings.warn("use verl.utils.metric.reduce_metrics", DeprecationWarning, stacklevel=2)
    return reduce(metrics)


# ------------------------------------------------------------------------------------------- a training step


def _compute_response_info(batch: DataProto) -> dict[str, torch.Tensor]:
    """`response_mask` (rows, response_length), and `prompt_length`, `response_length` (rows,) in tokens, float."""
    tensors = batch.batch
    if "attention_mask" in tensors:
        width = tensors["responses"].shape[-1]
        prompt_length = tensors["attention_mask"][:, :-width].sum(dim=-1)
        response_mask = tensors["attention_mask"][:, -width:]
    else:
        response_mask = tensors["response_mask"]
        prompt_length = tensors["prompt_length"]
    return {
        "response_mask": response_mask,
        "prompt_length": prompt_length.float(),
        "response_length": response_mask.sum(dim=-1).float(),
    }


def compute_data_metrics(
    batch: DataProto,
    use_critic: bool = True,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> dict[str, float]:
    """Scores, advantages, lengths and episodes of a training batch.

    Args:
        batch: rows with `token_level_scores`, `token_level_rewards`, `advantages`, `returns` (and `values`), all
            (rows, response_length), and, where there are episodes, the columns of `episode_metrics`.
        use_critic: report the critic's values and their explained variance.
        max_prompt_length, max_response_length: the limits that `clip_ratio` compares to; None takes the widths of the
            padded form, and for rows the engine's word that a response was cut (`finish_reason`).

    Returns:
        `critic/{score,rewards,advantages,returns}/{mean,max,min}` (score and rewards are sums of a row and contain
        penalties), with a critic `critic/values/*` and `critic/vf_explained_var`;
        `{response,prompt}_length/{mean,max,min,clip_ratio}`; and `episode_metrics`.
    """
    info = _compute_response_info(batch)
    real = info["response_length"] > 0  # (rows,)
    if not bool(real.any()):
        logger.warning("no row of the batch has a response token: no data metrics")
        return {}
    valid = info["response_mask"].bool()
    tensors = batch.batch
    metrics: dict[str, float] = {}
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        metrics.update(_spread(f"critic/{name}", tensors[key].sum(dim=-1)[real]))
    for name in ("advantages", "returns"):
        metrics.update(_spread(f"critic/{name}", tensors[name][valid]))
    if use_critic:
        values, returns = tensors["values"][valid], tensors["returns"][valid]
        metrics.update(_spread("critic/values", values))
        correction = min(1, values.numel() - 1)
        unexplained = torch.var(returns - values, correction=correction)
        unexplained = unexplained / (torch.var(returns, correction=correction) + 1e-5)
        metrics["critic/vf_explained_var"] = float(1.0 - unexplained)
    metrics.update(_length_metrics(batch, info, real, max_prompt_length, max_response_length))
    metrics.update(episode_metrics(batch.non_tensor_batch, real.cpu().numpy()))
    return metrics


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _length_metrics(
    batch: DataProto,
    info: Mapping[str, torch.Tensor],
    real: torch.Tensor,
    max_prompt_length: int | None,
    max_response_length: int | None,
) -> dict[str, float]:
    """`{response,prompt}_length/{mean,max,min,clip_ratio}` in tokens, clip_ratio as the share of rows at the limit."""
    tensors = batch.batch
    prompt, response = info["prompt_length"][real], info["response_length"][real]
    if "attention_mask" in tensors:
        width = tensors["responses"].shape[-1]
        max_response_length = max_response_length or width
        max_prompt_length = max_prompt_length or tensors["attention_mask"].shape[-1] - width
    metrics = {**_spread("response_length", response), **_spread("prompt_length", prompt)}
    if max_response_length is not None:
        metrics["response_length/clip_ratio"] = float((response == max_response_length).float().mean())
    elif "finish_reason" in batch.non_tensor_batch:
        cut = batch.non_tensor_batch["finish_reason"][real.cpu().numpy()] == "length"
        metrics["response_length/clip_ratio"] = float(np.mean(cut))
    if max_prompt_length is not None:
        metrics["prompt_length/clip_ratio"] = float((prompt == max_prompt_length).float().mean())
    return metrics


def episode_metrics(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, float]:
    """Statistics over trajectories, each counting once however many steps it has.

    Args:
        columns: arrays (N,): `traj_uid`; `episode_rewards`, `episode_lengths`, `tool_callings`, and any column whose
            name contains `success_rate`, with the value of the row's trajectory. NaN in a success column means that it
            does not apply to that trajectory.
        rows: (N,) bool, the rows to look at.

    Returns:
        `episode/{reward,length,tool_call_count}/{mean,max,min}`, and `episode/<name>` for every success column: its
        mean.
    """
    if "traj_uid" not in columns:
        return {}
    chosen = np.flatnonzero(rows)
    first = chosen[first_of_each(factorize(columns["traj_uid"][chosen]))]
    if first.size == 0:
        return {}
    metrics: dict[str, float] = {}
    for column, name in EPISODE_COLUMNS.items():
        if column in columns:
            metrics.update(_spread(f"episode/{name}", torch.from_numpy(columns[column][first].astype(np.float64))))
    for column in columns:
        if "success_rate" in column:
            values = columns[column][first].astype(np.float64)
            applies = ~np.isnan(values)
            if applies.any():
                metrics[f"episode/{column}"] = float(values[applies].mean())
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/<phase>` in seconds, and `timing_per_token_ms/<phase>` in milliseconds a token.

    `gen` is divided by response tokens, `PHASES_OF_ALL_TOKENS` by prompt and response tokens.
    """
    info = _compute_response_info(batch)
    responses = info["response_length"]
    response_tokens = float(responses.sum())
    all_tokens = response_tokens + float(info["prompt_length"][responses > 0].sum())
    tokens_of = {"gen": response_tokens, **dict.fromkeys(PHASES_OF_ALL_TOKENS, all_tokens)}
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, tokens in tokens_of.items():
        if name in timing_raw and tokens > 0:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000.0 / tokens
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds, and tokens per second and GPU.

    Args:
        batch: with `meta_info["global_token_num"]`, prompt and response tokens of every row.
        timing_raw: seconds; `step` is the whole step.
        n_gpus: ranks of the run.
    """
    total = sum(batch.meta_info["global_token_num"])
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / (seconds * n_gpus),
    }


# ------------------------------------------------------------------------------------------- validation


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of statistics of random subsets, drawn with replacement.

    Args:
        data: observations, numbers or anything the reducers take.
        subset_size: observations per draw.
        reduce_fns: each maps a draw to a number.
        n_bootstrap: number of draws.
        seed: of the draws.

    Returns:
        (mean, standard deviation) over draws for each reducer. With [0, 1], subset size 2 and max, about (0.75, 0.43).

    Raises:
        ValueError: no data.
    """
    if len(data) == 0:
        raise ValueError("bootstrap_metric needs at least one observation")
    draws = np.random.default_rng(seed).integers(len(data), size=(n_bootstrap, subset_size))
    results = np.array([[reduce([data[i] for i in draw]) for reduce in reduce_fns] for draw in draws], dtype=np.float64)
    return [(float(mean), float(std)) for mean, std in zip(results.mean(axis=0), results.std(axis=0), strict=True)]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value under `val_key` of the first item that carries the most frequent vote (the earliest of equals)."""
    winner, _ = Counter(item[vote_key] for item in data).most_common(1)[0]
    return next(item[val_key] for item in data if item[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str], sample_inputs: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """Validation scores per data source, over several responses to each prompt.

    Args:
        data_sources, sample_inputs: (samples,) source and prompt of each sample; samples of equal prompt belong
            together.
        infos_dict: variable -> (samples,) values; variables of text are skipped, except that `pred` serves as the vote.
        seed: of the bootstrap.

    Returns:
        source -> variable -> statistic, a mean over prompts. With N responses to a prompt: `mean@N`, and for N > 1
        `std@N` and, for k = 2, 4, … and N, `best@k/{mean,std}`, `worst@k/{mean,std}` and, with `pred`,
        `maj@k/{mean,std}` (bootstrapped).
    """
    samples: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, prompt in enumerate(zip(data_sources, sample_inputs, strict=True)):
        samples[prompt].append(position)
    votes = infos_dict.get("pred")
    gathered: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (source, _), positions in samples.items():
        for variable, column in infos_dict.items():
            values = [column[i] for i in positions]
            if isinstance(values[0], str):
                continue
            chosen = None if votes is None else [votes[i] for i in positions]
            for name, value in _prompt_statistics(values, chosen, seed).items():
                gathered.setdefault(source, {}).setdefault(variable, {}).setdefault(name, []).append(value)
    return {
        source: {
            variable: {name: float(np.mean(values)) for name, values in statistics.items()}
            for variable, statistics in variables.items()
        }
        for source, variables in gathered.items()
    }


def _prompt_statistics(values: Sequence[float], votes: Sequence[Any] | None, seed: int) -> dict[str, float]:
    """The statistics of one prompt's responses, see `process_validation_metrics`."""
    count = len(values)
    statistics = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return statistics
    statistics[f"std@{count}"] = float(np.std(values))
    for k in _subset_sizes(count):
        best, worst = bootstrap_metric(values, k, [np.max, np.min], seed=seed)
        statistics[f"best@{k}/mean"], statistics[f"best@{k}/std"] = best
        statistics[f"worst@{k}/mean"], statistics[f"worst@{k}/std"] = worst
        if votes is not None:
            ballots = [{"val": value, "pred": vote} for value, vote in zip(values, votes, strict=True)]
            majority = [lambda drawn: calc_maj_val(drawn, vote_key="pred", val_key="val")]
            ((statistics[f"maj@{k}/mean"], statistics[f"maj@{k}/std"]),) = bootstrap_metric(
                ballots, k, majority, seed=seed
            )
    return statistics


def _subset_sizes(count: int) -> list[int]:
    """Powers of two from 2 below `count`, and `count` itself."""
    sizes = []
    size = 2
    while size < count:
        sizes.append(size)
        size *= 2
    return [*sizes, count]
