"""Ranks are asked for first; what the driver needs is imported and loaded while they start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_system.environments import registry as environments
from tests.workers.tiny import save_tiny_model
from verl.trainer.config import default_config
from verl.trainer.config.failure import failure_report
from verl.trainer.main_ppo import TaskRunner, create_rl_dataset
from verl.trainer.ppo import ray_trainer, resources
from verl.trainer.ppo.advantage import registry as advantages
from verl.trainer.ppo.policy_loss import registry as losses
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.resources import Role
from verl.trainer.ppo.timing import StartupLedger
from verl.trainer.ppo.trainer_checkpoint import CheckpointFolder

EXTERNAL = "actor_rollout_ref.model.external_lib"


class FakeRanks:
    """Ranks that write down what they are asked."""

    warming_up: tuple[()] = ()

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.root = SimpleNamespace(shutdown=lambda **limits: events.append(f"shutdown {limits}"))

    def groups(self) -> SimpleNamespace:
        return SimpleNamespace(actor_rollout=self, critic=None, reward_model=None, root=self.root)

    def execute_ranks_async(self, ranks: list[int], method: str, steps: int) -> list[Any]:
        self.events.append(f"{method} {ranks} {steps}")
        return []

    def wait(self, timeout: float) -> list[dict[str, float]]:
        self.events.append("wait")
        return [{"startup/processes": 5.0}, {"startup/processes": 7.0}]

    def get(self, refs: list[Any], method: str, timeout: float, key: str) -> list[dict[str, float]]:
        self.events.append(f"get {method} within {key}")
        return [{"startup/model": 1.0}] * 2


@pytest.fixture()
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    happened: list[str] = []

    def start_ranks(config: Any, roles: Any, pools: Any, use_critic: bool) -> FakeRanks:
        happened.append(f"ask for ranks, critic {use_critic}")
        assert roles[Role.ActorRollout] == "verl.workers.fsdp_workers.ActorRolloutRefWorker"  # not yet imported
        return FakeRanks(happened)

    monkeypatch.setattr(resources, "start_ranks", start_ranks)
    monkeypatch.setattr(ray_trainer, "start_ranks", start_ranks)
    return happened


@pytest.mark.parametrize("step_done", [None, 7, 8])
def test_ranks_are_asked_for_before_the_trainer_is_built_and_ended_by_it(
    events: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step_done: int | None
) -> None:
    class Trainer:
        total_training_steps = 8

        def __init__(self, ranks: FakeRanks) -> None:
            events.append("build")
            self.ranks = ranks

        def init_workers(self) -> None:
            events.append("init_workers")

        def fit(self) -> dict[str, float]:
            events.append("fit")
            return {"val/score": 1.0}

        def shutdown(self) -> None:
            events.append("end")

    monkeypatch.setattr(TaskRunner, "_build_trainer", lambda self, config, *, ranks, **_: Trainer(ranks))
    ledger = StartupLedger()
    if step_done is not None:
        CheckpointFolder(tmp_path, step_done).commit(keep=None)
    overrides = ["algorithm.adv_estimator=gae", f"trainer.default_local_dir={tmp_path}"]
    figures = TaskRunner().run(default_config("preset=embedded", *overrides), ledger)
    trained = [] if step_done == 8 else ["init_workers", "fit"]
    assert events == ["ask for ranks, critic True", "build", *trained, "end"]
    assert figures == ({"val/score": 1.0} if trained else {})
    assert "startup/ranks_asked" in ledger.seconds()


def test_the_trainer_asks_for_the_critic_that_the_configuration_enables(events: list[str]) -> None:
    own = ["algorithm.adv_estimator=mine", "critic.enable=true", f"{EXTERNAL}=no_such_module_of_the_user"]
    with pytest.raises(ValueError, match="no_such_module_of_the_user"):
        TaskRunner().run(default_config("preset=embedded", *own))
    assert events[0] == "ask for ranks, critic True"


def test_ranks_that_start_are_ended_if_the_driver_cannot_go_on(
    events: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    library = tmp_path / "losses.py"
    library.write_text("import no_such_package_of_the_user\n")
    config = default_config("preset=embedded", "algorithm.adv_estimator=grpo", f"{EXTERNAL}={library}")
    with pytest.raises(ValueError, match="external_lib=.*losses.py fails with ModuleNotFoundError"):
        TaskRunner().run(config)
    assert events == ["ask for ranks, critic False", "shutdown {'grace_seconds': 0}"]


OWN_NAMES = """
from agent_system.environments.registry import register_environment
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

register_environment("crop_field")(lambda config: None)
register_adv_est("above_mean")(lambda inputs: None)
register_policy_loss("halved")(lambda *args: None)
"""


def test_a_misspelt_name_of_the_users_own_ends_the_start_with_the_one_that_was_meant(
    events: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for registry, names in ((environments, "_MAKERS"), (advantages, "_ESTIMATORS"), (losses, "_POLICY_LOSSES")):
        monkeypatch.setattr(registry, names, dict(getattr(registry, names)))
    library = tmp_path / "own_names.py"
    library.write_text(OWN_NAMES)
    for key, given, meant in (
        ("env.env_name", "crop_feild", "crop_field"),
        ("algorithm.adv_estimator", "abov_mean", "above_mean"),
        ("actor.policy_loss.loss_mode", "halfed", "halved"),
    ):
        whole = key.replace("actor.", "actor_rollout_ref.actor.")
        config = default_config("preset=embedded", f"{EXTERNAL}={library}", f"{whole}={given}")
        with pytest.raises(ValueError, match=f"{key}='?{given}'? is not .*did you mean {meant}\\?"):
            TaskRunner().run(config)
        assert events[-1] == "shutdown {'grace_seconds': 0}"


def test_a_model_folder_without_a_tokenizer_is_reported_with_its_key(events: list[str], tmp_path: Any) -> None:
    model = f"actor_rollout_ref.model.path={save_tiny_model(tmp_path)}"
    with pytest.raises(ValueError, match=f"{model}: its tokenizer has no chat template"):
        TaskRunner().run(default_config("preset=embedded", "algorithm.adv_estimator=grpo", model))
    assert events[-1] == "shutdown {'grace_seconds': 0}"


@pytest.mark.parametrize("given", [True, False])
def test_models_are_loaded_as_soon_as_ranks_run_and_environments_beside_it(events: list[str], given: bool) -> None:
    config = default_config("preset=embedded", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=9")
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config, trainer.startup, trainer.world_size, trainer.total_training_steps = config, StartupLedger(), 2, 9
    trainer.use_critic, trainer.resource_pool_manager = False, None
    trainer.role_worker_mapping = {Role.ActorRollout: "verl.workers.fsdp_workers.ActorRolloutRefWorker"}
    trainer._ranks = FakeRanks(events) if given else None
    trainer._make_envs = lambda: events.append("environments") or ("train", "val")
    trainer.init_workers()
    asked = [] if given else ["ask for ranks, critic False"]
    assert events == [*asked, "init_model [0, 1] 9", "environments", "wait", "get init_model within trainer.start_timeout"]
    assert (trainer.envs, trainer.val_envs) == ("train", "val")
    seconds = trainer.startup.seconds()
    assert (seconds["startup/processes"], seconds["startup/model"]) == (7.0, 1.0)
    assert {"startup/driver", "startup/environments", "startup/waiting_for_ranks"} <= set(seconds)


DATASETS = {
    "Missing": "AttributeError: Custom type 'Missing' is not defined in '{file}'",
    "Fails": "OSError: no such table",
    "number": "ValueError: data.custom_cls.name=number must be a subclass of torch.utils.data.Dataset",
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_custom_dataset_that_fails_is_reported_with_its_key(name: str, tmp_path: Any) -> None:
    file = tmp_path / "tasks.py"
    file.write_text(
        "from torch.utils.data import Dataset\nnumber = 3\n\nclass Fails(Dataset):\n"
        "    def __init__(self, **_):\n        raise OSError('no such table')\n"
    )
    config = default_config("preset=embedded", f"data.custom_cls.path={file}", f"data.custom_cls.name={name}")
    with pytest.raises(Exception) as error:
        create_rl_dataset([], config.data, None, None)
    last = failure_report(error.value).splitlines()[-1]
    assert last.startswith("The run failed: " + DATASETS[name].format(file=file))
    assert f"data.custom_cls.name={name}" in last
