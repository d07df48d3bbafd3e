"""Keys that were given and have no effect because of another key are said; those that others follow are not."""

from __future__ import annotations

import pytest

from verl.trainer.config import default_config
from verl.trainer.config.compose import compose
from verl.trainer.config.explain import explain
from verl.trainer.config.notices import notices

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{node}" for node in ("actor", "rollout", "ref"))
GROUPS = "env.rollout.n=2"


def idle(*overrides: str) -> dict[str, str]:
    """Keys that are said to have no effect, and why."""
    lines = [line for line in notices(default_config(GROUPS, *overrides)) if line.startswith("Settings without effect")]
    parts = lines[0].partition(": ")[2].split("; ") if lines else []
    return dict(part.rstrip(")").split(" (") for part in parts)


ROWS = {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": f"{ACTOR}.use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{REF}.log_prob_micro_batch_size": f"{REF}.log_prob_use_dynamic_bsz",
    "critic.ppo_micro_batch_size_per_gpu": "critic.use_dynamic_bsz",
}
BUDGETS = {
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_micro_batch_size": f"{REF}.log_prob_max_token_len_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu": "critic.ppo_max_token_len_per_gpu",
}
TOKENS = {
    f"{ACTOR}.ppo_max_token_len_per_gpu": f"{ACTOR}.use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{REF}.log_prob_max_token_len_per_gpu": f"{REF}.log_prob_use_dynamic_bsz",
    "critic.forward_max_token_len_per_gpu": "critic.use_dynamic_bsz",
}
LOSS = {f"{ACTOR}.kl_loss_coef": f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_type": f"{ACTOR}.use_kl_loss"}
REWARD = {f"algorithm.{key}": "algorithm.use_kl_in_reward" for key in ("kl_ctrl.kl_coef", "kl_ctrl.type", "kl_penalty")}
GIVEN = [
    *(f"{key}=4" for key in ROWS), *(f"{key}={900 + number}" for number, key in enumerate(TOKENS)), f"{ACTOR}.kl_loss_coef=0.02",
    f"{ACTOR}.kl_loss_type=mse", "algorithm.kl_ctrl.kl_coef=0.02", "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_penalty=mse",
]


def test_keys_that_another_switches_off_are_said() -> None:
    off = idle(*GIVEN)  # every switch is false by default
    assert off == {key: f"{switch} is false" for key, switch in {**TOKENS, **LOSS, **REWARD}.items()}
    switches = sorted({*ROWS.values(), *LOSS.values(), *REWARD.values()})
    on = [f"{switch}=true" for switch in switches]
    assert idle(*GIVEN, *on) == {key: f"{switch} is true: use {BUDGETS[key]}" for key, switch in ROWS.items()}
    assert idle(*on) == {}


@pytest.mark.parametrize("switch", [f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ACTOR}.use_kl_loss"])
def test_a_switch_is_that_of_its_own_section(switch: str) -> None:
    table = {**TOKENS, **LOSS, **REWARD}
    off = {key: f"{other} is false" for key, other in table.items() if other != switch}
    rows = {key: f"{other} is true: use {BUDGETS[key]}" for key, other in ROWS.items() if other == switch}
    assert idle(*GIVEN, f"{switch}=true") == {**off, **rows}


def test_a_key_counts_where_one_that_follows_it_does() -> None:
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu=999"
    assert idle(budget, f"{ROLLOUT}.log_prob_use_dynamic_bsz=true") == {}
    own = f"{ROLLOUT}.log_prob_max_token_len_per_gpu=777"
    assert set(idle(budget, f"{ROLLOUT}.log_prob_use_dynamic_bsz=true", own)) == {f"{ACTOR}.ppo_max_token_len_per_gpu"}


def test_the_values_of_a_preset_are_not_said() -> None:
    fixed = f"{ACTOR}.use_dynamic_bsz=false"
    assert idle("preset=embedded", fixed, f"{ACTOR}.ppo_micro_batch_size_per_gpu=8") == {}
    assert len(idle("preset=embedded", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8")) == 1


def test_explain_says_it() -> None:
    text = explain(compose(["preset=embedded", f"{ACTOR}.kl_loss_coef=0.5"]))
    assert f"{ACTOR}.kl_loss_coef ({ACTOR}.use_kl_loss is false)" in text.partition("To note:")[2]
