"""The transformers engine: right tokens, right log-probs, rows that do not disturb each other, whatever joins or leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.rollout import tiny
from verl.workers.rollout.base import RolloutEngine, SamplingSettings, run_to_completion
from verl.workers.rollout.hf_rollout import HFRollout, sample


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny.build_model(seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: str, model: torch.nn.Module) -> HFRollout:
    return loaded(folder, model)


def loaded(folder: str, model: torch.nn.Module, **changes: int) -> HFRollout:
    engine = HFRollout(tiny.settings(folder, **changes))
    engine.load_weights(model.state_dict().items())
    return engine


def in_order(engine: RolloutEngine, batch: list, slice_steps: int = 256) -> list:
    results = {result.request_id: result for result in run_to_completion(engine, batch, slice_steps)}
    return [results[request.request_id] for request in batch]


def test_is_a_rollout_engine(engine: HFRollout) -> None:
    assert isinstance(engine, RolloutEngine)


def test_greedy_tokens_against_argmax_without_a_cache(engine: HFRollout, model: torch.nn.Module) -> None:
    batch = tiny.requests(6, tiny.GREEDY)
    for request, result in zip(batch, in_order(engine, batch)):
        assert result.response_ids.tolist() == tiny.greedy_tokens(model, request.prompt_ids, 24)


def test_log_probs_are_at_the_sampling_temperature(engine: HFRollout, model: torch.nn.Module) -> None:
    batch = tiny.requests(6, SamplingSettings(temperature=1.6, max_tokens=40))
    for request, result in zip(batch, in_order(engine, batch)):
        ours = tiny.log_probs_of(model, request.prompt_ids, result.response_ids, 1.6)
        np.testing.assert_allclose(result.log_probs, ours, atol=1e-4)


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 40}])
@pytest.mark.parametrize("slice_steps", [1, 5, 256])
def test_a_request_is_answered_alike_alone_in_a_batch_or_in_turns(
    folder: str, model: torch.nn.Module, engine: HFRollout, limits: dict, slice_steps: int
) -> None:
    batch = [
        request
        for length in (3, 24, 11)  # rows leave at different times
        for request in tiny.requests(3, SamplingSettings(temperature=0.7, max_tokens=length), name=f"{length}-")
    ]
    alone = [in_order(engine, [request])[0] for request in batch]
    together = in_order(loaded(folder, model, **limits), batch, slice_steps)
    for one, other in zip(alone, together):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


def test_requests_may_join_midway(engine: HFRollout) -> None:
    batch = tiny.requests(5, tiny.SAMPLED)
    expected = in_order(engine, batch)
    finished = engine.step(batch[:2], 6) + engine.step(batch[2:4], 4) + engine.step(batch[4:], 1000)
    assert not engine.has_unfinished()
    by_id = {result.request_id: result.response_ids.tolist() for result in finished}
    assert [by_id[request.request_id] for request in batch] == [result.response_ids.tolist() for result in expected]


def test_responses_end_with_the_end_token(folder: str, model: torch.nn.Module) -> None:
    engine = HFRollout(tiny.settings(folder, eos_token_ids=range(3, 60)))
    engine.load_weights(model.state_dict().items())
    results = in_order(engine, tiny.requests(8, SamplingSettings(temperature=2.0, max_tokens=100)))
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert stopped
    for result in stopped:
        is_end = (result.response_ids >= 3) & (result.response_ids < 60)
        assert is_end[-1] and not is_end[:-1].any()
    unending = SamplingSettings(temperature=2.0, max_tokens=100, ignore_eos=True)
    assert {len(result.response_ids) for result in in_order(engine, tiny.requests(4, unending))} == {100}


def test_the_context_limit_ends_a_response(engine: HFRollout) -> None:
    (request,) = tiny.requests(1, SamplingSettings(temperature=1.0, max_tokens=1000, ignore_eos=True))
    (result,) = in_order(engine, [request])
    assert len(request.prompt_ids) + len(result.response_ids) == tiny.MAX_MODEL_LEN
    assert result.finish_reason == "length"


def test_abort_and_refusal_leave_an_idle_engine(engine: HFRollout) -> None:
    engine.step(tiny.requests(3, tiny.GREEDY), 2)
    assert engine.has_unfinished()
    engine.abort_all()
    assert not engine.has_unfinished()
    with pytest.raises(ValueError, match="min_p is not known to rollout.name=hf"):
        engine.step(tiny.requests(1, SamplingSettings(temperature=1.0, extra={"min_p": 0.1})), 1)
    assert not engine.has_unfinished()


def test_statistics_count_what_was_generated(engine: HFRollout) -> None:
    batch = tiny.requests(4, SamplingSettings(temperature=1.0, max_tokens=10, ignore_eos=True))
    in_order(engine, batch)
    stats = engine.stats()
    assert stats["generated_tokens"] == 40 and stats["requests"] == 4 and stats["steps"] == 10
    assert stats["prompt_tokens"] == sum(len(request.prompt_ids) for request in batch)
    assert stats["running_sum"] == 40 and stats["busy_s"] > 0


def test_missing_weights_are_noticed(folder: str, model: torch.nn.Module) -> None:
    with pytest.raises(AssertionError, match="no weights came for"):
        HFRollout(tiny.settings(folder)).load_weights(list(model.state_dict().items())[:-3])


def test_sampling_draws_from_the_distribution_that_it_reports() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    setting = SamplingSettings(temperature=0.5, top_k=3, top_p=0.95)
    weights = [math.exp(2 * 2.0), math.exp(2 * 1.0)]  # top-k drops the last; the first two reach 0.95 of the mass
    expected = [weights[0] / sum(weights), weights[1] / sum(weights)]
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros(4)
    for _ in range(4000):
        token, log_prob = sample(logits, [setting], [generator])
        counts[token] += 1
        assert math.isclose(log_prob.exp(), expected[token], rel_tol=1e-5)
    assert counts[2] == counts[3] == 0
    assert abs(counts[0] / 4000 - expected[0]) < 0.02
