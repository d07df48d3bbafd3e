"""The trainer's batches: what a checkpoint remembers of the data loader when the step it belongs to is dropped."""
from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.main_ppo import create_rl_sampler
from verl.trainer.ppo.dataloaders import restore_position
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.timing import StartupLedger

STEPS = 8  # of three batches an epoch


def collate(rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    return {"row": torch.tensor([row["row"] for row in rows])}


def make_trainer(shuffle: bool, step: int = 0, rows: int = 7, batch: int = 2, workers: int = 0) -> RayPPOTrainer:
    trainer = object.__new__(RayPPOTrainer)
    trainer.startup = StartupLedger()
    data = [{"row": i} for i in range(rows)]
    sampler = create_rl_sampler(SimpleNamespace(shuffle=shuffle, seed=5), data)
    trainer.train_dataloader = StatefulDataLoader(
        data,
        batch_size=batch,
        num_workers=workers,
        drop_last=True,
        sampler=sampler,
        collate_fn=collate,
    )
    trainer.envs, trainer.kl_ctrl_in_reward = SimpleNamespace(split_digest="abc"), None
    trainer.traj_collector = SimpleNamespace(state_dict=dict)
    trainer.global_steps, trainer.total_training_steps = step, STEPS
    return trainer


def play(trainer: RayPPOTrainer) -> list:
    """(state before, rows) of every step until the last."""
    steps = []
    for state, shell in trainer._batches():
        trainer.global_steps += 1
        steps.append((copy.deepcopy(state), shell.batch["row"].tolist()))
    return steps


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_dropped_step_is_the_first_of_the_resumed_run(shuffle):
    whole = play(make_trainer(shuffle))
    rows = [rows for _, rows in whole]
    assert len(rows) == STEPS
    for number, (state, _) in enumerate(whole):
        assert state.global_step == number
        assert state.split_digest == "abc"
        resumed = make_trainer(shuffle, state.global_step)
        restore_position(resumed.train_dataloader, state.dataloader, state.data_shape)
        assert [rows for _, rows in play(resumed)] == rows[number:]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": 4, "batch": 4}, "rows of data.train_files: 8 in the checkpoint, 4 from now on; data.train_batch_size"),
        ({"rows": 16, "batch": 8}, "rows of data.train_files: 8 in the checkpoint, 16 from now on"),
        ({"batch": 4}, "data.train_batch_size (data.gen_batch_size): 8 in the checkpoint, 4 from now on"),
        ({"batch": 3}, "data.train_batch_size (data.gen_batch_size): 8 in the checkpoint, 3 from now on"),
        ({"workers": 1}, "data.dataloader_num_workers: 0 in the checkpoint, 1 from now on"),
        ({"shuffle": None}, "data.shuffle: "),
    ],
)
def test_other_data_begin_with_their_first_row_and_say_so(caplog, shuffle, change, said):
    shape = {"rows": 8, "batch": 8, "shuffle": shuffle}
    states = [state for state, _ in play(make_trainer(**shape))]
    changed = {**shape, **change}
    changed["shuffle"] = not shuffle if changed["shuffle"] is None else shuffle
    fresh = play(make_trainer(**changed, step=STEPS - 3))
    for state in (states[0], states[1], states[-1]):
        caplog.clear()
        resumed = make_trainer(**changed, step=STEPS - 3)
        restore_position(resumed.train_dataloader, state.dataloader, state.data_shape)
        assert [record.getMessage()[:52] for record in caplog.records] == [
            "the training data start again from their first row: "
        ]
        assert said in caplog.text
        assert [rows for _, rows in play(resumed)] == [rows for _, rows in fresh]


def test_a_position_that_does_not_say_what_it_counts_is_left_out(caplog):
    state = play(make_trainer(shuffle=True))[2][0]
    resumed = make_trainer(shuffle=True, step=5)
    restore_position(resumed.train_dataloader, state.dataloader, {})
    assert "the checkpoint does not say what its position in them counts" in caplog.text
    assert len(play(resumed)) == STEPS - 5


class Ranks:
    """Ranks whose engines compute what the trainer computes, or not."""

    def __init__(self, events: list[str], agree: bool) -> None:
        self.events, self.agree = events, agree

    def execute_all_async(self, method: str) -> list[str]:
        self.events.append(f"ask for {method}")
        return [method]

    def get(self, refs: list[str], method: str) -> list[dict[str, float]]:
        assert refs == [method]
        self.events.append(f"wait for {method}")
        if not self.agree:
            raise RuntimeError("engine and trainer differ")
        return [{"rollout/probe_gap_mean": 0.0, "rollout/probe_gap_max": 0.0}]


@pytest.mark.parametrize("fails", [None, "no episode came through", "engine and trainer differ"])
def test_trackers_start_beside_the_probe_and_end_on_every_way_out(fails, tmp_path, monkeypatch):
    trainer = make_trainer(shuffle=False)
    events: list[str] = []
    monkeypatch.setattr(trainer, "_load_checkpoint", lambda: setattr(trainer, "_tracker_state", {}), raising=False)
    tracker = SimpleNamespace(finish=lambda: events.append("end"), log=lambda values, step: None)
    start = lambda *args, **options: events.append("start") or tracker  # noqa: E731
    monkeypatch.setattr("verl.trainer.ppo.ray_trainer.Tracking.for_run", start)
    trainer.run_dir, trainer.val_envs = tmp_path, object()
    settings = SimpleNamespace(val_before_train=True, val_only=True, run_dir="run", progress_bar=False)
    trainer.config = SimpleNamespace(trainer=settings)
    trainer.actor_rollout_wg = Ranks(events, agree=fails != "engine and trainer differ")
    pinned: list[str] = []
    monkeypatch.setattr("verl.trainer.ppo.ray_trainer.pin_split", lambda config, digest: pinned.append(digest) or config)
    monkeypatch.setattr("verl.trainer.ppo.ray_trainer.begin_record", lambda config, step: None)

    def validate() -> dict[str, float]:
        if fails:
            raise RuntimeError(fails)
        return {"val/success_rate": 1.0}

    trainer._validate = validate
    if fails:
        with pytest.raises(RuntimeError, match=fails):
            trainer.fit()
    else:
        assert trainer.fit() == {"val/success_rate": 1.0}
    assert events == ["ask for probe", "start", "wait for probe", "end"]
    assert pinned == ["abc"]


def test_what_does_not_end_hides_nothing(caplog):
    trainer, ended = make_trainer(shuffle=False), []

    def broken() -> None:
        raise RuntimeError("already gone")

    trainer.envs, trainer.worker_group = SimpleNamespace(close=broken), SimpleNamespace(shutdown=lambda: ended.append(1))
    trainer.shutdown()
    assert ended == [1]
    assert "already gone" in caplog.text
