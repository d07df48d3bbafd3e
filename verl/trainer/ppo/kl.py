"""KL between policy and reference: per-token estimators and the controllers of its coefficient."""

from __future__ import annotations

from typing import Any, Protocol

import torch

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_ESTIMATORS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
K3_BOUND = 10.0
# One update moves the adaptive coefficient by at most this share of n_steps / horizon.
MAX_PROPORTIONAL_ERROR = 0.2


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """Estimate KL(policy || reference) per token from one sample (http://joschu.net/blog/kl-approx.html).

    Args:
        logprob, ref_logprob: same shape, log-probs of the sampled tokens.
        kl_penalty: `k1`/`kl`: d = logprob - ref_logprob; `abs`: |d|; `k2`/`mse`: d^2 / 2; `k3`/`low_var_kl`: exp(-d) +
            d - 1, bounded to [-10, 10].

    Returns:
        The estimate, same shape.

    Raises:
        NotImplementedError: `full` (needs whole distributions) or an unknown name.
    """
    difference = logprob - ref_logprob
    kind = _ALIASES.get(kl_penalty, kl_penalty)
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        # exp is kept finite where the bound cuts in anyway, else its gradient there is 0 * inf.
        estimate = torch.exp((-difference).clamp(max=2 * K3_BOUND)) + difference - 1.0
        return torch.clamp(estimate, min=-K3_BOUND, max=K3_BOUND)
    raise NotImplementedError(
        f"KL estimator {kl_penalty!r} is not available: set algorithm.kl_penalty and actor.kl_loss_type to one of "
        + ", ".join(KL_ESTIMATORS)
    )


class KLController(Protocol):
    """Holds the coefficient of the KL penalty in the reward."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """A coefficient that stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint needs."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The config decides about a fixed coefficient, so a resumed run takes the configured one."""


class AdaptiveKLController:
    """A coefficient steered towards a target KL (arXiv 1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.value = float(init_kl_coef)
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """value *= 1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon, after `n_steps` rows."""
        error = min(max(current_kl / self.target - 1.0, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint needs."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of a checkpoint."""
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> KLController:
    """The controller for `algorithm.kl_ctrl` (type, kl_coef, target_kl, horizon).

    Raises:
        ValueError: an adaptive controller with a horizon or target that is not positive.
        NotImplementedError: unknown type.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        if not kl_ctrl.horizon > 0:
            raise ValueError(f"algorithm.kl_ctrl.horizon={kl_ctrl.horizon} must be greater than 0")
        if not kl_ctrl.target_kl > 0:
            raise ValueError(f"algorithm.kl_ctrl.target_kl={kl_ctrl.target_kl} must be greater than 0")
        return AdaptiveKLController(init_kl_coef=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon)
    raise NotImplementedError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is not available: use fixed or adaptive")
