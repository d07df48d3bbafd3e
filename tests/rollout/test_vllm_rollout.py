"""vLLM itself on CPU, float32: tokens and log-probs are those of transformers, weights arrive, requests do not disturb each
other. All checks run in one process that keeps the engine; a check is a function with asserts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.rollout import tiny
from verl.workers.rollout.base import RolloutEngine, SamplingSettings, run_to_completion
from verl.workers.sharding_manager import HybridEngine

pytest.importorskip("vllm")

STATE: dict[str, object] = {}


@pytest.fixture(scope="module")
def engine_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny.Ranks]:
    folder = tiny.save_config(tmp_path_factory.mktemp("tied"))
    ranks = tiny.Ranks(1)
    try:
        ranks(build_engine, "engine", folder, True)
        yield ranks
    finally:
        ranks.close()


def build_engine(name: str, folder: str, tied: bool) -> None:
    from verl.workers.rollout.vllm_rollout import VLLMRollout

    before = torch.get_rng_state()
    engine = VLLMRollout(tiny.settings(folder))
    assert torch.equal(torch.get_rng_state(), before), "building the engine must not move the trainer's generator"
    model = tiny.build_model(seed=1, tied=tied)
    hybrid = HybridEngine(model, engine, device="cpu", dtype=torch.float32)
    hybrid.begin_rollout()
    STATE.update({name: (model, engine, hybrid)})


def tied_engine() -> tuple[torch.nn.Module, RolloutEngine, HybridEngine]:
    return STATE["engine"]


# -- generation ----------------------------------------------------------------------------------------------------------


def check_greedy() -> None:
    model, engine, _ = tied_engine()
    for request, result in zip(batch := tiny.requests(6, tiny.GREEDY), sorted_results(engine, batch)):
        assert result.response_ids.tolist() == tiny.greedy_tokens(model, request.prompt_ids, 24)


def sorted_results(engine: RolloutEngine, batch: list) -> list:
    results = {result.request_id: result for result in run_to_completion(engine, batch)}
    return [results[request.request_id] for request in batch]


def test_greedy_tokens_are_those_of_transformers(engine_process: tiny.Ranks) -> None:
    engine_process(check_greedy)


def check_sampled_log_probs() -> None:
    model, engine, _ = tied_engine()
    for temperature in (1.0, 0.7, 1.6):
        batch = tiny.requests(8, SamplingSettings(temperature=temperature, max_tokens=32))
        for request, result in zip(batch, sorted_results(engine, batch)):
            ours = tiny.log_probs_of(model, request.prompt_ids, result.response_ids, temperature)
            np.testing.assert_allclose(result.log_probs, ours, atol=1e-4)


def test_log_probs_are_at_the_sampling_temperature(engine_process: tiny.Ranks) -> None:
    engine_process(check_sampled_log_probs)


def check_alone_or_together() -> None:
    _, engine, _ = tied_engine()
    batch = tiny.requests(6, tiny.SAMPLED)
    together = sorted_results(engine, batch)
    alone = [sorted_results(engine, [request])[0] for request in batch]
    for one, other in zip(together, alone):
        assert one.response_ids.tolist() == other.response_ids.tolist()
    reseeded = sorted_results(engine, tiny.requests(6, tiny.SAMPLED, first_seed=100))
    assert any(a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(together, reseeded))


def test_a_seed_gives_its_tokens_alone_or_in_a_batch(engine_process: tiny.Ranks) -> None:
    engine_process(check_alone_or_together)


def check_joining() -> None:
    _, engine, _ = tied_engine()
    batch = tiny.requests(6, tiny.SAMPLED)
    expected = sorted_results(engine, batch)
    finished = engine.step(batch[:2], 5)
    assert not finished and engine.has_unfinished()
    finished += engine.step(batch[2:4], 3)
    finished += engine.step(batch[4:], 1000)
    assert not engine.has_unfinished() and engine.step([], 10) == []
    by_id = {result.request_id: result for result in finished}
    for request, result in zip(batch, expected):
        assert by_id[request.request_id].response_ids.tolist() == result.response_ids.tolist()


def test_requests_may_join_midway(engine_process: tiny.Ranks) -> None:
    engine_process(check_joining)


def check_ends() -> None:
    _, engine, _ = tied_engine()
    steps = engine.stats()["steps"]
    towards_the_end = {"logit_bias": {tiny.EOS: 12.0}}
    results = sorted_results(engine, tiny.requests(12, SamplingSettings(1.0, max_tokens=150, extra=towards_the_end)))
    assert {result.finish_reason for result in results} <= {"stop", "length"}
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert len(stopped) > 6
    for result in stopped:
        assert result.response_ids[-1] == tiny.EOS and tiny.EOS not in result.response_ids[:-1]
        assert len(result.log_probs) == len(result.response_ids)
    ignoring = SamplingSettings(1.0, max_tokens=150, ignore_eos=True, extra=towards_the_end)
    assert {len(result.response_ids) for result in sorted_results(engine, tiny.requests(12, ignoring))} == {150}
    assert engine.stats()["steps"] > steps


def test_responses_end_with_the_end_token_or_at_their_length(engine_process: tiny.Ranks) -> None:
    engine_process(check_ends)


def check_sampling_keys() -> None:
    model, engine, _ = tied_engine()
    batch = tiny.requests(6, SamplingSettings(temperature=1.0, top_k=2, max_tokens=16))
    for request, result in zip(batch, sorted_results(engine, batch)):
        raw = tiny.log_probs_of(model, request.prompt_ids, result.response_ids, 1.0)
        assert (result.log_probs >= raw - 1e-4).all(), "log-probs are renormalised over the two tokens kept"
    narrow = SamplingSettings(temperature=1.0, max_tokens=8, extra={"allowed_token_ids": [7, 8]})
    for result in sorted_results(engine, tiny.requests(3, narrow)):
        assert set(result.response_ids.tolist()) <= {7, 8}
    with pytest.raises(ValueError, match="rollout.tempo is not a sampling parameter"):
        engine.step(tiny.requests(1, SamplingSettings(temperature=1.0, extra={"tempo": 1})), 1)
    assert not engine.has_unfinished()


def test_top_k_and_keys_of_the_engine(engine_process: tiny.Ranks) -> None:
    engine_process(check_sampling_keys)


def check_refusals_and_abort() -> None:
    _, engine, _ = tied_engine()
    good, long, foreign = tiny.requests(3, tiny.GREEDY)
    long.prompt_ids = np.full(tiny.MAX_MODEL_LEN, 5, dtype=np.int32)
    foreign.prompt_ids = np.array([tiny.VOCABULARY], dtype=np.int32)
    for bad, words in ((long, "max_prompt_length"), (foreign, "vocabulary")):
        with pytest.raises(ValueError, match=words):
            engine.step([good, bad], 1)
        assert not engine.has_unfinished(), "nothing of a refused bunch was added"
    engine.step([good], 3)
    engine.abort_all()
    assert not engine.has_unfinished()
    assert len(sorted_results(engine, [good])[0].response_ids) == 24


def test_refused_requests_and_abort(engine_process: tiny.Ranks) -> None:
    engine_process(check_refusals_and_abort)


# -- weights -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def train_a_little(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std())


def check_update(name: str) -> None:
    model, engine, hybrid = STATE[name]
    batch = tiny.requests(5, tiny.GREEDY)
    before = [result.response_ids.tolist() for result in sorted_results(engine, batch)]
    hybrid.end_rollout()
    assert hybrid.begin_rollout()["perf/weight_sync/tensors"] == 0, "unchanged weights do not travel"
    assert [result.response_ids.tolist() for result in sorted_results(engine, batch)] == before
    hybrid.end_rollout()
    train_a_little(model, seed=7)
    hybrid.mark_updated()
    metrics = hybrid.begin_rollout()
    assert metrics["perf/weight_sync/tensors"] > 20 and metrics["timing_rollout_s/weight_sync"] > 0
    after = [result.response_ids.tolist() for result in sorted_results(engine, batch)]
    assert after != before
    assert after == [tiny.greedy_tokens(model, request.prompt_ids, 24) for request in batch]
    gap = hybrid.verify(tiny.score_fn(model))
    assert gap["rollout/probe_gap_max"] < 2e-4


def test_updated_weights_change_the_output_to_the_new_model(engine_process: tiny.Ranks) -> None:
    engine_process(check_update, "engine")


def test_an_untied_head_travels_too(engine_process: tiny.Ranks, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny.save_config(tmp_path_factory.mktemp("untied"), tied=False)
    engine_process(build_engine, "untied", folder, False)
    engine_process(check_update, "untied")


def check_probe() -> None:
    model, engine, hybrid = tied_engine()
    sequences = [request.prompt_ids for request in tiny.requests(4, tiny.GREEDY)]
    assert hybrid.verify(tiny.score_fn(model), sequences)["rollout/probe_gap_mean"] < 1e-4
    wrong = dict(model.named_parameters(remove_duplicate=False))
    name = "model.layers.1.mlp.down_proj.weight"
    wrong[name] = wrong[name].detach().roll(1, 0)
    engine.load_weights(iter([(key, value.detach()) for key, value in wrong.items()]))
    with pytest.raises(RuntimeError, match="probe_tolerance"):
        hybrid.verify(tiny.score_fn(model))
    hybrid.end_rollout()
    hybrid.mark_updated()
    hybrid.begin_rollout()
    hybrid.verify(tiny.score_fn(model))


def test_the_probe_finds_weights_that_arrived_wrong(engine_process: tiny.Ranks) -> None:
    engine_process(check_probe)


def check_hf_engine(folder: str) -> None:
    from verl.workers.rollout.hf_rollout import HFRollout

    model, engine, _ = tied_engine()
    other = HFRollout(tiny.settings(folder))
    other.load_weights(model.state_dict().items())
    for sampling in (tiny.GREEDY, tiny.SAMPLED, SamplingSettings(temperature=1.2, top_p=0.8, top_k=40, max_tokens=24)):
        batch = tiny.requests(6, sampling)
        for mine, theirs in zip(sorted_results(engine, batch), sorted_results(other, batch)):
            assert mine.response_ids.tolist() == theirs.response_ids.tolist()
            np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=1e-4)


def test_both_engines_give_the_same_tokens_for_the_same_seeds(
    engine_process: tiny.Ranks, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine_process(check_hf_engine, tiny.save_config(tmp_path_factory.mktemp("hf")))
