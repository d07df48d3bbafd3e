"""The padded form of prompts, rows and rollouts, for code written against verl-agent's collector.

Nothing on the trainer's own path uses it: there rows are ragged. Here every prompt is left-padded to
``data.max_prompt_length`` (P) and every response right-padded to ``data.max_response_length`` (R), and a rollout is a
list of per-episode lists of row dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agent_system.multi_turn_rollout.prompt_encoder import PromptEncoder, truncate
from agent_system.multi_turn_rollout.utils import to_list_of_dict
from verl.protocol import DataProto
from verl.utils.row_arrays import object_array

RowDict = dict[str, Any]
Rollout = tuple[
    list[list[RowDict]], np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray, np.ndarray
]  # rows of each episode, rewards, lengths, success figures, traj_uids, tool calls

_EPISODE_COLUMNS = ("episode_rewards", "episode_lengths", "tool_callings")


def padded_prompt(ids: np.ndarray, max_length: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and ``position_ids``, int64 ``(P,)``, of one left-padded prompt."""
    input_ids = torch.full((max_length,), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(max_length, dtype=torch.int64)
    if len(ids):
        input_ids[-len(ids) :] = torch.from_numpy(ids.astype(np.int64))
        mask[-len(ids) :] = 1
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids(mask)}


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Positions counted from the first real token along the last dimension, 0 before it."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def preprocess_sample(
    encoder: PromptEncoder, config: Any, pad_token_id: int, item: int, gen_batch: DataProto, obs: Mapping[str, Any]
) -> RowDict:
    """One environment's observation as a padded prompt with its columns.

    Raises:
        ValueError: the observation has no text, or the prompt is too long and ``data.truncation`` is ``error``.
    """
    if obs.get("text") is None:
        raise ValueError("the observation has no text; prompts from images alone are not supported")
    text, data = obs["text"][item], config.data
    side = data.truncation if data.truncation in ("left", "right", "middle") else "error"
    ids = truncate(encoder.encode([text])[0], data.max_prompt_length, side)
    columns = gen_batch.non_tensor_batch
    anchors = obs["text"] if obs.get("anchor") is None else obs["anchor"]
    row = padded_prompt(ids, data.max_prompt_length, pad_token_id) | {
        "raw_prompt_ids": ids.tolist(),
        "anchor_obs": anchors[item],
        "index": columns["index"][item] if "index" in columns else item,
        "data_source": columns["data_source"][item] if "data_source" in columns else "unknown",
    }
    if data.return_raw_chat:
        row["raw_prompt"] = [{"role": "user", "content": text}]
    return row


def collate(samples: Sequence[RowDict]) -> DataProto:
    """Row dicts into rows: tensors stacked, everything else as one-dimensional object arrays."""
    columns: dict[str, torch.Tensor | np.ndarray] = {}
    for key, first in samples[0].items():
        values = [sample[key] for sample in samples]
        columns[key] = torch.stack(values) if isinstance(first, torch.Tensor) else object_array(values)
    return DataProto.from_single_dict(columns)


def padded_rows(rows: DataProto, max_prompt_length: int, max_response_length: int, pad_token_id: int) -> DataProto:
    """The padded form of N ragged rows.

    Returns:
        ``prompts`` ``(N, P)``, ``responses`` ``(N, R)``, ``input_ids``, ``attention_mask``, ``position_ids``
        ``(N, P+R)`` int64 and ``rollout_log_probs`` ``(N, R)`` float32 (-1 where there is no token), with all columns
        but ``prompt_ids`` kept.
    """
    prompts = [padded_prompt(ids, max_prompt_length, pad_token_id) for ids in rows.non_tensor_batch["prompt_ids"]]
    prompt_ids = torch.stack([prompt["input_ids"] for prompt in prompts])
    response_mask = _widen(rows.batch["response_mask"], max_response_length, 0)
    responses = _widen(rows.batch["responses"], max_response_length, pad_token_id)
    log_probs = _widen(rows.batch["rollout_log_probs"], max_response_length, 0.0)
    mask = torch.cat([torch.stack([prompt["attention_mask"] for prompt in prompts]), response_mask], dim=-1)
    tensors = {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=-1),
        "attention_mask": mask,
        "position_ids": _reference_positions(mask, max_response_length),
        "rollout_log_probs": torch.where(response_mask.bool(), log_probs, -1.0),
    }
    columns = {key: values for key, values in rows.non_tensor_batch.items() if key != "prompt_ids"}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info=dict(rows.meta_info))


def as_rollout(rows: DataProto) -> Rollout:
    """Rows grouped into episodes, with the figures of each episode beside them."""
    columns = rows.non_tensor_batch
    names, first = np.unique(columns["traj_uid"].astype(str), return_index=True)
    first = first[np.argsort(first)]
    episodes: dict[str, list[RowDict]] = {columns["traj_uid"][row]: [] for row in first}
    success = {key: columns[key][first] for key in columns if "success_rate" in key}
    for row in to_list_of_dict(rows):
        own = {key: value for key, value in row.items() if key not in (*_EPISODE_COLUMNS, *success)}
        episodes[row["traj_uid"]].append(own | {"active_masks": True})
    assert len(episodes) == len(names), "every episode has a name of its own"
    rewards, lengths, calls = (columns[key][first] for key in _EPISODE_COLUMNS)
    return list(episodes.values()), rewards, lengths, success, object_array(episodes), calls


def gather(
    total_batch_list: Sequence[Sequence[RowDict]],
    episode_rewards: np.ndarray,
    episode_lengths: np.ndarray,
    success: Mapping[str, np.ndarray],
    traj_uid: np.ndarray,
    tool_callings: np.ndarray,
) -> DataProto:
    """The active rows of a rollout as one batch, each with the figures of its own episode.

    A success figure that does not exist for every episode stands in every row as its mean.
    """
    samples = []
    for episode, rows in enumerate(total_batch_list):
        figures = {
            "episode_rewards": episode_rewards[episode],
            "episode_lengths": episode_lengths[episode],
            "tool_callings": tool_callings[episode],
        }
        for key, values in success.items():
            figures[key] = values[episode] if len(values) == len(total_batch_list) else np.mean(values)
        for row in rows:
            assert row["traj_uid"] == traj_uid[episode], "rows and figures are of different episodes"
            if row["active_masks"]:
                samples.append({**row, **figures})
    return collate(samples)


def _widen(values: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    missing = width - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing), value=fill) if missing > 0 else values


def _reference_positions(mask: torch.Tensor, response_length: int) -> torch.Tensor:
    """Positions that go on counting over the response, its padding included, as verl-agent has them."""
    prompt = position_ids(mask[:, :-response_length])
    return torch.cat([prompt, prompt[:, -1:] + torch.arange(1, response_length + 1)], dim=-1)
