"""The workers on two real Ray ranks: every registered call once, with the transformers engine on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from tests.workers.test_reward_model import as_they_are, placed, save_judge, scores_one_by_one
from tests.workers.tiny import embedded_config, random_rows, save_tiny_model, save_tiny_tokenizer
from verl.protocol import DataProto
from verl.trainer.config import default_config
from verl.trainer.ppo.resources import ResourcePoolManager, Role, WorkerGroups, start_ranks
from verl.trainer.ppo.scoring import reward_model_scores
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from verl.workers.role_models import sharding_options
from verl.workers.rollout.base import RolloutRequest, SamplingSettings

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("master", "compute", "reduce", "options"),
    [
        ("fp32", "bf16", "fp32", (BF16, FP32)),
        ("fp32", "bf16", "bf16", (BF16, None)),
        ("bf16", "bf16", "fp32", (None, FP32)),
        ("fp32", "fp32", "bf16", (None, BF16)),
        ("fp32", "fp32", "fp32", (None, None)),
    ],
)
def test_compute_and_reduction_have_the_dtypes_of_their_keys(master, compute, reduce, options) -> None:
    key = "actor_rollout_ref.actor.fsdp_config"
    dtypes = [f"{key}.model_dtype={master}", f"{key}.mixed_precision.param_dtype={compute}"]
    config = default_config(*dtypes, f"{key}.mixed_precision.reduce_dtype={reduce}")
    found = sharding_options(config.actor_rollout_ref.actor.fsdp_config, "cpu")
    assert (found.param_dtype, found.reduce_dtype) == options  # None: the dtype it has without one


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def groups(judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroups]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    save_tiny_tokenizer(folder)
    config = embedded_config(
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "reward_model.model.input_tokenizer=null",
        f"actor_rollout_ref.model.path={folder}",
        f"critic.model.path={folder}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "data.max_prompt_length=32",
        "data.max_response_length=9",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.n_gpus_per_node=2",
    )
    ray.init(num_cpus=4, include_dashboard=False, address="local")
    workers = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RewardModel: RewardModelWorker,
    }
    pools = ResourcePoolManager({"pool": [2]}, {role: "pool" for role in workers}, use_gpu=False)
    mapping = {role: ray.remote(worker) for role, worker in workers.items()}
    ranks = start_ranks(config, mapping, pools, use_critic=True)
    made = ranks.groups()
    ranks.wait(timeout=300)
    made.critic.init_model(10)
    made.reward_model.init_model(10)
    made.actor_rollout.init_model(10)
    yield made
    made.root.shutdown()
    ray.shutdown()


def _rows(count: int = 8) -> DataProto:
    rows = random_rows(count)
    rows.batch["mini_batch"] = torch.arange(count) % 2
    rows.meta_info = {"global_token_num": [10] * count}
    return rows


def phases_in_ledger(metrics: dict[str, float]) -> list[str]:
    """The phases whose memory is in the metrics, on CPU that of the process; in the order of the step."""
    prefix = "perf/memory_gb/"
    ledger = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    assert all(value > 0.01 for value in ledger.values())
    assert all(key.endswith("/rss") for key in ledger)
    return [key.removesuffix("/rss") for key in ledger]


def test_log_probs_reference_values_and_updates(groups: WorkerGroups) -> None:
    """The first update says how much memory every phase before it left in use, the next one only of itself."""
    actor, critic = groups.actor_rollout, groups.critic
    rows = _rows()
    output = actor.compute_log_prob(rows)
    mask = rows.batch["response_mask"].bool()
    assert torch.equal(output.batch["old_log_probs"] != 0, mask)
    assert output.batch["entropys"][mask].min() > 0
    reference = actor.compute_ref_log_prob(rows).batch["ref_log_prob"]
    torch.testing.assert_close(reference, output.batch["old_log_probs"])
    rows.batch["old_log_probs"], rows.batch["ref_log_prob"] = output.batch["old_log_probs"], reference
    rows.batch["values"] = critic.compute_values(rows).batch["values"]

    metrics = actor.update_actor(rows).meta_info["metrics"]
    expected = "pg_loss pg_clipfrac pg_clipfrac_lower ppo_kl grad_norm lr kl_loss kl_coef skipped_steps"
    assert {f"actor/{name}" for name in expected.split()} <= metrics.keys()
    assert metrics["actor/lr"] == pytest.approx(1e-2)
    assert {"perf/mfu/actor", "perf/cpu_memory_used_gb"} <= metrics.keys()
    assert phases_in_ledger(metrics) == ["old_log_prob", "ref", "values", "update_actor"]
    critic_metrics = critic.update_critic(rows).meta_info["metrics"]
    assert phases_in_ledger(critic_metrics) == ["update_critic"]
    assert {f"critic/{name}" for name in "vf_loss vf_clipfrac vpred_mean grad_norm lr".split()} <= critic_metrics.keys()

    after = actor.compute_log_prob(rows).batch["old_log_probs"]
    assert (after - reference)[mask].abs().max() > 1e-3
    torch.testing.assert_close(actor.compute_ref_log_prob(rows).batch["ref_log_prob"], reference)


def test_the_engine_samples_from_the_trained_weights(groups: WorkerGroups) -> None:
    actor = groups.actor_rollout
    for report in actor.probe():
        assert report["rollout/probe_gap_mean"] < 1e-3
    actor.begin_rollout()
    layout = actor.rollout_layout()
    assert layout == [(0, 0), (1, 0)]
    sampling = SamplingSettings(temperature=1.0, max_tokens=6)
    requests = [RolloutRequest(f"r{i}", np.arange(2, 7 + i, dtype=np.int32), sampling, seed=i) for i in range(3)]
    refs = actor.execute_ranks_async([0], "rollout_step", requests, 64)
    results = {result.request_id: result for result in ray.get(refs[0], timeout=60)}
    actor.end_rollout()
    assert results.keys() == {"r0", "r1", "r2"}
    assert all(len(r.response_ids) == len(r.log_probs) for r in results.values())


def test_generate_sequences_answers_every_prompt_and_reports_its_log_probs(groups: WorkerGroups) -> None:
    prompts = np.empty(4, dtype=object)
    prompts[:] = [np.arange(2, 6 + i, dtype=np.int32) for i in range(4)]
    asked = DataProto.from_dict(
        tensors={"row": torch.arange(4)}, non_tensors={"prompt_ids": prompts}, meta_info={"do_sample": True}
    )
    rows = groups.actor_rollout.generate_sequences(asked)
    mask = rows.batch["response_mask"].bool()
    assert mask.any(dim=1).all()
    rows.meta_info = {}
    trainer = groups.actor_rollout.compute_log_prob(rows).batch["old_log_probs"]
    torch.testing.assert_close(trainer[mask], rows.batch["rollout_log_probs"][mask], atol=1e-3, rtol=1e-3)


def test_a_checkpoint_brings_back_policy_critic_and_learning_rate(groups: WorkerGroups, tmp_path: Path) -> None:
    rows = _rows()
    for group, role, update, read, column in (
        (groups.actor_rollout, "actor", "update_actor", "compute_log_prob", "old_log_probs"),
        (groups.critic, "critic", "update_critic", "compute_values", "values"),
    ):
        path = str(tmp_path / "global_step_3" / role)
        getattr(group, update)(rows)
        group.save_checkpoint(path, None, 3, None)
        first = getattr(group, update)(rows).meta_info["metrics"]
        continued = getattr(group, read)(rows).batch[column]
        group.load_checkpoint(path)
        again = getattr(group, update)(rows).meta_info["metrics"]
        assert torch.equal(getattr(group, read)(rows).batch[column], continued)
        assert again[f"{role}/grad_norm"] == first[f"{role}/grad_norm"]
        assert (Path(path) / "config.json").is_file() and (Path(path) / "tokenizer.json").is_file()


def test_the_reward_model_beside_them_judges_rows_that_do_not_divide(groups: WorkerGroups, judge: Path) -> None:
    rows = random_rows(7)
    expected = placed(rows, scores_one_by_one(judge, "sequence", as_they_are(rows)))
    torch.testing.assert_close(reward_model_scores(rows, groups.reward_model), expected, atol=1e-5, rtol=1e-5)
