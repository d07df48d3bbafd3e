"""The reward of an episode, placed on the last response token of each of its steps."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto

logger = logging.getLogger(__name__)

_EXAMINE_PROBABILITY = 0.1


class EpisodeRewardManager:
    """Token-level scores from episode rewards.

    Args:
        tokenizer: decodes the samples that are logged.
        num_examine: samples logged at most of each data source; each row is considered with probability 0.1.
        normalize_by_length: divide the episode reward by the number of steps.
        compute_score: the user's own score of a row instead of the episode reward, called as
            ``compute_score(data_source=…, solution_str=…, ground_truth=None, extra_info=…)`` with the response text and
            the row's figures; it returns a finite number, or a dict with one as ``score``.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        normalize_by_length: bool = False,
        compute_score: Callable[..., float] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.normalize_by_length = normalize_by_length
        self.compute_score = compute_score
        self._random = random.Random(0)
        self._examined: Counter[str] = Counter()

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Scores of all rows.

        Args:
            data: rows with ``responses`` and ``response_mask``, or with the ``attention_mask`` of prompt and response
                together (the padded form); scores that are already there (``rm_scores``) are returned as they are.

        Returns:
            float32 ``(rows, response_length)``, zero but for the last response token of each row; with ``return_dict``
            ``{"reward_tensor": that, "reward_extra_info": {}}``.

        Raises:
            ValueError: the user's own score of a row is no finite number; its trajectory is named.
        """
        scores = data.batch["rm_scores"] if "rm_scores" in data.batch.keys() else self._scores(data)
        return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores

    def _scores(self, data: DataProto) -> torch.Tensor:
        responses = data.batch["responses"]
        mask = _response_mask(data)
        lengths = mask.sum(-1)
        scores = torch.zeros(responses.shape, dtype=torch.float32)  # (rows, response_length)
        rows = torch.nonzero(lengths > 0).squeeze(-1)
        scores[rows, lengths[rows] - 1] = self._row_scores(data, lengths)[rows]
        self._examine(data, scores.sum(-1), lengths)
        return scores

    def _row_scores(self, data: DataProto, lengths: torch.Tensor) -> torch.Tensor:
        columns = data.non_tensor_batch
        if self.compute_score is not None:
            values = np.array([self._own_score(data, row, int(lengths[row])) for row in range(len(data))])
        else:
            values = columns["episode_rewards"].astype(np.float32)
        if self.normalize_by_length:
            values = values / columns["episode_lengths"].astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    def _own_score(self, data: DataProto, row: int, length: int) -> float:
        assert self.compute_score is not None, "only called with a score function"
        columns = data.non_tensor_batch
        extra = {key: values[row] for key, values in columns.items() if key not in ("prompt_ids", "anchor_obs")}
        score = self.compute_score(
            data_source=_source(columns, row),
            solution_str=self._response_text(data, row, length),
            ground_truth=None,
            extra_info=extra,
        )
        score = score.get("score") if isinstance(score, dict) else score
        try:
            value = float(score)
        except (TypeError, ValueError):
            value = math.nan
        if isinstance(score, (str, bytes)) or not math.isfinite(value):
            trajectory = columns["traj_uid"][row] if "traj_uid" in columns else f"row {row}"
            raise ValueError(
                f"custom_reward_function gave {score!r} for {trajectory}, not a finite number: it has to return one "
                "for every row"
            )
        return value

    def _examine(self, data: DataProto, scores: torch.Tensor, lengths: torch.Tensor) -> None:
        """Logs a few rows as text."""
        if self.num_examine <= 0:
            return
        for row in range(len(data)):
            source = _source(data.non_tensor_batch, row)
            if self._examined[source] >= self.num_examine or self._random.random() >= _EXAMINE_PROBABILITY:
                continue
            self._examined[source] += 1
            logger.info(
                "[%s] prompt: %s\nresponse: %s\nscore: %g",
                source,
                self._prompt_text(data, row),
                self._response_text(data, row, int(lengths[row])),
                scores[row],
            )

    def _response_text(self, data: DataProto, row: int, length: int) -> str:
        return self.tokenizer.decode(data.batch["responses"][row, :length].tolist(), skip_special_tokens=False)

    def _prompt_text(self, data: DataProto, row: int) -> str:
        if "prompt_ids" in data.non_tensor_batch:
            ids = data.non_tensor_batch["prompt_ids"][row].tolist()
        else:
            prompts = data.batch["prompts"]
            kept = data.batch["attention_mask"][row, : prompts.shape[-1]].bool()
            ids = prompts[row][kept].tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _response_mask(data: DataProto) -> torch.Tensor:
    """``(rows, response_length)``: 1 on response tokens, from either form of rows."""
    if "response_mask" in data.batch.keys():
        return data.batch["response_mask"]
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :]


def _source(columns: dict[str, np.ndarray], row: int) -> str:
    return str(columns["data_source"][row]) if "data_source" in columns else "unknown"
