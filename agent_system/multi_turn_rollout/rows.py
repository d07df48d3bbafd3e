"""From episodes to the rows the trainer learns from, and from rows to records a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agent_system.multi_turn_rollout.episode import Episode, Turn
from verl.protocol import DataProto
from verl.utils.row_arrays import object_array


def build_rows(
    episodes: Sequence[Episode],
    success: dict[str, np.ndarray],
    pad_token_id: int,
    meta_info: dict[str, Any],
) -> DataProto:
    """One row per turn, ordered by episode and then by step.

    Args:
        episodes: those that count, in the order of the batch; E of them.
        success: figures of each episode, ``(E,)`` each. An array of another length has no figure per
            episode; its mean stands in every row.
        pad_token_id: fills responses up to the longest one.
        meta_info: of the result.

    Returns:
        N rows with ``responses``, ``response_mask`` int64 and ``rollout_log_probs`` float32 ``(N, longest response)``,
        ``prompt_length`` int64 ``(N,)``, ragged ``prompt_ids`` and the columns of the record (uid, traj_uid, …).
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    owner = np.repeat(np.arange(len(episodes)), [len(episode.turns) for episode in episodes])
    columns: dict[str, np.ndarray] = {
        "prompt_ids": object_array(turn.prompt_ids for turn in turns),
        "anchor_obs": object_array(turn.anchor for turn in turns),
        "finish_reason": object_array(turn.finish_reason for turn in turns),
        "rewards": np.array([turn.reward for turn in turns], dtype=np.float32),
        "is_action_valid": _flags(turns, "is_action_valid"),
        "is_action_admissible": _flags(turns, "is_action_admissible"),
        "step_index": np.array([i for e in episodes for i in range(len(e.turns))], dtype=np.int64),
        "uid": _text([episode.uid for episode in episodes], owner),
        "traj_uid": _text([episode.traj_uid for episode in episodes], owner),
        "task_id": _text([episode.task_id for episode in episodes], owner),
        "data_source": _text([episode.data_source for episode in episodes], owner),
        "policy_lag": np.array([episode.lag for episode in episodes], dtype=np.int64)[owner],
        "is_baseline": np.array([episode.baseline for episode in episodes], dtype=bool)[owner],
        "episode_rewards": _figures([episode.reward for episode in episodes], owner),
        "episode_lengths": _figures([len(episode.turns) for episode in episodes], owner),
        "tool_callings": _figures([episode.tool_callings for episode in episodes], owner),
        "prompt_overflow": np.array([episode.prompt_overflow for episode in episodes], dtype=bool)[owner],
    }
    if turns[0].prompt_text is not None:
        columns["prompt_text"] = object_array(turn.prompt_text for turn in turns)
    for name, values in success.items():
        if name in columns:
            raise ValueError(f"success_evaluator gave a figure the name {name!r}, which a column has; use another name")
        each = values if len(values) == len(episodes) else np.full(len(episodes), np.mean(values))
        columns[name] = _figures(each, owner)
    return DataProto.from_dict(tensors=_tensors(turns, pad_token_id), non_tensors=columns, meta_info=meta_info)


def episodes_to_records(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """Whole episodes as plain data, one record each, for a jsonl file.

    Every record has the episode's ids and totals (success figures among them) and ``steps``: for each step the
    prompt and response text, the reward, the two judgements of the action and why the response ended.
    """
    columns = batch.non_tensor_batch
    prompts = tokenizer.batch_decode([ids.tolist() for ids in columns["prompt_ids"]])
    lengths = batch.batch["response_mask"].sum(-1).tolist()
    responses = [ids[:length] for ids, length in zip(batch.batch["responses"].tolist(), lengths, strict=True)]
    texts = tokenizer.batch_decode(responses)
    figures = [key for key in columns if "success_rate" in key]
    records: dict[str, dict[str, Any]] = {}
    for row in range(len(batch)):
        record = records.setdefault(
            columns["traj_uid"][row],
            {key: columns[key][row] for key in ("uid", "traj_uid", "task_id", "data_source") if key in columns}
            | {"reward": float(columns["episode_rewards"][row]), "length": int(columns["episode_lengths"][row])}
            | {key: float(columns[key][row]) for key in figures}
            | {"steps": []},
        )
        record["steps"].append(
            {
                "prompt": prompts[row],
                "response": texts[row],
                "reward": float(columns["rewards"][row]),
                "is_action_valid": bool(columns["is_action_valid"][row]),
                "is_action_admissible": bool(columns["is_action_admissible"][row]),
                "finish_reason": columns["finish_reason"][row],
            }
        )
    return list(records.values())


def _tensors(turns: Sequence[Turn], pad_token_id: int) -> dict[str, torch.Tensor]:
    lengths = np.array([len(turn.response_ids) for turn in turns], dtype=np.int64)
    shape = (len(turns), int(lengths.max()))  # (rows, longest response)
    present = np.arange(shape[1]) < lengths[:, None]
    responses = np.full(shape, pad_token_id, dtype=np.int64)
    log_probs = np.zeros(shape, dtype=np.float32)
    responses[present] = np.concatenate([turn.response_ids for turn in turns])
    log_probs[present] = np.concatenate([turn.log_probs for turn in turns])
    return {
        "responses": torch.from_numpy(responses),
        "response_mask": torch.from_numpy(present.astype(np.int64)),
        "rollout_log_probs": torch.from_numpy(log_probs),
        "prompt_length": torch.tensor([len(turn.prompt_ids) for turn in turns], dtype=torch.int64),
    }


def _flags(turns: Sequence[Turn], key: str) -> np.ndarray:
    return np.array([bool(turn.info.get(key, True)) for turn in turns], dtype=bool)


def _text(values: Sequence[str], owner: np.ndarray) -> np.ndarray:
    return object_array(values)[owner]


def _figures(values: Sequence[float] | np.ndarray, owner: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)[owner]
