"""Mistakes of an environment's author: each is answered by the contract and the name of the class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.environments import contract
from agent_system.environments.base import EnvironmentManagerBase, EpisodeEnvironmentManager, Observation
from agent_system.environments.session_host import SessionHost
from agent_system.multi_turn_rollout.episode import Episode, Turn
from agent_system.multi_turn_rollout.episode_loop import EpisodeLoop
from agent_system.multi_turn_rollout.lock_step import LockStepAdapter
from agent_system.multi_turn_rollout.rollout_loop import _success
from agent_system.multi_turn_rollout.rows import build_rows
from verl.trainer.config.failure import failure_report


class Count(EnvironmentManagerBase):
    """Two episodes; what a call returns is as it should be but for what the test changes."""

    def __init__(self, change: Any = None, on: str = "step", **changes: Any) -> None:
        super().__init__(None, None, None)
        self.change, self.on, self.changes = change, on, changes

    def reset(self, kwargs=None):
        return self._reply("reset", observations=self._shown("one"), infos=[{}, {}])

    def step(self, text_actions):
        rewards, dones = np.array([[1.0], [0.0]]), torch.tensor([True, False])
        infos = [{"won": True, "is_action_valid": np.array(True)}, {"won": False}]
        return self._reply("step", observations=self._shown("two"), rewards=rewards, dones=dones, infos=infos)

    def _reply(self, call, **parts):
        if call != self.on:
            return tuple(parts.values())
        return self.change(parts) if self.change else tuple((parts | self.changes).values())

    @staticmethod
    def _shown(word, **parts):
        return {"text": [word, word], "image": None, "anchor": [word, {"page": np.ones(2)}]} | parts


def play(manager: EnvironmentManagerBase, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Observation]]:
    monkeypatch.setattr("ray.put", lambda value: value)
    adapter = LockStepAdapter(manager, num_episodes=2, group_size=2)
    adapter.begin([0])
    (observations,) = adapter.submit_steps([(0, "a"), (1, "b")])
    return observations


def test_what_the_contract_allows_comes_through_as_plain_values(monkeypatch):
    (_, first), (_, second) = play(Count(), monkeypatch)
    assert (first.reward, first.done, second.done) == (1.0, True, False) and type(first.done) is bool
    over = Count(observations=Count._shown("x", text=[None, "x"], anchor=[object(), "x"]))
    assert play(over, monkeypatch)[1][1].prompt == "x"  # nobody looks at the state of an episode that is over


MISTAKES = [
    (dict(change=lambda parts: (*parts.values(), {}), on="step"), r"Count.step returned 5 value.*\(observations, rewards, dones, infos\)"),
    (dict(change=lambda parts: None, on="step"), "Count.step returned None"),
    (dict(change=lambda parts: parts["observations"], on="reset"), r"Count.reset returned dict.*\(observations, infos\)"),
    (dict(on="reset", observations=["a", "b"]), r'Count.reset .*"text": one prompt per episode'),
    (dict(on="reset", observations={"anchor": ["a", "b"]}), r"Count.reset returned observations \['anchor'\]; .*\"text\""),
    (dict(on="reset", observations=Count._shown("a", text=None)), "'text': None.*images alone are not supported"),
    (dict(on="reset", observations=Count._shown("a", text=["a"])), r"1 text observations for 2 episodes: data\.train_batch_size"),
    (dict(on="reset", observations=Count._shown("a", text=["a", 5])), "Count.reset gave episode 1 prompt = 5; .* a text"),
    (dict(on="reset", observations=Count._shown("a", anchor=["a"])), r'observations\["anchor"\] 1 value\(s\); .* 2 episodes'),
    (dict(on="reset", observations=Count._shown("a", anchor=["a", {1}])), r"episode 1 anchor = \{1\}; .*text, numbers, arrays"),
    (dict(on="reset", infos={"won": [0, 0]}), "Count.reset returned infos dict; .* 2 episodes"),
    (dict(observations=Count._shown("a", text=["a"] * 3)), r'Count.step returned observations\["text"\] 3 value'),
    (dict(rewards=np.ones(3)), r"Count.step returned rewards ndarray of shape \(3,\); .* 2 episodes"),
    (dict(rewards=1.0), "Count.step returned rewards float"),
    (dict(rewards=[1.0, np.nan]), "Count.step gave episode 1 reward = nan; .* finite"),
    (dict(rewards=[1e39, 0.0]), "episode 0 reward = 1e.39; .* finite"),
    (dict(rewards=[None, 0.0]), "episode 0 reward = None; .* finite"),
    (dict(dones=[True]), r"Count.step returned dones 1 value\(s\)"),
    (dict(dones=[False, "no"]), "Count.step gave episode 1 done = 'no'; .* true or false"),
    (dict(infos=[{}]), r"Count.step returned infos 1 value\(s\)"),
    (dict(infos=[{}, None]), "Count.step gave episode 1 info = None; .* a dict"),
    (dict(infos=[{"is_action_valid": [True, False]}, {}]), r'info\["is_action_valid"\] = \[True, False\]; .* true or false'),
    (dict(infos=[{"is_action_admissible": "False"}, {}]), r'info\["is_action_admissible"\] = .False.; .* true or false'),
    (dict(infos=[{}, {"tool_calling": "one"}]), r'info\["tool_calling"\] = .one.; .* a number'),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "said"), MISTAKES)
def test_a_lock_step_mistake_is_answered_by_the_contract(monkeypatch, mistake, said):
    with pytest.raises(ValueError, match=said) as caught:
        play(Count(**mistake), monkeypatch)
    assert "Traceback" not in failure_report(caught.value)


def test_an_error_of_the_managers_own_says_where_it_was(monkeypatch):
    with pytest.raises(KeyError) as caught:
        play(Count(change=lambda parts: parts["missing"]), monkeypatch)
    assert failure_report(caught.value).endswith("The run failed: KeyError: 'missing' (in Count.step)\n")


def episode(number: int, *infos: dict[str, Any]) -> Episode:
    turns = [
        Turn(np.array([3]), response_ids=np.array([4]), log_probs=np.array([-0.5]), anchor="a", info=info) for info in infos
    ]
    return Episode(number, 0, number, 0, "g", f"g-{number}", turns=turns)


@pytest.mark.parametrize(
    ("infos", "found"),
    [([{"won": True}, {"score": 1}], r"step 2 has \['score'\]"), ([{}], "step 1 has no key"),
     ([{"won": None}], "at step 1 it is None"), ([{"won": np.nan}], "at step 1 it is nan")],
)  # fmt: skip
def test_a_missing_won_is_told_with_the_contract(infos, found):
    envs = LockStepAdapter(Count(), num_episodes=1, group_size=1)
    with pytest.raises(ValueError, match=rf'^Count has to give infos\[i\]\["won"\].*last step.*{found}') as caught:
        _success(envs, [episode(0, *infos)])
    assert "Traceback" not in failure_report(caught.value)


@pytest.mark.parametrize(
    ("figures", "said"),
    [(None, "returned None"), ({"score_success_rate": [1, 0]}, r"returned \['score_success_rate'\].*\"success_rate\""),
     ({"success_rate": [1.0]}, "for each of 2 episodes"), ({"success_rate": [1.0, np.nan]}, "for each of 2 episodes"),
     ({"success_rate": [1, 0], "pick_success_rate": []}, "pick_success_rate = "),
     ({"success_rate": ["won", "lost"]}, "finite numbers"), ({"success_rate": [1, 0], "a": [np.inf, 0]}, "a = .*finite")],
)  # fmt: skip
def test_what_a_success_evaluator_has_to_return(figures, said):
    class Judged(Count):
        def success_evaluator(self, **kwargs):
            return figures

    with pytest.raises(ValueError, match=rf"Judged\.success_evaluator returned.*{said}|{said}"):
        _success(LockStepAdapter(Judged(), 2, 1), [episode(0, {}), episode(1, {})])


def test_figures_that_apply_to_some_episodes_are_kept():
    figures = {"success_rate": [1, 0], "pick_success_rate": [1.0], "look_success_rate": [np.nan, 1.0]}
    checked = contract.checked_success(Count(), figures, 2)
    assert {name: values.shape for name, values in checked.items()} == {
        "success_rate": (2,), "pick_success_rate": (1,), "look_success_rate": (2,)
    }  # fmt: skip
    with pytest.raises(ValueError, match="'rewards', which a column has"):
        build_rows([episode(0, {})], {"rewards": np.ones(1)}, 0, {})


class Walk(EpisodeEnvironmentManager):
    """Two slots; ``started`` and ``shown`` are what ``_start`` and ``absorb`` return."""

    num_episodes = group_size = 2

    def __init__(self, started: Any = ((0, "t"), (1, "t")), shown: Any = None) -> None:
        super().__init__(SimpleNamespace(submit_resets=list, collect=lambda ref: ref), None, None)
        self.started, self.shown = started, shown

    def _start(self, groups, kwargs, attempt, block):
        return self.started

    def absorb(self, slot, raw):
        return raw["missing"] if self.shown is KeyError else self.shown

    def submit_steps(self, actions):
        return []

    def restart(self, slot):
        return []

    def finish(self, slot):
        """Forgets to return a list."""


@pytest.mark.parametrize("started", [None, [(0, "t")], [0, 1], [(0, "t"), (2, "t")]])
def test_start_gives_every_slot_a_task(started):
    with pytest.raises(ValueError, match=r"Walk\._start returned .*\(slot, task\) for each of the slots \[0, 1\]"):
        Walk(started).begin([0])


@pytest.mark.parametrize(
    ("shown", "said"),
    [(None, "Walk.absorb returned NoneType, it has to return an Observation"),
     (Observation("a", reward=float("inf")), "Walk.absorb gave episode 1 reward = inf"),
     (Observation("a", anchor=None), "episode 1 anchor = None"), (Observation(b"a"), "episode 1 prompt = b'a'"),
     (Observation("a", done=None), "episode 1 done = None"), (Observation("a", info=[]), r"episode 1 info = \[\]")],
)  # fmt: skip
def test_an_event_driven_mistake_is_answered_by_the_contract(shown, said):
    with pytest.raises(ValueError, match=said):
        Walk(shown=shown).collect([(1, {"page": "p"})])


def test_an_error_in_absorb_says_what_the_reply_had():
    with pytest.raises(KeyError) as caught:
        Walk(shown=KeyError).collect([(1, {"page": "p"})])
    assert failure_report(caught.value).endswith("KeyError: 'missing' (in Walk.absorb, of a reply with ['page'])\n")


def test_a_method_that_forgets_its_list_of_references_is_named():
    loop = EpisodeLoop(SimpleNamespace(wanted=1, most_groups=None, num_groups=1), Walk(), None, None, None)
    with pytest.raises(ValueError, match=r"Walk\.finish returned None; it has to return a list of references"):
        loop._expect(Walk().finish(0), "finish")


def test_a_session_that_returns_no_dict_is_a_failed_episode(tmp_path):
    class Mute:
        def reset(self, task):
            return None

        def step(self, action):
            return {"error": "of the game's own"}

    host = SessionHost(lambda: Mute, 10.0, 10.0, tmp_path / "marker")
    (reply,) = host.reset([("0", "t")])
    assert "have to return a dict, not NoneType" in reply["error"] and reply["blameless"] is False
    ((_, seen),) = Walk().collect([(0, {"error": "of the game's own"})])
    assert seen.infra_failed and seen.info == {"error": "of the game's own", "blameless": False}
