"""KL estimators and controllers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl.trainer.ppo.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty

LOG_PROB = torch.tensor([-1.0, -2.0, -20.0])
REFERENCE = torch.tensor([-1.5, -1.0, -1.0])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("k1", "kl"), [0.5, -1.0, -19.0]),
        (("abs",), [0.5, 1.0, 19.0]),
        (("k2", "mse"), [0.125, 0.5, 180.5]),
        (("k3", "low_var_kl"), [0.106531, 0.718282, 10.0]),
    ],
)
def test_reference_figures(names: tuple[str, ...], expected: list[float]) -> None:
    for name in names:
        assert kl_penalty(LOG_PROB, REFERENCE, name).tolist() == pytest.approx(expected, abs=1e-6)


def test_k3_is_never_negative_and_has_finite_gradients() -> None:
    log_prob = torch.tensor([-500.0, -1.0, 0.0], requires_grad=True)
    estimate = kl_penalty(log_prob, torch.tensor([0.0, -1.0, -500.0]), "k3")
    estimate.sum().backward()
    assert (estimate >= 0).all() and torch.isfinite(log_prob.grad).all()


def test_k1_and_k3_agree_in_expectation() -> None:
    """Over the whole vocabulary, weighted by the policy, k1 and k3 both give the exact KL (k3 while below its bound)."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.log_softmax(torch.rand(50, generator=generator).double(), 0) for _ in "ab")
    exact = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_penalty(policy, reference, name)).sum(), exact)


@pytest.mark.parametrize("name", ["full", "k4"])
def test_unknown_estimators_name_the_keys(name: str) -> None:
    with pytest.raises(NotImplementedError, match="algorithm.kl_penalty"):
        kl_penalty(LOG_PROB, REFERENCE, name)


def test_adaptive_controller_reference_figures() -> None:
    controller = AdaptiveKLController(0.001, target_kl=0.1, horizon=1e4)
    controller.update(0.05, 256)
    assert controller.value == pytest.approx(0.00099488)
    controller.update(10, 256)
    assert controller.value == pytest.approx(0.0009999738, rel=1e-6)


def test_adaptive_controller_resumes_where_it_stood() -> None:
    controller = AdaptiveKLController(0.001, 0.1, 1e4)
    controller.update(1.0, 512)
    resumed = AdaptiveKLController(0.001, 0.1, 1e4)
    resumed.load_state_dict(controller.state_dict())
    for one in (controller, resumed):
        one.update(0.01, 100)
    assert resumed.value == controller.value != 0.001


def test_fixed_controller_keeps_the_configured_value() -> None:
    controller = FixedKLController(0.02)
    controller.update(5.0, 100)
    controller.load_state_dict({"value": 0.5})
    assert controller.value == 0.02


def test_factory() -> None:
    config = SimpleNamespace(type="adaptive", kl_coef=0.3, target_kl=0.1, horizon=100)
    assert isinstance(get_kl_controller(config), AdaptiveKLController)
    config.type = "fixed"
    assert get_kl_controller(config).value == 0.3
    config.type = "pid"
    with pytest.raises(NotImplementedError, match="algorithm.kl_ctrl.type='pid'"):
        get_kl_controller(config)
    config.type, config.horizon = "adaptive", 0
    with pytest.raises(ValueError, match="algorithm.kl_ctrl.horizon"):
        get_kl_controller(config)
