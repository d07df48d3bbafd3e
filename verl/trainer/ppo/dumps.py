"""What a run writes for people to read: rollouts, validation results, sampled generations."""
from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.validation import Sample, choose_samples
from verl.utils.fs import write_atomically
from verl.utils.logger.metrics_file import FILE_NAME, drop_lines_beyond, move_aside, plain_value, read_lines
from verl.utils.tracking import GENERATIONS_FILE

_EXTRA_COLUMNS = (
    "uid", "traj_uid", "task_id", "step_index", "rewards", "is_action_valid", "is_action_admissible", "finish_reason"
)  # fmt: skip


def write_rollout(folder: str | None, rows: DataProto, tokenizer: Any, step: int) -> None:
    """``{folder}/{step}.jsonl``, one line a row: input, output, score, step, and the row's own figures."""
    if not folder:
        return
    scores = rows.batch["token_level_scores"].sum(-1).tolist()
    columns = {key: rows.non_tensor_batch[key] for key in _EXTRA_COLUMNS if key in rows.non_tensor_batch}
    lines = (
        json.dumps(
            {"input": prompt, "output": response, "score": score, "step": step}
            | {key: _plain(values[i]) for key, values in columns.items()},
            ensure_ascii=False,
        )
        for i, (prompt, response, score) in enumerate(zip(*decode(rows, tokenizer), scores))
    )
    _write_lines(Path(folder).expanduser() / f"{step}.jsonl", lines)


def write_validation(
    run_dir: Path, successes: dict[str, float], metrics: dict[str, float], step: int, split_digest: str | None = None
) -> None:
    """``{run_dir}/validation/{step}.json``: success of every task by name, beside the metrics and the tasks' split."""
    content = {"step": step, "split_digest": split_digest, "metrics": metrics, "success_by_task": successes}
    _write_json(run_dir / "validation" / f"{step}.json", content)


def claim_run_folder(run_dir: Path, resume_step: int, val_only: bool) -> None:
    """Leave in the run folder the validations and generations of the run that begins or goes on, as with its metrics.

    Args:
        run_dir: the run folder.
        resume_step: step of the checkpoint the run goes on from, beyond which they are removed; 0 for a new run, which
            moves those of an earlier one aside (``validation.1``, ``generations.1.jsonl``).
        val_only: the run is an evaluation, which is nobody's continuation.

    Raises:
        ValueError: an evaluation in the folder of a run that has gone on since, whose metrics would be lost.
    """
    folder, generations = run_dir / "validation", run_dir / GENERATIONS_FILE
    if val_only:
        later = [line["step"] for line in read_lines(run_dir / FILE_NAME)[0] if line["step"] > resume_step]
        if later:
            raise ValueError(
                f"trainer.run_dir={run_dir} holds the metrics of a run up to step {later[-1]}, and this evaluation is "
                f"of step {resume_step}; give it a folder of its own, such as trainer.run_dir=eval_{resume_step}"
            )
    elif resume_step:
        for file in folder.glob("*.json"):
            if file.stem.isdigit() and int(file.stem) > resume_step:
                file.unlink()
        if generations.is_file():
            drop_lines_beyond(generations, resume_step)
    else:
        for place in filter(Path.exists, (folder, generations)):
            move_aside(place)


def samples(rows: DataProto, tokenizer: Any, count: int) -> list[Sample]:
    """``count`` steps of the validation episodes, the same ones every time (none for 0)."""
    if count <= 0:
        return []
    prompts, responses = decode(rows, tokenizer)
    rewards = rows.non_tensor_batch["episode_rewards"]
    every = [Sample(prompt, response, float(reward)) for prompt, response, reward in zip(prompts, responses, rewards)]
    return choose_samples(every, count)


def decode(rows: DataProto, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Prompt and response text of every row."""
    lengths = rows.batch["response_mask"].sum(-1).tolist()
    responses = [ids[:length] for ids, length in zip(rows.batch["responses"].tolist(), lengths)]
    prompts = [ids.tolist() for ids in rows.non_tensor_batch["prompt_ids"]]
    return tokenizer.batch_decode(prompts), tokenizer.batch_decode(responses)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(plain_value(content), indent=1, allow_nan=False))


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines) + "\n")
