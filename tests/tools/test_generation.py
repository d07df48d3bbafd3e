"""Offline generation and scoring: what is asked, what comes back, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.workers.tiny import save_tiny_model, save_tiny_tokenizer
from verl.trainer.config import ConfigError
from verl.trainer.config.schema.offline import EvaluationConfig, GenerationConfig
from verl.trainer.config.tool import compose_tool, sigterm_stops, tool_main
from verl.trainer.main_eval import read_rows, run_eval, score_rows, summarise
from verl.trainer.main_generation import check, collect, prompt_ids, read_table, write_table
from verl.workers.rollout.base import RolloutResult

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
FILES = ["model.path=m", "data.path=in.parquet", "data.output_path=out.parquet", "trainer.device=cpu"]


def generation(*overrides: str) -> GenerationConfig:
    return compose_tool(GenerationConfig, "generation", [*FILES, *overrides])


def write_prompts(folder: Path, **columns: list[Any]) -> str:
    pq.write_table(pa.table(columns), folder / "in.parquet")
    return str(folder / "in.parquet")


class Backwards:
    """A generation client: the response is the prompt backwards, one request a slice. Ray's own store holds it."""

    num_replicas = 1

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self._open: list[Any] = []

    def begin(self) -> dict[str, float]:
        return {}

    end = begin

    def submit(self, replica: int, requests: Sequence[Any], max_steps: int) -> Any:
        import ray

        self.requests += requests
        self._open += requests
        if not self._open:  # a call that waited behind the last answer
            return ray.put([])
        request = self._open.pop()
        ids = request.prompt_ids[::-1].copy()
        return ray.put([RolloutResult(request.request_id, ids, np.zeros(len(ids), np.float32), "stop")])

    def receive(self, call: Any) -> list[RolloutResult]:
        import ray

        return ray.get(call)

    def check(self) -> None:
        """Nothing goes wrong here."""


def test_every_prompt_gets_its_samples_in_order_with_seeds_of_their_own(local_ray):
    config = generation("data.n_samples=3", "trainer.progress_bar=false")
    prompts = [np.array([row, row + 1], dtype=np.int32) for row in range(5)]
    client = Backwards()
    results = collect(config, client, prompts)
    assert [[r.response_ids.tolist() for r in row] for row in results] == [[[row + 1, row]] * 3 for row in range(5)]
    assert [r.request_id for r in results[4]] == ["4-0", "4-1", "4-2"]
    seeds = [request.seed for request in client.requests]
    assert len(set(seeds)) == 15
    again = Backwards()
    collect(config, again, prompts)
    assert [request.seed for request in again.requests] == seeds


def test_prompts_are_rendered_and_cut_as_asked(tmp_path):
    save_tiny_tokenizer(tmp_path)
    from verl.utils.tokenizer import hf_tokenizer

    tokenizer = hf_tokenizer(str(tmp_path))
    tokenizer.chat_template = TEMPLATE
    chats = ["w2 w3", [{"role": "user", "content": "w4 w5 w6"}]]
    assert [ids.tolist() for ids in prompt_ids(chats, tokenizer, generation())] == [[2, 3], [4, 5, 6]]
    short = ["rollout.prompt_length=2"]
    assert prompt_ids(chats, tokenizer, generation(*short, "data.truncation=left"))[1].tolist() == [5, 6]
    with pytest.raises(ConfigError, match="row 1 has a prompt of 3 tokens, rollout.prompt_length is 2"):
        prompt_ids(chats, tokenizer, generation(*short))
    for chat in ([], None, [{"role": "user", "content": None}], [{"role": "user"}], ["w2"]):
        with pytest.raises(ConfigError, match="row 0 is neither a chat nor a text"):
            prompt_ids([chat], tokenizer, generation())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.n_sample=3", "data.n_samples"),
        ("rollout.name=sglang", "rollout.name expects one of vllm, hf"),
        ("data.n_samples=0", "data.n_samples=0 has to be at least 1"),
        ("rollout.do_sample=false", "5 greedy responses are all the same"),
        ("rollout.tensor_model_parallel_size=3", "does not divide the 8 ranks"),
        ("model.path=null", "model.path is not set"),
        ("model.path=/nowhere", "model.path=/nowhere: there is no folder"),
        ("model.external_lib=missing.py", "model.external_lib=missing.py: there is no file"),
        ("rollout.temperature=-1", "rollout.temperature must be 0"),
        ("rollout.top_p=3", "rollout.top_p must lie in"),
        ("rollout.top_k=-5", "rollout.top_k must be -1"),
        ("rollout.temperature=inf", "rollout.temperature=inf has to be finite"),
        ("rollout.max_num_seqs=0", "rollout.max_num_seqs=0 has to be at least 1"),
        ("rollout.max_model_len=8", "rollout.max_model_len=8 is less than rollout.prompt_length"),
        ("rollout.gpu_memory_utilization=1.5", r"rollout.gpu_memory_utilization=1.5 has to lie in \(0, 1\]"),
        ("trainer.step_timeout=0", "trainer.step_timeout=0 has to be at least 1"),
        ("trainer.start_timeout=inf", "trainer.start_timeout=inf has to be finite"),
        ("ray_init.num_cpus=0", "ray_init.num_cpus=0 has to be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_named(override, said):
    with pytest.raises(ConfigError, match=said):
        check(generation(override))


def test_keys_of_the_reference_are_taken():
    config = generation("+actor.strategy=fsdp", "rollout.load_format=dummy_dtensor", "+rollout.min_p=0.1")
    assert config.rollout.extra == {"min_p": 0.1}
    check(config)


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        read_table(str(tmp_path / "none.parquet"), "data.path", "prompt")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="is no readable parquet file"):
        read_table(str(tmp_path / "bad.parquet"), "data.path")
    name = write_prompts(tmp_path, question=["a"])
    with pytest.raises(ConfigError, match="has no column 'prompt'; it has question"):
        read_table(name, "data.path", "prompt")
    with pytest.raises(ConfigError, match="holds no rows"):
        read_table(write_prompts(tmp_path, prompt=[]), "data.path", "prompt")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_table(pa.table({"a": [1]}), tmp_path / "file" / "out.parquet")


def test_an_output_that_could_not_be_written_ends_the_run_before_it_begins(tmp_path):
    (tmp_path / "file").write_text("")
    for path, said in ((tmp_path, "is a folder; give a file"), (tmp_path / "file" / "a" / "b", "is a file, not a folder")):
        with pytest.raises(ConfigError, match=said):
            check(generation(f"data.output_path={path}"))
        with pytest.raises(ConfigError, match=said):
            run_eval(evaluation("nowhere.parquet", f"data.output_path={path}"))
    check(generation(f"data.output_path={tmp_path / 'new' / 'out.parquet'}"))


def test_a_tool_that_is_stopped_says_so_in_one_line(capsys, monkeypatch):
    @tool_main(EvaluationConfig, "evaluation")
    def stopped(config: EvaluationConfig) -> None:
        """Ctrl-C comes in the middle."""
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["evaluate"])
    with pytest.raises(SystemExit) as ended:
        stopped()
    assert ended.value.code == 130 and capsys.readouterr().err.strip() == "Stopped; nothing was written."


def test_sigterm_stops_a_tool_like_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_stops():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------ scoring


def evaluation(path: str, *overrides: str) -> EvaluationConfig:
    return compose_tool(EvaluationConfig, "evaluation", [f"data.path={path}", *overrides])


def reward_file(folder: Path, body: str) -> str:
    (folder / "reward.py").write_text(body)
    return f"custom_reward_function.path={folder / 'reward.py'}"


def test_figures_are_means_of_means_and_of_the_best_by_source():
    figures = summarise(["a", "b", "a"], [[1.0, 0.0], [0.25], [0.0, 0.0]])
    assert figures == {
        "test_score/a": 0.25,
        "test_score/a/stderr": pytest.approx(0.25),  # standard deviation of (0.5, 0) is 0.3536, by sqrt(2)
        "test_score/a/best": 0.5,
        "test_score/a/rows": 2.0,
        "test_score/b": 0.25,
        "test_score/b/best": 0.25,
        "test_score/b/rows": 1.0,
    }


def test_the_function_sees_source_response_and_truth(tmp_path):
    name = write_prompts(
        tmp_path, data_source=["s", "t"], responses=[["4", "5"], ["6"]], reward_model=[{"ground_truth": "4"}, {"ground_truth": "7"}]
    )
    reward = reward_file(tmp_path, "def compute_score(source, text, truth, extra_info=None):\n    return {'score': float(text == truth)}\n")
    config = evaluation(name, reward)
    rows = read_rows(config)
    assert score_rows(config, rows) == [[1.0, 0.0], [0.0]]
    truthless = evaluation(write_prompts(tmp_path, data_source=["s"], responses=["4"]), reward)
    assert score_rows(truthless, read_rows(truthless)) == [[0.0]]


def test_a_function_that_fails_names_the_row(tmp_path):
    name = write_prompts(tmp_path, data_source=["s"], responses=[["4"]])
    for body, said in (("return None", "gave None"), ("return float('nan')", "gave nan"), ("return 1 / 0", "raised ZeroDivisionError"),
                       ("return '1'", "gave '1'"), ("return object()", "gave <object"), ("return {'score': {}}", "gave {}"),
                       ("import numpy; return numpy.ones(2)", "gave array"), ("raise SystemExit(0)", "raised SystemExit")):
        config = evaluation(name, reward_file(tmp_path, f"def compute_score(*parts):\n    {body}\n"))
        with pytest.raises(RuntimeError, match=rf"row 0 \(s\): the function {said}"):
            score_rows(config, read_rows(config))
    for body, said in (("raise SystemExit(0)", "cannot be imported: SystemExit: 0 .*reward.py, line 1"), ("compute_score = 3", "defines no such")):
        with pytest.raises(ConfigError, match=said):
            run_eval(evaluation(name, reward_file(tmp_path, body)))
    with pytest.raises(ConfigError, match="reward_timeout=0 has to be greater than 0"):
        run_eval(evaluation(name, "reward_timeout=0"))
    with pytest.raises(ConfigError, match="custom_reward_function.path is not set"):
        score_rows(evaluation(name), [])
    with pytest.raises(ConfigError, match="row 0 holds no list of texts"):
        read_rows(evaluation(write_prompts(tmp_path, data_source=["s"], responses=[[1]])))


# ------------------------------------------------------------------ the programs


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
@pytest.mark.recipes
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_generate_then_score(tmp_path, engine):
    model = tmp_path / "model"
    save_tiny_model(model)
    save_tiny_tokenizer(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    name = write_prompts(tmp_path, prompt=["w2 w3", "w4", "w5 w6 w7"], data_source=["s", "s", "t"])
    out = tmp_path / "out.parquet"
    common = [
        f"model.path={model}", f"data.path={name}", "trainer.device=cpu", "trainer.n_gpus_per_node=2", f"rollout.name={engine}",
        "rollout.dtype=float32", "rollout.prompt_length=16", "rollout.response_length=8", "rollout.max_num_seqs=8",
        "data.n_samples=2",
    ]  # fmt: skip
    written = []
    for number in range(2):
        done = run_module("verl.trainer.main_generation", *common, f"data.output_path={out}")
        assert done.returncode == 0, done.stderr[-3000:]
        written.append(pq.read_table(out).to_pydict())
        assert number == 0 or written[0] == written[1]  # seeds, not timing
    assert [len(responses) for responses in written[0]["responses"]] == [2, 2, 2]
    assert written[0]["prompt"] == ["w2 w3", "w4", "w5 w6 w7"]
    reward = reward_file(tmp_path, "def compute_score(source, text, truth):\n    return float(len(text.split()))\n")
    done = run_module("verl.trainer.main_eval", f"data.path={out}", reward, f"data.output_path={tmp_path / 'figures.json'}")
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    words = [[len(text.split()) for text in responses] for responses in written[0]["responses"]]
    assert figures["test_score/t"] == pytest.approx(np.mean(words[2]))
    assert figures["test_score/s"] == pytest.approx(np.mean([np.mean(words[0]), np.mean(words[1])]))


def test_the_command_line_prints_its_configuration_and_refuses_in_one_line():
    shown = run_module("verl.trainer.main_generation", "--cfg", "job", "rollout.temperature=0.3")
    assert shown.returncode == 0 and "temperature: 0.3" in shown.stdout
    refused = run_module("verl.trainer.main_eval", "data.pth=x")
    assert refused.returncode == 2
    assert refused.stderr.strip().splitlines()[-1].startswith("Configuration error: There is no setting data.pth; did you mean data.path?")
