"""The figures on GiGPO's two terms, on steps whose advantages can be worked out by hand."""

from __future__ import annotations

import pytest

from agent_system.environments.env_package.webshop.expert import ExpertSkill
from benchmarks.advantage_terms import Step, compare, measure


def test_terms_that_say_the_same_correlate_fully() -> None:
    steps = [Step(0, episode, "page", reward, reward) for episode, reward in ((0, 10.0), (1, 0.0))]
    figures = compare(steps)
    assert figures["success"] == 0.5 and figures["groups without signal"] == 0.0
    assert figures["gigpo/terms_correlation"] == pytest.approx(1.0)
    assert figures["correlation of sum and episode term"] == pytest.approx(1.0)
    assert figures["gigpo/episode_advantage_rms"] == figures["gigpo/step_advantage_rms"] == 5.0


def test_a_step_alone_on_its_page_gets_the_episode_term_only() -> None:
    steps = [Step(0, 0, "a", 10.0, 10.0), Step(0, 0, "b", 10.0, 10.0), Step(0, 1, "a", 0.0, 0.0)]
    figures = compare(steps)
    assert figures["gigpo/singleton_share"] == pytest.approx(1 / 3)
    # episode: (10, 10, 0) less their mean 20/3; step: ±5 on page a, 0 on page b
    assert figures["gigpo/terms_correlation"] == pytest.approx(0.866, abs=1e-3)  # √3 / 2
    assert figures["signs agree"] == 1.0


def test_a_shopper_with_fewer_slips_solves_more_and_figures_repeat() -> None:
    careful = measure(ExpertSkill(skip_options=0.2), batches=2, gamma=0.95, seed=1)
    careless = measure(ExpertSkill(skip_options=0.9), batches=2, gamma=0.95, seed=1)
    assert careful["success"][0] > careless["success"][0]
    assert careless == measure(ExpertSkill(skip_options=0.9), batches=2, gamma=0.95, seed=1)
