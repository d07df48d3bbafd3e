"""The parts of a step that only some algorithms use, in whole runs: ReMax's baselines, a reward model, carried groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end_support import ROOT
from test_main_ppo import learning_figures, train

EMBEDDED = ROOT / "agent_system/environments/env_package/webshop/embedded_model"


@pytest.mark.recipes
def test_remax_plays_its_baselines_in_the_same_rollout(tmp_path):
    lines = train(
        tmp_path, "remax", "algorithm.adv_estimator=remax", "env.rollout.n=1", "trainer.total_training_steps=2",
        "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
    )  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollout/episodes"] == 4  # two tasks, one sampled and one greedy episode each
        assert 0 <= line["remax/baseline_reward"] <= 10
        assert line["actor/grad_norm"] >= 0 and line["actor/skipped_steps"] == 0
        score, advantage = line["critic/score/max"], line["critic/advantages/max"]
        assert advantage <= score + 1e-6  # a baseline is never negative


@pytest.mark.recipes
def test_an_estimator_of_the_users_own_gets_the_values_of_a_critic(tmp_path):
    library = tmp_path / "above_value.py"
    library.write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est\n\n\n"
        "@register_adv_est('above_value')\n"
        "def above_value(inputs):\n"
        "    mask = inputs.response_mask\n"
        "    returns = (inputs.scores() + 3).unsqueeze(-1) * mask\n"
        "    values = inputs.tensor('values', 'the baseline') * mask\n"
        "    inputs.metrics['above_value/values'] = float(values.sum() / mask.sum())\n"
        "    return returns - values, returns\n"
    )
    lines = train(
        tmp_path, "own", f"actor_rollout_ref.model.external_lib={library}", "algorithm.adv_estimator=above_value",
        "critic.enable=true", "trainer.total_training_steps=3", "trainer.val_before_train=False",
        "trainer.test_freq=-1", "trainer.save_freq=3",
    )  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["critic/values/mean"] == pytest.approx(line["above_value/values"], rel=1e-4)
        assert line["critic/returns/min"] >= 2.5  # every score is at least -0.5, a penalty
        gap = line["critic/returns/mean"] - line["critic/values/mean"]
        assert line["critic/advantages/mean"] == pytest.approx(gap, rel=1e-3, abs=1e-3)
    assert lines[-1]["critic/values/mean"] > lines[0]["critic/values/mean"]  # the critic learns what it was told
    assert (tmp_path / "own" / "global_step_3" / "critic" / "dist_ckpt").is_dir()


def save_judge(folder: Path) -> None:
    """A random classifier over the embedded model's vocabulary."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(EMBEDDED)
    config.num_labels = 1
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


@pytest.mark.recipes
def test_a_judged_run_with_carried_groups_resumes_as_if_it_had_not_stopped(tmp_path):
    save_judge(tmp_path / "judge")
    data = tmp_path / "text"
    overrides = [
        "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", "data.gen_batch_size=3",
        "algorithm.filter_groups.surplus=carry", "algorithm.filter_groups.max_num_gen_batches=3",
        "reward_model.enable=True", f"reward_model.model.path={tmp_path}/judge",
        "reward_model.model.input_tokenizer=null", "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=40", "env.max_steps=8", "env.rollout.n=4", "trainer.save_freq=1",
        "trainer.test_freq=-1", "trainer.val_before_train=False", f"data.train_files=[{data}/train.parquet,{data}/train.parquet]",
    ]  # fmt: skip
    whole = train(tmp_path, "whole", *overrides, "trainer.total_training_steps=3")
    train(tmp_path, "parts", *overrides, "trainer.total_training_steps=2")
    parts = train(tmp_path, "parts", *overrides, "trainer.total_training_steps=3")
    assert [line["step"] for line in whole] == [1, 2, 3]
    assert learning_figures(whole) == learning_figures(parts)
    for line in whole:
        assert line["rollout/groups_played"] >= 2
        assert 0 <= line["response_length/overlong_share"] <= 1
        scores = {line[f"critic/score/{name}"] for name in ("mean", "max", "min")}
        assert len(scores) == 3 and line["episode/reward/max"] in (0.0, 10.0)  # the judge's numbers, not the shop's
