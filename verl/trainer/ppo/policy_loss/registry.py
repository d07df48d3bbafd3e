"""Registry of policy losses: `actor.policy_loss.loss_mode` names one of them.

A loss sees one micro-batch and returns a value per token (`PolicyLossOutput`); the caller aggregates. To add one::

    @register_policy_loss("mine")
    def my_loss(old_log_prob, log_prob, advantages, response_mask, config):
        return PolicyLossOutput(loss=-advantages * log_prob)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from verl.trainer.config.errors import nearest
from verl.trainer.ppo.aggregation import PolicyLossOutput


class PolicyLossOptions(Protocol):
    """`actor.policy_loss` of the config."""

    loss_mode: str
    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float


class PolicyLossConfig(Protocol):
    """The part of the actor config that the shipped losses read; the actor passes its whole config."""

    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float
    policy_loss: PolicyLossOptions


# (old_log_prob, log_prob, advantages, response_mask, config): tensors are (rows, response_length).
PolicyLossFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PolicyLossConfig], PolicyLossOutput]

# A ratio of e^20 is beyond any clip range.
MAX_LOG_RATIO = 20.0

_POLICY_LOSSES: dict[str, PolicyLossFn] = {}


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: make a policy loss selectable as `actor.policy_loss.loss_mode=<name>`.

    Raises:
        ValueError: another function already has the name.
    """

    def decorator(fn: PolicyLossFn) -> PolicyLossFn:
        known = _POLICY_LOSSES.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"policy loss {name!r} is already registered by {known.__module__}: choose another name")
        _POLICY_LOSSES[name] = fn
        return fn

    return decorator


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss called `name`.

    Raises:
        ValueError: no such loss; lists those there are.
    """
    if name not in _POLICY_LOSSES:
        meant = nearest(name, _POLICY_LOSSES)
        raise ValueError(
            f"actor.policy_loss.loss_mode={name!r} is not known; "
            + (f"did you mean {meant}? Else " if meant else "")
            + f"choose one of {', '.join(sorted(_POLICY_LOSSES))}, "
            "or register your own and name its file in actor_rollout_ref.model.external_lib"
        )
    return _POLICY_LOSSES[name]


def policy_loss_names() -> list[str]:
    """Names of all registered policy losses, sorted."""
    return sorted(_POLICY_LOSSES)


def clip_range(config: PolicyLossConfig) -> tuple[float, float]:
    """(low, high) clip distances: `clip_ratio_low`/`clip_ratio_high`, each falling back to `clip_ratio` when null."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return float(low), float(high)


def log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """log(new / old) per token, 0 at masked positions, so that nothing there can overflow. (rows, response_length)"""
    difference = log_prob - old_log_prob
    return torch.where(response_mask.bool(), difference, torch.zeros_like(difference))


def ratio_of(log_r: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio, kept finite: an infinite ratio, though clipped, would have a gradient of 0 * inf = NaN."""
    return torch.exp(log_r.clamp(max=MAX_LOG_RATIO))


def check_policy_loss_output(output: object, log_prob: torch.Tensor, name: str) -> PolicyLossOutput:
    """What a policy loss returned. Losses can be the user's own, so nothing is taken for granted.

    Args:
        output: of the loss.
        log_prob: (rows, response_length), that it was called with.
        name: `actor.policy_loss.loss_mode`.

    Raises:
        ValueError: it is no `PolicyLossOutput`, has not one value per token, cannot be learned from, or has metrics of
            another form.
    """
    where = f"actor.policy_loss.loss_mode={name}"
    if not isinstance(output, PolicyLossOutput):
        raise ValueError(f"{where} returned {type(output).__name__}, not PolicyLossOutput(loss=…, metrics=…)")
    loss = output.loss
    if not isinstance(loss, torch.Tensor) or loss.shape != log_prob.shape:
        found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"{where} returned a loss of shape {found}, not one value per token, (rows, response_length) = "
            f"{tuple(log_prob.shape)}: the trainer masks and averages it (actor.loss_agg_mode)"
        )
    if log_prob.requires_grad and not loss.requires_grad:
        raise ValueError(f"{where} returned a loss that does not depend on log_prob: nothing could be learned from it")
    for metric, pair in output.metrics.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(one, torch.Tensor) for one in pair)):
            raise ValueError(
                f"{where}: metric {metric} has to be a pair of tensors (sum, count), as metric_sum(values, "
                f"response_mask) makes it, not {pair!r}"
            )
    return output
