"""The reward-model worker against a plain transformers forward of each row by itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from tests.workers.ranks import run_ranks
from tests.workers.tiny import (
    VOCABULARY,
    embedded_config,
    random_rows,
    save_tiny_model,
    save_tiny_tokenizer,
    tiny_config,
)
from verl.protocol import DataProto
from verl.workers.fsdp_workers import RewardModelWorker
from verl.workers.rows import RaggedRows

_CLASSES = {"token": AutoModelForTokenClassification, "sequence": AutoModelForSequenceClassification}


def save_judge(folder: Path, kind: str = "sequence", seed: int = 5) -> Path:
    config = tiny_config()
    config.num_labels = 1
    torch.manual_seed(seed)
    _CLASSES[kind].from_config(config).save_pretrained(folder)
    return folder


def save_other_tokenizer(folder: Path) -> None:
    """The same words under other numbers, and a template of its own."""
    words = {"<pad>": 0, "<eos>": 1, "User": 2, "Judge": 3, **{f"w{i}": VOCABULARY + 5 - i for i in range(6, VOCABULARY)}}
    core = Tokenizer(WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'User ' if m['role'] == 'user' else 'Judge ' }}{{ m['content'] }} {% endfor %}<eos>"
    )
    tokenizer.save_pretrained(folder)


def judge_config(path: Path, **changes: Any) -> Any:
    config = embedded_config("reward_model.enable=true", f"reward_model.model.path={path}").reward_model
    model = dataclasses.replace(config.model, input_tokenizer=changes.pop("input_tokenizer", None))
    return dataclasses.replace(config, model=model, **changes)


def worker_of(config: Any) -> RewardModelWorker:
    worker = RewardModelWorker(config, "cpu")
    worker.init_model(10)
    return worker


def scores_one_by_one(path: Path, kind: str, sequences: list[np.ndarray]) -> list[float]:
    """Straight through transformers; a sequence classifier is asked for its own pooled logit."""
    model = _CLASSES[kind].from_pretrained(path).eval()
    found = []
    with torch.no_grad():
        for ids in sequences:
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits
            found.append(float(logits[0, -1, 0] if kind == "token" else logits[0, 0]))
    return found


def placed(rows: DataProto, scores: list[float]) -> torch.Tensor:
    """``scores`` on the last response token of each row."""
    mask = rows.batch["response_mask"]
    matrix = torch.zeros(mask.shape)
    for row, score in enumerate(scores):
        matrix[row, int(mask[row].sum()) - 1] = score
    return matrix


def as_they_are(rows: DataProto) -> list[np.ndarray]:
    ragged = RaggedRows(rows)
    return [np.concatenate(pair) for pair in zip(ragged.prompts, ragged.responses)]


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_scores_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    path, rows = save_judge(tmp_path, kind), random_rows(7)
    output = worker_of(judge_config(path)).compute_rm_score(rows)
    assert list(output.batch.keys()) == ["rm_scores"]
    expected = placed(rows, scores_one_by_one(path, kind, as_they_are(rows)))
    torch.testing.assert_close(output.batch["rm_scores"], expected, atol=1e-5, rtol=1e-5)


def test_micro_batches_length_limit_and_empty_rows(tmp_path: Path) -> None:
    path, rows = save_judge(tmp_path), random_rows(7)
    rows.batch["response_mask"][3] = 0  # a filler
    for sizes in ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}, {"forward_max_token_len_per_gpu": 25}):
        scores = worker_of(judge_config(path, max_length=6, **sizes)).compute_rm_score(rows).batch["rm_scores"]
        expected = placed(rows, scores_one_by_one(path, "sequence", [ids[-6:] for ids in as_they_are(rows)]))
        expected[3] = 0
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_a_model_with_a_template_of_its_own_reads_the_conversation(tmp_path: Path) -> None:
    judge, policy = tmp_path / "judge", tmp_path / "policy"
    save_judge(judge)
    save_other_tokenizer(judge)
    save_tiny_tokenizer(policy)
    rows = random_rows(4)
    rows.batch["responses"].clamp_(min=6)
    responses = RaggedRows(rows).responses
    rows.non_tensor_batch["prompt_text"] = np.array([f"w{10 + i} w{20 + i}" for i in range(4)], dtype=object)
    config = judge_config(judge, input_tokenizer=str(policy))
    scores = worker_of(config).compute_rm_score(rows).batch["rm_scores"]

    def number(word: int) -> int:
        return VOCABULARY + 5 - word

    read = [
        np.array([2, number(10 + i), number(20 + i), 3, *(number(int(w)) for w in responses[i]), 1]) for i in range(4)
    ]
    expected = placed(rows, scores_one_by_one(judge, "sequence", read))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    rows.non_tensor_batch.pop("prompt_text")
    with pytest.raises(ValueError, match="input_tokenizer=null"):
        worker_of(config).compute_rm_score(rows)


def test_what_cannot_judge_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "policy")
    save_tiny_tokenizer(tmp_path / "policy")
    with pytest.raises(ValueError, match="has to be a trained reward model"):
        worker_of(judge_config(tmp_path / "policy"))
    save_judge(tmp_path / "judge")
    save_tiny_tokenizer(tmp_path / "judge")
    with pytest.raises(ValueError, match="has no chat template"):
        worker_of(judge_config(tmp_path / "judge", input_tokenizer=str(tmp_path / "policy")))


def _score_my_half(path: str) -> torch.Tensor:
    import torch.distributed as dist

    rows = random_rows(7)
    mine = rows[:5] if dist.get_rank() == 0 else rows[5:]  # different numbers of micro-batches
    config = judge_config(Path(path), use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    return worker_of(config).compute_rm_score(mine).batch["rm_scores"]


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    path = save_judge(tmp_path)
    whole = worker_of(judge_config(path)).compute_rm_score(random_rows(7)).batch["rm_scores"]
    parts = run_ranks(_score_my_half, 2, str(path))
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
