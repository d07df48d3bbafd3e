"""The hybrid engine with the transformers engine, in this process: what travels, when, and what the probe says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.rollout import tiny
from verl.models.lora import LoraSettings, add_lora
from verl.workers.rollout.base import run_to_completion
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.sharding_manager import HybridEngine, hybrid_engine
from verl.workers.sharding_manager.weight_stream import plan_weights, stream_weights


@pytest.fixture
def folder(tmp_path) -> str:
    return tiny.save_config(tmp_path)


def hybrid_of(model: torch.nn.Module, folder: str, **changes) -> HybridEngine:
    engine = HFRollout(tiny.settings(folder))
    return HybridEngine(model, engine, device="cpu", dtype=torch.float32, **changes)


def streamed(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in stream_weights(plan_weights(model), dtype, "cpu")}


@pytest.mark.parametrize("tied", [True, False])
def test_the_stream_is_the_checkpoint(tied: bool) -> None:
    model = tiny.build_model(tied=tied)
    weights, checkpoint_weights = streamed(model), model.state_dict()
    assert list(weights) == list(checkpoint_weights), "same names in the same order, a tied head under both"
    for name, tensor in checkpoint_weights.items():
        assert torch.equal(weights[name], tensor)
    assert {tensor.dtype for tensor in streamed(model, torch.bfloat16).values()} == {torch.bfloat16}


def test_wrappers_leave_no_trace_in_the_names() -> None:
    model = tiny.build_model()
    names = list(streamed(model))
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert list(streamed(model)) == names


@pytest.mark.parametrize("in_place", [True, False])
def test_adapters_are_merged_on_the_way(in_place: bool) -> None:
    base = tiny.build_model()
    if in_place:
        adapted = add_lora(tiny.build_model(), LoraSettings(rank=4, alpha=16))
    else:
        targets = ["q_proj", "down_proj", "lm_head"]
        config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, use_rslora=True, modules_to_save=["norm"])
        adapted = get_peft_model(tiny.build_model(), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    tokens = torch.arange(10, 30)[None]
    expected = adapted(input_ids=tokens).logits
    weights = streamed(adapted)
    assert set(weights) == set(base.state_dict())
    merged = tiny.build_model(tied=False)  # an adapter on a tied head makes the head a weight of its own
    merged.load_state_dict(weights)
    assert not torch.equal(
        weights["model.layers.0.self_attn.q_proj.weight"], base.model.layers[0].self_attn.q_proj.weight
    )
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected, atol=2e-4, rtol=1e-4)


def test_adapters_that_cannot_be_merged_are_refused() -> None:
    model = get_peft_model(tiny.build_model(), LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError, match="target_modules.*DoRA"):
        plan_weights(model)


def test_weights_travel_once_a_version(folder: str) -> None:
    model = tiny.build_model(seed=1)
    hybrid = hybrid_of(model, folder)
    count = len(model.state_dict())
    for expected in (count, 0):
        metrics = hybrid.begin_rollout()
        assert metrics["perf/weight_sync/tensors"] == expected
        parts = metrics["timing_rollout_s/load_weights"] + metrics["timing_rollout_s/wake_kv_cache"]
        assert metrics["timing_rollout_s/weight_sync"] >= parts >= 0 and metrics["perf/memory_gb/rollout/rss"] > 0
        assert hybrid.rolling_out
        assert hybrid.end_rollout()["timing_rollout_s/engine_sleep"] >= 0
    hybrid.mark_updated()
    assert hybrid.begin_rollout()["perf/weight_sync/tensors"] == count
    with pytest.raises(AssertionError):
        hybrid.mark_updated()


GIB = 1 << 30


class SleepingEngine(HFRollout):
    """Takes 2 GiB for weights and 10 for its KV cache; a load leaves `left_by_load` GiB in torch's cache."""

    total, cached, left_by_load, releases = 0, 0, 0, 0

    def __init__(self, folder: str, can_sleep: bool = True) -> None:
        super().__init__(tiny.settings(folder))
        self.can_sleep = can_sleep
        self.taken = {"weights": 2, "kv_cache": 10}

    def free(self, device: torch.device) -> int:
        return (self.total - self.cached - sum(self.taken.values())) * GIB

    def release(self, device: torch.device) -> None:
        self.cached = 0
        self.releases += 1

    def sleep(self, level: int = 2) -> None:
        if self.can_sleep:
            self.taken = {}

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.taken |= {tag: {"weights": 2, "kv_cache": 10}[tag] for tag in tags} if self.can_sleep else {}
        assert self.free(torch.device("cpu")) >= 0, "the device has not that much"

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.cached += self.left_by_load


@pytest.mark.parametrize(
    "total, cached, left_by_load, releases",
    [
        (23, 5, 2, 0),  # 18 GiB free for 12 and 4 to spare; after the load 14 for 10
        (23, 8, 0, 1),  # 15 free for 12
        (23, 6, 2, 1),  # 17 free for 12; after the load 13 for 10
        (17, 9, 2, 2),
    ],
)
def test_cached_memory_goes_back_if_the_engine_lacks_it(
    folder: str, monkeypatch, total: int, cached: int, left_by_load: int, releases: int
) -> None:
    engine = SleepingEngine(folder)
    monkeypatch.setattr(hybrid_engine, "_free_bytes", engine.free)
    monkeypatch.setattr(hybrid_engine, "release_cached", engine.release)
    engine.total, engine.left_by_load = total, left_by_load
    hybrid = HybridEngine(tiny.build_model(seed=1), engine, device="cpu", dtype=torch.float32)
    for _ in range(2):
        engine.cached, engine.releases = cached, 0  # what training leaves behind
        hybrid.begin_rollout()
        assert engine.releases == releases and engine.taken == {"weights": 2, "kv_cache": 10}
        hybrid.end_rollout()


def test_an_engine_that_keeps_its_memory_needs_no_room(folder: str, monkeypatch) -> None:
    engine = SleepingEngine(folder, can_sleep=False)
    monkeypatch.setattr(hybrid_engine, "_free_bytes", engine.free)
    monkeypatch.setattr(hybrid_engine, "release_cached", engine.release)
    engine.total = 13
    hybrid = HybridEngine(tiny.build_model(seed=1), engine, device="cpu", dtype=torch.float32)
    engine.cached, engine.releases = 1, 0
    hybrid.begin_rollout()
    hybrid.end_rollout()
    assert engine.releases == 0 and engine.cached == 1


def test_the_trainers_generators_do_not_notice_a_rollout(folder: str) -> None:
    hybrid = hybrid_of(tiny.build_model(seed=1), folder)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    hybrid.begin_rollout()
    list(run_to_completion(hybrid.engine, tiny.requests(3, tiny.SAMPLED)))
    torch.rand(100)
    hybrid.end_rollout()
    assert torch.equal(torch.rand(3), expected)


def test_unfinished_requests_end_with_the_rollout(folder: str) -> None:
    hybrid = hybrid_of(tiny.build_model(seed=1), folder)
    hybrid.begin_rollout()
    hybrid.engine.step(tiny.requests(3, tiny.SAMPLED), 2)
    hybrid.end_rollout()
    assert not hybrid.engine.has_unfinished()


def test_the_probe_measures_the_gap(folder: str) -> None:
    model = tiny.build_model(seed=1)
    hybrid = hybrid_of(model, folder)
    hybrid.begin_rollout()
    score = tiny.score_fn(model)
    assert hybrid.verify(score)["rollout/probe_gap_max"] < 2e-4

    def off_in_the_prompt(sequences: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([row[:15] - 100, row[15:]]) for row in score(sequences)]

    assert hybrid.verify(off_in_the_prompt)["rollout/probe_gap_max"] < 2e-4, "prompts of 16 tokens, nobody samples them"
    rows = [request.prompt_ids for request in tiny.requests(3, tiny.GREEDY)]
    shifted = hybrid.verify(lambda sequences: [row + np.float32(5e-4) for row in score(sequences)], rows)
    assert shifted["rollout/probe_gap_mean"] == pytest.approx(5e-4, rel=0.05)
    assert hybrid.verify_sync(score)["rollout/probe_gap_max"] < 2e-4
    off = hybrid.verify_sync(lambda sequences: [row + np.float32(0.005) for row in score(sequences)])
    assert off["rollout/probe_gap_mean"] == pytest.approx(0.005, rel=0.05), "beyond the tolerance, but not far"
    with pytest.raises(RuntimeError, match="accepted 0.01"):
        hybrid.verify_sync(lambda sequences: [row + np.float32(0.02) for row in score(sequences)])
    with pytest.raises(RuntimeError, match="mean log-prob gap 0.01"):
        hybrid.verify(lambda sequences: [row + np.float32(0.01) for row in score(sequences)], rows)
    with pytest.raises(RuntimeError, match="inf"):
        hybrid.verify(lambda sequences: [row * np.float32("nan") for row in score(sequences)], rows)


def test_the_probe_asks_with_tokens_that_any_tokenizer_has(tmp_path) -> None:
    model = tiny.build_model(seed=1)
    model.resize_token_embeddings(4096, mean_resizing=False)
    model.config.save_pretrained(tmp_path)
    hybrid = hybrid_of(model, str(tmp_path))
    seen: list[np.ndarray] = []

    def score(sequences: list[np.ndarray]) -> list[np.ndarray]:
        seen.extend(sequences)
        return tiny.score_fn(model)(sequences)

    hybrid.begin_rollout()
    hybrid.verify(score)
    assert len(seen) == 4
    assert max(int(row[:16].max()) for row in seen) < 2048, "rows past the tokenizer's end may hold anything"


def test_the_probe_finds_stale_and_corrupted_weights(folder: str) -> None:
    model = tiny.build_model(seed=1)
    hybrid = hybrid_of(model, folder)
    hybrid.begin_rollout()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.05)  # trained, and nobody told the engine
    with pytest.raises(RuntimeError, match="disagree"):
        hybrid.verify(tiny.score_fn(model))
    hybrid.end_rollout()
    hybrid.mark_updated()
    hybrid.begin_rollout()
    hybrid.verify(tiny.score_fn(model))


def test_tolerance_can_be_set(folder: str) -> None:
    model = tiny.build_model(seed=1)
    hybrid = hybrid_of(model, folder, tolerance=0.02)
    hybrid.begin_rollout()
    score = tiny.score_fn(model)
    gap = hybrid.verify(lambda sequences: [row + np.float32(0.01) for row in score(sequences)])
    assert gap["rollout/probe_gap_mean"] == pytest.approx(0.01, rel=0.05)
