"""The data-parallel reward model: one score for each row, read off at the row's last token.

The model sees the ids of prompt and response as they are, or, where it speaks another template than the policy, the
conversation rendered anew: the environment's text as the user's turn, the response's text as the answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from verl.models.heads import forward_row_scores
from verl.models.packing import pack_rows
from verl.protocol import DataProto
from verl.utils.fsdp_utils import reshard
from verl.workers.reward_model.base import BasePPORewardModel
from verl.workers.rows import RaggedRows
from verl.workers.update_loop import MicroBatchPlan

_NOTHING = np.zeros(0, dtype=np.int32)
_FILLER = np.zeros(1, dtype=np.int32)


class DataParallelRewardModel(BasePPORewardModel):
    """Scores of packed rows.

    Args:
        config: ``reward_model`` of the config.
        module: a classification model with one label and the packed head of ``verl.models.heads``.
        tokenizer: its own, to render conversations with; None: rows are judged as token ids.
        policy_tokenizer: reads the responses; needed beside ``tokenizer``.
        device: where the model computes. None: where its parameters are, which must not be offloaded then.
    """

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        tokenizer: Any | None = None,
        policy_tokenizer: Any | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config)
        assert tokenizer is None or policy_tokenizer is not None, "responses are read with the policy's tokenizer"
        self.module = module
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        rows = config.micro_batch_size_per_gpu
        if rows is None and config.micro_batch_size is not None:
            rows = max(1, config.micro_batch_size // dist.get_world_size())
        self.plan = MicroBatchPlan(config.use_dynamic_bsz, config.forward_max_token_len_per_gpu, rows, "reward_model.")
        self.device = device or next(module.parameters()).device

    @torch.no_grad()
    def compute_rm_score(self, data: DataProto) -> torch.Tensor:
        """Scores, float32 ``(N, R)`` on the host; a row without a response has none. Collective."""
        self.module.eval()
        rows = RaggedRows(data)
        sequences = self.sequences(data, rows)
        values = torch.zeros(len(rows))
        for group in self._micro_batches(sequences):
            chosen = [sequences[i] for i in group] or [_FILLER]
            packed = pack_rows(chosen, [_NOTHING] * len(chosen), self.device)
            scores = forward_row_scores(self.module, packed).cpu()
            if group:
                values[torch.tensor(group)] = scores
        reshard(self.module)
        lengths = torch.tensor([len(response) for response in rows.responses])
        scored = torch.nonzero(lengths > 0).squeeze(-1)
        result = torch.zeros(len(rows), rows.width)
        result[scored, lengths[scored] - 1] = values[scored]
        return result

    def sequences(self, data: DataProto, rows: RaggedRows) -> list[np.ndarray]:
        """What the model reads of each row, N int arrays; of one longer than ``max_length`` its end, with the answer.

        Raises:
            ValueError: conversations are to be rendered and the rows hold no ``prompt_text``.
        """
        if self.tokenizer is None:
            ids = [np.concatenate(pair) for pair in zip(rows.prompts, rows.responses)]
        else:
            ids = self._rendered(data, rows)
        limit = self.config.max_length
        return ids if limit is None else [one[-limit:] for one in ids]

    def _rendered(self, data: DataProto, rows: RaggedRows) -> list[np.ndarray]:
        if "prompt_text" not in data.non_tensor_batch:
            raise ValueError(
                "the rows hold no prompt_text to render for the reward model: use reward_model.model.input_tokenizer="
                "null if it reads the policy's token ids"
            )
        answers = self.policy_tokenizer.batch_decode(rows.responses, skip_special_tokens=True)
        chats = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
                tokenize=False,
            )
            for prompt, answer in zip(data.non_tensor_batch["prompt_text"], answers)
        ]
        encoded = self.tokenizer(chats, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def _micro_batches(self, sequences: list[np.ndarray]) -> list[list[int]]:
        """Positions in groups, the same number of groups on every rank (FSDP gathers parameters in each)."""
        groups = self.plan.split(np.array([len(one) for one in sequences], dtype=np.int64))
        count = torch.tensor(len(groups), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return groups + [[] for _ in range(int(count) - len(groups))]
