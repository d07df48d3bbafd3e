"""An endpoint over real HTTP plays an environment as the engines of training do, and writes the same files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_system.environments.base import EnvironmentManagerBase
from agent_system.environments.registry import register_environment
from examples.prompt_agent import endpoint as endpoint_module
from examples.prompt_agent.endpoint import EndpointCalls, EndpointError, EndpointSettings, TextCodec
from examples.prompt_agent.evaluate import Results, environment_config, evaluate, main, summary
from verl.trainer.config import ConfigError
from verl.utils.net_utils import get_free_port
from verl.workers.rollout.base import RolloutRequest, SamplingSettings

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["env.env_name=tellme", "env.max_steps=3", "data.val_batch_size=4", "trainer.progress_bar=false"]


class TellMe(EnvironmentManagerBase):
    """Task ``t`` asks for its own number; it is won by saying it, within three tries."""

    def __init__(self, episodes: int, config: Any) -> None:
        super().__init__(None, lambda texts: (texts, [1] * len(texts)), config)
        self._episodes, self._block = episodes, -1

    def reset(self, kwargs: Any = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        self._block += 1
        self._tasks = [self._block * self._episodes + slot for slot in range(self._episodes)]
        return self._observation(), [{} for _ in self._tasks]

    def step(self, text_actions: list[str]) -> tuple[dict[str, Any], np.ndarray, np.ndarray, list[dict[str, Any]]]:
        won = np.array([text == f"it is {task}" for text, task in zip(text_actions, self._tasks)])
        infos = [{"won": bool(one), "is_action_valid": text != ""} for one, text in zip(won, text_actions)]
        return self._observation(), won * 10.0, won, infos

    def _observation(self) -> dict[str, Any]:
        return {"text": [f"say ☂ {task}" for task in self._tasks], "image": None, "anchor": None}

    def close(self) -> None:
        """There is nothing to end."""


@register_environment("tellme")
def make_tell_me(config: Any) -> tuple[TellMe, TellMe]:
    return TellMe(1, config), TellMe(config.data.val_batch_size, config)


def own_number_if_even(prompt: str) -> str:
    task = int(prompt.split()[-1])
    return f"it is {task}" if task % 2 == 0 else "dunno"


def settings_of(endpoint: Any, **changes: Any) -> EndpointSettings:
    return replace(EndpointSettings(endpoint.base_url, "toy", max_retries=2, request_timeout_s=60.0), **changes)


def config_of(episodes: int, *overrides: str) -> Any:
    from unittest.mock import patch

    with patch("examples.prompt_agent.evaluate.check_names", lambda config: iter(())):  # tellme is no module's own
        return environment_config([*SMALL, *overrides], episodes)


def ask(settings: EndpointSettings, *prompts: str) -> tuple[list[Any], dict[str, float]]:
    """Answers in the order of ``prompts``, and the counts; without Ray."""

    async def go() -> tuple[list[Any], dict[str, float]]:
        calls = EndpointCalls(settings)
        ids = TextCodec()(prompts)["input_ids"]
        sampling = SamplingSettings(temperature=0.5, max_tokens=7)
        waiting = [RolloutRequest(str(i), np.array(p, dtype=np.int32), sampling, 40 + i) for i, p in enumerate(ids)]
        found: dict[str, Any] = {}
        while len(found) < len(prompts):
            found.update((result.request_id, result) for result in await calls.step(waiting))
            waiting = []
        await calls.close()
        return [found[str(i)] for i in range(len(prompts))], calls.counts

    return asyncio.run(asyncio.wait_for(go(), 60))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(endpoint_module, "_FIRST_WAIT_S", 0.01)


def test_a_request_carries_what_sampling_asks_for(endpoint, monkeypatch):
    endpoint.policy = lambda prompt: prompt[::-1]
    results, counts = ask(settings_of(endpoint, api_key="k", extra_body={"top_k": 4, "top_p": None}), "ä☂", "b")
    assert [TextCodec().decode(result.response_ids) for result in results] == ["☂ä", "b"]
    body = next(body for body in endpoint.requests if body["messages"][0]["content"] == "ä☂")
    assert body == {
        "model": "toy",
        "messages": [{"role": "user", "content": "ä☂"}],
        "temperature": 0.5,
        "max_tokens": 7,
        "seed": 40,
        "top_k": 4,
    }
    assert set(endpoint.keys) == {"Bearer k"} and counts["completion_tokens"] == 4
    assert "'k'" not in repr(settings_of(endpoint, api_key="k"))  # never in a log
    ask(settings_of(endpoint, send_seed=False, max_tokens_field="max_completion_tokens"), "c")
    assert endpoint.requests[-1].keys() == {"model", "messages", "temperature", "top_p", "max_completion_tokens"}
    assert endpoint.keys[-1] is None


def test_passing_failures_are_tried_again_and_no_more_than_allowed(endpoint):
    endpoint.faults = [(500, {}, "busy"), (429, {"Retry-After": "0"}, "slow down")]
    results, counts = ask(settings_of(endpoint), "a")
    assert len(endpoint.requests) == 3 and counts["retries"] == 2 and len(results) == 1
    endpoint.faults = [(503, {}, "still busy")] * 9
    with pytest.raises(EndpointError, match="failed 3 times.*HTTP 503: still busy"):
        ask(settings_of(endpoint), "a")
    assert len(endpoint.requests) == 6
    endpoint.faults = [3.0, 3.0]
    with pytest.raises(EndpointError, match="no answer within --request-timeout 0.2 s"):
        ask(settings_of(endpoint, request_timeout_s=0.2, max_retries=1), "a")
    with pytest.raises(EndpointError, match="no connection"):
        ask(EndpointSettings("http://127.0.0.1:9/v1", "toy", max_retries=0), "a")


def test_calls_are_answered_in_their_order_and_their_requests_asked_at_once(endpoint, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_REPLY_S", 30.0)
    asked, answered = [], []

    async def go() -> list[list[str]]:
        calls, may_end = EndpointCalls(settings_of(endpoint)), {"0": asyncio.Event(), "1": asyncio.Event()}

        async def answer(request: RolloutRequest) -> Any:
            asked.append(request.request_id)
            await may_end[request.request_id].wait()
            return request

        async def step(number: str) -> list[str]:
            request = RolloutRequest(number, np.zeros(1, dtype=np.int32), SamplingSettings(1.0), 0)
            found = await calls.step([request])
            answered.append(number)
            return [result.request_id for result in found]

        calls._answer = answer
        steps = [asyncio.create_task(step(number)) for number in may_end]
        while len(asked) < 2:
            await asyncio.sleep(0)
        assert asked == ["0", "1"]
        may_end["1"].set()
        await asyncio.sleep(0.1)
        assert answered == []  # the first call waits for what it found running
        may_end["0"].set()
        return await asyncio.gather(*steps)

    results = asyncio.run(asyncio.wait_for(go(), 60))
    assert [sorted(names) for names in results] == [["0", "1"], []]
    assert answered == ["0", "1"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((401, {}, "bad key"), "HTTP 401: bad key. Set the key"),
        ((400, {}, "unknown field seed"), "unknown field seed. Check --model"),
        ((200, {}, "<html>"), "answers no JSON"),
        ((200, {}, "[]"), "answers no chat completion"),
        ((200, {}, '{"choices": []}'), "answers no chat completion"),
        ((200, {}, '{"choices": [{"message": {"content": 5}}]}'), "answers no chat completion"),
        ((200, {}, '{"choices": [{"message": {"content": {"a": 1}}}]}'), "answers no chat completion"),
        ((200, {}, '{"choices": [{"message": {"content": [{"type": "image"}]}}]}'), "answers no chat completion"),
        ((200, {}, "[" * 100_000), "answers no JSON"),
    ],
)
def test_lasting_failures_end_at_once_with_what_the_server_said(endpoint, fault, said):
    endpoint.faults = [fault]
    with pytest.raises(EndpointError) as caught:
        ask(settings_of(endpoint), "a")
    assert said in str(caught.value) and len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "half \ud800 a character"}, "half ? a character"),  # which no file could hold
    ],
)
@pytest.mark.parametrize("usage", ["none", [1], {"prompt_tokens": "three"}])
def test_unusual_answers_are_read(endpoint, message, text, usage):
    endpoint.faults = [(200, {}, json.dumps({"choices": [{"message": message}], "usage": usage}))]
    results, counts = ask(settings_of(endpoint), "a")
    assert TextCodec().decode(results[0].response_ids) == text and counts["prompt_tokens"] == 0


def test_a_key_that_no_header_could_carry_is_refused(endpoint):
    for key in ("abc\n", "schlüssel"):
        with pytest.raises(ValueError, match="--api-key-env"):
            settings_of(endpoint, api_key=key)


def test_an_evaluation_that_is_stopped_says_how_to_go_on(capsys, monkeypatch):
    def interrupted(*_: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr("examples.prompt_agent.evaluate._with_ray", interrupted)
    assert main(["--base-url", "http://127.0.0.1:9/v1", "--model", "toy", "env.env_name=Webshop"]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out .*file is no folder"):
        Results(tmp_path / "file", {})


def test_no_more_requests_are_in_flight_than_allowed(endpoint):
    three_at_once = threading.Event()

    def answer(prompt: str) -> str:
        if endpoint.most_in_flight == 3:
            three_at_once.set()
        assert three_at_once.wait(60)
        time.sleep(0.05)  # in which a fourth would arrive
        return prompt

    endpoint.policy = answer
    ask(settings_of(endpoint, concurrency=3), *"abcdefghij")
    assert endpoint.most_in_flight == 3


def test_episodes_are_counted_written_and_played_once(local_ray, endpoint, tmp_path):
    endpoint.policy = own_number_if_even
    config = config_of(10)
    metrics = evaluate(settings_of(endpoint), config, 10, tmp_path)
    # tasks 0 … 9 in blocks of 4, 4 and 2: the even half is won
    assert metrics["val/success_rate"] == 0.5 and metrics["val/episodes"] == 10
    assert metrics["val/success_rate_stderr"] == pytest.approx((10 * 0.25 / 9) ** 0.5 / 10**0.5)
    assert metrics["val/episode_length"] == (5 * 1 + 5 * 3) / 10  # won at once, or three tries
    assert len(endpoint.requests) == 20 and metrics["endpoint/prompt_tokens"] == 60
    assert "success 0.500 ± 0.167 over 10 episodes" in summary(metrics)

    lines = [json.loads(line) for line in (tmp_path / "episodes" / "0.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    first = lines[0]
    assert (first["input"], first["output"], first["score"], first["step"]) == ("say ☂ 0", "it is 0", 10.0, 0)
    assert {"uid", "traj_uid", "step_index", "rewards", "is_action_valid", "finish_reason"} <= first.keys()
    written = json.loads((tmp_path / "validation" / "0.json").read_text())
    assert written["metrics"]["val/success_rate"] == 0.5 and len(written["success_by_task"]) == 10

    endpoint.policy = lambda prompt: "never asked again"
    again = evaluate(settings_of(endpoint), config, 10, tmp_path)
    assert len(endpoint.requests) == 20 and again["val/success_rate"] == 0.5
    with pytest.raises(ConfigError, match=r"other settings \(model\)"):
        evaluate(settings_of(endpoint, model="another"), config, 10, tmp_path)
    with pytest.raises(ConfigError, match=r"other settings \(max_prompt_length, send_seed\)"):
        shorter = config_of(10, "data.max_prompt_length=500")
        evaluate(settings_of(endpoint, send_seed=False), shorter, 10, tmp_path)


def test_an_evaluation_that_broke_off_goes_on(local_ray, endpoint, tmp_path):
    endpoint.policy = own_number_if_even
    config = config_of(8, "env.max_steps=1")
    endpoint.faults = [0.0] * 4 + [(401, {}, "out of credit")] * 4
    with pytest.raises(EndpointError, match="out of credit"):
        evaluate(settings_of(endpoint), config, 8, tmp_path)
    assert not (tmp_path / "validation").exists()
    endpoint.faults.clear()
    # the toy environment starts again with task 0, so the block that is missing plays tasks 0 … 3 once more
    assert evaluate(settings_of(endpoint), config, 8, tmp_path)["val/success_rate"] == 0.5
    asked = [body["messages"][0]["content"] for body in endpoint.requests]
    assert [asked.count(f"say ☂ {task}") for task in range(4)] == [2] * 4


def test_settings_that_cannot_work_end_with_one_line(capsys, monkeypatch):
    for variable in ("OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    url = ["--base-url", "http://x/v1", "--model", "m"]
    for arguments, said in (
        ([], "--base-url is not set"),
        (["--base-url", "http://x/v1"], "--model is not set"),
        (["--base-url", "x", "--model", "m"], "http://"),
        ([*url, "--concurrency", "0"], "--concurrency 0"),
        ([*url, "--episodes", "0"], "--episodes=0"),
        ([*url, "env.max_step=3"], "env.max_steps"),
        ([*url, "env.env_name=chess"], "env.env_name=chess"),
        ([*url, "env.webshop.data_dir=/nowhere"], "env.webshop.data_dir=/nowhere"),
    ):
        assert main(arguments) == 2, arguments
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.recipes
def test_vllms_own_server_plays_webshop(tmp_path):
    pytest.importorskip("vllm")
    model = ROOT / "agent_system/environments/env_package/webshop/embedded_model"
    port = get_free_port()
    # beside a config.json of a Qwen2 model, AutoTokenizer puts Qwen2's text splitting in the place of the file's own
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, tokenizer)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--tokenizer",
        str(tokenizer), "--served-model-name",
        "embedded", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16",
        "--host", "127.0.0.1", "--port", str(port), "--no-enable-chunked-prefill",
    ]  # fmt: skip
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        played = subprocess.run(
            [
                sys.executable, "-m", "examples.prompt_agent.evaluate", "--base-url", f"http://127.0.0.1:{port}/v1",
                "--model", "embedded", "--episodes", "16", "--out", str(tmp_path / "out"),
                "env.env_name=Webshop", "env.max_steps=15", "data.max_response_length=64", "data.max_prompt_length=4000",
                "actor_rollout_ref.rollout.val_kwargs.temperature=0.4", "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert played.returncode == 0, played.stderr[-3000:]
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
        log.close()
    metrics = json.loads((tmp_path / "out" / "validation" / "0.json").read_text())["metrics"]
    assert metrics["val/episodes"] == 16
    assert metrics["val/action_valid_ratio"] > 0.9  # the model has learnt the form of an answer
    assert metrics["val/success_rate"] > 0.1
