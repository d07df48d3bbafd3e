"""The update of policy and critic: what splitting must not change, and what each term adds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.workers.ranks import run_ranks
from tests.workers.tiny import actor_config, embedded_config, random_rows, save_tiny_model
from verl.models.build import ModelSpec, build_model
from verl.protocol import DataProto
from verl.utils.checkpoint.hf_export import full_parameters
from verl.utils.fsdp_utils import ShardingOptions, create_device_mesh, decoder_layers, ensure_process_group
from verl.workers.actor import DataParallelPPOActor
from verl.workers.critic import DataParallelPPOCritic

ROWS = 12


def _module(path: str, kind: str = "causal_lm", fsdp_size: int = -1) -> torch.nn.Module:
    mesh = create_device_mesh(dist.get_world_size(), fsdp_size, "cpu")
    return build_model(ModelSpec(path, kind=kind, seed=7), mesh, ShardingOptions())


def _with_filler(rows: DataProto, count: int) -> DataProto:
    filler = rows.select_idxs(np.zeros(count, dtype=np.int64))
    for key, value in filler.batch.items():
        filler.batch[key] = torch.zeros_like(value)
    prompts = np.empty(count, dtype=object)
    prompts[:] = [np.zeros(1, dtype=np.int32)] * count
    filler.non_tensor_batch["prompt_ids"] = prompts
    return DataProto.concat([rows, filler])


def _split_unevenly(rows: DataProto) -> DataProto:
    """This rank's rows; long rows gather on rank 0, and fillers complete the count."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return rows
    order = np.argsort(-rows.batch["response_mask"].sum(-1).numpy(), kind="stable")
    mine = rows.select_idxs(np.array_split(order, world)[rank])
    minis = rows.batch["mini_batch"].numpy()
    most = [max((minis[part] == i).sum() for part in np.array_split(order, world)) for i in np.unique(minis)]
    ids = mine.batch["mini_batch"].numpy()
    missing = [m - (ids == i).sum() for i, m in enumerate(most)]
    if not sum(missing):
        return mine
    padded = _with_filler(mine, int(sum(missing)))
    padded.batch["mini_batch"][len(mine) :] = torch.tensor(np.repeat(np.arange(len(most)), missing))
    return padded


def _update(path: str, changes: dict[str, Any], steps: int = 2, fsdp_size: int = -1) -> tuple[dict, dict]:
    """Metrics and full weights after one update of ``steps`` optimiser steps."""
    rows = random_rows(ROWS)
    rows.batch["mini_batch"] = torch.arange(ROWS) % steps
    module = _module(path, fsdp_size=fsdp_size)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    actor = DataParallelPPOActor(actor_config(**changes), module, optimizer, response_length=32)
    metrics = actor.update_policy(_split_unevenly(rows))
    return metrics, {name: tensor.clone() for name, tensor in full_parameters(module)}


def _assert_same(first: tuple[dict, dict], second: tuple[dict, dict]) -> None:
    assert first[0].keys() == second[0].keys()
    for name, value in first[0].items():
        assert second[0][name] == pytest.approx(value, abs=1e-5, rel=1e-4), name
    for name, tensor in first[1].items():
        torch.testing.assert_close(second[1][name], tensor, atol=1e-5, rtol=1e-4, msg=name)


ALL_TERMS = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "tis_cap": 2.0, "grad_clip": 1.0}
SPLITS = (
    {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1},
    {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 5},
    {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 24},
)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    ensure_process_group("cpu")
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_change_nothing(model_path: str, mode: str) -> None:
    whole = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 100_000, "loss_agg_mode": mode, **ALL_TERMS}
    expected = _update(model_path, whole)
    for split in SPLITS:
        _assert_same(expected, _update(model_path, {**whole, **split}))


def _update_in_all_modes(path: str, fsdp_size: int) -> list[tuple[dict, dict]]:
    budget = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 40}
    return [_update(path, {"loss_agg_mode": mode, **budget, **ALL_TERMS}, fsdp_size=fsdp_size) for mode in MODES]


def _on_one_rank_of_two(path: str) -> dict[str, Any]:
    """Everything that is compared with a single rank, in one start of the processes."""
    return {
        "sharded": _update_in_all_modes(path, -1),
        "replicated": _update_in_all_modes(path, 1),
        "critic": _critic_update(path, 40),
    }


@pytest.fixture(scope="module")
def two_ranks(model_path: str) -> list[dict[str, Any]]:
    return run_ranks(_on_one_rank_of_two, 2, model_path)


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_two_ranks_do_what_one_does(model_path: str, two_ranks: list[dict[str, Any]], layout: str) -> None:
    alone = _update_in_all_modes(model_path, -1)
    for rank in two_ranks:
        for expected, got in zip(alone, rank[layout]):
            _assert_same(expected, got)


def test_filler_rows_change_nothing(model_path: str) -> None:
    def update(rows: DataProto) -> tuple[dict, dict]:
        rows.batch["mini_batch"] = torch.zeros(len(rows), dtype=torch.int64)
        module = _module(model_path)
        actor = DataParallelPPOActor(
            actor_config(loss_agg_mode="seq-mean-token-mean"), module, torch.optim.SGD(module.parameters(), lr=0.05)
        )
        return actor.update_policy(rows), dict(full_parameters(module))

    _assert_same(update(random_rows(ROWS)), update(_with_filler(random_rows(ROWS), 5)))


def test_rows_without_ids_are_taken_in_order(model_path: str) -> None:
    module = _module(model_path)
    config = actor_config(ppo_mini_batch_size=5, ppo_epochs=2)
    actor = DataParallelPPOActor(config, module, torch.optim.SGD(module.parameters(), lr=0.0))
    taken: list[int] = []
    step = actor._step
    actor._step = lambda data, rows, members, *rest: (taken.append(len(members)), step(data, rows, members, *rest))
    actor.update_policy(random_rows(ROWS))
    assert taken == [5, 5, 2] * 2


def test_log_probs_come_back_in_row_order(model_path: str) -> None:
    rows = random_rows(ROWS)
    module = _module(model_path)
    by_tokens = DataParallelPPOActor(actor_config(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=20), module)
    by_rows = DataParallelPPOActor(actor_config(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=1), module)
    for ours, theirs in zip(by_tokens.compute_log_prob(rows), by_rows.compute_log_prob(rows)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert torch.equal(ours != 0, rows.batch["response_mask"].bool())


def test_padded_rows_give_the_same_log_probs(model_path: str) -> None:
    rows = random_rows(4)
    actor = DataParallelPPOActor(actor_config(), _module(model_path))
    width, response = 16, rows.batch["responses"]
    ids = torch.zeros(4, width + response.shape[1], dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(rows.non_tensor_batch["prompt_ids"]):
        ids[i, width - len(prompt) : width] = torch.from_numpy(prompt)
        mask[i, width - len(prompt) : width] = 1
    ids[:, width:], mask[:, width:] = response, rows.batch["response_mask"]
    padded = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "responses": response}, meta_info=dict(rows.meta_info)
    )
    torch.testing.assert_close(actor.compute_log_prob(padded)[0], actor.compute_log_prob(rows)[0])


def test_an_update_on_its_own_log_probs_has_ratio_one(model_path: str) -> None:
    rows = random_rows(ROWS)
    module = _module(model_path)
    actor = DataParallelPPOActor(
        actor_config(entropy_coeff=0.0), module, torch.optim.SGD(module.parameters(), lr=0.0)
    )
    rows.batch["old_log_probs"], entropys = actor.compute_log_prob(rows)
    metrics = actor.update_policy(rows)
    mask, advantages = rows.batch["response_mask"].bool(), rows.batch["advantages"]
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/pg_loss"] == pytest.approx(-advantages[mask].mean().item(), abs=1e-5)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_steps"] == 0
    assert "actor/kl_loss" not in metrics
    assert entropys[mask].min() > 0


def test_a_non_finite_step_is_skipped_and_the_third_in_a_row_stops(model_path: str) -> None:
    rows = random_rows(ROWS)
    rows.batch["advantages"][0, 0] = float("nan")
    module = _module(model_path)
    before = {name: tensor.clone() for name, tensor in full_parameters(module)}
    actor = DataParallelPPOActor(actor_config(), module, torch.optim.SGD(module.parameters(), lr=1.0))
    for _ in range(2):
        assert actor.update_policy(rows)["actor/skipped_steps"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_parameters(module))
    with pytest.raises(RuntimeError, match="3 optimiser steps in a row"):
        actor.update_policy(rows)


def test_truncated_importance_sampling_without_rollout_log_probs_ends_with_the_key(model_path: str) -> None:
    rows = random_rows(ROWS)
    del rows.batch["rollout_log_probs"]
    module = _module(model_path)
    actor = DataParallelPPOActor(actor_config(tis_cap=2.0), module, torch.optim.SGD(module.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="actor.tis_cap=2 needs rollout_log_probs.*actor.tis_cap=null"):
        actor.update_policy(rows)


def _critic_update(path: str, budget: int) -> tuple[dict, dict, torch.Tensor]:
    rows = random_rows(ROWS)
    rows.batch["mini_batch"] = torch.arange(ROWS) % 2
    rows = _split_unevenly(rows)
    module = _module(path, kind="value")
    config = dataclasses.replace(
        embedded_config().critic, ppo_max_token_len_per_gpu=budget, forward_max_token_len_per_gpu=budget
    )
    critic = DataParallelPPOCritic(config, module, torch.optim.SGD(module.parameters(), lr=0.05))
    values = critic.compute_values(rows)
    assert torch.equal(values != 0, rows.batch["response_mask"].bool())
    return critic.update_critic(rows), dict(full_parameters(module)), values.sum()


def test_the_critic_learns_the_same_on_one_and_two_ranks(model_path: str, two_ranks: list[dict[str, Any]]) -> None:
    alone = _critic_update(model_path, 100_000)
    assert alone[0]["critic/vf_loss"] > 0
    _assert_same(alone[:2], _critic_update(model_path, 25)[:2])
    first, second = (rank["critic"] for rank in two_ranks)
    _assert_same(alone[:2], first[:2])
    torch.testing.assert_close(first[2] + second[2], alone[2], atol=1e-4, rtol=1e-4)


def test_the_deprecated_micro_batch_size_counts_rows_over_all_ranks(model_path: str) -> None:
    config = actor_config(use_dynamic_bsz=False, ppo_micro_batch_size=4)
    assert DataParallelPPOActor(config, _module(model_path)).update_plan.split(np.ones(6)) == [[0, 2, 4], [1, 3, 5]]
    config = actor_config(use_dynamic_bsz=False)
    with pytest.raises(ValueError, match="actor.ppo_micro_batch_size_per_gpu"):
        DataParallelPPOActor(config, _module(model_path)).update_plan.split(np.ones(6))


def test_recomputing_some_layers_changes_nothing(model_path: str) -> None:
    results = []
    for recomputed in (0, 1, 2):
        module = _module(model_path)
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for index, layer in enumerate(decoder_layers(module)):
            layer.gradient_checkpointing = index < recomputed
        actor = DataParallelPPOActor(actor_config(), module, torch.optim.SGD(module.parameters(), lr=0.05))
        assert actor.memory.recomputed == recomputed
        metrics = actor.update_policy(random_rows(ROWS))
        assert metrics.pop("perf/recomputed_layers/actor") == recomputed
        results.append((metrics, dict(full_parameters(module))))
    _assert_same(results[0], results[1])
    _assert_same(results[0], results[2])
