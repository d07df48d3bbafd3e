"""Score the responses of a parquet file with a reward function of your own.

::

    python -m verl.trainer.main_eval data.path=responses.parquet \\
        custom_reward_function.path=reward.py custom_reward_function.name=compute_score

The function is called as ``f(data_source, response, ground_truth)``, with ``extra_info=`` where it takes that, and
returns a number or a dict with ``score``. For each data source the figures are, over its rows: the mean of the row's
mean score with its standard error, and the mean of the row's best score. The settings are in
``config/evaluation.yaml``.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.trainer.config.errors import ConfigError
from verl.trainer.config.schema.offline import EvaluationConfig
from verl.trainer.config.tool import output_problem, tool_main
from verl.trainer.main_generation import read_table

logger = logging.getLogger(__name__)

_ROWS_PER_TASK = 16
_EXTRA = "extra_info"


@tool_main(EvaluationConfig, "evaluation")
def main(config: EvaluationConfig) -> None:
    """Score the responses of a parquet file; every key is in verl/trainer/config/evaluation.yaml."""
    figures = run_eval(config)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


def run_eval(config: EvaluationConfig) -> dict[str, float]:
    """``test_score/{source}``, ``…/stderr``, ``…/best``, ``…/rows`` for every data source. Starts and ends Ray.

    Raises:
        ConfigError: files, columns or a function that cannot be used.
        RuntimeError: the function raised, or gave something else than a finite number.
        TimeoutError: it did not finish a row within ``reward_timeout``.
    """
    output = config.data.output_path
    if output and (problem := output_problem("data.output_path", output)):
        raise ConfigError(problem)
    if not 0 < config.reward_timeout < math.inf:
        raise ConfigError(f"reward_timeout={config.reward_timeout:g} has to be greater than 0 and finite, in seconds")
    rows = read_rows(config)
    load_reward(config)  # a mistake in the file is told here, not by a worker
    import ray

    from verl.utils.lost_actors import unusable_ray_folder
    from verl.utils.process_sessions import children_in_own_sessions

    if not ray.is_initialized():
        if not os.environ.get("RAY_ADDRESS") and (unusable := unusable_ray_folder()):
            raise ConfigError(unusable)
        own = {} if os.environ.get("RAY_ADDRESS") else {"address": "local", "num_cpus": config.ray_init.num_cpus}
        with children_in_own_sessions():
            ray.init(**own, include_dashboard=False, logging_level=logging.WARNING)
    try:
        scores = _score(config, rows)
    finally:
        ray.shutdown()
    figures = summarise([row["data_source"] for row in rows], scores)
    if output:
        from verl.utils.fs import write_atomically

        path = Path(output).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(figures, indent=1))
        except OSError as error:
            raise ConfigError(f"data.output_path={output} cannot be written: {error}") from error
    return figures


def read_rows(config: EvaluationConfig) -> list[dict[str, Any]]:
    """``data_source``, ``responses`` (list of text), ``ground_truth`` and ``extra_info`` of every row.

    Raises:
        ConfigError: the file, a column or a row cannot be used.
    """
    data = config.data
    table = read_table(data.path, "data.path", data.response_key, data.data_source_key)
    rows = []
    for number, row in enumerate(table.to_pylist()):
        responses = row[data.response_key]
        responses = [responses] if isinstance(responses, str) else responses
        if not responses or not all(isinstance(one, str) for one in responses):
            raise ConfigError(f"data.response_key={data.response_key}: row {number} holds no list of texts")
        truth = row.get(data.reward_model_key)
        rows.append(
            {
                "number": number,
                "data_source": str(row[data.data_source_key]),
                "responses": responses,
                "ground_truth": truth.get("ground_truth") if isinstance(truth, dict) else truth,
                _EXTRA: row.get(_EXTRA),
            }
        )
    return rows


def load_reward(config: EvaluationConfig) -> Callable[..., Any]:
    """The function of ``custom_reward_function``; ConfigError where it is not set or cannot be loaded."""
    from verl.trainer.ppo.reward import get_custom_reward_fn

    if not config.custom_reward_function.path:
        raise ConfigError(
            "custom_reward_function.path is not set: give a python file with a function "
            f"{config.custom_reward_function.name}(data_source, response, ground_truth)"
        )
    try:
        function = get_custom_reward_fn(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert function is not None, "the path is set"
    return function


def score_rows(config: EvaluationConfig, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The score of every response of every row; runs in a Ray worker.

    Raises:
        RuntimeError: the function raised or gave something else than a finite number; the row is named.
    """
    function = load_reward(config)
    takes_extra = _takes_extra(function)
    scores = []
    for row in rows:
        extra = {_EXTRA: row[_EXTRA]} if takes_extra else {}
        scores.append([_one_score(function, row, response, extra) for response in row["responses"]])
    return scores


def _one_score(function: Callable[..., Any], row: dict[str, Any], response: str, extra: dict[str, Any]) -> float:
    where = f"custom_reward_function.path: row {row['number']} ({row['data_source']})"
    try:
        result = function(row["data_source"], response, row["ground_truth"], **extra)
    except (Exception, SystemExit) as error:
        raise RuntimeError(f"{where}: the function raised {error!r}") from error
    value = result.get("score") if isinstance(result, dict) else result
    try:
        score = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # of numbers, NumPy and torch
        score = math.nan
    if not math.isfinite(score):
        raise RuntimeError(f"{where}: the function gave {value!r}, not a finite number")
    return score


def _takes_extra(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return _EXTRA in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _score(config: EvaluationConfig, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Scores of all rows in their order, a few rows to a Ray task."""
    import ray
    from tqdm import tqdm

    task = ray.remote(max_retries=0)(score_rows)
    starts = range(0, len(rows), _ROWS_PER_TASK)
    refs = {task.remote(config, rows[start : start + _ROWS_PER_TASK]): start for start in starts}
    found: dict[int, list[list[float]]] = {}
    waiting = list(refs)
    with tqdm(total=len(rows), desc="rows", mininterval=0.5) as bar:
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=config.reward_timeout)
            if not ready:
                raise TimeoutError(
                    f"custom_reward_function finished no row within reward_timeout={config.reward_timeout:g} s "
                    f"({len(found) * _ROWS_PER_TASK} of {len(rows)} rows are done)"
                )
            for ref in ready:
                found[refs[ref]] = ray.get(ref)
                bar.update(len(found[refs[ref]]))
    return [scores for start in starts for scores in found[start]]


def summarise(sources: Sequence[str], scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Figures by data source; see ``run_eval``.

    Args:
        sources: of each row.
        scores: of each row's responses, one or more.
    """
    by_source: dict[str, list[Sequence[float]]] = defaultdict(list)
    for source, row in zip(sources, scores, strict=True):
        by_source[source].append(row)
    figures: dict[str, float] = {}
    for source, rows in sorted(by_source.items()):
        means = np.array([np.mean(row) for row in rows], dtype=np.float64)
        key = f"test_score/{source}"
        figures[key] = float(means.mean())
        if len(rows) > 1:
            figures[f"{key}/stderr"] = float(means.std(ddof=1) / np.sqrt(len(rows)))
        figures[f"{key}/best"] = float(np.mean([max(row) for row in rows]))
        figures[f"{key}/rows"] = float(len(rows))
    return figures


if __name__ == "__main__":
    main()
