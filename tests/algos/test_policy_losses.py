"""Policy losses: the reference's figures, and gradients against autograd of the formula written plainly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from algos_support import actor_config
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.ppo.aggregation import PolicyLossOutput, agg_loss, metric_sum
from verl.trainer.ppo.core_algos import compute_policy_loss, compute_policy_loss_gspo
from verl.trainer.ppo.policy_loss import (
    apply_truncated_importance_sampling,
    check_policy_loss_output,
    get_policy_loss_fn,
    policy_loss_names,
    register_policy_loss,
)
from verl.trainer.ppo.policy_loss.covariance import rounded_at_random, token_covariance

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -1.0, 0.0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.182694),
        ("seq-mean-token-sum", 0.456735),
        ("seq-mean-token-mean", 0.468912),
        ("seq-mean-token-sum-norm", 0.228367),
    ],
)
def test_dual_clip_reference_figures(mode: str, expected: float) -> None:
    new = torch.tensor([[-0.5, -2.5, -0.5, 0.0], [-3.0, 1.0, 0.0, 0.0]])
    old, advantages, mask = (torch.nn.functional.pad(x, (0, 1)) for x in (OLD, ADVANTAGES, MASK))
    loss, clipfrac, kl, lower = compute_policy_loss(
        old, new, advantages, mask, cliprange_low=0.2, cliprange_high=0.28, clip_ratio_c=3.0, loss_agg_mode=mode
    )
    assert loss.item() == pytest.approx(expected, abs=2e-6)
    assert (clipfrac.item(), kl.item(), lower.item()) == pytest.approx((0.4, 0.0, 0.2), abs=1e-6)


def test_gspo_reference_figures() -> None:
    new = torch.tensor([[-0.7, -2.1, -0.5], [-1.5, -1.2, 0.0]], requires_grad=True)
    loss, clipfrac, kl, lower = compute_policy_loss_gspo(
        OLD, new, ADVANTAGES, MASK, cliprange_low=0.2, cliprange_high=0.2, loss_agg_mode="token-mean"
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.134470, abs=1e-6)
    assert (clipfrac.item(), kl.item(), lower.item()) == pytest.approx((0.4, 0.1, 0.0), abs=1e-6)
    torch.testing.assert_close(new.grad[0], torch.full((3,), -0.178157), atol=1e-6, rtol=0)
    assert torch.equal(new.grad[1], torch.zeros(3))


def test_clip_ratio_c_must_exceed_one() -> None:
    with pytest.raises(ValueError, match="actor.clip_ratio_c"):
        compute_policy_loss(OLD, OLD, ADVANTAGES, MASK, cliprange=0.2, clip_ratio_c=1.0)


# --------------------------------------------------------------- each formula written plainly, one token at a time


def plain_vanilla(old: list, new: list, advantages: list, row: int, t: int) -> torch.Tensor:
    """max(-A r, -A clip(r)), at most -A c where A < 0."""
    advantage, ratio = advantages[row][t], torch.exp(new[row][t] - old[row][t])
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
    loss = torch.max(-advantage * ratio, -advantage * clipped)
    return torch.clamp(loss, max=-advantage * 3.0) if advantage < 0 else loss


def plain_cispo(old: list, new: list, advantages: list, row: int, t: int) -> torch.Tensor:
    """-sg(clip(r)) A log_prob."""
    ratio = math.exp(float(new[row][t].detach()) - old[row][t])
    return -min(max(ratio, 1 - 0.2), 1 + 0.28) * advantages[row][t] * new[row][t]


def plain_gpg(old: list, new: list, advantages: list, row: int, t: int) -> torch.Tensor:
    """-A log_prob."""
    return -advantages[row][t] * new[row][t]


def plain_gspo(old: list, new: list, advantages: list, row: int, t: int) -> torch.Tensor:
    """PPO clip of the row's ratio; the token's gradient is that of its own log-probability."""
    length = len(new[row])
    log_ratio = sum(float(new[row][k].detach()) - old[row][k] for k in range(length)) / length
    ratio = math.exp(min(log_ratio, 10.0)) * torch.exp(new[row][t] - new[row][t].detach())
    advantage = advantages[row][t]
    return torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - 0.2, 1 + 0.28))


PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "vanilla": plain_vanilla,
    "cispo": plain_cispo,
    "gpg": plain_gpg,
    "gspo": plain_gspo,
}


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """old, new, advantages, mask (5, 6) float64 and the lengths; NaN and huge numbers where masked."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (5,), generator=generator).tolist()
    mask = (torch.arange(6) < torch.tensor(lengths).unsqueeze(-1)).long()
    old = -torch.rand(5, 6, generator=generator, dtype=torch.float64) * 3
    new = old + 0.4 * torch.randn(5, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    old = torch.where(mask.bool(), old, torch.tensor(-1e4, dtype=torch.float64))
    advantages = torch.where(mask.bool(), advantages, torch.tensor(0.0, dtype=torch.float64))
    return old, new, advantages, mask, lengths


@pytest.mark.parametrize("name", sorted(PLAIN))
@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=25)
def test_value_and_gradient_against_the_plain_formula(name: str, seed: int) -> None:
    old, new, advantages, mask, lengths = random_case(seed)
    new.requires_grad_(True)
    output = get_policy_loss_fn(name)(old, new, advantages, mask, actor_config())
    mode = output.agg_mode_override or "token-mean"
    loss = agg_loss(output.loss, mask, mode)
    (gradient,) = torch.autograd.grad(loss, new)

    cells = [[new[i, t] for t in range(length)] for i, length in enumerate(lengths)]
    olds = [[float(x) for x in row] for row in old]
    advs = [[float(x) for x in row] for row in advantages]
    rows = [[PLAIN[name](olds, cells, advs, i, t) for t in range(length)] for i, length in enumerate(lengths)]
    if mode == "token-mean":
        plain = sum(sum(row) for row in rows) / sum(lengths)
    else:
        plain = sum(sum(row) / len(row) for row in rows) / len(rows)
    (expected,) = torch.autograd.grad(plain, new)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("name", policy_loss_names())
def test_metrics_are_sums_and_counts_over_valid_tokens(name: str) -> None:
    old, new, advantages, mask, lengths = random_case(3)
    output = get_policy_loss_fn(name)(old, new, advantages, mask, actor_config())
    assert set(output.metrics) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
    for total, count in output.metrics.values():
        assert int(count) == sum(lengths) and not total.requires_grad
    kl = sum(float(old[i, t] - new[i, t]) for i, length in enumerate(lengths) for t in range(length))
    assert float(output.metrics["actor/ppo_kl"][0]) == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("name", policy_loss_names())
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_runaway_ratio_gives_finite_loss_and_gradient(name: str, sign: float) -> None:
    old = torch.tensor([[-200.0, -1.0, -1.0]])
    new = torch.tensor([[-1.0, -200.0, -1.0]], requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.long)
    output = get_policy_loss_fn(name)(old, new, torch.full((1, 3), sign), mask, actor_config())
    loss = agg_loss(output.loss, mask, "token-mean")
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(new.grad).all()


@pytest.mark.parametrize("name", [n for n in policy_loss_names() if n not in ("clip_cov", "kl_cov")])
def test_rows_do_not_influence_each_other(name: str) -> None:
    old, new, advantages, mask, _ = random_case(5)
    loss_fn = get_policy_loss_fn(name)
    together = loss_fn(old, new, advantages, mask, actor_config()).loss
    for i in range(len(old)):
        one = slice(i, i + 1)
        alone = loss_fn(old[one], new[one], advantages[one], mask[one], actor_config()).loss
        torch.testing.assert_close(together[one], alone)


# --------------------------------------------------------------- covariance losses


def covariance_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log-probs, advantages and mask with means 0 over the four valid tokens, so that c is their product."""
    log_prob = torch.tensor([[-2.0, 2.0, -1.0, 1.0, 50.0]])
    advantages = torch.tensor([[-2.0, 2.0, 1.0, -1.0, 50.0]])  # c = 4, 4, -1, -1
    return log_prob, advantages, torch.tensor([[1, 1, 1, 1, 0]])


def test_token_covariance_by_hand() -> None:
    assert token_covariance(*covariance_case())[0, :4].tolist() == [4.0, 4.0, -1.0, -1.0]


def test_clip_cov_drops_the_asked_share_of_high_covariance_tokens() -> None:
    new, advantages, mask = covariance_case()
    new.requires_grad_(True)
    old = new.detach()
    dropped = set()
    for seed in range(12):
        torch.manual_seed(seed)
        output = get_policy_loss_fn("clip_cov")(old, new, advantages, mask, actor_config(clip_cov_ratio=0.25))
        (gradient,) = torch.autograd.grad(output.loss[mask.bool()].sum(), new)
        zero = (gradient[0, :4] == 0).nonzero().flatten().tolist()
        assert len(zero) == 1  # 0.25 of 4 valid tokens
        torch.testing.assert_close(gradient[0, 2:4], -advantages[0, 2:4])  # ratio 1: the rest as PPO
        dropped.update(zero)
    assert dropped == {0, 1}  # only tokens with 1 < c < 5, and at random


def test_clip_cov_respects_its_bounds() -> None:
    new, advantages, mask = covariance_case()
    config = actor_config(clip_cov_ratio=1.0, clip_cov_ub=3.0)
    output = get_policy_loss_fn("clip_cov")(new, new, advantages, mask, config)
    assert float(output.metrics["actor/pg_clipfrac"][0]) == 0.0


def test_kl_cov_penalises_the_top_share() -> None:
    new, advantages, mask = covariance_case()
    old = new - 0.1
    config = actor_config(kl_cov_ratio=0.5, ppo_kl_coef=2.0)
    loss = get_policy_loss_fn("kl_cov")(old, new, advantages, mask, config).loss[0, :4]
    plain = -advantages[0, :4] * math.exp(0.1)
    torch.testing.assert_close(loss, plain + torch.tensor([2.0 * 0.1, 2.0 * 0.1, 0.0, 0.0]))


@given(expected=st.floats(0, 50))
@settings(deadline=None, max_examples=50)
def test_rounding_at_random_stays_next_to_the_number(expected: float) -> None:
    assert abs(rounded_at_random(expected) - expected) < 1


def test_rounding_at_random_is_right_on_average() -> None:
    torch.manual_seed(0)
    assert sum(rounded_at_random(0.3) for _ in range(4000)) / 4000 == pytest.approx(0.3, abs=0.03)
    assert {rounded_at_random(2.0) for _ in range(50)} == {2}


# --------------------------------------------------------------- truncated importance sampling


def test_truncated_importance_sampling_by_hand() -> None:
    """Weights e^0.5 = 1.65, e^2 = 7.39 cut to 2, and 1; the gradient does not pass through them."""
    old = torch.tensor([[-0.5, -1.0, -1.0]])
    rollout = torch.tensor([[-1.0, -3.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.long)
    new = old.clone().requires_grad_(True)
    output = get_policy_loss_fn("gpg")(old, new, torch.ones(1, 3), mask, actor_config())
    weighted = apply_truncated_importance_sampling(output, old, rollout, mask, cap=2.0)
    (gradient,) = torch.autograd.grad(weighted.loss.sum(), new)
    weights = torch.tensor([[math.exp(0.5), 2.0, 1.0]])
    torch.testing.assert_close(gradient, -weights)
    assert [float(x) for x in weighted.metrics["actor/tis_clipfrac"]] == [1.0, 3.0]
    assert float(weighted.metrics["actor/tis_weight"][0]) == pytest.approx(float(weights.sum()))
    assert "actor/ppo_kl" in weighted.metrics and weighted.agg_mode_override == output.agg_mode_override


def test_truncated_importance_sampling_needs_rollout_log_probs() -> None:
    output = get_policy_loss_fn("gpg")(OLD, OLD, ADVANTAGES, MASK, actor_config())
    with pytest.raises(ValueError, match="actor.tis_cap=null"):
        apply_truncated_importance_sampling(output, OLD, None, MASK, 2.0)
    with pytest.raises(ValueError, match="actor.tis_cap=0"):
        apply_truncated_importance_sampling(output, OLD, OLD, MASK, 0.0)


# --------------------------------------------------------------- registry


def test_an_own_loss_that_returns_something_else_is_named() -> None:
    log_prob = OLD.clone().requires_grad_()
    loss = -ADVANTAGES * log_prob
    good = PolicyLossOutput(loss=loss, metrics={"mine/mean": metric_sum(loss, MASK)})
    assert check_policy_loss_output(good, log_prob, "mine") is good
    check_policy_loss_output(PolicyLossOutput(loss=loss.detach()), log_prob.detach(), "mine")
    for output, said in (
        (None, "returned NoneType, not PolicyLossOutput"),
        (loss, "returned Tensor, not PolicyLossOutput"),
        (PolicyLossOutput(loss=loss.mean()), r"of shape \(\), not one value per token.*\(2, 3\)"),
        (PolicyLossOutput(loss=1.0), "of shape float"),
        (PolicyLossOutput(loss=loss.detach()), "does not depend on log_prob"),
        (PolicyLossOutput(loss=loss, metrics={"mine/mean": 0.5}), "metric mine/mean has to be a pair"),
    ):
        with pytest.raises(ValueError, match=f"actor.policy_loss.loss_mode=mine.*{said}"):
            check_policy_loss_output(output, log_prob, "mine")


def test_unknown_loss_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="loss_mode='vanila'.*vanilla"):
        get_policy_loss_fn("vanila")


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register_policy_loss("vanilla")(lambda *args: None)


def test_null_sides_fall_back_to_clip_ratio() -> None:
    old, new, advantages, mask, _ = random_case(1)
    loss_fn = get_policy_loss_fn("vanilla")
    fallback = loss_fn(
        old, new, advantages, mask, actor_config(clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None)
    )
    given_sides = loss_fn(old, new, advantages, mask, actor_config(clip_ratio_low=0.1, clip_ratio_high=0.1))
    assert torch.equal(fallback.loss, given_sides.loss)
